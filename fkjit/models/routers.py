"""Routers of mixtures by fkjit's kernel, each known by the choices that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from fkjit.errors import FkjitError
from fkjit.models.modules import Forward, floating
from fkjit.ops.moe.gradient import weights_of
from fkjit.ops.moe.route import moe_route
from fkjit.ops.op import torch_ops

_ROWS = 64
_BEHIND = ("e_score_correction_bias", "num_group", "topk_group", "routed_scaling_factor")


class _Rule(NamedTuple):
    """What a router makes of logits. widened: to fp32. dtype: of weights; None: as logits."""

    top_k: int
    scoring: Any
    renormalize: bool
    groups: tuple[int, int] | None
    scale: float
    widened: bool = False
    dtype: Any = None


def replacement(module: Any) -> tuple[str, Forward] | None:
    """("router", forward) of a module named …TopKRouter that makes (logits [tokens, experts],
    weights and ids [tokens, top_k]) of rows by a rule that `fkjit.moe_route` has; else None.

    The logits stay PyTorch's product, so that the same experts are chosen.
    """
    weight = getattr(module, "weight", None)
    named = "topkrouter" in type(module).__name__.lower() and hasattr(module, "top_k")
    if not named or weight is None or weight.dim() != 2 or not floating(weight):
        return None
    rule = _rule(module, weight)
    return None if rule is None else ("router", partial(_routed, module, rule))


def _rule(module: Any, weight: Any) -> _Rule | None:
    """The one whose choices and weights are those of `module` for some rows."""
    torch = torch_ops.torch_seen()
    rows = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            logits, weights, ids = module(rows.to(weight.device, weight.dtype))
            clear = _clear(logits, module.top_k)
            wanted = _dense(logits, weights, ids)[clear]
            widened = logits.dtype != weight.dtype
            for rule in _candidates(module):
                made = _dense(logits, *_chosen(module, rule, logits))[clear]
                if len(wanted) and torch.allclose(made, wanted, rtol=2.0**-7, atol=1e-6):
                    dtype = None if weights.dtype == logits.dtype else weights.dtype
                    return rule._replace(widened=widened, dtype=dtype)
        except (TypeError, RuntimeError, ValueError, IndexError, AttributeError, FkjitError):
            return None  # it takes or makes other things
    return None


def _clear(logits: Any, top_k: int) -> Any:
    """Rows whose last chosen logit has no equal that is not chosen: of 16-bit logits some have, and
    either may be taken."""
    ranked = logits.sort(-1, descending=True).values
    return (ranked[:, top_k - 1 : -1] != ranked[:, top_k:])[:, :1].all(-1)


def _candidates(module: Any) -> Iterator[_Rule]:
    """Rules that the module's attributes allow."""
    bias, number, kept, scale = (getattr(module, name, None) for name in _BEHIND)
    groups = (int(number), int(kept)) if number and kept and number > 1 else None
    for scoring in ("softmax", "sigmoid") if bias is None else ("sigmoid", "softmax"):
        for renormalize in (False, True):
            yield _Rule(module.top_k, scoring, renormalize, groups, float(scale or 1.0))


def _dense(logits: Any, weights: Any, ids: Any) -> Any:
    """fp32 [tokens, experts]: weights of chosen experts, zeros elsewhere."""
    return logits.new_zeros(logits.shape).float().scatter_(1, ids.long(), weights.float())


def _chosen(module: Any, rule: _Rule, logits: Any) -> tuple[Any, Any]:
    bias = getattr(module, _BEHIND[0], None)
    number, kept = rule.groups or (None, None)
    return moe_route(
        logits.detach(), rule.top_k, scoring=rule.scoring, renormalize=rule.renormalize,
        bias=None if bias is None else bias.float(), num_groups=number, topk_groups=kept,
        routed_scaling_factor=rule.scale,
    )  # fmt: skip


def _routed(module: Any, rule: _Rule, x: Any) -> tuple[Any, Any, Any]:
    """(logits, weights, ids) as transformers' routers have them."""
    torch, weight = torch_ops.torch_seen(), module.weight
    x = x.reshape(-1, weight.shape[1])
    if rule.widened:
        x, weight = x.float(), weight.float()
    logits = torch.nn.functional.linear(x, weight)
    weights, ids = _chosen(module, rule, logits)
    if logits.requires_grad:
        weights = weights_of(logits, ids, rule.scoring, rule.renormalize, rule.scale)
    return logits, weights.to(rule.dtype or logits.dtype), ids.long()
