"""How merging partial attention is checked and timed: parts with and without keys, and the
reference in float64."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from fkjit.ops.attention.merge.kernels import ROW_AXES, describe
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


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
    axes = ROW_AXES[problem["layout"]]
    found: Arrays = {}
    for o, lse in (("o", "lse"), ("other", "other_lse")) if problem["pair"] else (("o", "lse"),):
        parts = () if problem["pair"] else (problem["parts"],)
        values = rng.standard_normal((*parts, *rows, problem["columns"]), dtype=np.float32)
        sums = (4 * rng.standard_normal((*parts, *rows), dtype=np.float32)).astype(np.float32)
        nothing = rng.random(sums.shape) < problem["empty"]
        values[nothing] = np.nan
        sums[nothing] = np.where(rng.random(nothing.sum()) < 0.8, -np.inf, np.inf)
        swapped = np.moveaxis(values, [len(parts) + i for i in range(3)],
                             [len(parts) + i for i in axes])  # fmt: skip
        found[o] = np.ascontiguousarray(swapped).astype(numpy_dtype(problem["dtype"]))
        found[lse] = sums
    return found


def outputs(params: Params, problem: Problem) -> Arrays:
    """out and out_lse, poisoned with NaN."""
    rows, columns = problem["shape"], problem["columns"]
    shape = tuple(rows[axis] for axis in ROW_AXES[problem["layout"]])
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
    axes = ROW_AXES[problem["layout"]]
    swapped = o.transpose(0, *(1 + axis for axis in axes), 4)
    out, whole = merged(swapped, lse)
    return {"out": out.transpose(*axes, 3), "out_lse": whole}


def tolerance(params: Params) -> float:
    """Greatest error against float64 on N(0, 1) inputs."""
    return {"fp16": 1e-3, "bf16": 8e-3, "fp32": 2e-6}[params["dtype"]]


ROWS = Verification(
    problems=problems, inputs=inputs, outputs=outputs, reference=reference, tolerance=tolerance,
)  # fmt: skip
