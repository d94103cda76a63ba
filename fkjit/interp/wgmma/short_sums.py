"""Sums of e4m3 products as Hopper's tensor cores make them: 13 bits behind the leading one.

Of one instruction's 32 products and the accumulator, all are aligned to the greatest exponent among
them, and what lies more than 13 places below it is cut off, towards zero. The sum of what is left
loses what lies more than 13 places below its own leading bit. A product's exponent is the sum of
its factors' (1.5 * 1.5 has 0), a factor below 2^-6 counts as one of 2^-6, a product of 0 has none.

Measured: an H200's results (2026-11-23), crafted and random, come out to the bit
(tests/interp/wgmma/test_short_sums.py).
"""

from __future__ import annotations

import numpy as np

BITS = 13
_LEAST = np.float32(2.0**-6)  # e4m3's numbers below have no leading one
_NOTHING = np.float32(2.0**-60)  # stands for the exponent of a sum of zeros
_EXPONENT = np.uint32(0xFF << 23)


def add_products(a: np.ndarray, b: np.ndarray, added: np.ndarray | None) -> np.ndarray:
    """a [warpgroups, m, 32] by b [warpgroups, n, 32], numbers of e4m3, and float32 [.., m, n]."""
    total = np.zeros((*a.shape[:2], b.shape[1]), np.float32) if added is None else added
    powers = [np.where(x == 0, np.float32(0), np.maximum(_power(x), _LEAST)) for x in (a, b)]
    greatest = (powers[0][:, :, None] * powers[1][:, None]).max(-1)
    unit = np.maximum(np.maximum(greatest, _power(total)), _NOTHING) * np.float32(2.0**-BITS)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN, infinities
        products = a[:, :, None] * b[:, None]
        products /= unit[..., None]
        np.trunc(products, out=products)
        total = (products.sum(-1) + np.trunc(total / unit)) * unit
        own = np.maximum(_power(total), _NOTHING) * np.float32(2.0**-BITS)
        return np.trunc(total / own) * own


def _power(x: np.ndarray) -> np.ndarray:
    """The power of two of each number's exponent; 0 of 0."""
    return (np.ascontiguousarray(x).view(np.uint32) & _EXPONENT).view(np.float32)
