"""How LayerNorm and RMSNorm are checked: problems, arrays, references in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fkjit.ops.norm.kernels import capacity, size
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

TOLERANCE = {"fp16": 1.5e-3, "bf16": 1.2e-2, "fp32": 3e-6}


def problem(
    params: Params, rows: int, columns: int, gap: int = 0, affine: str = "both",
    eps: float = 1e-5, residual: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Rows `gap` elements apart. `affine`: weights given: "none", "weight" or "both"."""
    return {
        "dtype": params["dtype"],
        "weight_dtype": params["weight_dtype"],
        "rows": rows,
        "columns": columns,
        "stride": columns + gap,
        "affine": affine,
        "residual": residual,
        "eps": eps,
        "most": None,
    }


def _problems(params: Params, scale: str, affine: str, full: int) -> list[dict[str, Any]]:
    """Rows that fill a tile, and some that do not, with gaps between them; with a residual."""
    step = size(params["dtype"])
    few, many = (2, 5) if scale == "small" else (3, 700)
    less = full - 3 * step if params["vector"] else full - 13
    most = {"most": 2 if scale == "small" else 132}
    return [
        problem(params, few, full, affine=affine),
        {**problem(params, many, less, step, "weight", residual=True), **most},
        problem(params, 1, max(step, full // 3 // step * step), affine="none"),
    ]


def normal(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    return rng.standard_normal(count, dtype=np.float32).astype(numpy_dtype(dtype))


def extent(p: Problem) -> int:
    """Elements from the first to the last of an array's rows."""
    return p["stride"] * (p["rows"] - 1) + p["columns"]


def seen(p: Problem, buffer: Any) -> np.ndarray:
    """The rows in the buffer that holds them."""
    array = np.asarray(buffer)
    steps = (p["stride"] * array.itemsize, array.itemsize)
    return np.lib.stride_tricks.as_strided(array, (p["rows"], p["columns"]), steps)


def weights(p: Problem, rng: np.random.Generator) -> Arrays:
    """Weight around 1 and bias around 0, those that the problem has."""
    kind, columns = p["weight_dtype"], p["columns"]
    made: Arrays = {}
    if p["affine"] != "none":
        made["weight"] = (1 + 0.1 * rng.standard_normal(columns)).astype(numpy_dtype(kind))
    if p["affine"] == "both":
        made["bias"] = normal(rng, columns, kind)
    return made


def inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh N(0, 1) x and residual; some rows of x far from 0."""
    made = {"x": normal(rng, extent(p), p["dtype"])}
    seen(p, made["x"])[1::3] += np.asarray(4, made["x"].dtype)
    if p["residual"]:
        made["residual"] = normal(rng, extent(p), p["dtype"])
    return {**made, **weights(p, rng)}


def outputs(centered: bool) -> Any:
    """The spec's `outputs`: NaN where the kernel must write."""

    def poisoned(params: Params, p: Problem) -> Arrays:
        nan = np.full(extent(p), np.nan, numpy_dtype(p["dtype"]))
        made = {"out": nan, "rstd": np.full(p["rows"], np.nan, np.float32)}
        if centered:
            made["mean"] = np.full(p["rows"], np.nan, np.float32)
        return {**made, "sum": nan.copy()} if p["residual"] else made

    return poisoned


def normalised(x: np.ndarray, centered: bool, eps: float) -> tuple[np.ndarray, ...]:
    """(x normalised over its last dimension, mean, rstd) in float64."""
    x = x.astype(np.float64)
    mean = x.mean(-1, keepdims=True) if centered else np.zeros((*x.shape[:-1], 1))
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps)
    return (x - mean) * rstd, mean[..., 0], rstd[..., 0]


def reference(centered: bool) -> Any:
    """The spec's `reference`, NaN between the rows."""

    def expected(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
        s = seen(p, arrays["x"]).astype(np.float64)
        made: Arrays = {}
        if p["residual"]:
            s = s + seen(p, arrays["residual"]).astype(np.float64)
            made["sum"] = np.full(extent(p), np.nan)
            seen(p, made["sum"])[...] = s
        y, mean, made["rstd"] = normalised(s, centered, p["eps"])
        if arrays.get("weight") is not None:
            y = y * np.asarray(arrays["weight"]).astype(np.float64)
        if arrays.get("bias") is not None:
            y = y + np.asarray(arrays["bias"]).astype(np.float64)
        made["out"] = np.full(extent(p), np.nan)
        seen(p, made["out"])[...] = y
        return {**made, "mean": mean} if centered else made

    return expected


def _of_tile(params: Params) -> int:
    return capacity(params["dtype"], params["tile"])


def _of_block(params: Params) -> int:
    return 2 * capacity(params["dtype"], (params["threads"], 2, 1)) + 72


def _verification(centered: bool, full: Callable[[Params], int]) -> Verification:
    """`full`: columns of a row that leaves no lane idle."""
    affine = "both" if centered else "weight"
    return Verification(
        problems=lambda params, scale: _problems(params, scale, affine, full(params)),
        inputs=inputs,
        outputs=outputs(centered),
        reference=reference(centered),
        tolerance=lambda params: TOLERANCE[params["dtype"]],
    )


LAYER_NORM_ROWS, LAYER_NORM_WIDE = _verification(True, _of_tile), _verification(True, _of_block)
RMS_NORM_ROWS, RMS_NORM_WIDE = _verification(False, _of_tile), _verification(False, _of_block)
