"""f16 and bf16: conversion to and from float32, correctly rounded, and arithmetic through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_SCALE = np.array([2.0**112], np.float32)
_F16_BITS = np.array([0x8FFFE000], np.uint32).view(np.int32)
NAN_BITS = np.uint16(0x7FFF)  # the NaN that conversions to f16 and bf16 give
F32_NAN = np.array([0x7FFFFFFF], np.uint32).view(np.float32)


def base_type(kind: str) -> str:
    """f16x2 -> f16."""
    return kind.removesuffix("x2")


def to_float(kind: str, bits: np.ndarray) -> np.ndarray:
    """Halves as raw u16 -> float32, exact; subnormals, infinities and NaN included."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    wide = (bits.astype(np.uint32) << np.uint32(16)).view(np.int32)
    wide >>= 3  # the sign stays on top, the exponent comes to its place in a float32
    wide &= _F16_BITS
    value = wide.view(np.float32)
    value *= _SCALE  # 2^(127-15): subnormals become normal numbers by this
    if value.size and (value.max() >= 65536 or value.min() <= -65536):
        return bits.view(np.float16).astype(np.float32)
    return value


def from_float(kind: str, value: np.ndarray) -> np.ndarray:
    """float32 -> halves as raw u16, round to nearest even; NaN becomes 0x7fff."""
    value = np.ascontiguousarray(value, np.float32)
    if kind == "bf16":
        bits = value.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    else:
        rounded = value.astype(np.float16).view(np.uint16)
    nan = np.isnan(value)
    return np.where(nan, NAN_BITS, rounded) if nan.any() else rounded


def from_double(kind: str, value: np.ndarray) -> np.ndarray:
    """float64 -> halves as raw u16 with one rounding."""
    if kind == "f16":
        rounded = value.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(value), NAN_BITS, rounded)
    return from_float(kind, round_to_odd(value))


def round_to_odd(value: np.ndarray) -> np.ndarray:
    """float64 -> float32 such that a later rounding to fewer bits is correct."""
    near = value.astype(np.float32)
    bits = near.view(np.uint32)
    back = near.astype(np.float64)
    inexact = (back != value) & np.isfinite(value) & np.isfinite(near)
    above = inexact & (np.abs(back) > np.abs(value))
    bits = (bits - above.astype(np.uint32)) | inexact.astype(np.uint32)
    return bits.view(np.float32)


def flush(kind: str, bits: np.ndarray) -> np.ndarray:
    """Subnormal halves (raw u16) -> zero of the same sign."""
    exponent = np.uint16(0x7F80 if kind == "bf16" else 0x7C00)
    return np.where(bits & exponent == 0, bits & np.uint16(0x8000), bits)


def split(kind: str, packed: np.ndarray) -> np.ndarray:
    """A register of halves (u16, or u32 with two of them) -> float32, two values for x2."""
    return to_float(base_type(kind), np.ascontiguousarray(packed).view(np.uint16))


def through_float(kind: str, function: Callable[..., Any], *packed: np.ndarray) -> np.ndarray:
    """A float32 function of packed halves, rounded to halves again, packed as the inputs are.

    One rounding in effect for +, -, *, / and sqrt: 24 bits are at least twice 11 plus 2.
    """
    size = max(one.size for one in packed)
    wide = [split(kind, np.broadcast_to(one, (size,))) for one in packed]
    return from_float(base_type(kind), function(*wide)).view(packed[0].dtype)
