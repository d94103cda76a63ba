"""How a step of AdamW is checked: problems, arrays, the reference in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_ARRAYS = ("param", "grad", "first", "second")


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Several blocks with elements to spare, and fewer than an access has; no decay, no beta."""
    many = 2 * 8 * params["threads"] + 13 if scale == "small" else (1 << 20) + 3
    usual = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.01}
    others = {"beta1": 0.0, "beta2": 0.95, "eps": 1e-3, "decay": 0.0}
    return [{"elements": many, "dtype": params["dtype"], **usual},
            {"elements": 3, "dtype": params["dtype"], **others}]  # fmt: skip


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """Moments such as gradients leave; large steps, so that a wrong one shows."""
    dtype, size = numpy_dtype(p["dtype"]), p["elements"]
    made = {name: rng.standard_normal(size) for name in _ARRAYS}
    made["second"] = rng.uniform(0.1, 2, size)
    made = {name: x.astype(dtype) for name, x in made.items()}
    number = rng.integers(1, 9)
    return {**made, "rate": np.full(1, 0.3, np.float32), "number": np.full(1, number, np.float32)}


def _outputs(params: Params, p: Problem) -> Arrays:
    names = ("new_param", "new_first", "new_second")
    return {name: np.full(p["elements"], np.nan, numpy_dtype(p["dtype"])) for name in names}


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """In float64."""
    param, grad, first, second = (np.asarray(arrays[n]).astype(np.float64) for n in _ARRAYS)
    rate, number = (float(np.asarray(arrays[name])[0]) for name in ("rate", "number"))
    first = p["beta1"] * first + (1 - p["beta1"]) * grad
    second = p["beta2"] * second + (1 - p["beta2"]) * grad**2
    scale = np.sqrt(second / (1 - p["beta2"] ** number)) + p["eps"]
    step = rate / (1 - p["beta1"] ** number) * first / scale
    made = param * (1 - rate * p["decay"]) - step
    return {"new_param": made, "new_first": first, "new_second": second}


STEP = Verification(
    problems=_problems, inputs=_inputs, outputs=_outputs, reference=reference,
    tolerance=lambda params: {"fp16": 1e-3, "bf16": 4e-3, "fp32": 1e-5}[params["dtype"]],
)  # fmt: skip
