"""flash_wide_sm90, attention's backward for Hopper (sm_90a) of head dimensions above 128.

Beside kernels_sm90.py, whose schedule, grid and arguments it has: of 64 keys, which two warpgroups
share. It takes a band of keys, a soft cap or ALiBi slopes, a mask, and packed sequences.
"""

from __future__ import annotations

from typing import Any

from fkjit.ops.attention.backward import kernels_sm90 as sm90
from fkjit.ops.attention.backward import problem
from fkjit.ops.attention.backward.kernels_preprocess import CASES, OP
from fkjit.ops.attention.backward.tiles import (
    BLOCK_K_SM90,
    WIDE_SM90,
    block_q_sm90,
    is_paired,
)
from fkjit.ops.attention.features import parse
from fkjit.ops.attention.problem import shape_class
from fkjit.spec import KernelSpec, Param, Params, SharedLayout, Work

_PAIR_BYTES = 32 + 96 + 16  # of barriers behind those of features, and a number


def _stages(params: Params) -> dict[str, int]:
    """Where dq is copied in order it needs a place, which P and dS leave it."""
    ordered, tall = params["deterministic"], block_q_sm90(params) > 64
    return {
        "q_stages": 2, "do_stages": 2 - tall,
        "p_stages": 2 - ordered, "ds_stages": 2 - (ordered or tall), "dq_stages": int(ordered),
    }  # fmt: skip


def _registers(params: Params) -> dict[str, int]:
    """Those of a thread, and how many pairs of lse and of delta it reads early."""
    tall = block_q_sm90(params) > 64
    if is_paired(params):
        few = "form" in params
        ahead, each = (8, 2 if few else 8) if tall else (4, 0), (184, 112, 32)
    else:
        ahead, each = ((8, 2), (200, 80, 32)) if tall else ((4, 4), (208, 64, 32))
    names = ("lse_ahead", "delta_ahead", "main_registers", "dq_registers", "copy_registers")
    return dict(zip(names, (*ahead, *each), strict=True))


def _derive(params: Params) -> dict[str, Any]:
    values = {
        "block_q": block_q_sm90(params),
        **dict.fromkeys(("form", "varlen", "softcap", "alibi", "mask"), False),
        **_stages(params),
        "direct": is_paired(params) or not _stages(params)["dq_stages"],
        "paired": is_paired(params),
        "shared_tiles": is_paired(params),
        **_registers(params),
    }
    return values | (parse(params["form"]).values() if "form" in params else {})


def _shared(params: Params) -> SharedLayout:
    """K, V, rings of Q and dO, of dS, of P, of dq, of lse_log2 and delta with the bits of a mask;
    the mbarriers with what is noted of tiles."""
    block_q, block_k = block_q_sm90(params), BLOCK_K_SM90[params["head_dim"]]
    row, row_v = (2 * sm90.width(params[name]) for name in ("head_dim", "head_dim_v"))
    stages = _stages(params)
    rows = stages["do_stages"] if stages["do_stages"] > 1 else stages["q_stages"]
    masked = "form" in params and parse(params["form"]).mask
    rings = (
        ("K", block_k * row, 1), ("V", block_k * row_v, 1),
        ("Q", block_q * row, stages["q_stages"]), ("dO", block_q * row_v, stages["do_stages"]),
        ("dS", 2 * block_k * block_q, stages["ds_stages"]),
        ("P", 2 * block_k * block_q, stages["p_stages"]),
        ("dQ", 64 * 64 * 4, stages["dq_stages"]),
        ("rows", 8 * block_q + block_k * block_q // 8 * masked, rows),
    )  # fmt: skip
    return [
        *((f"{name} stage {i}", size) for name, size, count in rings for i in range(count)),
        ("mbarriers", sm90.barrier_bytes("form" in params) + _PAIR_BYTES * is_paired(params)),
    ]


FLASH_WIDE_SM90 = KernelSpec(
    op=OP,
    name="flash_wide_sm90",
    source="attention/backward_wide_sm90.cu",
    entry="attention_flash_backward_wide_sm90",
    doc="dk, dv and sums of dq for Hopper above head dimension 128: TMA, wgmma, keys shared",
    params=(
        Param("dtype", ("fp16", "bf16"), "element type of q, k, v, dout, dk and dv"),
        Param("head_dim", (192, 256), "of q and k, padded to this in shared memory"),
        Param("head_dim_v", (128, 192, 256), "of v and dout, padded to this in shared memory"),
        Param("deterministic", (True, False), "blocks add to dq in a fixed order"),
    ),
    derive=_derive,
    illegal=lambda params: (
        None
        if (params["head_dim"], params["head_dim_v"]) in WIDE_SM90
        else f"head_dim_v={params['head_dim_v']} is not compiled for head_dim={params['head_dim']}"
    ),
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
