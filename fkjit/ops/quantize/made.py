"""Codes of rows as they are made: `fkjit.quantize_rms_norm`, `…_layer_norm`, `…_gated`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fkjit.arguments import one_of, shown
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.gemm.epilogue import ACTIVATIONS
from fkjit.ops.op.checks import check_dtype, check_same_dtype, check_shape
from fkjit.ops.op.node import Node, like, of_dtype
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.op.shapes import MAX_GRID, rows_of
from fkjit.ops.quantize.kernels_made import MADE_ROWS, tile_of
from fkjit.ops.quantize.schemes import (
    SCHEMES,
    STORED,
    QuantizedTensor,
    as_e4m3,
    scales_shape,
)
from fkjit.runtime.interop import ITEMSIZE, View

MADE_SCHEMES = ("fp8_row", "int8_row", "fp8_block")  # those that products take of x
_GATES = tuple(name for name in ACTIVATIONS if name != "none")
_CHUNK, _EIGHT = 16, 8


def quantize_rms_norm(
    x: Any, weight: Any = None, scheme: str = "fp8_row", *, eps: float = 1e-6, residual: Any = None,
    weight_offset: float = 0.0,
) -> Any:  # fmt: skip
    """`fkjit.quantize` of `fkjit.rms_norm`, in one pass: codes and scales are all that is written.

    Args:
        x: fp16 or bf16 [..., columns], columns a multiple of 8, rows on 16-byte boundaries.
        weight: [columns] of x's dtype or fp32, or None: 1.
        scheme: "fp8_row", "int8_row" or "fp8_block" (a scale for 128 columns of a row), which
            `fkjit.linear` takes beside a weight of codes.
        eps, weight_offset: as in `fkjit.rms_norm`.
        residual: as x; then s = x + residual, rounded to x's dtype, is normalised and returned.

    Returns:
        A QuantizedTensor, or (QuantizedTensor, s) with a residual. What becomes codes is fp32: it
        is not rounded to x's dtype first, as it is where both calls are made.

    Raises:
        ParameterError: shapes, strides, eps or a scheme that are not as above; an input that
            requires grad: quantization has no gradient. ArgumentTypeError: no arrays, other dtypes.

    Example:
        >>> x = np.linspace(-1, 1, 16, dtype=np.float16).reshape(1, 16)
        >>> codes = fkjit.quantize_rms_norm(x, scheme="int8_row")
        >>> codes.data[0, [0, 8, 15]]
        array([-127,    8,  127], dtype=int8)
    """
    return _made("quantize_rms_norm", _RMS, (x, weight, None, residual), scheme,
                 (scheme, eps, weight_offset))  # fmt: skip


def quantize_layer_norm(
    x: Any, weight: Any = None, bias: Any = None, scheme: str = "fp8_row", *, eps: float = 1e-5,
    residual: Any = None, weight_offset: float = 0.0,
) -> Any:  # fmt: skip
    """`fkjit.quantize` of `fkjit.layer_norm`, in one pass. Arguments and what is returned are those
    of `quantize_rms_norm`, and bias: as weight, or None: 0; only beside a weight.

    Example:
        >>> x = np.linspace(0, 2, 16, dtype=np.float16).reshape(1, 16)
        >>> fkjit.quantize_layer_norm(x, scheme="int8_row").data[0, [0, 8, 15]]
        array([-127,    8,  127], dtype=int8)
    """
    return _made("quantize_layer_norm", _LAYER, (x, weight, bias, residual), scheme,
                 (scheme, eps, weight_offset))  # fmt: skip


def quantize_gated(
    gate: Any, up: Any, scheme: str = "fp8_row", *, activation: str = "silu"
) -> QuantizedTensor:
    """Codes of activation(gate) * up, in one pass: what SwiGLU's last product takes.

    Args:
        gate, up: fp16 or bf16 [..., columns], alike, columns a multiple of 8, rows on 16-byte
            boundaries at any distance: halves of one product's output, for example.
        scheme: "fp8_row", "int8_row" or "fp8_block".
        activation: "silu", "gelu" (exact), "gelu_tanh", "relu".

    Returns:
        A QuantizedTensor. activation(gate) * up is fp32 until it is codes.

    Raises:
        ParameterError, ArgumentTypeError: as `quantize_rms_norm`.

    Example:
        >>> gate = np.array([[1, 2, 3, 4, 5, 6, 7, 8]], np.float16)
        >>> fkjit.quantize_gated(gate, gate, "int8_row", activation="relu").data
        array([[  2,   8,  18,  32,  50,  71,  97, 127]], dtype=int8)
    """
    return _made("quantize_gated", _GATED, (gate, up), scheme, (scheme, activation))


def _made(call: str, op: Op, arrays: tuple[Any, ...], scheme: Any, options: Any) -> Any:
    made = op(arrays, (), options)
    codes = QuantizedTensor(as_e4m3(made[0]) if str(scheme).startswith("fp8") else made[0],
                            made[1], scheme)  # fmt: skip
    return codes if len(made) == 2 else (codes, made[2])


# ------------------------------------------------------------------ the ops


def _number(call: str, name: str, value: Any, least: float) -> float:
    try:
        if isinstance(value, (str, bytes, bool)) or getattr(value, "requires_grad", False):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(f"{call}: {name}={shown(value)} is not a plain number") from None
    if not least <= found < math.inf:
        raise ParameterError(f"{call}: {name}={found}; allowed: a finite number from {least}")
    return found


def _request(
    call: str, rows: Mapping[str, View | None], weights: Mapping[str, View | None], scheme: Any,
    params: dict[str, Any], problem: dict[str, Any], added: bool,
) -> Request:  # fmt: skip
    """`rows`: x and what is beside it, which have one shape; `added`: it is a residual."""
    one_of(call, "scheme", scheme, MADE_SCHEMES)
    (first, x), (second, other) = rows.items()
    assert x is not None
    dtype = check_same_dtype(call, rows, ("bf16", "fp16"))
    shape = tuple(x.shape)
    if not shape or shape[-1] % _EIGHT or not shape[-1]:
        raise ParameterError(
            f"{call}: {first} has shape {shape}; allowed: [..., columns], a multiple of {_EIGHT}"
        )
    if other is not None:
        check_shape(call, second, other, shape, f"{first}'s")
    how = SCHEMES[scheme]
    outputs: dict[str, Output | None]
    outputs = {"data": Output(shape, STORED[how.code]),
               "scales": Output(scales_shape(how, shape), "fp32")}  # fmt: skip
    if weights:
        outputs["sum"] = Output(shape, dtype) if added else None
    inputs = {**rows, **weights}
    if 0 in shape:
        return Request(inputs, outputs, ())
    count, columns, _ = rows_of(call, first, x)
    for name, view in rows.items():
        if view is not None:
            _check_rows(call, name, view)
    problem |= {
        "rows": count, "columns": columns, "x_stride": rows_of(call, first, x)[2],
        "other_stride": 0 if other is None else rows_of(call, second, other)[2], "dtype": dtype,
        "residual": added, **how._asdict(),
    }  # fmt: skip
    usual = {"dtype": dtype, "weight_dtype": dtype, "activation": "none", **how._asdict()}
    params = {**usual, **params, **tile_of(columns)}
    return Request(inputs, outputs, (Launch(MADE_ROWS, params, problem),))


def _check_rows(call: str, name: str, view: View) -> None:
    rows, _, stride = rows_of(call, name, view)
    if (view.pointer % _CHUNK) or stride * ITEMSIZE[view.dtype] % _CHUNK:
        raise ParameterError(
            f"{call}: rows of {name} do not start on 16-byte boundaries; pass a contiguous copy"
        )
    if rows > MAX_GRID:
        raise ParameterError(f"{call}: {name} has {rows:,} rows; allowed: up to {MAX_GRID:,}")


def _check_norm(source: str) -> Any:
    call = f"quantize_{source}"

    def check(views: Mapping[str, View | None], scheme: Any, eps: Any, offset: Any) -> Request:
        x, weight, bias = views["x"], views["weight"], views.get("bias")
        assert x is not None
        kinds = {"weight": weight, "bias": bias}
        for name, view in kinds.items():
            if view is not None:
                check_dtype(call, name, view, (x.dtype, "fp32"))
                check_shape(call, name, view, tuple(x.shape[-1:]), "the width of x")
                _check_rows(call, name, view)
        if bias is not None and weight is None:
            raise ParameterError(f"{call}: bias is given without a weight; pass a weight of ones")
        weight_dtype = check_same_dtype(call, kinds, (x.dtype, "fp32")) or x.dtype
        shift = _number(call, "weight_offset", offset, -math.inf)
        if shift and weight is None:
            raise ParameterError(f"{call}: weight_offset={shift}; allowed: 0 without a weight")
        affine = "none" if weight is None else "both" if bias else "weight"
        problem = {"source": source, "eps": _number(call, "eps", eps, 0.0),
                   "weight_offset": shift, "affine": affine}  # fmt: skip
        rows = {"x": x, "residual": views["residual"]}
        return _request(call, rows, kinds, scheme, {"source": source, "weight_dtype": weight_dtype},
                        problem, views["residual"] is not None)  # fmt: skip

    return check


def _check_gated(views: Mapping[str, View | None], scheme: Any, activation: Any) -> Request:
    call = "quantize_gated"
    one_of(call, "activation", activation, _GATES)
    problem = {"source": "gated", "eps": 0.0, "weight_offset": 0.0, "affine": "none"}
    params = {"source": "gated", "activation": activation}
    rows = {"gate": views["gate"], "up": views["up"]}
    return _request(call, rows, {}, scheme, params, problem, False)


def _fake(x: Any, *rest: Any) -> list[Any]:
    scheme = next(each for each in rest if isinstance(each, str))
    how, shape = SCHEMES[scheme], tuple(x.shape)
    return [of_dtype(x, shape, STORED[how.code]), of_dtype(x, scales_shape(how, shape), "fp32")]


def _fake_norm(x: Any, weight: Any, bias: Any, residual: Any, *options: Any) -> list[Any]:
    made = _fake(x, *options)
    return made if residual is None else [*made, like(x)]


def _norm(source: str) -> Op:
    return Op(
        f"quantize_{source}", inputs=("x", "weight", "bias", "residual"),
        outputs=("data", "scales", "sum"), check=_check_norm(source),
        optional=("weight", "bias", "residual"),
        node=Node(_fake_norm, "str scheme, float eps, float weight_offset", None),
    )  # fmt: skip


_RMS, _LAYER = _norm("rms_norm"), _norm("layer_norm")
_GATED = Op(
    "quantize_gated", inputs=("gate", "up"), outputs=("data", "scales"), check=_check_gated,
    node=Node(_fake, "str scheme, str activation", 2),
)  # fmt: skip
quantize_rms_norm.prepare = _RMS.preparing(quantize_rms_norm)  # type: ignore[attr-defined]
quantize_layer_norm.prepare = _LAYER.preparing(quantize_layer_norm)  # type: ignore[attr-defined]
quantize_gated.prepare = _GATED.preparing(quantize_gated)  # type: ignore[attr-defined]
