"""Training steps of whole models: forward, backward and PyTorch's fused AdamW.

A candidate is a Hugging Face model of random weights, the same for all, with its own attention,
loss and compiler:

    eager          transformers' attention in PyTorch, logits of all tokens
    sdpa           scaled_dot_product_attention
    compile        sdpa under torch.compile
    causal         sdpa that is told to be causal and gets no mask, under torch.compile
    patch          fkjit.models.patch
    fkjit          the same with loss=True: linear_cross_entropy in place of the head and the loss
    graph          fkjit's whole step, with the optimizer, as one CUDA graph
    adamw          fkjit with fkjit.models.patch_optimizer as well
    adamw-graph    adamw's whole step as one CUDA graph
    compiled       fkjit's model under torch.compile

While torch.compile traces, transformers makes a mask of all pairs, with which PyTorch's attention
computes all of them; `causal` is without.

The learning rate rises over the first steps: without that GPT-2's loss jumps now and then, at
another step with each way to round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from fkjit.models import CapturedStep, patch, patch_optimizer
from fkjit.models.config import fields_of

CANDIDATES = ("adamw-graph", "adamw", "graph", "fkjit", "compile", "causal", "sdpa", "eager")
RATE, WARM_UP = 3e-4, 50  # steps
_OURS = ("fkjit", "graph", "adamw", "adamw-graph", "compiled")
_COMPILES = ("compile", "causal", "compiled")
_AHEAD = 32  # batches that are drawn together
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


def _causal(module: Any, q: Any, k: Any, v: Any, mask: Any, **named: Any) -> tuple[Any, None]:
    """Attention under transformers' interface that needs no mask, as it has none of this name."""
    made = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=named.get("scaling"), enable_gqa=q.shape[1] != k.shape[1]
    )
    return made.transpose(1, 2), None


def _attention(candidate: str) -> str:
    """transformers' name of it."""
    if candidate.startswith("causal"):
        AttentionInterface.register("causal", _causal)
        return "causal"
    return "eager" if candidate == "eager" else "sdpa"


class Training:
    """A model with its optimizer."""

    def __init__(
        self, candidate: str, config: Any, dtype: Any, device: Any, rate: float = RATE
    ) -> None:
        self.model = built(config, _attention(candidate), dtype, device)
        captures = candidate.endswith("graph")
        if candidate == "patch" or candidate in _OURS:
            patch(self.model, loss=candidate in _OURS)
        self._forward = self.model
        if candidate in _COMPILES:
            self._forward = torch.compile(self.model)
        self._top, self._rate = rate, torch.tensor(rate, device=device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self._rate, fused=True, capturable=captures
        )
        if candidate.startswith("adamw"):
            patch_optimizer(self._optimizer)
        self._steps = 0
        self._run: Callable[..., Any] = self._eager
        if captures:
            self._run = CapturedStep(self._forward, self._optimizer)

    def step(self, tokens: Any) -> Any:
        """The loss before the step, a tensor. tokens: [batch, length] int64."""
        self._steps += 1
        self._rate.fill_(self._top * min(1.0, self._steps / WARM_UP))
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
        shape = (length, _AHEAD * batch)
        others = torch.randint(kinds, shape, generator=made)
        noisy = torch.rand(shape, generator=made) < _NOISE
        for at in range(1, length):
            others[at] = torch.where(noisy[at], others[at], follows[others[at - 1]])
        yield from names[others.t()].to(device).split(batch)


def curve(
    training: Training, given: Iterator[Any], steps: int,
    said: Callable[[int, float], None] = lambda step, loss: None, every: int = 20,
) -> list[float]:  # fmt: skip
    """The loss of each step; `said` hears of one in `every`."""
    losses: list[Any] = []
    for step in range(1, steps + 1):
        losses.append(training.step(next(given)))
        if step % every == 0 or step == steps:
            said(step, float(losses[-1]))
    return torch.stack(losses).tolist()


class Apart(NamedTuple):
    """How far a curve is from another one, relative to it: at most, and in the mean of steps."""

    most: float
    mean: float


def apart(curves: Mapping[str, list[float]], base: str) -> dict[str, Apart]:
    """The distance of each curve to `base`."""
    exact, found = curves[base], {}
    for name, losses in curves.items():
        each = [abs(a - b) / abs(b) for a, b in zip(losses, exact, strict=True)]
        found[name] = Apart(max(each), sum(each) / len(each))
    return found
