"""Matrix elements of every type that tensor cores multiply: register bits to floats, exactly."""

from __future__ import annotations

from functools import cache

import numpy as np

BITS = {
    "f64": 64, "tf32": 32, "f16": 16, "bf16": 16,
    "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1, "b1.xor": 1,
}  # fmt: skip

_SCALE = np.array([2.0**112], np.float32)  # from the exponent bias of f16 to that of float32
_F16_BITS = np.array([0x8FFFE000], np.uint32).view(np.int32)
_TF32_BITS = np.uint32(0xFFFFE000)  # the hardware drops the other bits


def raw_type(kind: str) -> np.dtype:
    """The type in which registers are seen for `spread`: a byte holds 2 integers or 8 bits."""
    return np.dtype("f8" if kind == "f64" else f"u{max(BITS[kind] // 8, 1)}")


def matrix_type(kind: str) -> np.dtype:
    """The type that holds elements, and sums of integer products, exactly."""
    return np.dtype("f8" if kind == "f64" else "f4")


def spread(kind: str, bits: np.ndarray) -> np.ndarray:
    """Bits [..., n] with one element each: bytes become [..., 2 n] 4-bit integers, or 8 n bits."""
    if BITS[kind] == 1:
        return np.unpackbits(bits, axis=-1, bitorder="little")
    if BITS[kind] != 4:
        return bits
    pairs = np.empty((*bits.shape, 2), np.uint8)
    np.left_shift(bits, 4, out=pairs[..., 0])
    pairs[..., 1] = bits
    signed = pairs.view(np.int8) if kind == "s4" else pairs
    signed >>= 4
    return pairs.reshape(*bits.shape[:-1], -1)


def unpack(kind: str, bits: np.ndarray, out: np.ndarray) -> None:
    """Elements as `spread` gives them -> floats into `out` (contiguous, of the same shape)."""
    if kind == "bf16":
        np.copyto(out.view(np.uint32), bits)
        np.left_shift(out.view(np.int32), 16, out=out.view(np.int32))
    elif kind == "f16":
        _unpack_f16(bits, out)
    elif kind == "tf32":
        np.bitwise_and(bits, _TF32_BITS, out=out.view(np.uint32))
    elif kind in ("e4m3", "e5m2"):
        out[...] = _eight_bit_floats(kind)[bits]
    elif kind == "b1.xor":  # 1 and -1: their products tell equal bits from others
        np.subtract(1, np.multiply(2, bits, out=out), out=out)
    else:
        np.copyto(out, bits.view(np.int8) if kind in ("s8", "s4") else bits)


def _unpack_f16(bits: np.ndarray, out: np.ndarray) -> None:
    whole = out.view(np.int32)
    np.copyto(whole, bits.view(np.int16))  # sign-extended: the sign is on top after the shift
    np.left_shift(whole, 13, out=whole)
    np.bitwise_and(whole, _F16_BITS, out=whole)
    np.multiply(out, _SCALE, out=out)
    if bits.view(np.int16).max() >= 0x7C00 or bits.max() >= 0xFC00:  # infinities and NaN
        out[...] = bits.view(np.float16)


@cache
def _eight_bit_floats(kind: str) -> np.ndarray:
    """The values of all 256 bit patterns."""
    import ml_dtypes

    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
