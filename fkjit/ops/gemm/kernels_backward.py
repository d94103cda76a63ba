"""The gradient of a product's activation: dz, and dbias beside it. The products of the gradients
are those of the forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.gemm.problem import outputs_of
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register, size_class

_DTYPES = ("bf16", "fp16", "fp32")
SIZE = 8  # columns of a thread
_THREADS = (128, 32)
_GROUPS = (4, 1)  # of threads: a row each
_GROUPS_A_SM, _FEW_STRIPS = 4, 4
_MOST_PARTS, _ROWS_A_GROUP = 128, 4  # rows of partial sums, which one block adds up
_SMS = 108  # where there is no GPU to ask


def _derive(params: Params) -> dict[str, Any]:
    plain = (params["activation"], params["gate"]) == ("none", False)
    return {"plain": plain, **epilogue.values(params["activation"])}


def _illegal(params: Params) -> str | None:
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"is not {params['dtype']} or fp32"
    return None


def strips(params: Params, n: int) -> int:
    """Blocks beside each other."""
    return -(-n // (SIZE * params["threads"]))


def parts(params: Params, problem: Problem) -> int:
    """Blocks that share the rows of a strip."""
    groups = params["groups"]
    blocks = _GROUPS_A_SM // groups * problem.get("multiprocessors", _SMS)
    most = problem["m"] // (_ROWS_A_GROUP * groups)
    return max(1, min(blocks // strips(params, problem["n"]), _MOST_PARTS, most))


def scratch(params: Params, problem: Problem) -> tuple[int, int]:
    """Bytes of partial sums, and counters."""
    if not problem["dbias"]:
        return 0, 0
    return 4 * parts(params, problem) * outputs_of(problem), strips(params, problem["n"])


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: arrays.get(name) for name in ("dy", "pre", "dz", "dbias", "y", "counters")}
    sizes = {name: problem[name] for name in ("m", "n", "dy_stride")}
    return {**named, "workspace": arrays.get("workspace"), **sizes}


def _traffic(problem: Problem) -> float:
    elements = problem["m"] * outputs_of(problem)
    dy = ITEMSIZE[problem["out_dtype"]] * problem["m"] * problem["n"]
    dy += problem.get("y", False) * ITEMSIZE[problem["dtype"]] * problem["m"] * problem["n"]
    return float(dy + ITEMSIZE[problem["dtype"]] * elements * (problem["pre"] + problem["dz"]))


def layout(n: int) -> dict[str, int]:
    """Of a block, for rows of so many columns: where these are few, many blocks would be beside one
    another in rows, and the last one would add up a row of partials of each."""
    threads = _THREADS[0] if n > SIZE * _THREADS[1] else _THREADS[1]
    few = -(-n // (SIZE * threads)) <= _FEW_STRIPS
    return {"threads": threads, "groups": _GROUPS[0] if few else _GROUPS[1]}


BACKWARD = KernelSpec(
    op="linear_backward",
    name="activation",
    source="gemm/activation_backward.cu",
    entry="linear_activation_backward",
    doc="dz = dy * act'(z) and dbias, its column sums, of a product with an activation",
    params=(
        Param("dtype", _DTYPES, "element type of pre, dz and dbias"),
        Param("out_dtype", _DTYPES, "element type of dy: dtype or fp32"),
        *epilogue.PARAMS,
        Param("vector", (True, False), "16-byte accesses: all rows start on 16-byte boundaries"),
        Param("threads", _THREADS, "threads of a block that have a row", tunable=True),
        Param("groups", _GROUPS, "rows that a block has at a time", tunable=True),
    ),
    derive=_derive,
    illegal=_illegal,
    pdl=True,
    block=lambda params: (params["threads"] * params["groups"], 1, 1),
    grid=lambda params, problem: (strips(params, problem["n"]), parts(params, problem), 1),
    arguments=_arguments,
    shape_class=lambda p: {"m": size_class(p["m"], 1 << 14), "n": p["n"]},
    work=Work(flops=lambda p: 10.0 * p["m"] * outputs_of(p), bytes=_traffic),
    verification="fkjit.ops.gemm.cases_backward:ACTIVATION",
)
register(epilogue.shipped(BACKWARD))
