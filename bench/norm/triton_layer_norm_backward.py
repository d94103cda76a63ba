"""Gradients of LayerNorm and RMSNorm in Triton, the twin of kernels_cu/norm/backward.cu and
sum_partials.cu.

A program goes through every so many rows, each padded to a power of two, and adds up its part of
dweight and dbias; a second launch adds the parts, always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused
from .peers_norms import first

_WIDEST = 16_384
_PARTS_A_GPU = 256  # programs where there is no GPU to ask
_NAMES = ("dy", "dsum", "x", "weight", "mean", "rstd")


@triton.jit
def _rows(
    dy,  # [rows, columns]
    dsum,  # [rows, columns] where STREAM
    x,  # [rows, columns]
    weight,  # [columns]
    mean,  # [rows] where CENTERED
    rstd,  # [rows]
    dx,  # [rows, columns]
    dweight_parts,  # [programs, columns]
    dbias_parts,  # [programs, columns] where CENTERED
    rows,
    columns,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
    STREAM: tl.constexpr,
):
    part, parts = tl.program_id(0), tl.num_programs(0)
    places = tl.arange(0, BLOCK)
    inside = places < columns
    w = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for row in range(part, rows, parts):
        at = tl.cast(row, tl.int64) * columns + places
        h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        if CENTERED:
            h = tl.where(inside, h - tl.load(mean + row), 0.0)
            dbias += given
        h *= scale
        dweight += given * h
        g = given * w
        made = g - h * (tl.sum(g * h, 0) / columns)
        if CENTERED:
            made -= tl.sum(g, 0) / columns
        made *= scale
        if STREAM:
            made += tl.load(dsum + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, made.to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight_parts + part * columns + places, dweight, mask=inside)
    if CENTERED:
        tl.store(dbias_parts + part * columns + places, dbias, mask=inside)


@triton.jit
def _sums(
    parts,  # [several, count, columns]
    out,  # [several, columns]
    count,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which, inside = tl.program_id(1), column < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, count, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & inside[None, :]
        at = (which * count + row)[:, None] * columns + column[None, :]
        total += tl.load(parts + at, mask=mask, other=0.0)
    kept = tl.sum(total, 0).to(out.dtype.element_ty)
    tl.store(out + which * columns + column, kept, mask=inside)


def gradients(
    dy: torch.Tensor,
    dsum: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: Any,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """(dx, dweight, dbias) of LayerNorm, (dx, dweight) of RMSNorm, which has no mean."""
    (rows, columns), centered = x.shape, mean is not None
    several, dx = 1 + centered, torch.empty_like(x)
    size = triton.next_power_of_2(columns)
    warps = min(max(size // 512, 1), 16)
    parts = _PARTS_A_GPU
    if x.is_cuda:
        parts = torch.cuda.get_device_properties(x.device).multi_processor_count
        parts *= max(1, 16 // warps)
    parts = min(parts, rows)
    made = torch.empty(several, parts, columns, dtype=torch.float32, device=x.device)
    _rows[(parts,)](
        dy, dsum, x, weight, mean, rstd, dx, made[0], made[-1], rows, columns, size, centered,
        dsum is not None, num_warps=warps,
    )  # fmt: skip
    sums = torch.empty(several, columns, dtype=weight.dtype, device=x.device)
    _sums[(triton.cdiv(columns, 32), several)](made, sums, parts, columns, 64, 32, num_warps=8)
    return (dx, *sums)


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    if problem["columns"] > _WIDEST:
        raise Refused(f"takes rows of up to {_WIDEST} columns")
    given = tuple(arrays.get(name) for name in _NAMES)
    return Prepared(lambda: gradients(*given), first)
