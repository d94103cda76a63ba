"""A whole mixture of experts in Triton, in the style of fused MoE kernels: five launches and a sum.

Router, sort (two launches), gate and up gathered by choice with SwiGLU in the epilogue, down times
the choices' weights, and PyTorch's sum over each token's choices.
"""

from __future__ import annotations

import torch

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared
from .triton_grouped_linear import experts
from .triton_moe_regroup import moe_regroup
from .triton_moe_route import moe_route


def rows_of(choices: int, active: int) -> int:
    """Of a tile: about as many as an expert has, where all have as many."""
    each = choices / max(active, 1)
    return next((rows for rows in (16, 32, 64) if each <= rows), 128)


def moe_layer(
    x: torch.Tensor, logits: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, top_k: int
) -> torch.Tensor:
    """[tokens, H] of x [tokens, H] and logits [tokens, E]."""
    (tokens, hidden), count = x.shape, logits.shape[1]
    choices = tokens * top_k
    weights, ids = moe_route(logits, top_k)
    rows = rows_of(choices, min(count, choices))
    sorted_ids, expert_ids, _ = moe_regroup(ids, count, rows)
    inner = experts(x, w_gate_up, sorted_ids, expert_ids, choices, gate=True, share=top_k)
    y = experts(inner, w_down, sorted_ids, expert_ids, choices, share=1, scales=weights)
    return y.view(tokens, top_k, hidden).sum(1)


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    from .peers_moe_layer import given

    arguments, top_k = given(arrays), problem["top_k"]
    return Prepared(lambda: moe_layer(*arguments, top_k))
