"""`generate` of a patched model: transformers' own, with a decode loop of ours in it.

transformers prepares a call: its configuration, processors, stopping criteria, the prompt. Where
the model and the call are such as this module knows, it hands them to `_sample`, whose step is one
CUDA graph over a paged cache (fkjit/models/step.py) and reads the model's own weights. Everything
else goes on as if there were no patch.

Greedy choice, and drawing by temperature, top-k and top-p, are in the graph. Other processors and
criteria are transformers' objects, which get the logits of the graph and choose outside of it.

What transformers prepares takes the host longer than a short prompt takes the GPU. It depends on
the call's options and on two configurations, so of a call whose options, and configurations, are
those of an earlier one it is known, and only the tokens are looked at. What transformers says of
such options (warnings) it says once.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from fkjit.models import hf_calls
from fkjit.models.config import ModelConfig
from fkjit.models.engine import Engine
from fkjit.models.hf_calls import Call, Modules
from fkjit.models.step import LOGITS
from fkjit.ops.op import torch_ops

_ELSEWHERE = ("custom_generate", "assistant_model", "assistant_tokenizer", "tokenizer",
              "synced_gpus", "negative_prompt_ids", "negative_prompt_attention_mask",
              "position_ids", "past_key_values", "inputs_embeds")  # fmt: skip
# Of a call what its key has not, or, of a configuration, has by its fields.
_APART = ("inputs", "input_ids", "attention_mask", "streamer", "generation_config")
# Methods of the model, which somebody may have replaced.
_PREPARING = ("_prepare_generation_config", "_prepare_special_tokens", "_get_logits_processor",
              "_get_stopping_criteria", "prepare_inputs_for_generation")  # fmt: skip
_PLAIN = {type(None), bool, int, float, str}
_ANY = "any"  # number of new tokens
_MOST_KNOWN = 64
_signature = cache(inspect.signature)


class Known(NamedTuple):
    """What came of a call. decodable: whether a loop of ours may answer it. call: as transformers
    prepared it, without prompts and objects; None: it has objects that choose or stop."""

    decodable: bool
    call: Call | None = None


class Engines:
    """What stays with a patched model from call to call: its engine, made when it is first needed,
    and what is known of calls. A copy of the model has none yet."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._modules: Modules | None = None
        self._known: dict[Hashable, Known] = {}
        self._config: tuple[Hashable, ModelConfig | None] = (None, None)

    def __deepcopy__(self, memo: Any) -> Engines:
        return Engines()

    def __reduce__(self) -> Any:
        return Engines, ()

    def of(self, model: Any, config: ModelConfig, places: list[Any], batch: int, length: int,
           ) -> Engine:  # fmt: skip
        """With room for `batch` sequences of `length` tokens, over the weights as they are now."""
        found, self.engine = self.engine, None
        if found is None or not found.fits(config, places, batch, length):
            if found is not None:
                batch, length = max(batch, found.batch), max(length, found.length)
            found = None  # its memory, before there is another one
            found = Engine(model, config, batch, length)
        self.engine = found
        return found

    def modules(self, model: Any) -> Modules:
        """Of the model as it is now."""
        if self._modules is None or not self._modules.stand():
            self._modules = Modules(model)
        return self._modules

    def config(self, model: Any, fields: Hashable) -> ModelConfig | None:
        """As `hf_calls.model_config`. fields: of the model's configuration, frozen."""
        if fields is None or fields != self._config[0]:
            self._config = fields, hf_calls.model_config(model)
        return self._config[1]

    def known(self, key: Hashable) -> Known | None:
        """Of a call of this key; None where it was not met, or has none."""
        return None if key is None else self._known.get(key)

    def remember(self, key: Hashable, known: Known) -> None:
        """For `known`."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        if key is not None:
            self._known[key] = known


class _Turn(NamedTuple):
    """A call of `generate` for which a loop of ours may be. given: what was said, by name. places:
    of the parameters. key: see `_key`."""

    engines: Engines
    config: ModelConfig
    places: list[Any]
    given: dict[str, Any]
    key: Hashable

    @property
    def tokens(self) -> Any:
        """The prompt, as it was given."""
        found = self.given.get("inputs")
        return self.given.get("input_ids") if found is None else found

    @property
    def new(self) -> int | None:
        """New tokens, where the call itself says how many."""
        found = self.given.get("max_new_tokens")
        return found if type(found) is int and found > 0 else None

    @property
    def out(self) -> Any:
        """A streamer or None."""
        return self.given.get("streamer")


def generate(model: Any, engines: Engines, *args: Any, **named: Any) -> Any:
    """What stands in for `model.generate`."""
    own = type(model).generate
    given = dict(_signature(own).bind(model, *args, **named).arguments)
    others = given.pop("kwargs", {})
    given.pop("self", None)
    fields = frozen(vars(model.config))
    config, modules = engines.config(model, fields), engines.modules(model)
    elsewhere = any(others.get(name, given.get(name)) is not None for name in _ELSEWHERE)
    places = modules.places()
    if config is None or elsewhere or not (modules.plain(places) and hf_calls.alone()):
        return own(model, *args, **named)
    turn = _Turn(engines, config, places, {**given, **others}, None)
    turn = turn._replace(key=_key(model, own, turn, fields))
    known = engines.known(turn.key)
    if known is not None and known.call is not None:
        call = _with_prompts(turn, known.call)
        if call is not None:
            return _answered(model, turn, call, turn.tokens)
    elif known is None:
        known = Known(hf_calls.decodable(model, given.get("generation_config"), others))
        engines.remember(turn.key, known)
    if not known.decodable:
        return own(model, *args, **named)
    return own(model, *args, **named, custom_generate=partial(_sample, turn))


def _key(model: Any, own: Any, turn: _Turn, fields: Hashable) -> Hashable:
    """All that transformers' preparation of a call depends on but the tokens themselves; None where
    some of it is no plain value, or where it would not be the prompt that is decoded. fields: of
    the model's configuration."""
    tokens, given = turn.tokens, turn.given
    if not _is_prompt(tokens, turn) or len({"inputs", "input_ids"} & given.keys()) > 1:
        return None
    said = {name: value for name, value in given.items() if name not in _APART}
    shape: tuple[int, ...] = tuple(tokens.shape)
    if turn.new is not None:  # whatever it is, and whatever the prompt's length
        said["max_new_tokens"], shape = _ANY, shape[:1]
    parts = [fields, frozen(said), _fields(model.generation_config),
             _fields(given.get("generation_config"))]  # fmt: skip
    if None in parts:
        return None
    preparing = tuple([getattr(model, name) for name in _PREPARING])
    return own, preparing, *parts, shape, given.get("attention_mask") is None


