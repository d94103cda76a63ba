"""The weights of a router in PyTorch's own operations: where logits have gradients."""

from __future__ import annotations

from typing import Any

from fkjit.types import Scoring


def weights_of(
    logits: Any, ids: Any, scoring: Scoring, renormalize: bool, routed_scaling_factor: float
) -> Any:
    """fp32 [tokens, top_k]: the scores of each token's experts, as `moe_route` makes them.

    logits: a tensor [tokens, experts]. ids: the experts that `moe_route` chose. A gradient comes
    from the scores; the choice has none.
    """
    scores = logits.float()
    scores = scores.softmax(-1) if scoring == "softmax" else scores.sigmoid()
    weights = scores.gather(1, ids.long())
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.where(total != 0, total.new_ones(()))
    return weights * routed_scaling_factor if routed_scaling_factor != 1.0 else weights
