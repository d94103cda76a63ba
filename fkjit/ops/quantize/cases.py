"""How the kernels of quantization are checked: problems, arrays, and codes as NumPy rounds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.quantize.kernels import amax_blocks
from fkjit.ops.quantize.schemes import WIDTH, Scheme, scale_dtype, scales_shape
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

GREATEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's nibbles: which number each is


def scales_of(x: np.ndarray, how: Scheme) -> np.ndarray:
    """[rows, columns] -> its scales, rounded as the kernels round them."""
    dtype = numpy_dtype(scale_dtype(how, "bf16" if x.dtype.name == "bfloat16" else _name(x)))
    padded = _padded(np.abs(x.astype(np.float32)), how)
    most = {
        "tensor": lambda a: a.max(initial=0).reshape(1),
        "row": lambda a: a.max(axis=1),
        "group": lambda a: a.reshape(a.shape[0], -1, WIDTH).max(axis=2),
        "block": lambda a: a.reshape(-(-a.shape[0] // WIDTH), WIDTH, -1, WIDTH).max(axis=(1, 3)),
    }[how.span](padded)
    least = np.float32(2.0**-24 if dtype == np.float16 else 2.0**-126)
    scale = np.maximum(most / np.float32(GREATEST[how.code]), least).astype(dtype)
    scale = np.where(most == 0, dtype.type(1), scale)
    return np.where(np.isfinite(most), scale, dtype.type(np.nan)).astype(dtype)


def _name(x: np.ndarray) -> str:
    return {"float16": "fp16", "float32": "fp32"}[x.dtype.name]


def _padded(x: np.ndarray, how: Scheme) -> np.ndarray:
    rows, columns = x.shape
    more = (-rows % WIDTH if how.span == "block" else 0, -columns % WIDTH)
    return np.pad(x, ((0, more[0]), (0, more[1] if how.span in ("group", "block") else 0)))


def spread(scales: np.ndarray, how: Scheme, shape: tuple[int, int]) -> np.ndarray:
    """Scales as fp32, one for each number."""
    rows, columns = shape
    own = scales.astype(np.float32)
    if how.span == "tensor":
        return np.broadcast_to(own.reshape(1, 1), shape)
    if how.span == "row":
        return np.broadcast_to(own.reshape(rows, 1), shape)
    if how.span == "block":
        own = np.repeat(own, WIDTH, axis=0)[:rows]
    return np.repeat(own.reshape(own.shape[0], -1), WIDTH, axis=1)[:, :columns]


def encode(x: np.ndarray, scales: np.ndarray, how: Scheme) -> np.ndarray:
    """[rows, columns] -> codes as they are stored."""
    top = np.float32(GREATEST[how.code])
    with np.errstate(invalid="ignore"):
        scaled = np.clip(x.astype(np.float32) / spread(scales, how, x.shape), -top, top)
        if how.code == "fp8":
            import ml_dtypes

            return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes = np.rint(scaled).astype(np.int8)
    return codes if how.code == "int8" else packed(codes)


def packed(codes: np.ndarray) -> np.ndarray:
    """int4 codes [rows, columns] as bytes."""
    nibbles = (codes & 15).astype(np.uint8).reshape(codes.shape[0], -1, 8)[..., list(_ORDER)]
    pairs = nibbles.reshape(codes.shape[0], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)


def unpacked(data: np.ndarray) -> np.ndarray:
    """Bytes [rows, columns / 2] as int4 codes."""
    low, high = data << 4, data & 0xF0
    nibbles = np.stack([low, high], axis=-1).astype(np.uint8).view(np.int8) >> 4
    words = nibbles.reshape(data.shape[0], -1, 8)
    made = np.empty_like(words)
    made[..., list(_ORDER)] = words
    return made.reshape(data.shape[0], -1)


def decode(data: np.ndarray, scales: np.ndarray, how: Scheme) -> np.ndarray:
    """Codes and scales -> fp32 [rows, columns]."""
    if how.code == "fp8":
        import ml_dtypes

        codes = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        codes = (data if how.code == "int8" else unpacked(data)).astype(np.float32)
    return codes * spread(scales, how, codes.shape)


# ------------------------------------------------------------------ problems


def _how(p: Mapping[str, Any]) -> Scheme:
    return Scheme(p["code"], p["span"])


def _problem(params: Params, rows: int, columns: int, gap: int) -> dict[str, Any]:
    columns = -(-columns // 32) * 32 if params["code"] == "int4" else columns
    columns = -(-columns // 8) * 8 if params["wide"] else columns
    made = {"rows": rows, "columns": columns, "x_stride": columns + (8 * gap if gap else 0)}
    return {**made, "dtype": params["dtype"], "code": params["code"],
            "span": params.get("span", "tensor")}  # fmt: skip


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged groups, rows longer than a block holds, one number."""
    if scale == "full":
        shapes = ((4096, 4096), (37, 14336), (1, 9001))
    else:
        long = 8300 if params.get("span") == "row" else 700
        shapes = ((5, 301), (2, long), (1, 8))
        shapes = ((131, 141), *shapes[2:]) if params.get("span") == "block" else shapes
    return [_problem(params, *shape, gap=i % 2) for i, shape in enumerate(shapes)]


