"""`fkjit.models.patch` and `unpatch`: a Hugging Face model's forwards, replaced and put back."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.models import (
    blocks,
    causal_lm,
    experts,
    generation,
    hf_attention,
    hf_calls,
    joined,
    routers,
)
from fkjit.models.modules import Forward, replacement
from fkjit.ops.op import torch_ops
from fkjit.ops.op.checks import check_flag

_STATE = "_fkjit_patch"


class Report(NamedTuple):
    """replaced: (module's name, kind) of each; left: (module's name, class) of those with
    parameters of their own that compute as before; attention: whether it goes through fkjit;
    generate: whether `generate` has a decode loop of fkjit's for calls that it knows."""

    replaced: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]
    attention: bool
    generate: bool = False

    def __str__(self) -> str:
        kinds = Counter(kind for _, kind in self.replaced)
        classes = Counter(name for _, name in self.left)
        said = [f"{n} {kind}" for kind, n in kinds.items()]
        said += ["attention"] if self.attention else []
        said += ["generate"] if self.generate else []
        left = [f"{n} {name}" for name, n in classes.items()]
        left += [] if self.attention else ["attention"]
        return f"replaced: {', '.join(said) or 'nothing'}; left: {', '.join(left) or 'nothing'}"


class _State(NamedTuple):
    report: Report
    implementation: str | None
    modules: tuple[Any, ...]


def patch(model: Any, *, attention: bool = True, loss: bool = False) -> Report:
    """Let fkjit's kernels compute what they can of a Hugging Face model, in place.

    Args:
        model: a transformers.PreTrainedModel, fp16, bf16 or fp32, on one device. Parameters,
            `generate`, caches and gradients stay what they are.
        attention: False leaves the model's attention implementation as it is.
        loss: True, of the models that `generate` is for: a forward pass with labels whose loss
            wants gradients makes it without the logits of all tokens, by `linear_cross_entropy`;
            its result then has None for `logits`. Under torch.no_grad() it has them as before.

    Returns: what was replaced and what was left. Of a model that is patched already: the report of
    that time, and nothing is done.

    Raises:
        ArgumentTypeError: model is no PreTrainedModel.
        ParameterError: its attention cannot be chosen (attention=False patches the rest).
    """
    _check("patch", model)
    check_flag("patch", "attention", attention)
    check_flag("patch", "loss", loss)
    if _STATE in model.__dict__:
        return model.__dict__[_STATE].report
    before = _set_attention(model) if attention else None
    found = {
        name: replaced
        for name, module in model.named_modules()
        if "forward" not in module.__dict__
        and (replaced := _replacement(module, attention)) is not None
    }
    if loss and (replaced := causal_lm.replacement(model)) is not None:
        found[""] = replaced
    modules = dict(model.named_modules())
    for name, (_, forward) in found.items():
        modules[name].forward = forward
    replaced = tuple((name, kind) for name, (kind, _) in found.items())
    left = tuple(
        (name, type(module).__name__)
        for name, module in modules.items()
        if name not in found and next(module.parameters(recurse=False), None) is not None
    )
    joined.join(model)
    decodes = attention and hf_calls.model_config(model) is not None
    if decodes:
        model.generate = partial(generation.generate, model, generation.Engines())
    report = Report(replaced, left, attention, decodes)
    model.__dict__[_STATE] = _State(report, before, tuple(modules[name] for name in found))
    return report


def _replacement(module: Any, attention: bool) -> tuple[str, Forward] | None:
    finders = [replacement, experts.replacement, routers.replacement]
    finders += [blocks.replacement] if attention else []
    return next((found for find in finders if (found := find(module)) is not None), None)


def unpatch(model: Any) -> None:
    """Put back what `patch` replaced; nothing to do for a model that is not patched. Weights that
    `patch` made views of one array get arrays of their own.

    Raises ArgumentTypeError: model is no PreTrainedModel.
    """
    _check("unpatch", model)
    state = model.__dict__.pop(_STATE, None)
    if state is None:
        return
    for module in state.modules:
        module.__dict__.pop("forward", None)
    model.__dict__.pop("generate", None)
    joined.part(model)
    if state.report.attention:
        model.set_attn_implementation(state.implementation)


def _set_attention(model: Any) -> str:
    """Choose fkjit's attention; return the name of what was chosen before."""
    before = model.config._attn_implementation
    hf_attention.register()
    model.set_attn_implementation(hf_attention.NAME)
    if model.config._attn_implementation != hf_attention.NAME:
        raise ParameterError(
            f"patch: {type(model).__name__} does not take its attention from transformers' "
            "AttentionInterface; allowed with attention=False"
        )
    return before


def _check(call: str, model: Any) -> None:
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise ArgumentTypeError(
            f"{call}: model is a {type(model).__name__}; allowed: a transformers.PreTrainedModel"
        )
    if model.dtype is torch_ops.torch_seen().float64:
        raise ArgumentTypeError(f"{call}: model is {model.dtype}; allowed: fp16, bf16, fp32")
