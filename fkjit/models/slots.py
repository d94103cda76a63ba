"""What a decode step knows of its sequences, on the device, at addresses that stay."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from fkjit.models.sampling import Draws, Sampling
from fkjit.ops.op import torch_ops

_COLDEST = 1e-30  # of temperatures: logits by a colder one are no longer fp32


class State(NamedTuple):
    """tokens [slots] int64: the next input. positions [slots] int32: where it stands. rows [slots]
    int32: its sequence's row in the cache's tables, -1: the slot is empty. active [slots] int32: 1,
    or 0 where it is empty. temperature, top_p fp32, top_k int64 [slots]. uniforms [slots, length]
    fp32: by which the token behind a position is drawn."""

    tokens: Any
    positions: Any
    rows: Any
    active: Any
    temperature: Any
    top_k: Any
    top_p: Any
    uniforms: Any

    def draws(self) -> Draws:
        """For the tokens behind `positions`."""
        uniform = self.uniforms.gather(1, self.positions.long()[:, None])[:, 0]
        return Draws(self.temperature, self.top_k, self.top_p, uniform)


class Starting(NamedTuple):
    """A sequence whose prompt of `length` tokens is in the cache. uniforms: by which its new tokens
    are drawn, on the host; None: it draws none."""

    length: int
    sampling: Sampling
    uniforms: Any

    @classmethod
    def of(cls, length: int, sampling: Sampling, new: int) -> Starting:
        """With uniform numbers for `new` tokens, by the sampling's seed."""
        if sampling.temperature == 0:
            return cls(length, sampling, None)
        torch = torch_ops.torch_seen()
        made = torch.Generator()
        made.seed() if sampling.seed is None else made.manual_seed(sampling.seed)
        return cls(length, sampling, torch.rand(new, generator=made))


class Slots:
    """`size` slots for sequences of up to `length` tokens; the full ones come first."""

    def __init__(self, size: int, length: int, vocabulary: int, device: Any) -> None:
        self.length = length
        torch = torch_ops.torch_seen()
        self._vocabulary = vocabulary

        def zeros(dtype: Any, *shape: int) -> Any:
            return torch.zeros(size, *shape, dtype=dtype, device=device)

        self.state = State(
            zeros(torch.int64), zeros(torch.int32), zeros(torch.int32).fill_(-1),
            zeros(torch.int32), zeros(torch.float32), zeros(torch.int64).fill_(vocabulary),
            zeros(torch.float32).fill_(1.0), zeros(torch.float32, length),
        )  # fmt: skip

    def first(self, count: int) -> State:
        """Views of the first slots."""
        return State(*(array[:count] for array in self.state))

    def put(self, at: int, rows: Any, tokens: Any, draws: Draws, starting: list[Starting]) -> None:
        """Sequences into the slots from `at` on: rows, tokens and draws are of them all."""
        torch, state = torch_ops.torch_seen(), self.state
        span = slice(at, at + len(starting))
        lengths = torch.tensor([one.length for one in starting], dtype=torch.int32)
        pairs = (
            (state.tokens, tokens), (state.rows, rows), (state.positions, lengths),
            (state.temperature, draws.temperature), (state.top_k, draws.top_k),
            (state.top_p, draws.top_p),
        )  # fmt: skip
        for own, given in pairs:
            own[span].copy_(given, non_blocking=True)
        state.active[span] = 1
        for slot, one in enumerate(starting, at):
            if one.uniforms is not None:
                drawn = state.uniforms[slot, one.length - 1 :][: len(one.uniforms)]
                drawn.copy_(one.uniforms, non_blocking=True)

    def draws(self, starting: list[Starting]) -> Draws:
        """For the first new tokens of these sequences."""
        torch, device = torch_ops.torch_seen(), self.state.tokens.device
        said = [one.sampling for one in starting]
        most = self._vocabulary
        first = [0.0 if one.uniforms is None else float(one.uniforms[0]) for one in starting]

        def uploaded(values: list[Any], dtype: Any) -> Any:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return Draws(
            uploaded(
                [one.temperature and max(one.temperature, _COLDEST) for one in said], torch.float32
            ),
            uploaded([min(one.top_k or most, most) for one in said], torch.int64),
            uploaded([one.top_p or 1.0 for one in said], torch.float32),
            uploaded(first, torch.float32),
        )

    def remove(self, gone: Collection[int], count: int) -> list[tuple[int, int]]:
        """Empty some of the first `count` slots, which are full. The last sequences take the places
        of those that are gone; (from, to) of each. Nothing waits for the device."""
        left = count - len(gone)
        holes = sorted(slot for slot in gone if slot < left)
        last = [slot for slot in range(left, count) if slot not in gone]
        if last:
            self._move(last, holes)
        state, freed = self.state, slice(left, count)
        state.rows[freed] = -1
        for array in (state.active, state.positions, state.temperature):
            array[freed] = 0
        return list(zip(last, holes, strict=True))

    def _move(self, sources: list[int], targets: list[int]) -> None:
        torch, like = torch_ops.torch_seen(), self.state.tokens
        pair = torch.tensor([sources, targets], pin_memory=like.is_cuda)
        source, target = pair.to(like.device, non_blocking=True)
        for array in self.state:
            array.index_copy_(0, target, array.index_select(0, source))
