"""Sums, means and maxima in Triton, the twin of kernels_cu/reduce/.

A program reduces one row, or a piece of one; pieces leave their results to a second launch, since
programs that wait for one another would need an atomic counter. fp32 accumulation, arrays without
gaps; NaN wins in a maximum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused

_PIECE = 1 << 16  # elements of a program, where a row has several
_BLOCK = 4096  # elements at a time
_PROGRAMS = 4096  # of a row, at most


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _reduce_rows(
    x,  # [rows, columns]
    out,  # [rows, pieces]
    columns,
    piece,
    divisor,
    BLOCK: tl.constexpr,
    MAXIMUM: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64)
    begin = tl.cast(tl.program_id(1), tl.int64) * piece
    end = tl.minimum(begin + piece, columns)
    acc = tl.full([BLOCK], float("-inf") if MAXIMUM else 0.0, tl.float32)
    for start in range(begin, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        other = float("-inf") if MAXIMUM else 0.0
        values = tl.load(x + row * columns + places, mask=places < end, other=other).to(tl.float32)
        acc = _greater(acc, values) if MAXIMUM else acc + values
    total = tl.reduce(acc, 0, _greater) if MAXIMUM else tl.sum(acc, 0) / divisor
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(out + place, total.to(out.dtype.element_ty))


def reduce(x: torch.Tensor, kind: str, axis: int | None = None) -> torch.Tensor:
    """`kind` "sum", "mean" or "max" of all elements (axis None) or of each row (-1)."""
    columns = x.numel() if axis is None else x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty(() if axis is None else x.shape[:-1], dtype=x.dtype, device=x.device)
    divisor, largest = float(columns if kind == "mean" else 1), kind == "max"
    block = min(_BLOCK, triton.next_power_of_2(columns))
    pieces = min(triton.cdiv(columns, _PIECE), max(1, _PROGRAMS // rows))
    if pieces == 1:
        _reduce_rows[(rows, 1)](x, out, columns, columns, divisor, block, largest)
        return out
    piece = triton.cdiv(triton.cdiv(columns, pieces), block) * block
    pieces = triton.cdiv(columns, piece)
    partial = torch.empty((rows, pieces), dtype=torch.float32, device=x.device)
    _reduce_rows[(rows, pieces)](x, partial, columns, piece, 1.0, block, largest)
    last = triton.next_power_of_2(pieces)
    _reduce_rows[(rows, 1)](partial, out, pieces, pieces, divisor, last, largest)
    return out


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    x = arrays["x"]
    if not x.is_contiguous() or problem["out_dtype"] != problem["dtype"]:
        raise Refused("takes arrays without gaps, and gives their dtype")
    return Prepared(lambda: reduce(x, problem["kind"], problem["axis"]))
