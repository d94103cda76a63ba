"""Sums as a tensor core of few bits makes them: Hopper's accumulator of e4m3 products, emulated.

Of each step of k = 32 the products are exact. They and the accumulator are aligned to the greatest
exponent among them, what lies below `bits` binary places under it is cut off (towards zero), and
the sum of what is left is the new accumulator. After `interval` numbers the accumulator is added to
an fp32 register and begins anew: promotion.

`BITS` is a published figure, none of ours: about 14 (the report of DeepSeek-V3, section 3.3.2);
SageAttention2's paper has 13.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

STEP = 32  # of k, in one instruction on operands of a byte
BITS = 14
_BUDGET = 1 << 18  # products at a time: what stays in a cache
_SINGLE = 17  # bits up to which fp32 holds every sum of 33 numbers exactly
_EXPONENT = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}


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
    kind, mask = _EXPONENT[a.dtype]
    total = torch.zeros(a.shape[0], a.shape[1], b.shape[1], dtype=a.dtype)
    for at in range(0, a.shape[-1], STEP):
        addends = a[:, :, None, at : at + STEP] * b[:, None, :, at : at + STEP]
        greatest = torch.maximum(addends.amax(-1), -addends.amin(-1)).maximum(total.abs())
        power = (greatest.clamp_min(2.0**-60).view(kind) & mask).view(a.dtype)
        unit = power * 2.0**-bits
        addends = addends.mul_((1 / unit)[..., None]).trunc_()
        total = (addends.sum(-1) + (total / unit).trunc()) * unit
    return total
