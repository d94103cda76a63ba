"""`fkjit.quantize` and `fkjit.dequantize`."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from fkjit.arguments import shown
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.op.checks import FLOATS, check_dtype, check_flag, check_shape
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.op.shapes import MAX_GRID, rows_of
from fkjit.ops.quantize.kernels import AMAX, DEQUANTIZE, SPANS, amax_blocks, spans_of, threads_of
from fkjit.ops.quantize.schemes import (
    EVEN,
    STORED,
    WIDTH,
    QuantizedTensor,
    Scheme,
    as_e4m3,
    parts,
    scale_dtype,
    scales_shape,
    scheme_of,
)
from fkjit.runtime.interop import ITEMSIZE, View, contiguous, empty, view

_QUANTIZE, _DEQUANTIZE = "quantize", "dequantize"
_CHUNK = 16  # bytes of a load


def quantize(x: Any, scheme: str, *, weight: bool = False) -> QuantizedTensor:
    """Codes of x and their scales, made on the device in one pass over x (two for "fp8_tensor").

    Args:
        x: [..., K], fp16, bf16 or fp32, K contiguous, rows at one distance; torch, CuPy, NumPy or
            any DLPack array.
        scheme: "fp8_tensor", "fp8_row", "fp8_block" (e4m3; a scale for all of x, a row, 128 columns
            of a row), "int8_row", "int8_group" or "int4_group" (128 columns of a row). "int4_group"
            takes K of a multiple of 32.
        weight: of "fp8_block": a scale for 128 by 128 numbers, as a weight [N, K] has them, or
            weights [..., N, K] with N a multiple of 128.

    Returns:
        QuantizedTensor(data, scales, scheme); a number is code * scale. A scale is the greatest
        magnitude of its numbers divided by the greatest code: 448, 127 or 7. Scales are fp32, those
        of the int groups of x's dtype. Codes are quotients rounded to the nearest, ties to even.
        Of zeros a scale is 1. A NaN or an infinity makes its scale NaN, and so all that shares it:
        nothing is lost in silence. e4m3 keeps the sign of -0.

    Raises:
        ParameterError: no such scheme, shapes and strides that are not as above, a tensor that
            requires grad (quantization has no gradient). ArgumentTypeError: no array, other dtypes.

    Example:
        >>> x = np.array([[1.0, -2.0, 127.0, 63.4]], np.float32)
        >>> codes = fkjit.quantize(x, "int8_row")
        >>> codes.data, codes.scales
        (array([[  1,  -2, 127,  63]], dtype=int8), array([1.], dtype=float32))
    """
    data, scales = _QUANT((x,), (None, None), (scheme, weight))
    return QuantizedTensor(as_e4m3(data) if scheme.startswith("fp8") else data, scales, scheme)


def dequantize(quantized: QuantizedTensor, dtype: str = "bf16") -> Any:
    """The numbers that codes stand for: code * scale in fp32, rounded once.

    Args:
        quantized: as `quantize` returns it.
        dtype: of the result: "bf16", "fp16" or "fp32".

    Returns:
        An array of the quantized tensor's shape, in its framework.

    Raises:
        ParameterError: no such scheme or dtype, shapes that do not fit each other.
        ArgumentTypeError: no QuantizedTensor, codes of other dtypes.

    Example:
        >>> x = np.array([[1.0, -2.0, 127.0, 63.4]], np.float32)
        >>> fkjit.dequantize(fkjit.quantize(x, "int8_row"), dtype="fp32")
        array([[  1.,  -2., 127.,  63.]], dtype=float32)
    """
    data, scales, scheme = parts(_DEQUANTIZE, "quantized", quantized)
    return _DEQUANT((data, scales), (None,), (scheme, dtype))


# ------------------------------------------------------------------ quantize


def _check(views: Mapping[str, View | None], scheme: str, weight: Any) -> Request:
    x, how = views["x"], scheme_of(_QUANTIZE, scheme)
    assert x is not None
    check_dtype(_QUANTIZE, "x", x)
    if check_flag(_QUANTIZE, "weight", weight) and scheme == "fp8_block":
        how = Scheme("fp8", "block")
    shape = tuple(x.shape)
    _check_x(x, how)
    stored = (*shape[:-1], shape[-1] // 2) if how.code == "int4" else shape
    outputs = {
        "data": Output(stored, STORED[how.code]),
        "scales": Output(scales_shape(how, shape), scale_dtype(how, x.dtype)),
    }
    if 0 in shape:
        return Request({"x": x}, outputs, ())
    rows, columns, stride = rows_of(_QUANTIZE, "x", x)
    problem = {
        "rows": rows, "columns": columns, "x_stride": stride, "dtype": x.dtype,
        **how._asdict(),
    }  # fmt: skip
    _check_size(problem)
    wide = columns % 8 == 0 and _on_chunks(x.pointer, stride * ITEMSIZE[x.dtype])
    params = {"dtype": x.dtype, **how._asdict(), "wide": wide}
    codes = Launch(SPANS, {**params, "threads": threads_of(how.span, columns)}, problem)
    if how.span != "tensor":
        return Request({"x": x}, outputs, (codes,))
    amax = Launch(AMAX, {"dtype": x.dtype, "code": how.code, "wide": wide}, problem)
    return Request({"x": x}, outputs, (amax, codes), 4 * amax_blocks(problem), 1)


def _check_x(x: View, how: Scheme) -> None:
    shape = tuple(x.shape)
    if not shape or shape[-1] == 0:
        raise ParameterError(f"{_QUANTIZE}: x has shape {shape}; allowed: [..., K], K from 1")
    if how.span == "block" and (len(shape) < 2 or (len(shape) > 2 and shape[-2] % WIDTH)):
        raise ParameterError(
            f"{_QUANTIZE}: x has shape {shape}; allowed: [N, K] with weight=True of fp8_block, or "
            f"[..., N, K] with N a multiple of {WIDTH}"
        )
    if shape[-1] % EVEN[how.code]:
        raise ParameterError(
            f"{_QUANTIZE}: x has {shape[-1]} columns; allowed: a multiple of {EVEN[how.code]} for "
            f"{how.code}; pad x with zeros"
        )


def _check_size(problem: Mapping[str, Any]) -> None:
    if max(problem["columns"], spans_of(problem)) > MAX_GRID // 8:
        raise ParameterError(
            f"{_QUANTIZE}: x has {problem['rows']:,} rows of {problem['columns']:,} columns; "
            f"allowed: up to {MAX_GRID // 8:,} groups of 128"
        )


def _on_chunks(*places: int) -> bool:
    return not any([place % _CHUNK for place in places])


def _quantize_fake(x: Any, scheme: str, weight: bool) -> list[Any]:
    how = scheme_of(_QUANTIZE, scheme)
    if weight and scheme == "fp8_block":
        how = Scheme("fp8", "block")
    shape = tuple(x.shape)
    stored = (*shape[:-1], shape[-1] // 2) if how.code == "int4" else shape
    scales = scales_shape(how, shape)
    own = scale_dtype(how, "") == "fp32"
    return [
        of_dtype(x, stored, STORED[how.code]),
        of_dtype(x, scales, "fp32") if own else x.new_empty(scales),
    ]


_QUANT = Op(
    _QUANTIZE, inputs=("x",), outputs=("data", "scales"), check=_check,
    node=Node(_quantize_fake, "str scheme, bool weight", 2),
)  # fmt: skip

# ------------------------------------------------------------------ dequantize


def _check_codes(views: Mapping[str, View | None], scheme: str, dtype: Any) -> Request:
    data, scales = views["data"], views["scales"]
    assert data is not None and scales is not None
    if not isinstance(dtype, str) or dtype not in FLOATS:
        raise ParameterError(f"{_DEQUANTIZE}: dtype={shown(dtype)}; allowed: {', '.join(FLOATS)}")
    how, shape = checked_parts(_DEQUANTIZE, "quantized", data, scales, scheme)
    inputs, outputs = {"data": data, "scales": scales}, {"out": Output(shape, dtype)}
    if 0 in shape:
        return Request(inputs, outputs, ())
    columns = shape[-1]
    problem = {
        "rows": prod(shape[:-1]), "columns": columns, "x_stride": columns, "dtype": dtype,
        **how._asdict(),
    }  # fmt: skip
    _check_size(problem)
    wide = columns % 8 == 0 and _on_chunks(data.pointer)
    params = {"dtype": dtype, **how._asdict(), "wide": wide, "scale_dtype": scales.dtype}
    return Request(inputs, outputs, (Launch(DEQUANTIZE, params, problem),))


def checked_parts(
    call: str, name: str, data: View, scales: View, scheme: str
) -> tuple[Scheme, tuple[int, ...]]:
    """The scheme, "block" where fp8_block has one scale for 128 by 128, and the tensor's shape."""
    how = scheme_of(call, scheme)
    check_dtype(call, f"{name}.data", data, (STORED[how.code],))
    shape = tuple(data.shape)
    if not shape:
        raise ParameterError(f"{call}: {name}.data has no dimensions; allowed: [..., K]")
    shape = (*shape[:-1], 2 * shape[-1]) if how.code == "int4" else shape
    other = Scheme("fp8", "block")
    found = tuple(scales.shape)
    if scheme == "fp8_block" and len(shape) >= 2 and found == scales_shape(other, shape):
        how = other if found != scales_shape(how, shape) else how
    check_shape(call, f"{name}.scales", scales, scales_shape(how, shape), f"{scheme}'s")
    allowed = FLOATS if scale_dtype(how, "") != "fp32" else ("fp32",)
    check_dtype(call, f"{name}.scales", scales, allowed)
    for part, seen in (("data", data), ("scales", scales)):
        if 0 not in seen.shape and tuple(seen.strides) != contiguous(tuple(seen.shape)):
            _check_contiguous(call, f"{name}.{part}", seen)
    return how, shape


