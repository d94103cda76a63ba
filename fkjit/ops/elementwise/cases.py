"""How `vector_add` is checked: problems, arrays, the sum in float64."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged, short and long rows, with gaps or in three dimensions."""
    aligned = 8 if params["vector"] else 1  # what strides are multiples of
    column = 1 if params["vector"] else 3
    found = []
    for rows, columns in ((7, 5), (2, 1001)) if scale == "small" else ((3, 2**20 + 3), (5000, 77)):
        step = -(-columns * column // aligned) * aligned + aligned
        sizes = {0: (1, 1, 1), 1: (1, 1, rows), 3: (2, 3, rows)}[params["dimensions"]]
        strides = (step * rows * 4, step * rows, step, column)
        other = (step * rows, step * rows * 2, step, column)
        found.append(
            {
                "dtype": params["dtype"],
                "columns": columns,
                "rows": prod(sizes),
                "sizes": sizes,
                "dimensions": params["dimensions"],
                "strides": {"a": strides, "b": other, "out": strides},
                "shift": 0,
            }
        )
    return found


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh N(0, 1) a and b, in buffers that hold all their elements."""
    dtype = numpy_dtype(problem["dtype"])
    sizes = {name: _length(problem, name) for name in ("a", "b")}
    return {n: rng.standard_normal(s, dtype=np.float32).astype(dtype) for n, s in sizes.items()}


def outputs(params: Params, problem: Problem) -> Arrays:
    """out, poisoned with NaN."""
    return {"out": np.full(_length(problem, "out"), np.nan, numpy_dtype(problem["dtype"]))}


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """The sum in float64, NaN where `out` has no element."""
    seen = [_seen(problem, np.asarray(arrays[n]), n).astype(np.float64) for n in ("a", "b")]
    out = np.full(_length(problem, "out"), np.nan)
    _seen(problem, out, "out")[...] = seen[0] + seen[1]
    return {"out": out}


def _seen(problem: Problem, buffer: np.ndarray, name: str) -> np.ndarray:
    """The elements of an array in the buffer that holds it."""
    shape = (*problem["sizes"], problem["columns"])
    steps = tuple(step * buffer.itemsize for step in problem["strides"][name])
    return np.lib.stride_tricks.as_strided(buffer, shape, steps)


def _length(problem: Problem, name: str) -> int:
    shape = (*problem["sizes"], problem["columns"])
    return 1 + sum((n - 1) * s for n, s in zip(shape, problem["strides"][name], strict=True))


ROWS = Verification(
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    reference=reference,
    tolerance=lambda params: {"fp16": 5e-4, "bf16": 4e-3, "fp32": 6e-8}[params["dtype"]],
)
