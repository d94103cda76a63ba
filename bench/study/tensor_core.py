"""Sums as a tensor core of few bits makes them: Hopper's accumulator of e4m3 products, emulated.

Of each step of k = 32 the products are exact. They and the accumulator are aligned to the greatest
exponent among them, what lies below `bits` binary places under it is cut off (towards zero), and
the sum of what is left is the new accumulator, of which `bits` places behind its own greatest are
kept. After `interval` numbers the accumulator is added to an fp32 register and begins anew:
promotion.

The exponent of a product is the sum of its factors' (so 1.5 * 1.5 has 0, not 1), that of a factor
below 2^-6, which e4m3 has without a leading one, is -6, and a product of 0 has none.

`BITS` and all of the above were measured: wgmma's sums on an H200 (2026-11-23), crafted and
random, come out to the bit (tests/interp/wgmma/e4m3_sums.npz has some; the interpreter adds them in
the same way within `fkjit.sanitize(short_sums=True)`). mma.sync of e4m3 adds products of fp16
there, in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

STEP = 32  # of k, in one instruction on operands of a byte
BITS = 13
LEAST = 2.0**-6  # of e4m3's numbers with a leading one
_BUDGET = 1 << 18  # products at a time: what stays in a cache
_SINGLE = 16  # bits up to which fp32 holds every sum of 33 numbers exactly
_NOTHING = 2.0**-60  # what stands for the exponent of a sum of zeros
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
    total = torch.zeros(a.shape[0], a.shape[1], b.shape[1], dtype=a.dtype)
    powers = [torch.where(x == 0, 0, _power(x).clamp_min(LEAST)) for x in (a, b)]
    for at in range(0, a.shape[-1], STEP):
        step = slice(at, at + STEP)
        greatest = (powers[0][:, :, None, step] * powers[1][:, None, :, step]).amax(-1)
        unit = greatest.maximum(_power(total)).clamp_min(_NOTHING) * 2.0**-bits
        addends = a[:, :, None, step] * b[:, None, :, step]
        addends = addends.mul_((1 / unit)[..., None]).trunc_()
        total = (addends.sum(-1) + (total / unit).trunc()) * unit
        own = _power(total).clamp_min(_NOTHING) * 2.0**-bits
        total = (total / own).trunc() * own
    return total


def _power(x: torch.Tensor) -> torch.Tensor:
    """The power of two of each number's exponent; 0 of 0."""
    kind, mask = _EXPONENT[x.dtype]
    return (x.view(kind) & mask).view(x.dtype)
