"""Schemes of quantization: which codes, and which numbers share a scale; `QuantizedTensor`.

    scheme       codes  a scale of              scales of x [..., rows, K]
    fp8_tensor   e4m3   the whole tensor        fp32 [1]
    fp8_row      e4m3   a row                   fp32 [..., rows]
    fp8_block    e4m3   128 columns of a row    fp32 [..., rows, K / 128]        (activations)
                        128 by 128              fp32 [..., rows / 128, K / 128]  (weights)
    int8_row     int8   a row                   fp32 [..., rows]
    int8_group   int8   128 columns of a row    x's dtype [..., rows, K / 128]
    int4_group   int4   128 columns of a row    x's dtype [..., rows, K / 128]

Parts of 128 are rounded up. A number is code * scale.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from fkjit.arguments import shown
from fkjit.errors import ArgumentTypeError, ParameterError, did_you_mean
from fkjit.ops.kv.scales import as_codes, dtype_name
from fkjit.runtime.interop import torch_dtype

WIDTH = 128  # columns of a group, rows and columns of a block


class Scheme(NamedTuple):
    """What the kernels are compiled for."""

    code: str  # fp8 (e4m3), int8, int4
    span: str  # of numbers that share a scale: tensor, row, group, block


SCHEMES = {
    "fp8_tensor": Scheme("fp8", "tensor"),
    "fp8_row": Scheme("fp8", "row"),
    "fp8_block": Scheme("fp8", "group"),
    "int8_row": Scheme("int8", "row"),
    "int8_group": Scheme("int8", "group"),
    "int4_group": Scheme("int4", "group"),
}
STORED = {"fp8": "uint8", "int8": "int8", "int4": "uint8"}  # dtype of codes, by kind
EVEN = {"fp8": 1, "int8": 1, "int4": 32}  # what the number of columns is a multiple of


class QuantizedTensor(NamedTuple):
    """Codes of a tensor and their scales: what `fkjit.quantize` makes and `fkjit.linear` takes.

    data: codes in the tensor's shape: float8_e4m3fn (uint8 where the framework has none), int8, or
        uint8 of half as many columns for int4, two codes a byte: of each eight numbers the even
        ones are the low half of a 32-bit word, the odd ones the high half, in their order.
    scales: as `scheme` has them (fkjit/ops/quantize/schemes.py lists all).
    """

    data: Any
    scales: Any
    scheme: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor whose codes these are."""
        shape = tuple(self.data.shape)
        return (*shape[:-1], 2 * shape[-1]) if self.scheme == "int4_group" else shape

    def __repr__(self) -> str:
        scales = list(getattr(self.scales, "shape", ()))
        return f"QuantizedTensor({list(self.shape)}, scales={scales}, scheme={self.scheme!r})"


def scheme_of(call: str, name: Any) -> Scheme:
    """ParameterError for a name of none."""
    if not isinstance(name, str) or name not in SCHEMES:
        near = did_you_mean(name, SCHEMES) if isinstance(name, str) else ""
        raise ParameterError(
            f"{call}: scheme={shown(name)} is not one of {', '.join(SCHEMES)}{near}"
        )
    return SCHEMES[name]


def scale_dtype(scheme: Scheme, dtype: str) -> str:
    """Of the scales of a tensor of this dtype."""
    return dtype if scheme.span == "group" and scheme.code != "fp8" else "fp32"


def scales_shape(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor of this shape."""
    groups = -(-shape[-1] // WIDTH)
    if scheme.span == "tensor":
        return (1,)
    if scheme.span == "row":
        return shape[:-1]
    if scheme.span == "group":
        return (*shape[:-1], groups)
    return (*shape[:-2], -(-shape[-2] // WIDTH), groups)


def parts(call: str, name: str, given: Any) -> QuantizedTensor:
    """A QuantizedTensor, its codes as bytes; ArgumentTypeError for anything else."""
    if not isinstance(given, tuple) or len(given) != 3:
        raise ArgumentTypeError(
            f"{call}: {name} is a {type(given).__name__}; allowed: a QuantizedTensor, as "
            "fkjit.quantize returns it"
        )
    data, scales, scheme = given
    scheme_of(call, scheme)
    return QuantizedTensor(as_codes(data), scales, scheme)


FP8_TYPES = {"fp8": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def as_e4m3(codes: Any) -> Any:
    """Bytes as e4m3 where PyTorch or ml_dtypes have it; anything else as it is."""
    return as_fp8(codes, "fp8")


def as_fp8(codes: Any, code: str) -> Any:
    """The same as e4m3 ("fp8") or "e5m2"."""
    if dtype_name(codes) != "uint8":
        return codes
    kind = type(codes).__module__.partition(".")[0]
    if kind == "numpy":
        return codes.view(getattr(import_module("ml_dtypes"), FP8_TYPES[code]))
    return codes.view(torch_dtype(FP8_TYPES[code])) if hasattr(codes, "new_empty") else codes
