"""Correct rounding: to any binary format in every PTX mode, and exact sums and products of f64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

MODES = ("rn", "rz", "rm", "rp")
_SPLIT = 134217729.0  # 2^27 + 1: cuts a float64 into two halves of 26 bits
_SAFE = 2.0**480  # factors up to here and products down to its inverse squared stay in range


@dataclass(frozen=True)
class Format:
    """A binary floating format: bits of the significand (the hidden one too), exponents, limit."""

    bits: int
    lowest: int  # exponent of the smallest normal number
    largest: float


FORMATS = {
    "f32": Format(24, -126, float(np.finfo(np.float32).max)),
    "f16": Format(11, -14, 65504.0),
    "bf16": Format(8, -126, (2 - 2.0**-7) * 2.0**127),
    "tf32": Format(11, -126, (2 - 2.0**-10) * 2.0**127),
    "e4m3": Format(4, -6, 448.0),
    "e5m2": Format(3, -14, 57344.0),
    "e2m3": Format(4, 0, 7.5),
    "e3m2": Format(3, -2, 28.0),
    "e2m1": Format(2, 0, 6.0),
}


def _ties_away(values: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(values) + 0.5), values)


_INTEGRAL: dict[str, Any] = {
    "rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil, "rna": _ties_away,
}  # fmt: skip


def quantise(value: np.ndarray, kind: str, mode: str) -> np.ndarray:
    """float64 values rounded to a format of FORMATS, still as float64; NaN stays NaN.

    Beyond the largest number lies infinity, or that number where the mode rounds towards it.
    """
    target = FORMATS[kind]
    _, exponent = np.frexp(value)
    unit = np.maximum(exponent - target.bits, target.lowest - target.bits + 1)
    finite = np.isfinite(value)
    safe = np.where(finite, value, 0.0)
    rounded = np.ldexp(_INTEGRAL[mode](np.ldexp(safe, -unit)), unit)
    rounded = np.where(finite, np.copysign(rounded, value), value)
    over = finite & (np.abs(rounded) > target.largest)
    if over.any():
        kept = {"rz": over, "rm": over & (value > 0), "rp": over & (value < 0)}.get(mode, False)
        limit = np.where(kept, target.largest, np.inf)
        rounded = np.where(over, np.copysign(limit, value), rounded)
    return rounded


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded float64 sum and its exact error (0 where the sum is not finite)."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return total, np.where(np.isfinite(total), error, 0.0)


def two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded float64 product and its exact error, far from overflow and underflow."""
    product = a * b
    high_a, high_b = _SPLIT * a, _SPLIT * b
    high_a, high_b = high_a - (high_a - a), high_b - (high_b - b)
    low_a, low_b = a - high_a, b - high_b
    error = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
    return product, error


def to_odd(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """value + error as one float64 whose last bit is odd where it is inexact.

    Rounding it to 51 bits or fewer, in any mode, gives what the exact sum would give.
    """
    even = (value.view(np.uint64) & np.uint64(1)) == 0
    move = even & (error != 0)
    toward = np.nextafter(value, np.where(error > 0, np.inf, -np.inf))
    return np.where(move, toward, value)


def sum_to_odd(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    """The float64 sum rounded to odd; an exact 0 of opposite terms is -0 under .rm."""
    value, error = two_sum(np.asarray(a, np.float64), np.asarray(b, np.float64))
    if error.any():
        value = to_odd(value, error)
    if mode == "rm":
        value = np.where((value == 0) & (np.signbit(a) | np.signbit(b)), -0.0, value)
    return value


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b+c of float64 with one rounding (Boldo and Melquiond's algorithm)."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = two_product(a, b)
    middle, rest = two_sum(c, low)
    top, tail = two_sum(high, middle)
    result = top + to_odd(*two_sum(rest, tail))
    finite = np.isfinite(a) & np.isfinite(b)
    plain = (a == 0) | (b == 0) | ~finite
    result = np.where(plain, a * b + c, result)
    result = np.where(finite & ~np.isfinite(c), c, result)
    extreme = np.maximum(np.abs(a), np.abs(b)) > _SAFE
    extreme |= (np.abs(high) < 1 / _SAFE / _SAFE) | (np.abs(c) > _SAFE * _SAFE)
    slow = extreme & ~plain & np.isfinite(c)
    return exactly("fma", "rn", (a, b, c), slow, result) if slow.any() else result


_RATIONAL: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "fma": lambda a, b, c: a * b + c,
}


def exactly(
    name: str, mode: str, inputs: tuple[np.ndarray, ...], where: np.ndarray, result: np.ndarray
) -> np.ndarray:
    """`result` with the elements of `where` computed in rational numbers: finite, and not 0 / 0.

    name: add, sub, mul, div, rcp, fma or sqrt, of float64.
    """
    out = np.array(result)
    for at in np.flatnonzero(where).tolist():
        out[at] = _one(name, mode, [float(values[at]) for values in inputs], float(out[at]))
    return out


def _one(name: str, mode: str, values: list[float], near: float) -> float:
    numbers = [Fraction(value) for value in values]
    if name == "sqrt":
        return _direct(near, Fraction(near) ** 2 - numbers[0], mode)
    exact = _RATIONAL[name](*numbers)
    if exact == 0:
        return _zero(name, mode, values, near)
    try:
        near = float(exact)
    except OverflowError:
        near = math.inf if exact > 0 else -math.inf
        outward = mode == "rn" or mode == ("rp" if exact > 0 else "rm")
        return near if outward else math.nextafter(near, 0.0)
    return _direct(near, Fraction(near) - exact, mode)


def _direct(near: float, excess: Fraction, mode: str) -> float:
    """The neighbour of the nearest number that the mode asks for; excess: nearest - exact."""
    inward = mode == "rz" and (excess > 0) == (near > 0)
    if excess > 0 and (mode == "rm" or (inward and near > 0)):
        return math.nextafter(near, -math.inf)
    if excess < 0 and (mode == "rp" or (inward and near < 0)):
        return math.nextafter(near, math.inf)
    return near


def _zero(name: str, mode: str, values: list[float], near: float) -> float:
    """The sign of an exact zero: that of IEEE 754 for sums of opposite terms."""
    if mode != "rm" or name not in ("add", "sub", "fma"):
        return near
    if name == "fma":
        terms = [math.copysign(1.0, values[0]) * math.copysign(1.0, values[1]), values[2]]
    else:
        terms = [values[0], values[1] if name == "add" else -values[1]]
    positive = all(math.copysign(1.0, term) > 0 for term in terms)
    return 0.0 if positive else -0.0


def directed64(
    name: str, function: Callable[..., np.ndarray], mode: str, inputs: tuple[np.ndarray, ...]
) -> np.ndarray:
    """An f64 operation rounded toward zero (rz), down (rm) or up (rp)."""
    inputs = tuple(np.broadcast_arrays(*inputs))
    near = np.asarray(function(*inputs))
    where = np.logical_and.reduce([np.isfinite(values) for values in inputs]) & ~np.isnan(near)
    if name in ("div", "rcp"):
        where &= inputs[-1] != 0
    return exactly(name, mode, inputs, where, near)
