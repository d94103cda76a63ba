"""Which calls of transformers' `generate` a decode loop of ours can answer, and what they want."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit.errors import FkjitError
from fkjit.models.config import HEADS, ModelConfig
from fkjit.models.modules import is_ours
from fkjit.models.sampling import Sampling
from fkjit.ops.op import torch_ops
from fkjit.ops.op.request import arch_of
from fkjit.runtime.interop import view

_MODELS = ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
           "Qwen3ForCausalLM")  # fmt: skip
_MODES = ("greedy_search", "sample")
_CACHES = (None, "dynamic", "static", "hybrid", "sliding_window")
_PAGES = "cp_async"  # what kernels read keys in pages with
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
_IN_GRAPH = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k",
             "TopPLogitsWarper": "top_p"}  # fmt: skip
_PLAIN_STOPS = {"MaxLengthCriteria", "EosTokenCriteria"}


class Call(NamedTuple):
    """prompts: the tokens of each row without padding, int64 arrays. new: tokens at most. stops,
    pad: what ends a row and what follows then. sampling: how the step's graph chooses tokens; None:
    `processors` and `criteria`, transformers' objects, do, and where `draws`, multinomial. kept:
    "scores" and "logits", as far as the caller wants those of each step."""

    prompts: list[Any]
    new: int
    stops: frozenset[int]
    pad: int
    sampling: Sampling | None
    processors: Any
    criteria: Any
    draws: bool
    kept: frozenset[str]


def model_config(model: Any) -> ModelConfig | None:
    """Of a model whose forward pass is `Network`'s, with heads that pages have; None of others."""
    kind, said = type(model), model.config
    if kind.__name__ not in _MODELS or not kind.__module__.startswith("transformers.models."):
        return None
    try:
        found = ModelConfig.of(said)
    except FkjitError:
        return None
    return found if found.head_dim in HEADS else None


def decodable(model: Any, given: Any, named: Mapping[str, Any]) -> bool:
    """Whether such a call is greedy or draws, and nothing besides changes what the model computes.

    given: a GenerationConfig or None. named: the call's keywords that are none of `generate`'s
    parameters.
    """
    torch = torch_ops.torch_seen()
    if torch.is_autocast_enabled(model.device.type) or _distributed(torch):
        return False
    said, _ = model._prepare_generation_config(given, **named)
    if said.get_generation_mode().value not in _MODES or said.token_healing:
        return False
    if said.cache_implementation not in _CACHES or not said.use_cache:
        return False
    if said.return_dict_in_generate and (said.output_attentions or said.output_hidden_states):
        return False
    return _is_plain(model)


def _distributed(torch: Any) -> bool:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


def _is_plain(model: Any) -> bool:
    """No hooks, no foreign forwards, no dropout, and weights of one dtype on one device, which has
    kernels that read pages."""
    torch = torch_ops.torch_seen()
    for module in model.modules():
        state = module.__dict__
        if state["_forward_pre_hooks"] or any(map(_is_foreign, state["_forward_hooks"].values())):
            return False
        if "forward" in state and not is_ours(state["forward"]):
            return False
    if model.training and _drops(model, torch):
        return False
    kinds = {(one.dtype, one.device) for one in model.parameters()}
    dtypes = (torch.float16, torch.bfloat16)
    if len(kinds) > 1 or next(iter(kinds))[0] not in dtypes:
        return False
    return _PAGES in arch_of(view(next(model.parameters()), "generate", "model")).features


def _is_foreign(hook: Any) -> bool:
    """Not one of transformers' own, which stay with a model that was asked for hidden states."""
    return getattr(hook, "__module__", None) != "transformers.utils.output_capturing"


def _drops(model: Any, torch: Any) -> bool:
    rates = [one.p for one in model.modules() if isinstance(one, torch.nn.Dropout)]
    return any(rates) or bool(getattr(model.config, "attention_dropout", 0))


def read(input_ids: Any, processors: Any, criteria: Any, said: Any,
         model_kwargs: Mapping[str, Any]) -> Call | None:  # fmt: skip
    """What was prepared; None where it is not for a loop of ours."""
    stops = {type(one).__name__: one for one in criteria}
    if model_kwargs.keys() - _KNOWN or "MaxLengthCriteria" not in stops:
        return None
    new = min(one.max_length for one in criteria if hasattr(one, "max_length")) - input_ids.shape[1]
    prompts = _prompts(input_ids.cpu(), model_kwargs.get("attention_mask"))
    if new < 1 or prompts is None:
        return None
    ends = [one.eos_token_id.tolist() for one in criteria if hasattr(one, "eos_token_id")]
    found = frozenset(token for each in ends for token in each)
    pad = 0 if said._pad_token_tensor is None else int(said._pad_token_tensor)
    plain = stops.keys() <= _PLAIN_STOPS and len(stops) == len(criteria)
    kept = frozenset(
        name
        for name in ("scores", "logits")
        if said.return_dict_in_generate and getattr(said, f"output_{name}")
    )
    draws = bool(said.do_sample)
    sampling = _sampling(processors, draws) if plain and not kept else None
    return Call(prompts, new, found, pad, sampling, processors, criteria, draws, kept)


def _prompts(tokens: Any, mask: Any) -> list[Any] | None:
    """Rows without the padding at their left; None where there is padding elsewhere, too, or
    nothing is left of a row."""
    if mask is None:
        return list(tokens.numpy()) if tokens.shape[1] else None
    seen = mask.cpu() != 0
    if seen.shape != tokens.shape or not seen.shape[1] or not seen[:, -1].all():
        return None
    if (seen[:, :-1] & ~seen[:, 1:]).any():
        return None
    counts = seen.sum(1).tolist()
    return [row[len(row) - count :] for row, count in zip(tokens.numpy(), counts, strict=True)]


def _sampling(processors: Any, draws: bool) -> Sampling | None:
    """Of processors that the graph knows, in transformers' order."""
    said: dict[str, Any] = {}
    names = list(_IN_GRAPH)
    for one in processors:
        kind = type(one).__name__
        if not draws or kind not in names or type(one).__module__.split(".")[0] != "transformers":
            return None
        if getattr(one, "filter_value", -float("inf")) != -float("inf"):
            return None
        if kind == "TopPLogitsWarper" and one.min_tokens_to_keep != 1:
            return None
        said[_IN_GRAPH[kind]] = getattr(one, _IN_GRAPH[kind])
        names = names[names.index(kind) + 1 :]  # the order is that in which they act
    return Sampling(**{"temperature": 1.0, **said}) if draws else Sampling()