def _check_contiguous(call: str, name: str, view: View) -> None:
    pairs = zip(view.shape, view.strides, contiguous(tuple(view.shape)), strict=True)
    if any([n > 1 and step != wanted for n, step, wanted in pairs]):
        raise ParameterError(
            f"{call}: {name} has strides {tuple(view.strides)}; it must be contiguous: pass a "
            "contiguous copy"
        )


_DEQUANT = Op(
    _DEQUANTIZE, inputs=("data", "scales"), outputs=("out",), check=_check_codes,
    node=Node(
        lambda data, scales, scheme, dtype: [
            of_dtype(data, QuantizedTensor(data, scales, scheme).shape, dtype)
        ],
        "str scheme, str dtype",
    ),
)  # fmt: skip


def prepare_dequantize(quantized: QuantizedTensor, dtype: str = "bf16") -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    data, scales, scheme = parts(_DEQUANTIZE, "quantized", quantized)
    if not hasattr(data, "shape"):
        raise ArgumentTypeError(f"{_DEQUANTIZE}: quantized.data is a {type(data).__name__}")
    _DEQUANT.prepare([data, scales], (scheme, dtype))


def prepared_codes(x: Any, scheme: str) -> QuantizedTensor:
    """What `quantize` would return, after its `prepare`; the codes are whatever memory held."""
    _QUANT.prepare([x], (scheme, False))
    seen = view(x, _QUANTIZE, "x")
    request = _check({"x": seen}, scheme, False)
    data, scales = (empty(seen, o.shape, o.dtype) for o in request.outputs.values() if o)
    return QuantizedTensor(data, scales, scheme)


quantize.prepare = _QUANT.preparing(quantize)  # type: ignore[attr-defined]
dequantize.prepare = prepare_dequantize  # type: ignore[attr-defined]
