"""What a decode step knows of its sequences, on the device, at addresses that stay."""

from __future__ import annotations

from typing import Any, NamedTuple

from fkjit.models.sampling import Draws, Sampling
from fkjit.ops.op import torch_ops


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


class Slots:
    """`size` slots for sequences of up to `length` tokens; the full ones come first."""

    def __init__(self, size: int, length: int, vocabulary: int, device: Any) -> None:
        torch = torch_ops.torch_seen()
        self._vocabulary = vocabulary

        def zeros(dtype: Any, *shape: int) -> Any:
            return torch.zeros(size, *shape, dtype=dtype, device=device)

        self.state = State(
            zeros(torch.int64), zeros(torch.int32), zeros(torch.int32).fill_(-1),
            zeros(torch.int32), zeros(torch.float32), zeros(torch.int64), zeros(torch.float32),
            zeros(torch.float32, length),
        )  # fmt: skip

    def first(self, count: int) -> State:
        """Views of the first slots."""
        return State(*(array[:count] for array in self.state))

    def put(self, at: int, row: Any, position: int, token: Any, draws: Draws, whole: Any) -> None:
        """A sequence: row and token are tensors of one number; draws, whole: of `prepared`."""
        state = self.state
        state.tokens[at].copy_(token)
        state.rows[at].copy_(row)
        state.positions[at], state.active[at] = position, 1
        for own, given in zip((state.temperature, state.top_k, state.top_p), draws, strict=False):
            own[at].copy_(given[0])
        state.uniforms[at, : len(whole)].copy_(whole)

    def prepared(self, sampling: Sampling, prompt: int, new: int) -> tuple[Draws, Any]:
        """(what the first new token is drawn by, [1] each; the sequence's uniform numbers by
        position)."""
        torch, device = torch_ops.torch_seen(), self.state.tokens.device
        made = torch.Generator()
        made.seed() if sampling.seed is None else made.manual_seed(sampling.seed)
        whole = torch.zeros(prompt + new - 1)
        if sampling.temperature > 0:
            whole[prompt - 1 :] = torch.rand(new, generator=made)
        whole = whole.to(device)
        top_k = min(sampling.top_k or self._vocabulary, self._vocabulary)
        draws = Draws(
            torch.tensor([sampling.temperature], dtype=torch.float32, device=device),
            torch.tensor([top_k], device=device),
            torch.tensor([sampling.top_p or 1.0], dtype=torch.float32, device=device),
            whole[prompt - 1 : prompt],
        )
        return draws, whole

    def remove(self, at: int, last: int) -> None:
        """Empty a slot; the sequence of the last full one takes it."""
        state = self.state
        if at != last:
            for array in state:
                array[at].copy_(array[last])
        state.rows[last], state.active[last], state.positions[last] = -1, 0, 0
