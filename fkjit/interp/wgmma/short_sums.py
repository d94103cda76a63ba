"""Sums of e4m3 products as Hopper's tensor cores make them (wgmma, f32.e4m3.e4m3), to the bit.

Of the 32 products of a step and the accumulator, the exponent of the greatest counts: of a product
the sum of its factors' exponents, -6 for those below the normal ones. What lies more than 13 binary
places below it is cut off, towards zero; the sum of what is left is cut off behind 13 places of its
own. (mma.sync of e4m3 is made of products of fp16 on Hopper, whose sums are nearly those of fp32.)

Seen on an H200: tests/interp/mma/data/e4m3_sums.npz has what it made of crafted and drawn numbers.
"""

from __future__ import annotations

import numpy as np

BITS = 13
_LEAST = np.float32(2.0**-6)  # of e4m3, normal
_SMALLEST = np.float32(2.0**-112)  # unit; below it nothing is looked at
_EXPONENT, _LOST = np.uint32(0xFF << 23), np.uint32((1 << 23 - BITS) - 1)


def summed(a: np.ndarray, b: np.ndarray, added: np.ndarray | None) -> np.ndarray:
    """float32 [..., m, 32] by [..., n, 32], e4m3's numbers, on float32 [..., m, n] or zeros."""
    plain = np.matmul(a, b.swapaxes(-1, -2))
    if added is not None:
        plain += added
    with np.errstate(invalid="ignore", over="ignore"):
        made = _cut(a, b, np.float32(0) if added is None else added, plain.shape)
    return np.where(np.isfinite(plain), made, plain)


def _cut(
    a: np.ndarray, b: np.ndarray, added: np.ndarray | np.float32, shape: tuple[int, ...]
) -> np.ndarray:
    of_a, of_b = (np.where(x == 0, x, np.maximum(_power(x), _LEAST)) for x in (a, b))
    greatest = np.broadcast_to(_power(np.asarray(added)), shape).copy()
    for k in range(a.shape[-1]):
        np.maximum(greatest, of_a[..., :, None, k] * of_b[..., None, :, k], out=greatest)
    unit = np.maximum(greatest * np.float32(2.0**-BITS), _SMALLEST)
    scale = 1 / unit
    total = np.trunc(added * scale)
    for k in range(a.shape[-1]):
        total += np.trunc(a[..., :, None, k] * b[..., None, :, k] * scale)
    return ((total * unit).view(np.uint32) & ~_LOST).view(np.float32)


def _power(x: np.ndarray) -> np.ndarray:
    """The power of two that |x| begins with; 0 of 0."""
    return (x.astype(np.float32).view(np.uint32) & _EXPONENT).view(np.float32)
