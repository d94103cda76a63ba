"""Partial attention put together in Triton, the twin of kernels_cu/attention/merge_states.cu.

A program has ROWS rows of all parts, one part after the other. Arrays have no gaps, o is
[B, S, H, D]; the CUDA kernel takes any strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused


def _config(rows: int, warps: int) -> triton.Config:
    return triton.Config({"ROWS": rows}, num_warps=warps)


_ALL = [_config(4, 1), _config(8, 2), _config(16, 4), _config(32, 8), _config(32, 4)]
_INTERPRETED = [_config(4, 4)]  # Triton's interpreter times nothing


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["rows", "columns", "PARTS"],
)
@triton.jit
def _merge(
    o,  # [PARTS, rows, columns], of a pair the first part
    lse,  # [PARTS, batch, heads, length]
    other,  # [rows, columns]
    other_lse,
    out,
    out_lse,
    rows,
    heads,
    length,
    columns,
    PARTS: tl.constexpr,
    PAIR: tl.constexpr,
    WIDTH: tl.constexpr,  # columns up to a power of two
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    head, token = row % heads, row // heads
    place = (token // length * heads + head) * length + token % length  # in lse
    column = tl.arange(0, WIDTH)
    there = inside[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    value = tl.zeros([ROWS, WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        if PAIR and part == 1:
            seen = tl.load(other_lse + place, mask=inside, other=float("-inf"))
            x = tl.load(other + offset, mask=there, other=0).to(tl.float32)
        else:
            seen = tl.load(lse + part * rows + place, mask=inside, other=float("-inf"))
            x = tl.load(o + part * rows * columns + offset, mask=there, other=0).to(tl.float32)
        nothing = tl.abs(seen) == float("inf")
        seen = tl.where(nothing, float("-inf"), seen)
        higher = tl.maximum(top, seen)
        by = tl.where(nothing, 0.0, tl.exp(seen - higher))
        shrink = tl.where(top == float("-inf"), 0.0, tl.exp(top - higher))
        total = total * shrink + by
        x = tl.where(nothing[:, None], 0.0, x)
        value = value * shrink[:, None] + by[:, None] * x
        top = higher
    scale = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    tl.store(out + offset, (value * scale[:, None]).to(out.dtype.element_ty), mask=there)
    whole = tl.where(total == 0, float("-inf"), top + tl.log(tl.where(total == 0, 1.0, total)))
    tl.store(out_lse + place, whole, mask=inside)


def merge_states(
    o: torch.Tensor,
    lse: torch.Tensor,
    other: torch.Tensor | None = None,
    other_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, S, H, D], lse [B, H, S]) of two parts, or of a stack of them."""
    pair = other is not None
    parts = 2 if pair else o.shape[0]
    out, out_lse = (torch.empty_like(x if pair else x[0]) for x in (o, lse))
    _, length, heads, columns = out.shape
    rows = out_lse.numel()
    if rows:
        _merge[lambda tiles: (triton.cdiv(rows, tiles["ROWS"]),)](
            o, lse, other if pair else o, other_lse if pair else lse, out, out_lse,
            rows, heads, length, columns, parts, pair, triton.next_power_of_2(columns),
        )  # fmt: skip
    return out, out_lse


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    if problem["layout"] != "bshd":
        raise Refused("takes o [B, S, H, D]")
    given = [arrays[name] for name in ("o", "lse", "other", "other_lse") if name in arrays]
    return Prepared(lambda: merge_states(*given), lambda made: made[0].flatten(0, 2))
