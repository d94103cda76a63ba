"""flash_wide_sm90, attention's backward for Hopper (sm_90a) of head dimensions above 128.

Beside kernels_sm90.py, whose schedule, grid and arguments it has: of 64 keys, which two warpgroups
share. It takes a band of keys, a soft cap or ALiBi slopes, a mask, and packed sequences.
"""

from __future__ import annotations

from typing import Any

from fkjit.ops.attention.backward import kernels_sm90 as sm90
from fkjit.ops.attention.backward import problem
from fkjit.ops.attention.backward.kernels_preprocess import CASES, OP
from fkjit.ops.attention.backward.tiles import BLOCK_K_SM90, BLOCK_Q_SM90, WIDE_SM90
from fkjit.ops.attention.features import parse
from fkjit.ops.attention.problem import shape_class
from fkjit.spec import KernelSpec, Param, Params, SharedLayout, Work

_Q_STAGES = _DO_STAGES = 2
_PAIR = 2 * 64  # columns of tiles: whole panels for each of the two warpgroups


def _stages(params: Params) -> dict[str, int]:
    """Where dq is copied in order it needs a place, which P and dS leave it."""
    ordered = params["deterministic"]
    return {
        "q_stages": _Q_STAGES, "do_stages": _DO_STAGES,
        "p_stages": 2 - ordered, "ds_stages": 2 - ordered, "dq_stages": int(ordered),
    }  # fmt: skip


def _derive(params: Params) -> dict[str, Any]:
    values = {
        "block_q": BLOCK_Q_SM90[params["head_dim"]],
        **dict.fromkeys(("form", "varlen", "softcap", "alibi", "mask"), False),
        **_stages(params),
        **{"main_registers": 208, "dq_registers": 64, "copy_registers": 32},
    }
    return values | (parse(params["form"]).values() if "form" in params else {})


def _shared(params: Params) -> SharedLayout:
    """K, V, rings of Q and dO, of dS, of P, of dq, of lse_log2 and delta with the bits of a mask;
    the mbarriers with what is noted of tiles."""
    block_q, block_k = BLOCK_Q_SM90[params["head_dim"]], BLOCK_K_SM90[params["head_dim"]]
    row, stages = 2 * -(-params["head_dim"] // _PAIR) * _PAIR, _stages(params)
    masked = "form" in params and parse(params["form"]).mask
    rings = (
        ("K", block_k * row, 1), ("V", block_k * row, 1),
        ("Q", block_q * row, stages["q_stages"]), ("dO", block_q * row, stages["do_stages"]),
        ("dS", 2 * block_k * block_q, stages["ds_stages"]),
        ("P", 2 * block_k * block_q, stages["p_stages"]),
        ("dQ", 64 * 64 * 4, stages["dq_stages"]),
        ("rows", 8 * block_q + block_k * block_q // 8 * masked, stages["do_stages"]),
    )  # fmt: skip
    return [
        *((f"{name} stage {i}", size) for name, size, count in rings for i in range(count)),
        ("mbarriers", sm90.barrier_bytes("form" in params)),
    ]


FLASH_WIDE_SM90 = KernelSpec(
    op=OP,
    name="flash_wide_sm90",
    source="attention/backward_wide_sm90.cu",
    entry="attention_flash_backward_wide_sm90",
    doc="dk, dv and sums of dq for Hopper above head dimension 128: TMA, wgmma, keys shared",
    params=(
        Param("dtype", ("fp16", "bf16"), "element type of q, k, v, dout, dk and dv"),
        Param("head_dim", WIDE_SM90, "of all arrays, padded to this in shared memory"),
        Param("deterministic", (True, False), "blocks add to dq in a fixed order"),
    ),
    derive=_derive,
    features=lambda params: frozenset({"wgmma"}),
    shared_layout=_shared,
    block=lambda params: (512, 1, 1),
    grid=sm90.grid,
    cooperative=True,  # blocks wait for one another where they add to dq in order
    shape_class=shape_class,
    arguments=sm90.arguments,
    work=Work(flops=problem.flops, bytes=problem.traffic, interpreter_flops=2e9),
    verification=f"{CASES}_sm90:FLASH_WIDE_SM90",
)
