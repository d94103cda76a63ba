"""Comparing results with goldens: bit for bit (any NaN equals any NaN) or within a tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.golden.case import EXACT, Tolerance


@dataclass(frozen=True)
class Format:
    """How an element is stored: the unsigned integer that holds it, and its floating-point fields.

    `mantissa` 0 is an integer. e4m3 has no infinity: its only NaNs have all bits set.
    """

    bits: str
    mantissa: int = 0
    infinity: bool = True


FORMATS = {
    "u8": Format("u1"), "u16": Format("u2"), "u32": Format("u4"), "u64": Format("u8"),
    "f16": Format("u2", 10), "bf16": Format("u2", 7), "f32": Format("u4", 23),
    "f64": Format("u8", 52), "e5m2": Format("u1", 2), "e4m3": Format("u1", 3, infinity=False),
}  # fmt: skip

LOWEST = {"f16": -14, "bf16": -126, "f32": -126, "f64": -1022}  # exponents of normal numbers


def is_nan(bits: np.ndarray, kind: str) -> np.ndarray:
    """Which of the elements (their bits) are NaN."""
    form = FORMATS[kind]
    if not form.mantissa:
        return np.zeros(bits.shape, bool)
    magnitude = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    exponent = ((1 << (8 * bits.itemsize - 1)) - 1) >> form.mantissa << form.mantissa
    if not form.infinity:
        return magnitude == (1 << (8 * bits.itemsize - 1)) - 1
    return magnitude > bits.dtype.type(exponent)


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """The values in float64."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view({"f16": "f2", "f32": "f4", "f64": "f8"}[kind]).astype(np.float64)


def differing(
    got: np.ndarray, expected: np.ndarray, kind: str, tolerance: Tolerance = EXACT
) -> np.ndarray:
    """Which elements are too far off; both arrays of any dtype are taken as elements of `kind`."""
    unsigned = FORMATS[kind].bits
    a, b = (np.ascontiguousarray(array).reshape(-1).view(unsigned) for array in (got, expected))
    wrong = (a != b) & ~(is_nan(a, kind) & is_nan(b, kind))
    if tolerance == EXACT or not wrong.any():
        return wrong
    with np.errstate(all="ignore"):
        x, y = decode(a, kind), decode(b, kind)
        exponent = np.fmax(np.floor(np.log2(np.abs(y))), LOWEST[kind])
        ulp = np.exp2(exponent - FORMATS[kind].mantissa)
        allowed = np.fmax(tolerance.absolute, tolerance.relative * np.abs(y))
        near = np.abs(x - y) <= np.fmax(allowed, tolerance.ulps * ulp)
    return wrong & ~(near & np.isfinite(y))


def report(got: np.ndarray, expected: np.ndarray, kind: str, wrong: np.ndarray) -> str:
    """The first few elements that differ, in hexadecimal and, for floats, as numbers."""
    unsigned = FORMATS[kind].bits
    a, b = (np.ascontiguousarray(array).reshape(-1).view(unsigned) for array in (got, expected))
    lines = [f"{int(wrong.sum())} of {wrong.size} {kind} elements differ"]
    digits = 2 * a.itemsize
    for i in np.flatnonzero(wrong)[:8]:
        line = f"  [{i}] interpreter {int(a[i]):0{digits}x}, GPU {int(b[i]):0{digits}x}"
        if kind in ("f16", "bf16", "f32", "f64"):
            pair = decode(np.array([a[i], b[i]]), kind)
            line += f" ({pair[0]:.9g}, {pair[1]:.9g})"
        lines.append(line)
    return "\n".join(lines)
