"""Which calls of transformers' `generate` a decode loop of ours can answer, and what they want."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

from fkjit.errors import FkjitError
from fkjit.models.config import HEADS, ModelConfig
from fkjit.models.joined import places
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
    "scores" and "logits", as far as the caller wants those of each step. named: whether the result
    has fields."""

    prompts: list[Any]
    new: int
    stops: frozenset[int]
    pad: int
    sampling: Sampling | None
    processors: Any
    criteria: Any
    draws: bool
    kept: frozenset[str]
    named: bool


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
    """Whether such a call is greedy or draws, with a cache that it does not hand out.

    given: a GenerationConfig or None. named: the call's keywords that are none of `generate`'s
    parameters.
    """
    said, _ = model._prepare_generation_config(given, **named)
    if said.get_generation_mode().value not in _MODES or said.token_healing:
        return False
    if said.cache_implementation not in _CACHES or not said.use_cache:
        return False
    return not (
        said.return_dict_in_generate and (said.output_attentions or said.output_hidden_states)
    )


def alone() -> bool:
    """Whether this is the only process."""
    torch = torch_ops.torch_seen()
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not there or torch.distributed.get_world_size() == 1


class Modules:
    """A model's modules and parameters in lists: to look at all of them takes an eighth of the time
    that PyTorch takes to walk them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._states = [module.__dict__ for module in model.modules()]
        self._parts, self._parameters = self._listed(), list(model.parameters())
        forwards = [state["forward"] for state in self._states if "forward" in state]
        self._ours = all(map(is_ours, forwards))

    def stand(self) -> bool:
        """Whether the model has these modules, parameters and forwards still."""
        now = self._listed()
        return len(now) == len(self._parts) and all(map(is_, now, self._parts))

    def _listed(self) -> list[Any]:
        made: list[Any] = []
        for state in self._states:
            made += state["_modules"].values()
            made += state["_parameters"].values()
            made.append(state.get("forward"))
        return made

    def places(self) -> list[Any]:
        """Of the parameters, as they are now."""
        return places(self._parameters)

    def plain(self, places: list[Any]) -> bool:
        """No autocast, hooks, foreign forwards or dropout, and weights of one dtype on one device,
        which has kernels that read pages. places: as `places` tells them."""
        torch, model = torch_ops.torch_seen(), self._model
        for state in self._states:
            if state["_forward_pre_hooks"] or (state["_forward_hooks"] and _has_foreign(state)):
                return False
        if not self._ours or (model.training and _drops(model, torch)):
            return False
        kinds = {place[1:] for place in places}
        dtype, device = next(iter(kinds))
        if len(kinds) > 1 or dtype not in (torch.float16, torch.bfloat16):
            return False
        if torch.is_autocast_enabled(device.type):
            return False
        return _PAGES in arch_of(view(self._parameters[0], "generate", "model")).features


def _has_foreign(state: Mapping[str, Any]) -> bool:
    return any(map(_is_foreign, state["_forward_hooks"].values()))


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
    rows = prompts(input_ids, model_kwargs.get("attention_mask"))
    if new < 1 or rows is None:
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
    named = bool(said.return_dict_in_generate)
    return Call(rows, new, found, pad, sampling, processors, criteria, draws, kept, named)


def prompts(tokens: Any, mask: Any) -> list[Any] | None:
    """Rows without the padding at their left, on the host; None where there is padding elsewhere,
    too, or nothing is left of a row."""
    if not tokens.shape[1] or (mask is not None and mask.shape != tokens.shape):
        return None
    if mask is None:
        return list(_on_host(tokens)[0])
    rows, seen = _on_host(tokens, mask != 0)
    if seen.all():
        return list(rows)
    if not seen[:, -1].all() or (seen[:, :-1] & ~seen[:, 1:]).any():
        return None
    counts = seen.sum(1).tolist()
    return [row[len(row) - count :] for row, count in zip(rows, counts, strict=True)]


def _on_host(*arrays: Any) -> list[Any]:
    """As NumPy arrays. A device is waited for once."""
    torch = torch_ops.torch_seen()
    made = [one.to("cpu", non_blocking=True) for one in arrays]
    for device in {one.device for one in arrays if one.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return [one.numpy() for one in made]


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
