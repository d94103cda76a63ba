"""The kernel that merges partial attention.

A problem: rows [B, H, S] in the fewest `sizes` that all arrays allow, `columns` elements of each,
and `parts` of them. `strides` are an array's, of the rows; `part_stride` and `lse_part_stride` lead
from one part to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from fkjit.ops.op.checks import FLOATS
from fkjit.ops.op.shapes import coalesce, log2_ceil
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register

ARRAYS = ("o", "lse", "other", "other_lse", "out_lse", "out")  # rows lie in the order of the last
ROW_AXES = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1)}  # where batch, head, row of o stand
THREADS = 128
_DIMENSIONS = 3
MOST_KNOWN = 16  # parts whose count a kernel is compiled for
_ACCESSES = 2  # of a lane to each part
_SHOWN = (0, 2, 8)  # counts that are compiled ahead
_PARTS = "how many, known when compiled; 0: any number; others are compiled when called"

Strides = tuple[int, ...]


def describe(
    dtype: str, shape: Sequence[int], strides: Mapping[str, Strides], parts: int, columns: int,
    part_stride: int = 0, lse_part_stride: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """A problem of rows `shape`; without `other` its parts lie in o."""
    pair = "other" in strides
    given = [tuple(strides.get(name, (0,) * len(shape))) for name in ARRAYS]
    sizes, steps = coalesce(shape, given)
    fill = _DIMENSIONS - len(sizes)
    return {
        **{"dtype": dtype, "parts": parts, "pair": pair, "columns": columns},
        **{"sizes": (1,) * fill + sizes, "rows": prod(sizes)},
        "strides": {n: (0,) * fill + step for n, step in zip(ARRAYS, steps, strict=True)},
        **{"part_stride": part_stride, "lse_part_stride": lse_part_stride},
    }


def is_vector(problem: Problem, pointers: Sequence[int]) -> bool:
    """Whether the rows of o, other and out are whole 16-byte vectors on 16-byte boundaries."""
    size = 16 // ITEMSIZE[problem["dtype"]]
    steps = [step for n in ("o", "other", "out") for step in problem["strides"][n]]
    steps += [problem["columns"], problem["part_stride"] if problem["parts"] > 1 else 0]
    return all(p % 16 == 0 for p in pointers) and all(step % size == 0 for step in steps)


def parameters(problem: Problem, vector: bool) -> dict[str, Any]:
    """Of the variant that takes a problem."""
    known = problem["pair"] or (vector and 2 <= problem["parts"] <= MOST_KNOWN)
    return {
        "dtype": problem["dtype"], "vector": vector, "parts": problem["parts"] if known else 0,
        "pair": problem["pair"], "threads": THREADS,
    }  # fmt: skip


def _illegal(params: Params) -> str | None:
    if params["pair"]:
        return None if params["parts"] == 2 else "a pair is two parts"
    stack = params["parts"] and not params["vector"]
    return "a stack of rows that are no vectors has any number of parts" if stack else None


def _illegal_shown(params: Params) -> str | None:
    if params["parts"] == 2 and not params["pair"]:
        return "is compiled when it is first called"
    return _illegal(params)


def _width(params: Params) -> int:
    """Elements of an access."""
    return 16 // ITEMSIZE[params["dtype"]] if params["vector"] else 1


def _lanes_log2(params: Params, problem: Problem) -> int:
    lanes = -(-problem["columns"] // (_width(params) * _ACCESSES))
    return min(log2_ceil(lanes), log2_ceil(params["threads"]))


def grid(params: Params, problem: Problem) -> Dim3:
    """Blocks of as many rows as have their lanes in one; and of as much of a row."""
    lanes = 1 << _lanes_log2(params, problem)
    rows, columns = params["threads"] // lanes, _ACCESSES * lanes * _width(params)
    return (-(-problem["rows"] // rows), -(-problem["columns"] // columns), 1)


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    batches, rows_1, rows_2 = problem["sizes"]
    scalars = ("part_stride", "lse_part_stride", "parts", "rows", "columns")
    return {
        **{name: arrays.get(name) for name in ARRAYS},
        **{f"{name}_strides": problem["strides"][name] for name in ARRAYS},
        **{name: problem[name] for name in scalars},
        **{"batches": batches, "rows_1": rows_1, "rows_2": rows_2},
        "lanes_log2": _lanes_log2(params, problem),
    }


def traffic(problem: Problem) -> float:
    """Bytes of the parts read, of o and lse written."""
    row = problem["columns"] * ITEMSIZE[problem["dtype"]] + 4
    return float(problem["rows"] * (problem["parts"] + 1) * row)


_SPEC = KernelSpec(
    op="merge_states",
    name="rows",
    source="attention/merge_states.cu",
    entry="merge_states",
    pdl=True,
    doc="partial attention over different keys, put together",
    params=(
        Param("dtype", FLOATS, "element type of o and out"),
        Param("vector", (True, False), "16-byte accesses: rows that allow them"),
        Param("pair", (False, True), "two parts, each an array of its own"),
        Param("threads", (THREADS,), "threads of a block", tunable=True),
        Param("parts", (0,), _PARTS),
    ),
    block=lambda params: (params["threads"], 1, 1),
    illegal=_illegal,
    grid=grid,
    arguments=arguments,
    work=Work(flops=lambda p: 2.0 * p["parts"] * p["rows"] * p["columns"], bytes=traffic),
    verification="fkjit.ops.attention.merge.cases:ROWS",
)


@lru_cache(maxsize=MOST_KNOWN + 1)
def kernel(*parts: int) -> KernelSpec:
    """The kernel for such counts of parts."""
    return replace(_SPEC, params=(*_SPEC.params[:-1], Param("parts", parts, _PARTS)))


MERGE = register(replace(kernel(*_SHOWN), illegal=_illegal_shown))
