"""How an array times a number is checked: problems, arrays, the reference in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Blocks that take several turns, with elements to spare; fewer than an access has; 1."""
    turn = 8 * params["threads"]
    many = 2 * 3 * turn + 13 if scale == "small" else (1 << 20) + 3
    sizes = ((many, 2), (3, 2), (many // 4 + 1, 1))
    return [{"elements": n, "dtype": params["dtype"], "most": most} for n, most in sizes]


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    x = rng.standard_normal(p["elements"]).astype(numpy_dtype(p["dtype"]))
    factor = 1.0 if p["most"] == 1 else -1.7
    return {"x": x, "factor": np.full(1, factor, np.float32)}


def _outputs(params: Params, p: Problem) -> Arrays:
    return {"out": np.full(p["elements"], np.nan, numpy_dtype(p["dtype"]))}


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """In float64."""
    x, factor = (np.asarray(arrays[name]).astype(np.float64) for name in ("x", "factor"))
    return {"out": x * factor}


SCALE = Verification(
    problems=_problems, inputs=_inputs, outputs=_outputs, reference=reference,
    tolerance=lambda params: {"fp16": 1e-3, "bf16": 4e-3, "fp32": 1e-6}[params["dtype"]],
)  # fmt: skip