def _fields(config: Any) -> Hashable:
    """Of a GenerationConfig or None; None of another class."""
    if config is None:
        return ()
    kind = import_module("transformers").GenerationConfig
    return frozen(vars(config)) if type(config) is kind else None


def _is_prompt(tokens: Any, turn: _Turn) -> bool:
    """Whether tokens, and a mask if there is one, are such as a loop of ours takes in."""
    torch, mask = torch_ops.torch_seen(), turn.given.get("attention_mask")
    if type(tokens) is not torch.Tensor or tokens.dtype != torch.int64 or tokens.dim() != 2:
        return False
    if tokens.device != turn.places[0][2]:
        return False
    return mask is None or (type(mask) is torch.Tensor and mask.shape == tokens.shape)


def frozen(value: Any) -> Hashable:
    """Equal for plain values, and lists, tuples and dictionaries of such, that are equal and of the
    same types; None for what has other values in it."""
    kind, deeper = type(value), ()
    if kind is dict:
        deeper, value = tuple(value), tuple(value.values())
    elif kind in (list, tuple):
        value = tuple(value)
    else:
        return (kind, value) if kind in _PLAIN or _is_dtype(kind) else None
    kinds = tuple(map(type, value))
    if not _PLAIN.issuperset(kinds):
        value = tuple([one if type(one) in _PLAIN else frozen(one) for one in value])
        if any(one is None and was not in _PLAIN for one, was in zip(value, kinds, strict=True)):
            return None
    return kind, deeper, kinds, value


def _is_dtype(kind: type) -> bool:
    return kind.__module__ == "torch" and kind.__name__ == "dtype"


def _with_prompts(turn: _Turn, call: Call) -> Call | None:
    """A call of a known key; None where transformers looks at the tokens: padding elsewhere than at
    the left, or padding tokens without a mask, or more than there is room for."""
    tokens, mask = turn.tokens, turn.given.get("attention_mask")
    prompts, new = hf_calls.prompts(tokens, mask), turn.new or call.new
    if prompts is None or tokens.shape[1] + new > turn.config.max_length:
        return None
    if mask is None and any((one == call.pad).any() for one in prompts):
        return None
    if turn.out is not None:
        turn.out.put(tokens.cpu())
    return call._replace(prompts=prompts, new=new)


