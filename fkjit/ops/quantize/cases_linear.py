"""How the kernels of products with quantized weights are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE, activated, with_scratch
from fkjit.ops.gemm.problem import outputs_of
from fkjit.ops.quantize.cases import decode, encode, scales_of
from fkjit.ops.quantize.kernels_few import SKINNY_ROWS, skinny_scratch
from fkjit.ops.quantize.product import is_quantized
from fkjit.ops.quantize.schemes import Scheme
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


def problem(
    params: Params, m: int, n: int, k: int, *, span: str = "group", x_span: str = "",
    gap: int = 0, **given: Any,
) -> dict[str, Any]:  # fmt: skip
    """Contiguous arrays with a bias, unless `given` says otherwise; `gap`: elements between."""
    return {
        "m": m, "n": n, "k": k, "dtype": params["dtype"], "out_dtype": params["out_dtype"],
        "code": params["code"], "span": span, "x_span": x_span or span,
        "activation": params["activation"], "gate": params["gate"], "scale": 1.0, "bias": True,
        "residual": False, "x_stride": k + gap, "out_stride": n + gap, "residual_stride": n + gap,
        **given,
    }  # fmt: skip


def _buffer(rows: int, columns: int, stride: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """An array of NaN, and the matrix in it."""
    buffer = np.full(max(rows, 1) * stride, np.nan, numpy_dtype(dtype))
    return buffer, buffer.reshape(-1, stride)[:rows, :columns]


def inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """N(0, 1), the weight such that sums are; NaN between rows."""
    m, n, k, wide = p["m"], p["n"], p["k"], outputs_of(p)
    weight = (rng.standard_normal((wide, k)) / math.sqrt(k)).astype(numpy_dtype(p["dtype"]))
    how = Scheme(p["code"], p["span"])
    scales = scales_of(weight, how)
    made: Arrays = {"weight": encode(weight, scales, how), "scales": scales}
    x = rng.standard_normal((m, k)).astype(numpy_dtype(p["dtype"]))
    if is_quantized(p):
        of_x = Scheme(p["code"], p["x_span"])
        made["x_scales"] = scales_of(x, of_x)
        made["x"] = encode(x, made["x_scales"], of_x)
    else:
        made["x"], matrix = _buffer(m, k, p["x_stride"], p["dtype"])
        matrix[...] = x
    if p["bias"]:
        made["bias"] = rng.standard_normal(wide).astype(numpy_dtype(p["dtype"]))
    if p["residual"]:
        made["residual"], matrix = _buffer(m, n, p["residual_stride"], p["out_dtype"])
        matrix[...] = rng.standard_normal((m, n)).astype(matrix.dtype)
    return made


def outputs(params: Params, p: Problem) -> Arrays:
    """NaN where the kernel must write."""
    return {"out": _buffer(p["m"], p["n"], p["out_stride"], p["out_dtype"])[0]}


def factors(p: Problem, arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """x and weight as their codes say, in float64."""
    weight = decode(np.asarray(arrays["weight"]), np.asarray(arrays["scales"]),
                    Scheme(p["code"], p["span"]))  # fmt: skip
    if is_quantized(p):
        how = Scheme(p["code"], p["x_span"])
        x = decode(np.asarray(arrays["x"]), np.asarray(arrays["x_scales"]), how)
    else:
        x = np.asarray(arrays["x"]).reshape(p["m"], -1)[:, : p["k"]]
    return x.astype(np.float64), weight.astype(np.float64)


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """The product of the numbers that codes stand for; NaN between the rows of out."""
    x, weight = factors(p, arrays)
    z = p["scale"] * (x @ weight.T)
    if arrays.get("bias") is not None:
        z = z + np.asarray(arrays["bias"]).astype(np.float64)
    n = p["n"]
    y = activated(p["activation"], z[:, :n])
    y = y * z[:, n:] if p["gate"] else y
    if arrays.get("residual") is not None:
        y = y + np.asarray(arrays["residual"]).reshape(p["m"], -1)[:, :n].astype(np.float64)
    out = np.full((max(p["m"], 1), p["out_stride"]), np.nan)
    out[: p["m"], :n] = y
    return {"out": out.reshape(-1)}


def _everything() -> dict[str, Any]:
    return {"residual": True, "scale": 0.5, "gap": 8}


def _gemv(params: Params, scale: str) -> list[dict[str, Any]]:
    """A ragged last tile, several tiles a block, k of several parts, groups that not all warps
    have, a last group that is short."""
    (warps, groups, *_), rows = params["tile"], 16
    if scale == "full":
        shapes = ((1, 4096, 4096), (8, 4104, 1056), (5, 67, 14336))
        return [problem(params, *shape, **_everything()) for shape in shapes]
    part = 128 * warps * groups
    return [
        problem(params, 5, 4 * rows + 3, 128 * warps + 32, multiprocessors=1, **_everything()),
        problem(params, 8, rows, part + 160),
        problem(params, 1, 4, 32, bias=False),
    ]


def _gemv_sm90(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged tiles, more than a batch of them, k of several parts, a part that is short."""
    part = 128 * params["tile"][0] * params["tile"][1]
    if scale == "full":
        shapes = ((1, 4096, 4096), (8, 4104, 1024), (5, 67, 14336))
        return [problem(params, *shape, **_everything()) for shape in shapes]
    return [
        problem(params, 5, 5 * 16 + 3, part + 1024, multiprocessors=1, **_everything()),
        problem(params, 8, 16, 1024, bias=False),
    ]


def _gemv_digits(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged tiles, more than two batches of them, k of several parts, a part that is short."""
    part = 128 * params["tile"][0] * params["tile"][1]
    if scale == "full":
        shapes = ((1, 4096, 4096), (2, 4104, 1024), (2, 67, 14336))
        return [problem(params, *shape, **_everything()) for shape in shapes]
    return [
        problem(params, 2, 9 * 16 + 3, part + 768, multiprocessors=1, **_everything()),
        problem(params, 1, 40, 768, bias=False),
    ]


def _skinny(params: Params, scale: str) -> list[dict[str, Any]]:
    """The same, with k in one part and in several."""
    tokens = params["tokens"]
    if scale == "full":
        shapes = ((tokens, 4096, 4096), (tokens - 3, 4104, 1056), (9, 67, 14336))
        return [problem(params, *shape, **_everything()) for shape in shapes]
    return [
        problem(params, tokens - 3, 70, 128 * 7 + 32, multiprocessors=4, **_everything()),
        problem(params, min(tokens, SKINNY_ROWS), 64, 96, bias=False),
    ]


def _verification(problems: Any) -> Verification:
    return Verification(
        problems=problems, inputs=inputs, outputs=outputs, reference=reference,
        tolerance=lambda params: TOLERANCE[params["out_dtype"]],
    )  # fmt: skip


GEMV = _verification(_gemv)
GEMV_SM90 = _verification(_gemv_sm90)
GEMV_DIGITS = _verification(_gemv_digits)
SKINNY = with_scratch(_verification(_skinny), skinny_scratch)
