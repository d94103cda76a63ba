"""How `quantize.made_rows` is checked: against float64, codes as places in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.quantize import cases
from fkjit.ops.quantize.kernels_made import groups_of
from fkjit.ops.quantize.schemes import Scheme
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_EPS, _OFFSET = 1e-5, 0.25


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Rows wider than registers hold, whose last number is the greatest; a ragged group; with and
    without what may be there."""
    wide = params["threads"] * params["held"] * 8 + 200
    shapes = ((1, wide), (3, 136)) if scale == "small" else ((5, wide), (300, 4096), (37, 14336))
    gap = 16
    return [
        {
            "rows": rows, "columns": columns, "x_stride": columns + gap * (i % 2),
            "other_stride": columns + gap * (i % 2), "eps": _EPS,
            "weight_offset": 0.0 if i % 2 else _OFFSET,
            "residual": params["source"] != "gated" and i % 2 == 0,
            "affine": "none" if i % 2 else "both", "source": params["source"],
            "activation": params["activation"], "dtype": params["dtype"],
            "weight_dtype": params["weight_dtype"], "code": params["code"], "span": params["span"],
        }
        for i, (rows, columns) in enumerate(shapes)
    ]  # fmt: skip


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    dtype, weights = (numpy_dtype(p[name]) for name in ("dtype", "weight_dtype"))

    def rows(stride: str) -> np.ndarray:
        made = np.full((p["rows"], p[stride]), np.nan, dtype)
        made[:, : p["columns"]] = rng.standard_normal((p["rows"], p["columns"])) + 0.3
        made[0, p["columns"] - 1] = 9
        return made.reshape(-1)

    if p["source"] == "gated":
        return {"gate": rows("x_stride"), "up": rows("other_stride")}
    made = {"x": rows("x_stride")}
    if p["residual"]:
        made["residual"] = rows("other_stride")
    if p["affine"] == "both":
        made["weight"] = rng.standard_normal(p["columns"]).astype(weights)
        if p["source"] == "layer_norm":
            made["bias"] = rng.standard_normal(p["columns"]).astype(weights)
    return made


def _outputs(params: Params, p: Problem) -> Arrays:
    shape, groups = (p["rows"], p["columns"]), groups_of(p)
    made: Arrays = {
        "data": np.full(shape, 0x55, np.int8 if p["code"] == "int8" else np.uint8),
        "scales": np.full((p["rows"], groups), np.nan, np.float32),
    }
    if p["residual"]:
        made["sum"] = np.full(shape, np.nan, numpy_dtype(p["dtype"]))
    return made


def _rows(p: Problem, array: Any, stride: str) -> np.ndarray:
    return np.asarray(array).reshape(p["rows"], p[stride])[:, : p["columns"]]


_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def _reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    made: Arrays = {}
    if p["source"] == "gated":
        gate, up = (
            _rows(p, arrays[n], s) for n, s in (("gate", "x_stride"), ("up", "other_stride"))
        )
        y = _ACTIVATIONS[p["activation"]](gate.astype(np.float64)) * up.astype(np.float64)
    else:
        s = _rows(p, arrays["x"], "x_stride")
        if p["residual"]:
            added = _rows(p, arrays["residual"], "other_stride").astype(np.float32)
            s = made["sum"] = (s.astype(np.float32) + added).astype(s.dtype)
        s = s.astype(np.float64)
        if p["source"] == "layer_norm":
            s = s - s.mean(axis=1, keepdims=True)
        y = s / np.sqrt((s * s).mean(axis=1, keepdims=True) + p["eps"])
        if "weight" in arrays:
            y = y * (np.asarray(arrays["weight"], np.float64) + p["weight_offset"])
        if "bias" in arrays:
            y = y + np.asarray(arrays["bias"], np.float64)
    how = Scheme(p["code"], p["span"])
    scales = cases.scales_of(y.astype(np.float32), how).reshape(p["rows"], -1)
    codes = cases.encode(
        y.astype(np.float32), scales if p["span"] == "group" else scales[:, 0], how
    )
    return {**made, "data": codes, "scales": scales}


def _numbers(params: Params, name: str, array: Any) -> Any:
    """Codes as places in the order of what they stand for, so that neighbours differ by 1; scales
    as thousandths, so that they are tens."""
    found = np.asarray(array)
    if name == "scales":
        return found.astype(np.float64) * 1000
    if name == "sum" or params["code"] == "int8":
        return found.astype(np.float64)
    return np.where(found >= 128, 128.0 - found, found)


# Of 127 places one, as a number may be rounded the other way; of scales a hundredth.
_TOLERANCE = 9e-3
MADE_ROWS = Verification(
    problems=_problems, inputs=_inputs, outputs=_outputs, reference=_reference,
    tolerance=lambda params: _TOLERANCE, numbers=_numbers,
)  # fmt: skip
