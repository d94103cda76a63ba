"""Inputs for the cases: edge values of every type, random bits, and numbers that add exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Random = np.random.RandomState
Make = Callable[[Random], np.ndarray]

STORED = {"u8": "u1", "u16": "u2", "u32": "u4", "u64": "u8", "f16": "u2", "bf16": "u2",
          "f16x2": "u4", "bf16x2": "u4", "f32": "u4", "f64": "u8", "fp8x2": "u2"}  # fmt: skip

_F32 = [
    0x00000000, 0x3F800000, 0x3F000000, 0x3FC00000, 0x40200000, 0x40400000, 0x7F7FFFFF, 0x7F800000,
    0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x00000001, 0x007FFFFF, 0x00800000, 0x00400000, 0x33800000,
    0x33000000, 0x33000001, 0x32FFFFFF, 0x387FC000, 0x387FE000, 0x387FFFFF, 0x38800000, 0x477FE000,
    0x477FEFFF, 0x477FF000, 0x477FF001, 0x47800000, 0x3F801000, 0x3F803000, 0x3F808000, 0x3F818000,
    0x3F808001, 0x3F801001, 0x3F800001, 0x3F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x43E00000, 0x43E80000,
    0x43E80001, 0x43F00000, 0x47600000, 0x47700000, 0x47700001, 0x3AC00000, 0x3A800000, 0x3A800001,
    0x3B000000, 0x37000000, 0x37800000, 0x37800001, 0x38000000, 0x3F880000, 0x3F980000, 0x3F900000,
    0x42FE0000, 0x42FF0000, 0x43000000, 0x437F0000, 0x437F8000, 0x46FFFE00, 0x477FFF00, 0x477FFF80,
    0x4EFFFFFF, 0x4F000000, 0x4F7FFFFF, 0x4F800000, 0x5EFFFFFF, 0x5F000000, 0x5F7FFFFF, 0x5F800000,
    0x49742408, 0x3DCCCCCD, 0x402DF854, 0x40490FDB, 0x3EFFFFFF, 0x3F000001, 0x4B000001, 0x4B7FFFFF,
]  # fmt: skip
_F16 = [0x0000, 0x3C00, 0x3800, 0x3E00, 0x4100, 0x0001, 0x0002, 0x03FF, 0x0400, 0x0401, 0x7BFF,
        0x7C00, 0x7E00, 0x7C01, 0x7FFF, 0x3BFF, 0x3C01, 0x3C02, 0x4248, 0x5BF8, 0x5C00, 0x5F00,
        0x5F20, 0x5F80, 0x57F0, 0x5800, 0x77FF, 0x7800, 0x7B80, 0x1400, 0x1600, 0x6400, 0x6401,
        0x3F80, 0x3D40, 0x3CC0, 0x00FF, 0x0200, 0x1000, 0x0600]  # fmt: skip
_BF16 = [0x0000, 0x3F80, 0x3F00, 0x3FC0, 0x4020, 0x0001, 0x007F, 0x0080, 0x0081, 0x7F7F, 0x7F80,
         0x7FC0, 0x7F81, 0x7FFF, 0x3F7F, 0x3F81, 0x3F82, 0x4049, 0x42FF, 0x4300, 0x437F, 0x4380,
         0x4700, 0x477F, 0x4780, 0x4F00, 0x4F80, 0x5F00, 0x7F00, 0x0040]  # fmt: skip
_F64 = [
    0.0, 1.0, 0.5, 1.5, 2.5, 3.0, 127.5, 128.0, 255.5, 256.0, 32767.5, 65519.0, 65520.0, 65535.5,
    2147483647.0, 2147483647.5, 2147483648.0, 4294967295.0, 4294967295.5, 9.223372036854775e18,
    2.0**63, 2.0**64, 1.844674407370955e19, 1e300, 1.7976931348623157e308, 3.4028234663852886e38,
    3.4028235677973366e38, 1.1754943508222875e-38, 1.4e-45, 7e-46, 5e-324, 2.2250738585072014e-308,
    1.1e-308, 5.96e-8, 2.98e-8, 6.1e-5, 1 + 2.0**-24, 1 + 3 * 2.0**-24, 1 + 2.0**-11,
    1 + 3 * 2.0**-11, 1 + 2.0**-52, 1 - 2.0**-53, 0.1, np.pi,
]  # fmt: skip
_INT = [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 254, 255, 256, 257,
        0x7FFF, 0x8000, 0xFFFF, 0x10000, 0xFFFFFF, 0x1000000, 0x1000001, 0x2000003, 0x12345678,
        0x7FFFFFFF, 0x80000000, 0x80000001, 0xDEADBEEF, 0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFF80,
        0xFFFFFF7F, 0xFFFF8000, 0xFFFF7FFF, 0x7FFFFFC0, 0x7FFFFF40]  # fmt: skip
_LONG = [0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0x8000000000000001, 0xFFFFFFFFFFFFFFFF,
         0xFFFFFFFF00000000, 0x0000000100000000, 0x20000000000001, 0x20000000000003,
         0xFFFFFFFFFFFFFF80, 0xFFFFFFFF80000000, 0xFFFFFFFF7FFFFFFF, 0x123456789ABCDEF0,
         0x7FFFFFFFFFFFFE00, 0xFFFFFFFFFFFFFC00]  # fmt: skip


def edges(kind: str) -> np.ndarray:
    """The bits of the values of a type that are worth testing, of both signs for floats."""
    if kind in ("f16x2", "bf16x2"):
        halves = edges(kind[:-2]).astype(np.uint32)
        return halves | np.roll(halves, 7) << 16
    if kind == "fp8x2":
        return (np.arange(0, 256, dtype=np.uint16) << 8) | np.roll(np.arange(256), 91)
    if kind in ("u8", "u16", "u32", "u64"):
        values = np.array(_INT + (_LONG if kind == "u64" else []), np.uint64)
        return np.unique(values.astype(STORED[kind]))
    if kind == "f64":
        special = np.array([0x7FF0 << 48, 0x7FF8 << 48, (0x7FF0 << 48) + 1], np.uint64)
        bits = np.concatenate([np.array(_F64).view(np.uint64), special])
    else:
        bits = np.array({"f32": _F32, "f16": _F16, "bf16": _BF16}[kind], STORED[kind])
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.concatenate([bits, bits | sign])


def random_bits(rng: Random, kind: str, count: int) -> np.ndarray:
    """`count` elements of any bits at all."""
    dtype = np.dtype(STORED[kind])
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()


def pool(kind: str, count: int = 192) -> Make:
    """All edges, then random bits: for operations of one input. At least `count` elements."""

    def make(rng: Random) -> np.ndarray:
        known = edges(kind)
        return np.concatenate([known, random_bits(rng, kind, max(16, count - known.size))])

    return make


def mixed(kind: str, count: int = 320) -> Make:
    """Edges (three of four) and random bits in random order: for operations of several inputs."""

    def make(rng: Random) -> np.ndarray:
        known = edges(kind)
        chosen = known[rng.randint(0, known.size, count)]
        return np.where(rng.randint(0, 4, count) > 0, chosen, random_bits(rng, kind, count))

    return make


def uniform(low: float, high: float, kind: str = "f32", count: int = 256) -> Make:
    """Floats between two bounds."""

    def make(rng: Random) -> np.ndarray:
        values = rng.uniform(low, high, count)
        if kind == "f64":
            return values.view(np.uint64)
        single = values.astype(np.float32).view(np.uint32)
        if kind == "f32":
            return single
        if kind in ("bf16", "bf16x2"):
            half = (single >> 16).astype(np.uint16)
        else:
            half = values.astype(np.float16).view(np.uint16)
        return half if not kind.endswith("x2") else half | np.roll(half, 1).astype(np.uint32) << 16

    return make


def below(limit: int, kind: str = "u32", count: int = 320) -> Make:
    """Integers from 0 to limit - 1."""
    return lambda rng: rng.randint(0, limit, count).astype(STORED[kind])


def small(rng: Random, kind: str, shape: tuple[int, ...] | int, most: int = 4) -> np.ndarray:
    """Integers from -most to most as bits of a float type: products and sums of them are exact."""
    values = rng.randint(-most, most + 1, shape)
    if kind in ("e4m3", "e5m2"):
        mantissa, bias = (3, 7) if kind == "e4m3" else (2, 15)
        table = [_small_float(abs(n), n < 0, mantissa, bias) for n in range(-most, most + 1)]
        return np.array(table, np.uint8)[values + most]
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    dtype = {"f16": "f2", "f32": "f4", "tf32": "f4", "f64": "f8", "s32": "i4", "s8": "i1"}[kind]
    made = values.astype(dtype)
    return made.view(f"u{made.itemsize}")


_SPECIAL = {  # one, minus one, infinity (or NaN where there is none), NaN
    "f16": (0x3C00, 0xBC00, 0x7C00, 0x7E00), "bf16": (0x3F80, 0xBF80, 0x7F80, 0x7FC0),
    "f32": (0x3F800000, 0xBF800000, 0x7F800000, 0x7FC00000),
    "tf32": (0x3F800000, 0xBF800000, 0x7F800000, 0x7FC00000),
    "e4m3": (0x38, 0xB8, 0x7F, 0x7F), "e5m2": (0x3C, 0xBC, 0x7C, 0x7E),
}  # fmt: skip


def special(rng: Random, kind: str, count: int) -> np.ndarray:
    """Bits of small integers, among which few infinities of both signs and fewer NaN stand."""
    made = small(rng, kind, count)
    one, minus, infinity, nan = (made.dtype.type(bits) for bits in _SPECIAL[kind])
    rare = rng.randint(0, 200, count)
    for number, bits in enumerate((one, minus, infinity, infinity | (one ^ minus), nan)):
        made[rare == number] = bits
    return made


def _small_float(value: int, negative: bool, mantissa: int, bias: int) -> int:
    """The bits of a small integer that the format holds exactly."""
    sign = 0x80 if negative else 0
    if not value:
        return sign
    exponent = value.bit_length() - 1
    fraction = (value << mantissa >> exponent) - (1 << mantissa)
    return sign | (exponent + bias) << mantissa | fraction
