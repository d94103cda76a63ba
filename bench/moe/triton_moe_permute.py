"""Rows of tokens to the places of their choices in Triton, the twin of kernels_cu/moe/permute.cu.

A program has a piece of a token's row, read once and written top_k times. Rows are contiguous;
places that nobody has are not cleared.
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


_ALL = [_config(1024, 4), _config(2048, 4), _config(4096, 8), _config(8192, 8)]
_INTERPRETED = [_config(64, 4)]  # Triton's interpreter times nothing
CONFIGS = _INTERPRETED if triton.knobs.runtime.interpret else _ALL


@triton.autotune(configs=CONFIGS, key=["tokens", "columns", "top_k"], do_bench=quickly)
@triton.jit
def _permute(
    x,  # [tokens, columns]
    inverse,  # [tokens, top_k]
    out,  # [places, columns]
    tokens,
    columns,
    top_k: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    row = tl.load(x + token * columns + column, mask=there)
    for k in range(top_k):
        place = tl.load(inverse + token * top_k + k).to(tl.int64)
        tl.store(out + place * columns + column, row, mask=there & (place >= 0))


def moe_permute(x: torch.Tensor, inverse: torch.Tensor, places: int) -> torch.Tensor:
    """[places, columns]."""
    (tokens, columns), top_k = x.shape, inverse.shape[1]
    out = x.new_empty(places, columns)
    if tokens:
        _permute[lambda tiles: (tokens, triton.cdiv(columns, tiles["COLUMNS"]))](
            x, inverse, out, tokens, columns, top_k
        )
    return out


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    x, inverse, places = arrays["x"], arrays["inverse"], problem["places"]
    return Prepared(lambda: moe_permute(x, inverse, places))
