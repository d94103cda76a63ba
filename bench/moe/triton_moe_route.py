"""The router of a mixture of experts in Triton, the twin of kernels_cu/moe/route.cu.

A program has TOKENS rows of logits, softmax of which it takes, and their greatest top_k times. No
sigmoid, bias or groups of experts; infinities and NaN are not looked for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared
from ..core.triton_tuning import quickly


def _config(tokens: int, warps: int) -> triton.Config:
    return triton.Config({"TOKENS": tokens}, num_warps=warps)


_ALL = [_config(t, w) for t, w in ((1, 1), (4, 1), (8, 2), (16, 4), (32, 4), (64, 8))]
_INTERPRETED = [_config(8, 2)]  # Triton's interpreter times nothing
CONFIGS = _INTERPRETED if triton.knobs.runtime.interpret else _ALL


@triton.autotune(configs=CONFIGS, key=["tokens", "experts", "top_k"], do_bench=quickly)
@triton.jit
def _route(
    logits,  # [tokens, experts]
    weights,  # [tokens, top_k]
    ids,
    tokens,
    experts,
    top_k: tl.constexpr,
    WIDTH: tl.constexpr,  # experts, or the next power of two
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    there = (expert < experts)[None, :]
    at = tl.minimum(row, tokens - 1).to(tl.int64)[:, None] * experts + expert[None, :]
    x = tl.load(logits + at, mask=there, other=-float("inf")).to(tl.float32)
    peak = tl.max(x, 1)
    total = tl.sum(tl.exp(x - peak[:, None]), 1)
    for k in range(top_k):
        best = tl.max(x, 1)
        chosen = tl.min(tl.where(x == best[:, None], expert[None, :], WIDTH), 1)
        place = row.to(tl.int64) * top_k + k
        tl.store(weights + place, tl.exp(best - peak) / total, mask=row < tokens)
        tl.store(ids + place, chosen, mask=row < tokens)
        x = tl.where(expert[None, :] == chosen[:, None], -float("inf"), x)


def moe_route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_weights, topk_ids) of contiguous logits."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        _route[lambda tiles: (triton.cdiv(tokens, tiles["TOKENS"]),)](
            logits, weights, ids, tokens, experts, top_k, WIDTH=triton.next_power_of_2(experts)
        )  # fmt: skip
    return weights, ids


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    from .cases_moe import routed

    logits, top_k, experts = arrays["logits"], problem["top_k"], problem["experts"]

    def output(made: Any) -> Any:
        return routed(*made, experts)

    return Prepared(lambda: moe_route(logits, top_k), output)