def _sample(
    turn: _Turn, model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any,
    generation_config: Any, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """In place of transformers' method of this name, which drops the streamer on its way here."""
    call = hf_calls.read(
        input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
    )
    length = int(input_ids.shape[1]) + (0 if call is None else call.new)
    if call is None or length > turn.config.max_length:
        return type(model)._sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config,
            streamer=turn.out, **model_kwargs,
        )  # fmt: skip
    as_given = input_ids is turn.tokens and turn.new in (None, call.new)
    if call.sampling is not None and as_given:
        bare = call._replace(prompts=[], processors=None, criteria=None)
        turn.engines.remember(turn.key, Known(True, bare))
    return _answered(model, turn, call, input_ids)


def _answered(model: Any, turn: _Turn, call: Call, input_ids: Any) -> Any:
    """What `generate` returns."""
    kept: dict[str, list[Any]] = {name: [] for name in call.kept}
    torch, out = torch_ops.torch_seen(), turn.out
    batch, length = input_ids.shape[0], input_ids.shape[1] + call.new
    with torch.inference_mode(False), torch.no_grad():  # what stays is for calls of any mode
        engine = turn.engines.of(model, turn.config, turn.places, batch, length)
        try:
            if call.sampling is None:
                made = _looked_at(engine, call, input_ids, out, kept)
            else:
                made = _in_graph(engine, call, input_ids, out)
        finally:
            engine.clear()
    if out is not None:
        out.end()
    if not call.named:
        return made
    result = import_module("transformers.generation.utils").GenerateDecoderOnlyOutput
    return result(sequences=made, **{name: tuple(found) for name, found in kept.items()})


def _in_graph(engine: Engine, call: Call, input_ids: Any, out: Any) -> Any:
    """Tokens chosen by the step itself. What a step made is read while the next one runs, and only
    where somebody wants to know."""
    torch = torch_ops.torch_seen()
    batch = input_ids.shape[0]
    first = engine.start(call.prompts, call.new, call.sampling)
    made = first.new_empty(call.new, batch)
    made[0].copy_(first)
    waiting, over, behind, count = [False] * batch, 0, False, call.new
    watched = bool(call.stops) or out is not None
    launched = engine.sent(first) if watched else None
    for step in range(1, call.new + 1):
        following = None
        if step < call.new:
            following = engine.step(engine.mode, watched)
            made[step].copy_(engine.tokens)
        if launched is not None:
            tokens = launched.read()
            behind = behind or any(waiting)
            if out is not None:
                kept = [call.pad if w else t for w, t in zip(waiting, tokens, strict=True)]
                out.put(torch.tensor(kept))
            waiting = [w or t in call.stops for w, t in zip(waiting, tokens, strict=True)]
            over = sum(waiting)
        if over == batch or following is None:
            count = step
            break
        launched = following if watched else None
    made = _padded(made[:count], call) if behind else made[:count]
    return torch.cat([input_ids, made.t()], 1)


def _padded(made: Any, call: Call) -> Any:
    """[steps, batch], with padding behind the first stop token of each."""
    torch = torch_ops.torch_seen()
    hit = torch.isin(made, torch.tensor(sorted(call.stops), device=made.device))
    behind = hit.cumsum(0) - hit.long() > 0
    return made.masked_fill(behind, call.pad)


def _looked_at(
    engine: Engine, call: Call, input_ids: Any, out: Any, kept: dict[str, list[Any]]
) -> Any:
    """transformers' objects process each step's logits, choose and stop. The next step runs while
    the host waits to hear whether that was the last one."""
    torch = torch_ops.torch_seen()
    logits = engine.start(call.prompts, call.new, None)
    left = torch.ones(input_ids.shape[0], dtype=torch.int64, device=input_ids.device)
    for step in range(1, call.new + 1):
        logits = logits.clone()  # the next step's come in their place
        scores = call.processors(input_ids, logits.clone() if "logits" in kept else logits)
        for name, found in kept.items():
            found.append(scores if name == "scores" else logits)
        if call.draws:
            tokens = torch.multinomial(scores.softmax(-1), 1)[:, 0]
        else:
            tokens = scores.argmax(-1)
        if call.stops:
            tokens = tokens * left + call.pad * (1 - left)
        input_ids = torch.cat([input_ids, tokens[:, None]], 1)
        if step < call.new:
            engine.tokens.copy_(tokens)
            engine.step(LOGITS)
        if out is not None:
            out.put(tokens.cpu())
        left = left & ~call.criteria(input_ids, tuple(kept["scores"]) if "scores" in kept else None)
        if not left.any():
            break
        logits = engine.logits
    return input_ids
