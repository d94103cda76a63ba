"""Weighted sums of the rows of a token's choices in Triton, the twin of kernels_cu/moe/combine.cu.

A program has a piece of a token's row. Rows are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared
from ..core.triton_tuning import quickly


def _config(columns: int, warps: int) -> triton.Config:
    return triton.Config({"COLUMNS": columns}, num_warps=warps)


_ALL = [_config(512, 2), _config(1024, 4), _config(2048, 4), _config(4096, 8)]
_INTERPRETED = [_config(64, 4)]  # Triton's interpreter times nothing
CONFIGS = _INTERPRETED if triton.knobs.runtime.interpret else _ALL


@triton.autotune(configs=CONFIGS, key=["tokens", "columns", "top_k"], do_bench=quickly)
@triton.jit
def _combine(
    y,  # [places, columns]
    inverse,  # [tokens, top_k]
    weights,  # [tokens, top_k]
    out,  # [tokens, columns]
    tokens,
    columns,
    top_k: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(top_k):
        place = tl.load(inverse + token * top_k + k).to(tl.int64)
        row = tl.load(y + place * columns + column, mask=there & (place >= 0), other=0)
        total += tl.load(weights + token * top_k + k) * row.to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=there)


def moe_combine(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[tokens, columns]."""
    (tokens, top_k), columns = inverse.shape, y.shape[1]
    out = y.new_empty(tokens, columns)
    if tokens:
        _combine[lambda tiles: (tokens, triton.cdiv(columns, tiles["COLUMNS"]))](
            y, inverse, weights, out, tokens, columns, top_k
        )
    return out


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    y, inverse, weights = (arrays[name] for name in ("y", "inverse", "weights"))
    return Prepared(lambda: moe_combine(y, inverse, weights))
