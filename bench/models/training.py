"""Training steps of whole models: forward, backward and PyTorch's fused AdamW.

A candidate is a Hugging Face model of random weights, the same for all, with its own attention,
loss and compiler:

    eager     transformers' attention in PyTorch, logits of all tokens
    sdpa      scaled_dot_product_attention
    compile   sdpa under torch.compile
    patch     fkjit.models.patch
    fkjit     the same with loss=True: linear_cross_entropy in place of the head and the loss
    graph     fkjit's whole step, with the optimizer, as one CUDA graph
    compiled  fkjit's model under torch.compile

The learning rate rises over the first steps: without that GPT-2's loss jumps now and then, at
another step with each way to round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from fkjit.models import CapturedStep, patch
from fkjit.models.config import fields_of

CANDIDATES = ("eager", "sdpa", "compile", "patch", "fkjit", "graph")
RATE, WARM_UP = 3e-4, 50  # steps
_OURS = ("fkjit", "graph", "compiled")
_KINDS, _NOISE = 512, 0.1  # of tokens; how often one follows that does not have to
_NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0)


def built(config: Any, attention: str, dtype: Any, device: Any, seed: int = 0) -> Any:
    """A model in training mode. config: a dictionary of transformers' fields, or a name of
    `fkjit.models.named_configs()`."""
    fields = {**fields_of(config), **_NO_DROPOUT, "use_cache": False}
    said = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    said._attn_implementation = attention
    torch.manual_seed(seed)
    with torch.device(device):  # of that dtype from the start: `to` would round RoPE's frequencies
        model = transformers.AutoModelForCausalLM.from_config(said, dtype=dtype)
    return model.train()


class Training:
    """A model with its optimizer."""

    def __init__(self, candidate: str, config: Any, dtype: Any, device: Any) -> None:
        attention = "eager" if candidate == "eager" else "sdpa"
        self.model = built(config, attention, dtype, device)
        captures = candidate == "graph"
        if candidate == "patch" or candidate in _OURS:
            patch(self.model, loss=candidate in _OURS)
        compiles = candidate in ("compile", "compiled")
        self._forward = torch.compile(self.model) if compiles else self.model
        self._rate = torch.tensor(RATE, device=device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self._rate, fused=True, capturable=captures
        )
        self._steps = 0
        self._run = CapturedStep(self.model, self._optimizer) if captures else self._eager

    def step(self, tokens: Any) -> Any:
        """The loss before the step, a tensor. tokens: [batch, length] int64."""
        self._steps += 1
        self._rate.fill_(RATE * min(1.0, self._steps / WARM_UP))
        return self._run(input_ids=tokens, labels=tokens)

    def _eager(self, **tensors: Any) -> Any:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._forward(**tensors).loss
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def batches(vocabulary: int, batch: int, length: int, device: Any, seed: int = 1) -> Iterator[Any]:
    """Tokens that can be learned, without end: each is followed by one of its own, or now and then
    by any. The same ones for a seed, whatever the device."""
    made = torch.Generator().manual_seed(seed)
    kinds = min(_KINDS, vocabulary)
    names = torch.randperm(vocabulary, generator=made)[:kinds]
    follows = torch.randperm(kinds, generator=made)
    while True:
        rows = [torch.randint(kinds, (batch,), generator=made)]
        for _ in range(length - 1):
            other = torch.randint(kinds, (batch,), generator=made)
            noisy = torch.rand(batch, generator=made) < _NOISE
            rows.append(torch.where(noisy, other, follows[rows[-1]]))
        yield names[torch.stack(rows, 1)].to(device)


def curve(training: Training, given: Iterator[Any], steps: int) -> list[float]:
    """The loss of each step."""
    return torch.stack([training.step(next(given)) for _ in range(steps)]).tolist()


def apart(curves: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """How far each curve is from `base` at most, relative to it."""
    exact = curves[base]
    return {
        name: max(abs(a - b) / abs(b) for a, b in zip(found, exact, strict=True))
        for name, found in curves.items()
    }
