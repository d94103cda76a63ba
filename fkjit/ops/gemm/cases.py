"""How the kernels of a product are checked: problems, arrays, the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fkjit.ops.gemm.problem import outputs_of
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

# Greatest absolute error of an element of N(0, 1) sums, rounded once to the output's dtype.
TOLERANCE = {"fp16": 6e-3, "bf16": 4e-2, "fp32": 3e-5}


def problem(params: Params, m: int, n: int, k: int, **given: Any) -> dict[str, Any]:
    """Contiguous arrays with a bias, unless `given` says otherwise; for a kernel's parameters."""
    made: dict[str, Any] = {
        "m": m, "n": n, "k": k, "dtype": params["dtype"],
        "out_dtype": params.get("out_dtype", params["dtype"]),
        "x_layout": params.get("x_layout", "mk"),
        "weight_layout": params.get("weight_layout", "nk"),
        "activation": params.get("activation", "none"), "gate": params.get("gate", False),
        "scale": 1.0, "bias": True, "residual": False, "pre": False, "gap": 0, **given,
    }  # fmt: skip
    gap = made.pop("gap")  # elements between rows
    wide = outputs_of(made)
    rows = {
        "x": k if made["x_layout"] == "mk" else m,
        "weight": k if made["weight_layout"] == "nk" else wide, "out": n, "residual": n,
    }  # fmt: skip
    strides = {f"{name}_stride": columns + gap for name, columns in rows.items()}
    return {**strides, **made}


def _places(p: Problem) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the arrays as they lie."""
    m, n, k, wide = p["m"], p["n"], p["k"], outputs_of(p)
    return {
        "x": (m, k) if p["x_layout"] == "mk" else (k, m),
        "weight": (wide, k) if p["weight_layout"] == "nk" else (k, wide),
        "out": (m, n), "residual": (m, n),
    }  # fmt: skip


def _buffer(p: Problem, name: str) -> tuple[int, int, int]:
    """(rows, columns, stride) of an array in the buffer that holds it."""
    rows, columns = _places(p)[name]
    return rows, columns, p[f"{name}_stride"]


def seen(p: Problem, name: str, buffer: Any) -> np.ndarray:
    """The matrix in its buffer."""
    array, (rows, columns, stride) = np.asarray(buffer), _buffer(p, name)
    steps = (stride * array.itemsize, array.itemsize)
    return np.lib.stride_tricks.as_strided(array, (rows, columns), steps)


def _empty(p: Problem, name: str, dtype: str) -> np.ndarray:
    """A buffer of NaN, rows at their distance."""
    rows, _, stride = _buffer(p, name)
    return np.full(max(rows, 1) * stride, np.nan, numpy_dtype(dtype))


def inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """x, bias and residual are N(0, 1), the weight such that sums are; gaps hold NaN."""
    spread = {"x": 1.0, "weight": 1 / math.sqrt(max(p["k"], 1)), "residual": 1.0}
    made: Arrays = {}
    for name in ("x", "weight", *(("residual",) if p["residual"] else ())):
        made[name] = _empty(p, name, p["out_dtype"] if name == "residual" else p["dtype"])
        matrix = seen(p, name, made[name])
        matrix[...] = (rng.standard_normal(matrix.shape) * spread[name]).astype(matrix.dtype)
    if p["bias"]:
        made["bias"] = rng.standard_normal(outputs_of(p)).astype(numpy_dtype(p["dtype"]))
    return made


def outputs(params: Params, p: Problem) -> Arrays:
    """NaN where the kernel must write."""
    made = {"out": _empty(p, "out", p["out_dtype"])}
    if p["pre"]:
        made["pre"] = np.full((p["m"], outputs_of(p)), np.nan, numpy_dtype(p["dtype"]))
    return made


_ERF = np.frompyfunc(math.erf, 1, 1)
_VALUES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z * (0.5 + 0.5 * np.asarray(_ERF(z / math.sqrt(2)), np.float64)),
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}


def activated(activation: str, z: np.ndarray) -> np.ndarray:
    """The activation of z, in float64."""
    return _VALUES[activation](z)


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """The spec's `reference`: NaN between the rows of out."""
    x, weight = (seen(p, name, arrays[name]).astype(np.float64) for name in ("x", "weight"))
    x = x if p["x_layout"] == "mk" else x.T
    z = p["scale"] * (x @ (weight.T if p["weight_layout"] == "nk" else weight))
    if arrays.get("bias") is not None:
        z = z + np.asarray(arrays["bias"]).astype(np.float64)
    n = p["n"]
    y = activated(p["activation"], z[:, :n])
    y = y * z[:, n:] if p["gate"] else y
    if arrays.get("residual") is not None:
        y = y + seen(p, "residual", arrays["residual"]).astype(np.float64)
    made = {"out": np.full(max(p["m"], 1) * p["out_stride"], np.nan)}
    seen(p, "out", made["out"])[...] = y
    return {**made, "pre": z} if p["pre"] else made


def verification(problems: Callable[[Params, str], list[dict[str, Any]]]) -> Verification:
    """Of a kernel, with the problems that fit its tiles."""
    return Verification(
        problems=problems, inputs=inputs, outputs=outputs, reference=reference,
        tolerance=lambda params: TOLERANCE[params.get("out_dtype", params["dtype"])],
    )  # fmt: skip


def with_scratch(
    own: Verification, scratch: Callable[[Params, Problem], tuple[int, int]]
) -> Verification:
    """The same of a kernel with partial sums: memory in which nobody may read what nobody wrote,
    and counters that are 0 again afterwards. `scratch`: (bytes, counters) of a problem."""

    def with_memory(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
        size, counters = scratch(params, p)
        return {
            **own.inputs(params, p, rng),
            "workspace": np.full(max(size // 4, 1), np.nan, np.float32),
            "counters": np.zeros(max(counters, 1), np.uint32),
        }

    def with_counters(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
        assert own.reference is not None
        return {**own.reference(p, arrays), "counters": np.zeros(len(arrays["counters"]))}

    return replace(own, inputs=with_memory, reference=with_counters)
