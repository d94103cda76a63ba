"""A paged cache and captured decode steps over a Hugging Face model's own weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fkjit.models.config import ModelConfig
from fkjit.models.decoder import CHUNK, PAGE_SIZE
from fkjit.models.joined import join, places
from fkjit.models.network import Network
from fkjit.models.prefill import Piece, Prompts
from fkjit.models.readback import Launched
from fkjit.models.sampling import GREEDY, Draws, Sampling, mode_of, pick
from fkjit.models.slots import Slots, State
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
        self._places = places(list(model.parameters()))
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

    def fits(self, config: ModelConfig, places: list[Any], batch: int, length: int) -> bool:
        """Whether there is room, and the parameters, which are at `places`, still lie where the
        steps read them."""
        room = batch <= self.batch and length <= self.length
        return room and places == self._places and config == self.config

    def start(self, prompts: Sequence[Any], new: int, sampling: Sampling | None) -> Any:
        """Take prompts in, each with room for `new` tokens more. Their first new tokens [sequences]
        int64, or, without a way of sampling, the logits, fp32."""
        torch, cache = torch_ops.torch_seen(), self._cache
        counts = [len(one) for one in prompts]
        self._count = len(counts)
        sequences = [cache.allocate() for _ in counts]
        cache.reserve(sequences, [count + new for count in counts], flush=False)
        logits = self._network.logits(self._filled(sequences, prompts))
        state = self._slots.first(self._count)
        state.rows.copy_(cache.rows(sequences))
        # Without a word it would wait for the prompts.
        state.positions.copy_(torch.tensor(counts, dtype=torch.int32), non_blocking=True)
        state.active.fill_(1)
        if sampling is None:
            return logits
        self.mode = mode_of([sampling])
        draws = None if self.mode == GREEDY else self._draws(sampling, state)
        first = pick(logits, draws, self.mode)
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
        return last[0] if len(last) == 1 else torch.cat(last)

    def _draws(self, sampling: Sampling, state: State) -> Draws:
        """Into the slots, by PyTorch's generator of the device; for the first new tokens."""
        torch, vocabulary = torch_ops.torch_seen(), self.config.vocabulary
        state.temperature.fill_(sampling.temperature)
        state.top_k.fill_(min(sampling.top_k or vocabulary, vocabulary))
        state.top_p.fill_(1.0 if sampling.top_p is None else sampling.top_p)
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

    def sent(self, tokens: Any) -> Launched:
        """Tokens as they are now, on their way to the host."""
        return self._steps.send(tokens)

    def step(self, mode: str, read: bool = True) -> Launched:
        """The next step of all sequences, by `mode`; LOGITS leaves `tokens` to the caller. read:
        whether the host wants them."""
        return self._steps.launch(self._count, mode, read)

    def clear(self) -> None:
        """End all sequences."""
        state = self._slots.state
        for sequence in self._cache.sequences:
            self._cache.free(sequence)
        state.rows.fill_(-1)
        for array in (state.active, state.positions, state.temperature):
            array.zero_()
        self._count = 0
