"""`generate` of a patched model: transformers' own, with a decode loop of ours in it.

transformers prepares a call: its configuration, processors, stopping criteria, the prompt. Where
the model and the call are such as this module knows, it hands them to `_decode`, whose step is one
CUDA graph over a paged cache (fkjit/models/step.py) and reads the model's own weights. Everything
else goes on as if there were no patch.

Greedy choice, and drawing by temperature, top-k and top-p, are in the graph. Other processors and
criteria are transformers' objects, which get the logits of the graph and choose outside of it.
"""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from typing import Any

from fkjit.models import hf_calls
from fkjit.models.engine import Engine
from fkjit.models.hf_calls import Call
from fkjit.models.step import LOGITS
from fkjit.ops.op import torch_ops

_ELSEWHERE = ("custom_generate", "assistant_model", "assistant_tokenizer", "tokenizer",
              "synced_gpus", "negative_prompt_ids", "negative_prompt_attention_mask",
              "position_ids", "past_key_values", "inputs_embeds")  # fmt: skip


class Engines:
    """The engine of a patched model, made when it is first needed. A copy of the model has none
    yet."""

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def __deepcopy__(self, memo: Any) -> Engines:
        return Engines()

    def __reduce__(self) -> Any:
        return Engines, ()

    def of(self, model: Any, config: Any, batch: int, length: int) -> Engine:
        """With room for `batch` sequences of `length` tokens, over the weights as they are now."""
        found, self.engine = self.engine, None
        if found is None or not found.fits(model, batch, length):
            if found is not None:
                batch, length = max(batch, found.batch), max(length, found.length)
            found = None  # its memory, before there is another one
            found = Engine(model, config, batch, length)
        self.engine = found
        return found


def generate(model: Any, engines: Engines, *args: Any, **named: Any) -> Any:
    """What stands in for `model.generate`."""
    own = type(model).generate
    given = inspect.signature(own).bind(model, *args, **named).arguments
    others = given.get("kwargs", {})
    config = hf_calls.model_config(model)
    elsewhere = any({**given, **others}.get(name) is not None for name in _ELSEWHERE)
    if config is None or elsewhere or not hf_calls.decodable(
        model, given.get("generation_config"), others
    ):  # fmt: skip
        return own(model, *args, **named)
    # transformers drops the streamer on its way to a custom_generate.
    loop = partial(_sample, engines=engines, config=config, out=given.get("streamer"))
    return own(model, *args, **named, custom_generate=loop)


def _sample(
    model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any,
    generation_config: Any, engines: Engines, config: Any, out: Any = None, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """In place of transformers' method of this name."""
    call = hf_calls.read(
        input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
    )
    length = int(input_ids.shape[1]) + (0 if call is None else call.new)
    if call is None or length > config.max_length:
        return type(model)._sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config,
            streamer=out, **model_kwargs,
        )  # fmt: skip
    kept: dict[str, list[Any]] = {name: [] for name in call.kept}
    torch = torch_ops.torch_seen()
    with torch.inference_mode(False), torch.no_grad():  # what stays is for calls of any mode
        engine = engines.of(model, config, input_ids.shape[0], length)
        try:
            if call.sampling is None:
                made = _looked_at(engine, call, input_ids, out, kept)
            else:
                made = _in_graph(engine, call, input_ids, out)
        finally:
            engine.clear()
    if out is not None:
        out.end()
    if not generation_config.return_dict_in_generate:
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
    waiting, over, read, count = [False] * batch, 0, first.tolist, call.new
    watched = bool(call.stops) or out is not None
    for step in range(1, call.new + 1):
        following = None
        if step < call.new:
            following = engine.step(engine.mode)
            made[step].copy_(engine.tokens)
        if watched:
            tokens = read()
            if out is not None:
                kept = [call.pad if w else t for w, t in zip(waiting, tokens, strict=True)]
                out.put(torch.tensor(kept))
            waiting = [w or t in call.stops for w, t in zip(waiting, tokens, strict=True)]
            over = sum(waiting)
        if over == batch or following is None:
            count = step
            break
        read = following.read
    return torch.cat([input_ids, _padded(made[:count], call).t()], 1)


def _padded(made: Any, call: Call) -> Any:
    """[steps, batch], with padding behind the first stop token of each."""
    if not call.stops:
        return made
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
