"""Sums as a tensor core of few bits makes them: Hopper's accumulator of e4m3 products, emulated.

Of each step of k = 32 the products are exact. They and the accumulator are aligned to the greatest
exponent among them (a product's is the sum of its factors', those below e4m3's normal numbers have
-6), and what lies below `bits` binary places under it is cut off, towards zero. The sum of what is
left, cut off behind as many places of its own, is the new accumulator. After `interval` numbers it
is added to an fp32 register and begins anew: promotion.

With 13 bits this is what an H200 does, to the bit (fkjit/interp/wgmma/short_sums.py, which has its
results to compare with). Published figures were about 14 (the report of DeepSeek-V3, section
3.3.2) and 13 (SageAttention2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

STEP = 32  # of k, in one instruction on operands of a byte
BITS = 13
_BUDGET = 1 << 18  # products at a time: what stays in a cache
_SINGLE = 16  # bits up to which fp32 holds every sum of 33 numbers exactly
_LEAST = 2.0**-6  # of e4m3's normal numbers
# Of a dtype: the integers of its bits, those of the exponent, how many the fraction has.
_BITS_OF = {
    torch.float32: (torch.int32, 0xFF << 23, 23),
    torch.float64: (torch.int64, 0x7FF << 52, 52),
}


class Sums(NamedTuple):
    """`bits` kept of each addend, None: sums in fp32. `interval`: of k, 0: never promoted."""

    bits: int | None = None
    interval: int = 0


EXACT = Sums()


def product(a: torch.Tensor, b: torch.Tensor, sums: Sums = EXACT) -> torch.Tensor:
    """a [..., m, k] by b [..., n, k], numbers that codes stand for -> fp32 [..., m, n]."""
    if sums.bits is None:
        return a.float() @ b.float().transpose(-1, -2)
    if a.ndim > 2:
        flat = zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), strict=True)
        made = torch.stack([product(one, other, sums) for one, other in flat])
        return made.reshape(*a.shape[:-1], b.shape[-2])
    width = min(sums.interval or a.shape[-1], a.shape[-1])
    whole = a.shape[-1] // width * width
    if whole < a.shape[-1]:
        tail = product(a[:, whole:], b[:, whole:], sums)
        return product(a[:, :whole], b[:, :whole], sums) + tail
    a, b = (_intervals(x, width) for x in (a, b))
    dtype = torch.float32 if sums.bits <= _SINGLE else torch.float64
    total = torch.zeros(a.shape[1], b.shape[1])
    columns = max(1, _BUDGET // (STEP * a.shape[1]))
    for first in range(0, b.shape[1], columns):
        part = b[:, first : first + columns].to(dtype)
        some = max(1, columns // part.shape[1])
        for at in range(0, len(a), some):
            own = a[at : at + some].to(dtype)
            found = _accumulated(own, part[at : at + some], sums.bits)
            total[:, first : first + columns] += found.float().sum(0)
    return total


def _intervals(x: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, k] -> [intervals, rows, width], the last step of each filled up with zeros."""
    parts = x.reshape(len(x), -1, width).transpose(0, 1)
    return torch.nn.functional.pad(parts, (0, -width % STEP))


def _accumulated(a: torch.Tensor, b: torch.Tensor, bits: int) -> torch.Tensor:
    """[intervals, m, width] by [intervals, n, width] -> each interval's sum [intervals, m, n]."""
    kind, _, fraction = _BITS_OF[a.dtype]
    kept = -(1 << fraction - bits)
    of_a, of_b = (torch.where(x == 0, x, _power(x).clamp_min(_LEAST)) for x in (a, b))
    total = torch.zeros(a.shape[0], a.shape[1], b.shape[1], dtype=a.dtype)
    for at in range(0, a.shape[-1], STEP):
        step = slice(at, at + STEP)
        powers = of_a[:, :, None, step] * of_b[:, None, :, step]
        unit = powers.amax(-1).maximum(_power(total)).clamp_min(2.0**-60) * 2.0**-bits
        addends = a[:, :, None, step] * b[:, None, :, step]
        addends = addends.mul_((1 / unit)[..., None]).trunc_()
        total = (addends.sum(-1) + (total / unit).trunc()) * unit
        total = (total.view(kind) & kept).view(a.dtype)
    return total


def _power(x: torch.Tensor) -> torch.Tensor:
    """The power of two that |x| begins with; 0 of 0."""
    kind, mask, _ = _BITS_OF[x.dtype]
    return (x.view(kind) & mask).view(x.dtype)
