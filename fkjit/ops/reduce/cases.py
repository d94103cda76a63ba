"""How the reductions are checked: problems, arrays, references in float64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from fkjit.ops.reduce.kernels import cut
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


def _problem(params: Params, rows: int, segments: int, columns: int) -> dict[str, Any]:
    """Rows with gaps between them; a mean where sums of 16 bits would be too large."""
    column = 1 if params["vector"] else 2
    step = -(-columns * column // 8) * 8 + 8
    count = segments * columns
    fixed = ("dtype", "out_dtype", "operation", "vector")
    return {
        **{name: params[name] for name in fixed},
        **{"rows": rows, "columns": columns, "segments": segments, "shift": 0},
        "row_stride": step if params["vector"] else step + 1,
        "column_stride": column,
        "divisor": 1.0 if params["operation"] == "max" else float(count),
    }


def _blocks_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    shapes = [(2, 66_003), (3, 50)] if scale == "small" else [(1, 2**22 + 5), (37, 50_001)]
    if params["gaps"]:
        return [_problem(params, 1, rows * 3, columns // 3) for rows, columns in shapes]
    return [_problem(params, rows, 1, columns) for rows, columns in shapes]


def _lanes_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    shapes = [(70, 13), (5, 301)] if scale == "small" else [(100_003, 77), (4097, 1000)]
    return [_problem(params, rows, 1, columns) for rows, columns in shapes]


def _inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh N(0, 1) x, and what the blocks of a row meet in."""
    last = max(problem["rows"], problem["segments"]) * problem["row_stride"]
    x = rng.standard_normal(last, dtype=np.float32).astype(numpy_dtype(problem["dtype"]))
    if "gaps" not in params:
        return {"x": x}
    blocks = cut(params, problem)[1] * problem["rows"]
    workspace = np.full(blocks, np.nan, np.float32)
    return {"x": x, "workspace": workspace, "counters": np.zeros(problem["rows"], np.uint32)}


def _outputs(params: Params, problem: Problem) -> Arrays:
    return {"out": np.full(problem["rows"], np.nan, numpy_dtype(problem["out_dtype"]))}


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """In float64."""
    values = _seen(problem, np.asarray(arrays["x"])).astype(np.float64)
    reduced = values.max if problem["operation"] == "max" else values.sum
    return {"out": reduced((1, 2)) / problem["divisor"]}


def _seen(problem: Problem, buffer: np.ndarray) -> np.ndarray:
    """The elements of each row in the buffer that holds them."""
    step, column = problem["row_stride"], problem["column_stride"]
    outer = (problem["rows"], 0 if problem["segments"] > 1 else step)
    dims = [outer, (problem["segments"], step), (problem["columns"], column)]
    shape, strides = zip(*dims, strict=True)
    size = buffer.itemsize
    return np.lib.stride_tricks.as_strided(buffer, shape, tuple(s * size for s in strides))


_VERIFICATION = partial(
    Verification,
    inputs=_inputs,
    outputs=_outputs,
    reference=reference,
    tolerance=lambda params: {"fp16": 5e-4, "bf16": 4e-3, "fp32": 4e-7}[params["out_dtype"]],
)
BLOCKS = _VERIFICATION(problems=_blocks_problems)
LANES = _VERIFICATION(problems=_lanes_problems)
