"""The loss of a causal language model where labels are given: without the logits of all tokens."""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from typing import Any

from fkjit.models.config import ModelConfig
from fkjit.models.gated import plain_products
from fkjit.models.hf_attention import NAME, causal_mask
from fkjit.models.hf_calls import model_config
from fkjit.models.loss import linear_cross_entropy
from fkjit.models.modules import Forward
from fkjit.ops.op import torch_ops

_IGNORED = -100


def replacement(module: Any) -> tuple[str, Forward] | None:
    """(kind, forward) of a model with a head that `linear_cross_entropy` knows; None of others."""
    if not hasattr(module, "lm_head") or not hasattr(module, "config"):
        return None
    config = model_config(module)
    if config is None:
        return None
    result = import_module("transformers.modeling_outputs").CausalLMOutputWithPast
    forward = partial(_forward, module, config, result)
    # transformers reads the names of what a forward takes.
    forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    return "loss", forward


def _forward(
    module: Any, config: ModelConfig, result: Any, *args: Any, **named: Any
) -> Any:  # fmt: skip
    """transformers' own, unless a gradient is wanted of a loss: then `logits` of the result is
    None."""
    torch = torch_ops.torch_seen()
    said = inspect.signature(type(module).forward).bind(module, *args, **named).arguments
    labels, others = said.get("labels"), said.get("kwargs", {})
    wanted = labels is not None and torch.is_grad_enabled() and not said.get("logits_to_keep")
    dictionary = others.get("return_dict")
    if not wanted or not (module.config.return_dict if dictionary is None else dictionary):
        return type(module).forward(module, *args, **named)
    passed = {name: x for name, x in said.items() if name not in ("self", "labels", "kwargs")}
    if _is_causal(module, config, passed):
        passed["attention_mask"] = causal_mask(labels)
    made = module.base_model(**{**passed, **others})
    hidden = made.last_hidden_state
    head = module.lm_head
    if not plain_products((head,), hidden) or head.bias is not None:
        logits = head(hidden)
        loss = module.loss_function(
            logits=logits, labels=labels, vocab_size=module.config.vocab_size, **others
        )
    else:
        logits, loss = None, _loss(hidden, head.weight, labels, **others)
    kept = {name: getattr(made, name) for name in ("past_key_values", "hidden_states",
                                                  "attentions")}  # fmt: skip
    return result(loss=loss, logits=logits, **kept)


def _is_causal(module: Any, config: ModelConfig, passed: dict[str, Any]) -> bool:
    """Whether every token sees all before it, of a sequence that begins with the call."""
    if module.config._attn_implementation != NAME or passed.get("input_ids") is None:
        return False
    if any(
        passed.get(n) is not None for n in ("attention_mask", "position_ids", "past_key_values")
    ):
        return False
    length = passed["input_ids"].shape[1]
    return all(seen is None or length <= seen for seen in config.windows)


def _loss(
    hidden: Any, weight: Any, labels: Any, num_items_in_batch: Any = None,
    ignore_index: int = _IGNORED, shift_labels: Any = None, **_: Any,
) -> Any:  # fmt: skip
    """As transformers' ForCausalLMLoss."""
    if shift_labels is None:
        pad = torch_ops.torch_seen().nn.functional.pad
        shift_labels = pad(labels[..., 1:], (0, 1), value=ignore_index)
    targets = shift_labels.flatten().to(hidden.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = linear_cross_entropy(
        hidden.flatten(0, -2), weight, targets, ignore_index=ignore_index, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
