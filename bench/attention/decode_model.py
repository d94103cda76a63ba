"""A small Llama-like model that decodes with fkjit, and the same model in plain PyTorch.

Copy `Decoder.step` into a model of yours: nothing in it waits for the GPU or asks the host for a
length, so that it can be captured into a CUDA graph (bench/attention/decode_step.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear, silu

import fkjit

THETA = 10_000.0
EPS = 1e-6


@dataclass(frozen=True)
class Size:
    """Of a model: `mlp` is the width between the two linears behind attention."""

    hidden: int
    heads_q: int
    heads_kv: int
    head_dim: int
    mlp: int
    layers: int
    vocabulary: int


def weights(size: Size, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Any]:
    """Random ones that keep activations near 1; "layers" is a list of such for each layer."""
    made = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        x = torch.randn(rows, columns, generator=made) * columns**-0.5
        return x.to(device, dtype)

    def gain() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size.hidden, generator=made)).to(device, dtype)

    heads = size.heads_q + 2 * size.heads_kv
    layers = [
        {
            "norm": gain(), "qkv": matrix(heads * size.head_dim, size.hidden),
            "out": matrix(size.hidden, size.heads_q * size.head_dim), "mlp_norm": gain(),
            "up": matrix(2 * size.mlp, size.hidden), "down": matrix(size.hidden, size.mlp),
        }
        for _ in range(size.layers)
    ]  # fmt: skip
    ends = {"embedding": matrix(size.vocabulary, size.hidden) * size.hidden**0.5, "norm": gain()}
    return {**ends, "head": matrix(size.vocabulary, size.hidden), "layers": layers}


class Decoder:
    """The model with its paged cache. `tokens` and `rows` are buffers that stay where they are.

    tokens [batch]: what each sequence goes on with. rows [batch] int32: its row in the cache's
    tables, below 0: none, which is nothing to do.
    """

    def __init__(
        self, size: Size, kept: dict[str, Any], batch: int, num_pages: int, page_size: int = 16
    ) -> None:
        embedded = kept["embedding"]
        self.size, self.weights = size, kept
        self.cache = fkjit.PagedKVCache(
            num_pages, page_size=page_size, num_kv_heads=size.heads_kv, head_dim=size.head_dim,
            dtype=embedded.dtype, device=embedded.device, num_layers=size.layers,
            max_sequences=batch, framework="torch",
        )  # fmt: skip
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=embedded.device)
        self.rows = torch.full((batch,), -1, dtype=torch.int32, device=embedded.device)

    def step(self) -> torch.Tensor:
        """Logits [batch, vocabulary] of one more token of each sequence. Room for it has to be
        reserved before, and it is counted on the host afterwards."""
        slots = fkjit.kv_slots(self.cache, self.rows)
        lengths = self.cache.lengths.index_select(0, self.rows.clamp(min=0))  # this one included
        return self._run(slots, lengths - 1, lambda q, layer: fkjit.paged_attention(
            q, self.cache, rows=self.rows, layer=layer
        ), self.tokens)  # fmt: skip

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """New sequences of these tokens, in the cache; their numbers. Not for capture."""
        sequences = []
        for prompt in prompts:
            sequence = self.cache.allocate()
            slots = self.cache.extend([sequence], [len(prompt)])
            tokens = torch.tensor(prompt, device=slots.device)
            positions = torch.arange(len(prompt), dtype=torch.int32, device=slots.device)

            def attend(q: Any, layer: int, sequence: int = sequence) -> Any:
                k, v = (x[None] for x in self.cache.read([sequence], layer=layer))
                return fkjit.attention(q[None], k, v, causal=True, layout="bshd")[0]

            self._run(slots, positions, attend, tokens)
            sequences.append(sequence)
        return sequences

    def _run(self, slots: Any, positions: Any, attend: Any, tokens: Any) -> torch.Tensor:
        size, kept = self.size, self.weights
        stream = embedding(tokens, kept["embedding"])  # the residual stream
        added = None
        for number, layer in enumerate(kept["layers"]):
            x, stream = _normed(stream, added, layer["norm"])
            heads = linear(x, layer["qkv"]).unflatten(-1, (-1, size.head_dim))
            q, k, v = heads.split((size.heads_q, size.heads_kv, size.heads_kv), 1)
            q = fkjit.rope_kv_append(
                q, k, v, self.cache, slots, positions, theta=THETA, layer=number
            )
            added = linear(attend(q, number).flatten(1), layer["out"])
            x, stream = _normed(stream, added, layer["mlp_norm"])
            gate, up = linear(x, layer["up"]).chunk(2, -1)
            added = linear(silu(gate) * up, layer["down"])
        return linear(_normed(stream, added, kept["norm"])[0], kept["head"])


def _normed(stream: Any, added: Any, gain: Any) -> tuple[Any, Any]:
    """(RMSNorm of the stream with what is added, the stream)."""
    if added is None:
        return fkjit.rms_norm(stream, gain, EPS), stream
    return fkjit.rms_norm(added, gain, EPS, residual=stream)


def textbook(size: Size, kept: dict[str, Any], tokens: Sequence[int], dtype: Any) -> torch.Tensor:
    """Logits [tokens, vocabulary] behind each token of one sequence, at once, without a cache."""
    ids = torch.tensor(tokens, device=kept["embedding"].device)
    stream = embedding(ids, kept["embedding"].to(dtype))
    hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=ids.device).triu(1)
    for layer in kept["layers"]:
        w = {name: x.to(dtype) for name, x in layer.items()}
        heads = linear(_rms(stream, w["norm"]), w["qkv"]).unflatten(-1, (-1, size.head_dim))
        q, k, v = heads.transpose(0, 1).split((size.heads_q, size.heads_kv, size.heads_kv))
        q, k = _turned(q), _turned(k)
        k, v = (x.repeat_interleave(size.heads_q // size.heads_kv, 0) for x in (k, v))
        scores = (q @ k.mT * size.head_dim**-0.5).masked_fill(hidden, float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        stream = stream + linear(attended, w["out"])
        gate, up = linear(_rms(stream, w["mlp_norm"]), w["up"]).chunk(2, -1)
        stream = stream + linear(silu(gate) * up, w["down"])
    return linear(_rms(stream, kept["norm"].to(dtype)), kept["head"].to(dtype))


def _rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], gain, EPS)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, D] by their positions: pairs are columns i and i + D / 2."""
    half = x.shape[-1] // 2
    frequency = THETA ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)[:, None] * frequency
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
