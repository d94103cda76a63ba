"""flash_sm90, attention's backward for Hopper (sm_90a): TMA and wgmma, dk, dv and sums of dq."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fkjit.arch import Arch
from fkjit.interop import ITEMSIZE
from fkjit.ops import attention_backward_kernels as portable
from fkjit.ops import attention_backward_problem as shared
from fkjit.ops import attention_problem as forward
from fkjit.ops.attention_hopper import product
from fkjit.ops.simple import Launch
from fkjit.spec import Arrays, Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register
from fkjit.tensor_map import TensorMap

HEAD_DIMS = (64, 128)  # what products are padded to
COUNTERS = 1
_BLOCK_K, _PANEL, _WARP_ROWS = 128, 64, 16
_BLOCK_Q = {64: 128, 128: 64}  # S^T and dK of a warpgroup in registers together
_STAGES, _DS_STAGES = 3, 2
_SMS = 132  # of an H100 or H200, where a problem does not say
_BARRIER_BYTES = 160 + 8 * 32 + 16


def _derive(params: Params) -> dict[str, Any]:
    head_dim, block_q = params["head_dim"], _BLOCK_Q[params["head_dim"]]
    dq = product("dq", 32, {"a": 1, "b": 1, "add": 1})
    return {
        "block_q": block_q,
        "stages": _STAGES,
        "main_registers": 208,
        "dq_registers": 88,
        "ptx_type": {"fp16": "f16", "bf16": "bf16"}[params["dtype"]],
        **product("keys", block_q // 2, {"a": 1, "b": 1, "add": 1}),
        **product("sum", head_dim // 2, {"a": 4, "b": 1}),
        **{name if name != "dq_registers" else "dq_list": value for name, value in dq.items()},
        "direct": _direct(params),
    }


def _direct(params: Params) -> bool:
    """Whether dq goes from registers to L2: fewer bytes through shared memory, more instructions,
    which is worth it where tiles have few queries."""
    return params["head_dim"] > 64 and not params["deterministic"]


def _shared(params: Params) -> SharedLayout:
    """K, V, rings of Q and dO, of dS, of lse_log2 and delta; the mbarriers."""
    d, block_q = params["head_dim"], _BLOCK_Q[params["head_dim"]]
    rings = (
        ("Q", 2 * block_q * d, _STAGES), ("dO", 2 * block_q * d, _STAGES),
        ("dS", 2 * _BLOCK_K * block_q, _DS_STAGES), ("rows", 8 * block_q, _STAGES),
    )  # fmt: skip
    return [
        ("K", 2 * _BLOCK_K * d),
        ("V", 2 * _BLOCK_K * d),
        *((f"{name} stage {i}", size) for name, size, count in rings for i in range(count)),
        *(() if _direct(params) else (("dQ", 64 * 64 * 4),)),
        ("mbarriers", _BARRIER_BYTES),
    ]


def _grid(params: Params, problem: Problem) -> Dim3:
    """One block an SM, or fewer where there is less to do."""
    works = -(-problem["seqlen_k"] // _BLOCK_K) * problem["heads_kv"] * problem["batch"]
    return (min(works, problem.get("multiprocessors", _SMS)), 1, 1)


def _map(problem: Problem, arrays: Mapping[str, Any], name: str, rows: int) -> TensorMap:
    """[batch, head, row, column] in boxes of `rows` rows and one panel of columns."""
    size = ITEMSIZE[problem["dtype"]]
    batch, heads, count, columns = shared.shape(problem, name)
    steps = tuple(step * size for step in shared.strides(problem, name, arrays))
    return TensorMap(
        arrays[name],
        problem["dtype"],
        (columns, count, heads, batch),
        steps[::-1],
        (_PANEL, rows, 1, 1),
        writable=rows == _WARP_ROWS,
    )


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    block_q = _BLOCK_Q[params["head_dim"]]
    boxes = {"q": block_q, "dout": block_q, "k": _BLOCK_K, "v": _BLOCK_K, "dk": _WARP_ROWS}
    boxes["dv"] = _WARP_ROWS
    return {
        **{f"{name}_map": _map(problem, arrays, name, rows) for name, rows in boxes.items()},
        **{name: arrays.get(name) for name in ("lse_log2", "delta", "dq_sum", "turns")},
        **{name: arrays[name] for name in ("counters",) if name in arrays},
        "batch": problem["batch"],
        **shared.scalars(problem),
    }


def takes(problem: Problem, aligned: bool, arch: Arch) -> bool:
    """Whether TMA can read the arrays and the kernel suits the problem: rows on 16-byte boundaries,
    no dimension repeated by a stride of 0, a positive scale (signs could not go into q), and enough
    queries for it to pay."""
    dims = padded_dim(problem["head_dim"]), padded_dim(problem["head_dim_v"])
    if dims[0] != dims[1] or dims[0] is None or problem["dtype"] == "fp32" or not aligned:
        return False
    if not arch.features >= FLASH_SM90.features({}):
        return False
    if prod(problem[name] for name in shared.SIZES) == 0 or problem["seqlen_q"] <= 32:
        return False
    steps = [
        (step, extent)
        for name in ("q", "k", "v", "dout")
        for step, extent in zip(
            problem["strides"][name], shared.shape(problem, name)[:3], strict=True
        )
    ]
    legal = all(n == 1 or 0 < step < 2**40 // ITEMSIZE[problem["dtype"]] for step, n in steps)
    return legal and problem["softmax_scale"] > 0


def pays(problem: Problem, deterministic: bool) -> bool:
    """Whether a call that names no kernel takes it: where sums of dq may come in any order.

    Where blocks take turns at dq it was slower than the portable kernels with a causal mask.
    Without one it was faster (bench/NOTES.md), but blocks that wait for one another are not for
    everybody until this form of them has been through the tests on a GPU: ask for it by name.
    """
    return not deterministic


def padded_dim(head_dim: int) -> int | None:
    """The compiled head dimension that holds this one, or None."""
    return next((padded for padded in HEAD_DIMS if head_dim <= padded), None)


def needs_zeros(problem: Problem, deterministic: bool) -> bool:
    """Whether sums of dq have to be set to 0 before: where blocks add to what nobody has written,
    or where there may be rows that see no key."""
    unseen = problem["causal"] and problem["seqlen_q"] > problem["seqlen_k"]
    return not deterministic or unseen


def launches(
    problem: Problem, deterministic: bool
) -> tuple[tuple[Launch, ...], dict[str, tuple[int, ...]]]:
    """The kernels of a call, and the shapes of what they hand on beside lse_log2 and delta."""
    dtype, dim = problem["dtype"], padded_dim(problem["head_dim"]) or 0
    zeros = needs_zeros(problem, deterministic)
    scratch: dict[str, tuple[int, ...]] = {"dq_sum": (*shared.rows_shape(problem), dim)}
    if deterministic:
        scratch["turns"] = _turns_shape(problem)
    params = {"dtype": dtype, "head_dim": dim, "deterministic": deterministic}
    made = (
        Launch(
            portable.ROWS,
            {"dtype": dtype, "aligned": True},
            {**problem, "sum_columns": dim if zeros else 0},
        ),
        Launch(FLASH_SM90, params, problem),
        Launch(portable.DQ, {"dtype": dtype}, {**problem, "sum_columns": dim}),
    )
    return made, scratch


def _turns_shape(problem: Problem) -> tuple[int, ...]:
    *more, rows = shared.rows_shape(problem)
    return (*more, rows // portable.TURN_ROWS)


def _problems(params: Params, scale: str) -> Sequence[Problem]:
    """Those of the kernels that add up dq; the small ones on GPUs of two and of many SMs."""
    block_q = _BLOCK_Q[params["head_dim"]]
    made = {**params, "head_dim_v": params["head_dim"], "aligned": True}
    found = shared.problems(block_q, _BLOCK_K, made, scale)
    more = {"sum_columns": params["head_dim"]}
    if scale == "small":
        found[1] |= {"seqlen_q": 2 * block_q - 3, "seqlen_k": 2 * _BLOCK_K + 1}
        return [{**found[0], **more, "multiprocessors": 2}, {**found[1], **more}]
    return [{**problem, **more} for problem in found]


def _outputs(params: Params, problem: Problem) -> Arrays:
    sums = (*shared.rows_shape(problem), params["head_dim"])
    return {
        **shared.outputs(("dk", "dv"))(params, problem),
        "dq_sum": np.zeros(sums, np.float32),
        "turns": np.zeros(_turns_shape(problem), np.uint32),
        "counters": np.zeros(COUNTERS, np.uint32),
    }


def _reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    found = shared.reference(problem, arrays)
    rows = shared.rows_padded(problem) - problem["seqlen_q"]
    columns = problem["sum_columns"] - problem["head_dim"]
    dq = np.pad(found["dq"] / problem["softmax_scale"], ((0, 0), (0, 0), (0, rows), (0, columns)))
    turns = np.zeros(_turns_shape(problem))
    sums = portable.fragments(dq)
    return {"dk": found["dk"], "dv": found["dv"], "dq_sum": sums, "turns": turns}


FLASH_SM90 = register(
    KernelSpec(
        op=portable.OP,
        name="flash_sm90",
        source="attention/flash_backward_sm90.cu",
        entry="attention_flash_backward_sm90",
        doc="dk, dv and sums of dq for Hopper: TMA, wgmma, a warpgroup for dq",
        params=(
            Param("dtype", ("fp16", "bf16"), "element type of q, k, v, dout, dk and dv"),
            Param("head_dim", HEAD_DIMS, "of all arrays, padded to this in shared memory"),
            Param("deterministic", (True, False), "blocks add to dq in a fixed order"),
        ),
        derive=_derive,
        features=lambda params: frozenset({"wgmma"}),
        shared_layout=_shared,
        block=lambda params: (384, 1, 1),
        grid=_grid,
        cooperative=True,  # blocks wait for one another where they add to dq in turn
        flops=shared.flops,
        bytes=shared.traffic,
        shape_class=forward.shape_class,
        interpreter_flops=2e9,
        problems=_problems,
        inputs=shared.inputs,
        outputs=_outputs,
        arguments=_arguments,
        reference=_reference,
        tolerance=shared.tolerance,
    )
)
