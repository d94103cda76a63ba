"""The kernels of the reductions, which of them takes a problem, and how it is cut into blocks.

A problem: rows of `segments` times `columns` elements; `row_stride` elements from one row (or
segment) to the next, `column_stride` from a column to the next; each row starts `shift` elements
after a 16-byte boundary where `vector`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.arch import Arch
from fkjit.ops.op.checks import FLOATS
from fkjit.ops.op.shapes import log2_ceil
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import (
    Dim3,
    KernelSpec,
    Param,
    Params,
    Problem,
    Work,
    register,
    size_class,
)
from fkjit.symbolic import cached
from fkjit.tuning import tuned

VECTOR_BYTES = 16
# How a row is cut; the same on every GPU, so that results are the same on every GPU.
_ALONE = 8192  # accesses that one block does alone; longer rows are cut
_BLOCKS = (64, 4096)  # of a grid where rows are cut, at least and at most
_PIECE = 8192  # accesses of a block, in between
_SMALL_BLOCKS = (2048, 1 << 18)  # rows not longer, and longer ones up to this, have small blocks
_LANE_ACCESSES = (256, 512)  # of rows that a few lanes reduce: of some rows, of many
_LANE_ROWS = (64, 1024)  # what some and many means
_SHORT = 64  # accesses of rows that are reduced by as many lanes as there are
_OPERATIONS = {"sum": "Sum", "max": "MaxOrNaN"}


def accesses(problem: Problem) -> int:
    """Of a segment, including those that stick out of it."""
    width = VECTOR_BYTES // ITEMSIZE[problem["dtype"]] if problem["vector"] else 1
    return -(-(problem["columns"] + problem["shift"]) // width)


def choose(problem: Problem, arch: Arch) -> tuple[KernelSpec, dict[str, Any], int, int]:
    """The kernel, its parameters, partial results and counters that it needs."""
    params = {name: problem[name] for name in ("dtype", "out_dtype", "operation", "vector")}
    each, rows = accesses(problem), problem["rows"]
    limits = zip(_LANE_ACCESSES, _LANE_ROWS, strict=True)
    if problem["segments"] == 1 and any([each <= most and rows >= few for most, few in limits]):
        unroll = 2 if each <= _SHORT else 8 if problem["dtype"] == "fp32" else 4
        params |= {"threads": 256, "unroll": unroll}
        return LANES, tuned(LANES, params, problem, arch), 0, 0
    gaps = problem["segments"] > 1
    small = each <= _SMALL_BLOCKS[0] or _ALONE < each <= _SMALL_BLOCKS[1]
    threads = 256 if small and problem["vector"] and not gaps else 512
    params |= {"gaps": gaps, "threads": threads, "unroll": 4}
    params = tuned(BLOCKS, params, problem, arch)
    return BLOCKS, params, *meeting(params, problem)


def meeting(params: Params, problem: Problem) -> tuple[int, int]:
    """(partial results, counters) of rows that several blocks reduce."""
    _, split = cut(params, problem)
    rows = problem["rows"] if split > 1 else 0
    return split * rows, rows


def cut(params: Params, problem: Problem) -> tuple[int, int]:
    """(accesses of a block, blocks of a row)."""
    return _cut(accesses(problem) * problem["segments"], problem["rows"], params["threads"])


@cached(256)
def _cut(total: int, rows: int, threads: int) -> tuple[int, int]:
    """The same for rows of `total` accesses; a launch asks three times."""
    low, high = _BLOCKS
    wanted = 1
    if total > _ALONE:
        blocks = min(max(total * rows // _PIECE, low), high)
        wanted = max(1, min(blocks // rows, -(-total // threads)))
    piece = max(1, -(-total // wanted))
    piece = -(-piece // threads) * threads
    return piece, max(1, -(-total // piece))


def lanes(params: Params, problem: Problem) -> int:
    """Of a row: enough for one round of accesses."""
    return 1 << min(5, log2_ceil(max(1, -(-accesses(problem) // params["unroll"]))))


def _blocks_grid(params: Params, problem: Problem) -> Dim3:
    return (cut(params, problem)[1] * problem["rows"], 1, 1)


def _lanes_grid(params: Params, problem: Problem) -> Dim3:
    return (-(-problem["rows"] * lanes(params, problem) // params["threads"]), 1, 1)


def _blocks_arguments(
    params: Params, problem: Problem, arrays: Mapping[str, Any]
) -> dict[str, Any]:
    piece, split = cut(params, problem)
    names = ("row_stride", "column_stride", "columns", "shift", "segments", "divisor")
    return {
        **arrays,
        **{name: problem[name] for name in names},
        "accesses": accesses(problem) * problem["segments"],
        "piece": piece,
        "split": split,
    }


def _lanes_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    names = ("row_stride", "column_stride", "rows", "columns", "shift", "divisor")
    return {
        **arrays,
        **{name: problem[name] for name in names},
        "lanes": lanes(params, problem),
    }


def _template(params: Params) -> dict[str, Any]:
    return {"operation": _OPERATIONS[params["operation"]]}


def _illegal(params: Params) -> str | None:
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"out_dtype={params['out_dtype']} is neither {params['dtype']} nor fp32"
    if params["operation"] == "max" and params["out_dtype"] != params["dtype"]:
        return "a maximum has the dtype of what it is of"
    small = params["threads"] == 256 and "gaps" in params
    if small and (params["gaps"] or not params["vector"]):
        return "small blocks are for 16-byte accesses without gaps"
    if "gaps" not in params and params["unroll"] == (4 if params["dtype"] == "fp32" else 8):
        return "is never the fastest (8 is for fp32, 4 for 16 bits)"
    return None


def shape_class(problem: Problem) -> dict[str, Any]:
    """Problems that share their tuned values."""
    each = problem["segments"] * problem["columns"]
    return {
        "rows": size_class(problem["rows"], _MOST_ROWS),
        "each": size_class(each, _LONGEST_ROW),
    }


_MOST_ROWS, _LONGEST_ROW = 1 << 20, 1 << 28  # beyond these it makes no difference


def traffic(problem: Problem) -> float:
    """Bytes of x read and of the results written."""
    count = problem["rows"] * problem["segments"] * problem["columns"]
    out = problem["rows"] * ITEMSIZE[problem["out_dtype"]]
    return float(count * ITEMSIZE[problem["dtype"]] + out)


_PARAMS = (
    Param("dtype", FLOATS, "element type of x"),
    Param("out_dtype", FLOATS, "element type of the result: x's or fp32"),
    Param("operation", tuple(_OPERATIONS), "sum (with a divisor: mean) or max"),
    Param("vector", (True, False), "16-byte accesses: rows alike to 16-byte boundaries"),
)
_SHARED: dict[str, Any] = dict(
    op="reduce",
    derive=_template,
    illegal=_illegal,
    shape_class=shape_class,
    block=lambda params: (params["threads"], 1, 1),
    work=Work(
        flops=lambda problem: float(problem["rows"] * problem["segments"] * problem["columns"]),
        bytes=traffic,
    ),
)

BLOCKS = register(
    KernelSpec(
        name="blocks",
        source="reduce/blocks.cu",
        entry="reduce_blocks",
        doc="a row by one block or by several, the last of which joins their results",
        params=(
            *_PARAMS,
            Param("gaps", (False, True), "a row is segments of memory at one distance"),
            Param("threads", (256, 512), "threads of a block", tunable=True),
            Param("unroll", (4,), "accesses of a thread under way", tunable=True),
        ),
        grid=_blocks_grid,
        arguments=_blocks_arguments,
        verification="fkjit.ops.reduce.cases:BLOCKS",
        **_SHARED,
    )
)

LANES = register(
    KernelSpec(
        name="lanes",
        source="reduce/lanes.cu",
        entry="reduce_lanes",
        doc="short rows by a few lanes of a warp each",
        params=(
            *_PARAMS,
            Param("threads", (256,), "threads of a block", tunable=True),
            Param("unroll", (2, 4, 8), "accesses of a lane under way", tunable=True),
        ),
        grid=_lanes_grid,
        arguments=_lanes_arguments,
        verification="fkjit.ops.reduce.cases:LANES",
        **_SHARED,
    )
)
