"""Products with a weight for each expert in Triton: the twin of kernels_cu/gemm/ on sorted rows.

A program owns a tile of rows, all of one expert, and BLOCK_N columns. Rows are those of places, or,
as fused MoE kernels have them, are gathered and written by the number of their choice, so that
nothing is permuted before and behind; then a choice's weight may be multiplied in. How many tiles
there are is not known to the host: programs without an expert end at once.

Sources: vLLM's fused_moe, for the layout and for what is fused; Triton's tutorial on matrix
multiplication, for the order of tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared
from ..core.triton_tuning import quickly

GROUP = 8  # rows of tiles


def _config(n: int, k: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)


# By the rows of a tile (up to). With a gate a program has two sums of each element.
_PLAIN = {
    32: [_config(64, 128, 4, 4), _config(128, 128, 4, 3), _config(32, 256, 4, 4)],
    64: [_config(128, 64, 4, 4), _config(256, 64, 8, 3), _config(128, 128, 8, 3)],
    128: [_config(128, 64, 8, 4), _config(256, 64, 8, 3), _config(128, 64, 4, 3)],
}
_GATED = {
    32: [_config(64, 128, 4, 3), _config(32, 128, 4, 4), _config(64, 64, 4, 5)],
    64: [_config(64, 64, 4, 4), _config(128, 64, 8, 3), _config(64, 128, 8, 3)],
    128: [_config(128, 64, 8, 3), _config(64, 64, 4, 4), _config(64, 64, 8, 4)],
}
_FP32 = [_config(64, 32, 4, 3), _config(32, 32, 4, 2)]
_TABLES = [tiles for table in (_PLAIN, _GATED) for tiles in table.values()]
_ALL = list({str(tile): tile for tiles in (*_TABLES, _FP32) for tile in tiles}.values())
_INTERPRETED = [_config(32, 32, 4, 1)]  # Triton's interpreter times nothing


def _candidates(configs: list[triton.Config], named: dict[str, Any], **constants: Any):
    """The tiles worth trying for a problem."""
    if named["x"].element_size() == 4:
        return _FP32
    table = _GATED if constants["GATE"] else _PLAIN
    return next(tiles for most, tiles in table.items() if constants["BLOCK_M"] <= most)


@triton.jit
def _part(weight, columns, outputs, at, k, BLOCK_K: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of an expert's weight [outputs, k]; zeros outside."""
    depth = at + tl.arange(0, BLOCK_K)
    inside = (depth < k)[:, None] & (columns < outputs)[None, :]
    return tl.load(weight + columns[None, :] * k + depth[:, None], mask=inside, other=0.0)


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["tiles", "n", "k", "GATE", "BY_CHOICE", "BLOCK_M"],
    prune_configs_by={"early_config_prune": _candidates},
    do_bench=quickly,
)
@triton.jit
def _experts(
    x,  # [places, k], or [choices / share, k] where BY_CHOICE
    weight,  # [experts, n, k]; 2 n outputs where GATE
    out,  # [places, n], or [choices, n] where BY_CHOICE
    sorted_ids,  # [places]: choices, or `choices` where there is none
    expert_ids,  # of each `block_size` places; -1 behind the last
    scales,  # fp32 [choices], or None
    tiles,
    choices,
    n,
    k,
    block_size,
    share,  # choices that have one row of x
    BY_CHOICE: tl.constexpr,
    GATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    across = tl.cdiv(n, BLOCK_N)
    group = tl.program_id(0) // (GROUP * across)
    among = tl.program_id(0) % (GROUP * across)
    height = tl.minimum(tiles - group * GROUP, GROUP)
    row = (group * GROUP + among % height) * BLOCK_M
    expert = tl.load(expert_ids + row // block_size)
    if expert >= 0:
        places = row + tl.arange(0, BLOCK_M)
        ids = tl.load(sorted_ids + places)
        real = ids < choices
        rows = tl.cast(ids // share if BY_CHOICE else places, tl.int64)
        columns = among // height * BLOCK_N + tl.arange(0, BLOCK_N)
        outputs = n * 2 if GATE else n
        own = weight + tl.cast(expert, tl.int64) * outputs * k
        z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = z
        for at in range(0, k, BLOCK_K):
            depth = at + tl.arange(0, BLOCK_K)
            inside = real[:, None] & (depth < k)[None, :]
            a = tl.load(x + rows[:, None] * k + depth[None, :], mask=inside, other=0.0)
            b = _part(own, columns, n, at, k, BLOCK_K)
            z = tl.dot(a, b, z, input_precision=PRECISION)
            if GATE:
                b = _part(own, columns + n, outputs, at, k, BLOCK_K)
                up = tl.dot(a, b, up, input_precision=PRECISION)
        y = z * tl.sigmoid(z) * up if GATE else z
        if scales is not None:
            y *= tl.load(scales + ids, mask=real, other=0.0)[:, None]
        to = tl.cast(ids if BY_CHOICE else places, tl.int64)
        inside = real[:, None] & (columns < n)[None, :]
        tl.store(out + to[:, None] * n + columns[None, :], y.to(out.dtype.element_ty), mask=inside)


def experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    choices: int,
    *,
    gate: bool = False,
    rows: int | None = None,
    share: int | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x weight[e]^T for each expert e, with a gate silu(gate) * up. [places, n] of x [places, k];
    with `share` [choices, n] of x [choices / share, k], each row times its scale. `rows` of a tile:
    as many as an expert's places are a multiple of, or a part of them."""
    places, by_choice = sorted_ids.numel(), share is not None
    n, k = weight.shape[1] // (2 if gate else 1), weight.shape[2]
    out = x.new_empty(choices if by_choice else places, n)
    size = places // max(expert_ids.numel(), 1)
    rows = min(rows or size, 128)
    if not out.numel():
        return out
    tiles = places // rows
    _experts[lambda tile: (tiles * triton.cdiv(n, tile["BLOCK_N"]),)](
        x, weight, out, sorted_ids, expert_ids, scales, tiles, choices, n, k, size, share or 1,
        BY_CHOICE=by_choice,
        GATE=gate,
        PRECISION="ieee" if x.dtype == torch.float32 else None,
        BLOCK_M=rows,
        GROUP=GROUP,
    )  # fmt: skip
    return out


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark: rows at their places."""
    x, weight, ids, owners = (
        arrays[name] for name in ("x", "weight", "sorted_token_ids", "expert_ids")
    )
    choices = problem["tokens"] * problem["top_k"]
    return Prepared(lambda: experts(x, weight, ids, owners, choices, gate=problem["gate"]))