def _seen(p: Problem, x: Any) -> np.ndarray:
    return np.asarray(x).reshape(p["rows"], p["x_stride"])[:, : p["columns"]]


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """N(0, 1), a row of zeros where there are several, NaN between rows."""
    dtype = numpy_dtype(p["dtype"])
    x = np.full(p["rows"] * p["x_stride"], np.nan, dtype)
    numbers = rng.standard_normal((p["rows"], p["columns"])) * rng.choice([1e-3, 1, 40])
    numbers[1:2] = 0
    numbers[0, -1] = 2 * np.abs(numbers).max()  # the greatest is the last that is read
    numbers[-1, ::7] = -0.0
    _seen(p, x)[...] = numbers.astype(dtype)
    made: Arrays = {"x": x}
    if p["span"] == "tensor" and "span" in params:
        made["scales"] = scales_of(_seen(p, x), _how(p))
    return made


def _outputs(params: Params, p: Problem) -> Arrays:
    how, shape = _how(p), (p["rows"], p["columns"])
    stored = p["columns"] // 2 if how.code == "int4" else p["columns"]
    data = np.full((p["rows"], stored), 0x55, np.int8 if how.code == "int8" else np.uint8)
    if how.span == "tensor":
        return {"data": data}
    scales = np.full(scales_shape(how, shape), np.nan, numpy_dtype(scale_dtype(how, p["dtype"])))
    return {"data": data, "scales": scales}


def _reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    x, how = _seen(p, arrays["x"]), _how(p)
    scales = scales_of(x, how)
    return {"data": encode(x, scales, how), "scales": scales}


def _amax_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    return {
        **_inputs(params, p, rng),
        "workspace": np.full(max(amax_blocks(p), 1), 0x7FFFFFFF, np.uint32),
        "counters": np.zeros(1, np.uint32),
    }


def _codes(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    how = _how(p)
    x = rng.standard_normal((p["rows"], p["columns"])).astype(numpy_dtype(_of(params)))
    scales = scales_of(x, how)
    return {"data": encode(x, scales, how), "scales": scales}


def _of(params: Params) -> str:
    """The dtype whose scales are of the kernel's."""
    return params["scale_dtype"]


def _numbers(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    return {"out": decode(np.asarray(arrays["data"]), np.asarray(arrays["scales"]), _how(p))}


SPANS = Verification(
    problems=_problems, inputs=_inputs, outputs=_outputs, reference=_reference,
    tolerance=lambda params: 0.0,
)  # fmt: skip
AMAX = Verification(
    problems=_problems, inputs=_amax_inputs,
    outputs=lambda params, p: {"scales": np.full(1, np.nan, np.float32)},
    reference=lambda p, arrays: {
        "scales": scales_of(_seen(p, arrays["x"]), _how(p)), "counters": np.zeros(1),
    },
    tolerance=lambda params: 0.0,
)  # fmt: skip
DEQUANTIZE = Verification(
    problems=_problems, inputs=_codes,
    outputs=lambda params, p: {
        "out": np.full((p["rows"], p["columns"]), np.nan, numpy_dtype(p["dtype"]))
    },
    reference=_numbers,
    tolerance=lambda params: {"fp16": 5e-4, "bf16": 4e-3, "fp32": 1e-7}[params["dtype"]],
)  # fmt: skip
