"""The kernel that merges partial attention, and its problems.

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

import numpy as np

from fkjit.ops.op.checks import FLOATS
from fkjit.ops.op.shapes import coalesce, log2_ceil
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Dim3, KernelSpec, Param, Params, Problem, register

ARRAYS = ("o", "lse", "other", "other_lse", "out_lse", "out")  # rows lie in the order of the last
ROWS = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1)}  # where batch, head, row of o stand
THREADS = 128
_DIMENSIONS = 3
MOST_KNOWN = 16  # parts whose count a kernel is compiled for
_PIECES = 2  # accesses of a lane to each part
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
    lanes = -(-problem["columns"] // (_width(params) * _PIECES))
    return min(log2_ceil(lanes), log2_ceil(params["threads"]))


def grid(params: Params, problem: Problem) -> Dim3:
    """Blocks of as many rows as have their lanes in one; and of as much of a row."""
    lanes = 1 << _lanes_log2(params, problem)
    rows, columns = params["threads"] // lanes, _PIECES * lanes * _width(params)
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


def problem_of(
    dtype: str, shape: tuple[int, int, int], columns: int, parts: int = 2, pair: bool = False,
    layout: str = "bhsd", empty: float = 0.2,
) -> dict[str, Any]:  # fmt: skip
    """Arrays without gaps, o in `layout`; a share `empty` of the parts saw no key."""
    _, h, s = shape
    lse = (h * s, s, 1)
    o = (h * s * columns, s * columns, columns)
    if layout == "bshd":
        o = (h * s * columns, columns, h * columns)
    names = ("o", "other", "out") if pair else ("o", "out")
    strides = dict.fromkeys(names, o)
    strides |= {"lse" if name == "o" else f"{name}_lse": lse for name in names}
    rows = prod(shape)
    made = describe(dtype, shape, strides, parts, columns, rows * columns, rows)
    return {**made, "shape": shape, "layout": layout, "empty": empty}


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Either layout, several rounds of parts, rows that fill no block, parts without keys."""
    size = 16 // ITEMSIZE[params["dtype"]] if params["vector"] else 1
    wide, pair = size * (13 if params["vector"] else 59), params["pair"]
    shape = (2, 3, 5) if scale == "small" else (3, 16, 1111)

    def one(parts: int, layout: str, columns: int, **other: Any) -> dict[str, Any]:
        parts = params["parts"] or parts
        return problem_of(params["dtype"], shape, columns, parts, pair, layout, **other)

    found = [one(6, "bshd", wide), one(4, "bhsd", size * 16, empty=0.0), one(1, "bhsd", size)]
    return found if scale == "small" else [*found, one(3, "bshd", size * 300, empty=0.5)]


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh parts. Of those without keys lse is an infinity, and o what nobody may read."""
    rows = problem["shape"]
    axes = ROWS[problem["layout"]]
    found: Arrays = {}
    for o, lse in (("o", "lse"), ("other", "other_lse")) if problem["pair"] else (("o", "lse"),):
        parts = () if problem["pair"] else (problem["parts"],)
        values = rng.standard_normal((*parts, *rows, problem["columns"]), dtype=np.float32)
        sums = (4 * rng.standard_normal((*parts, *rows), dtype=np.float32)).astype(np.float32)
        nothing = rng.random(sums.shape) < problem["empty"]
        values[nothing] = np.nan
        sums[nothing] = np.where(rng.random(nothing.sum()) < 0.8, -np.inf, np.inf)
        turned = np.moveaxis(values, [len(parts) + i for i in range(3)],
                             [len(parts) + i for i in axes])  # fmt: skip
        found[o] = np.ascontiguousarray(turned).astype(numpy_dtype(problem["dtype"]))
        found[lse] = sums
    return found


def outputs(params: Params, problem: Problem) -> Arrays:
    """out and out_lse, poisoned with NaN."""
    rows, columns = problem["shape"], problem["columns"]
    shape = tuple(rows[axis] for axis in ROWS[problem["layout"]])
    return {
        "out": np.full((*shape, columns), np.nan, numpy_dtype(problem["dtype"])),
        "out_lse": np.full(rows, np.nan, np.float32),
    }


def merged(o: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """o [parts, …, columns] and lse [parts, …] put together in float64."""
    seen = np.isfinite(lse)
    lse = np.where(seen, lse.astype(np.float64), -np.inf)
    top = lse.max(0, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(lse - top)
    total = weights.sum(0)
    values = np.where(seen[..., None], o.astype(np.float64), 0.0)
    with np.errstate(divide="ignore"):
        whole = np.log(total) + top
    return (weights[..., None] * values).sum(0) / np.where(total == 0, 1, total)[..., None], whole


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """out and out_lse in float64."""
    o, lse = (np.asarray(arrays[name]) for name in ("o", "lse"))
    if problem["pair"]:
        o = np.stack([o, np.asarray(arrays["other"])])
        lse = np.stack([lse, np.asarray(arrays["other_lse"])])
    axes = ROWS[problem["layout"]]
    turned = o.transpose(0, *(1 + axis for axis in axes), 4)
    out, whole = merged(turned, lse)
    return {"out": out.transpose(*axes, 3), "out_lse": whole}


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
    flops=lambda p: 2.0 * p["parts"] * p["rows"] * p["columns"],
    bytes=traffic,
    arguments=arguments,
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    reference=reference,
    tolerance=lambda params: {"fp16": 1e-3, "bf16": 8e-3, "fp32": 2e-6}[params["dtype"]],
)


@lru_cache(maxsize=MOST_KNOWN + 1)
def kernel(*parts: int) -> KernelSpec:
    """The kernel for such counts of parts."""
    return replace(_SPEC, params=(*_SPEC.params[:-1], Param("parts", parts, _PARTS)))


MERGE = register(replace(kernel(*_SHOWN), illegal=_illegal_shown))
