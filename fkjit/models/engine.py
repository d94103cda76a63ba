"""A paged cache and captured decode steps over a Hugging Face model's own weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fkjit.models.config import ModelConfig
from fkjit.models.decoder import CHUNK, PAGE_SIZE
from fkjit.models.joined import join
from fkjit.models.network import Network
from fkjit.models.prefill import Piece, Prompts
from fkjit.models.readback import Launched
from fkjit.models.sampling import Draws, Sampling, mode_of, pick
from fkjit.models.slots import Slots
from fkjit.models.step import LOGITS, Steps
from fkjit.models.weights import arranged
from fkjit.ops.kv.cache import PagedKVCache
from fkjit.ops.op import torch_ops

_LEAST = 1024  # tokens of a sequence: shorter calls share an engine


class Engine:
    """Generation of up to `batch` sequences of `length` tokens that begin and end together.

    The weights are views of the model's parameters, so a step reads what training has written.
    """

    def __init__(self, model: Any, config: ModelConfig, batch: int, length: int) -> None:
        join(model)
        parameters = dict(model.named_parameters())
        like = model.get_input_embeddings().weight
        weights = arranged(config, parameters, like.dtype, like.device)
        self.batch = 1 << (batch - 1).bit_length()
        self.length = min(max(1 << (length - 1).bit_length(), _LEAST), config.max_length)
        self.config, self.mode, self._count = config, LOGITS, 0
        self._pointers = _pointers(model)
        self._network = Network(config, weights)
        self._slots = Slots(self.batch, self.length, config.vocabulary, like.device)
        self._cache = PagedKVCache(
            self.batch * -(-self.length // PAGE_SIZE), page_size=PAGE_SIZE,
            num_kv_heads=config.heads_kv, head_dim=config.head_dim, dtype=like.dtype,
            device=like.device, num_layers=config.layers, max_sequences=self.batch,
            max_length=self.length, framework="torch",
        )  # fmt: skip
        self._steps = Steps(self._network, self._cache, self._slots, True)
        self._prompts = Prompts(self._network, self._cache, True)

    def fits(self, model: Any, batch: int, length: int) -> bool:
        """Whether there is room, and the parameters still lie where the steps read them."""
        return batch <= self.batch and length <= self.length and _pointers(model) == self._pointers

    def start(self, prompts: Sequence[Any], new: int, sampling: Sampling | None) -> Any:
        """Take prompts in, each with room for `new` tokens more. Their first new tokens [sequences]
        int64, or, without a way of sampling, the logits, fp32."""
        torch, cache = torch_ops.torch_seen(), self._cache
        counts = [len(one) for one in prompts]
        self._count = len(counts)
        sequences = [cache.allocate() for _ in counts]
        cache.reserve(sequences, [count + new for count in counts])
        stream = self._filled(sequences, prompts)
        state = self._slots.first(self._count)
        state.rows.copy_(cache.rows(sequences))
        state.positions.copy_(torch.tensor(counts, dtype=torch.int32))
        state.active.fill_(1)
        logits = self._network.logits(stream)
        if sampling is None:
            return logits
        self.mode = mode_of([sampling])
        first = pick(logits, self._draws(sampling), self.mode)
        state.tokens.copy_(first)
        return first

    def _filled(self, sequences: list[int], prompts: Sequence[Any]) -> Any:
        """The residual stream behind the prompts' last tokens, after passes of up to CHUNK."""
        torch, last = torch_ops.torch_seen(), []
        todo = [Piece(*one) for one in zip(sequences, [0] * len(prompts), prompts, strict=True)]
        while todo:
            taken, room = [], CHUNK
            while todo and room:
                one = todo.pop(0)
                now, rest = one.tokens[:room], one.tokens[room:]
                taken.append(one._replace(tokens=now))
                room -= len(now)
                if len(rest):
                    todo.insert(0, Piece(one.sequence, one.start + len(now), rest))
            stream, _ = self._prompts.fill(taken)
            ended = len(taken) - bool(todo and todo[0].sequence == taken[-1].sequence)
            last.append(stream[:ended])
        return torch.cat(last)

    def _draws(self, sampling: Sampling) -> Draws:
        """Into the slots, by PyTorch's generator of the device; for the first new tokens."""
        torch, state = torch_ops.torch_seen(), self._slots.first(self._count)
        vocabulary = self.config.vocabulary
        state.temperature.fill_(sampling.temperature)
        state.top_k.fill_(min(sampling.top_k or vocabulary, vocabulary))
        state.top_p.fill_(1.0 if sampling.top_p is None else sampling.top_p)
        if sampling.temperature:
            state.uniforms.copy_(torch.rand_like(state.uniforms))
        uniform = torch.rand_like(state.temperature)
        return Draws(state.temperature, state.top_k, state.top_p, uniform)

    @property
    def tokens(self) -> Any:
        """[sequences] int64: what the next step takes, and the last one made."""
        return self._slots.state.tokens[: self._count]

    @property
    def logits(self) -> Any:
        """[sequences, vocabulary] fp32, of the last step; the next one overwrites them."""
        return self._steps.logits(self._count)

    def step(self, mode: str) -> Launched:
        """The next step of all sequences, by `mode`; LOGITS leaves `tokens` to the caller."""
        return self._steps.launch(self._count, mode)

    def clear(self) -> None:
        """End all sequences."""
        state = self._slots.state
        for sequence in self._cache.sequences:
            self._cache.free(sequence)
        state.rows.fill_(-1)
        for array in (state.active, state.positions, state.temperature):
            array.zero_()
        self._count = 0


def _pointers(model: Any) -> tuple[int, ...]:
    return tuple(np.fromiter((one.data_ptr() for one in model.parameters()), np.uint64).tolist())
