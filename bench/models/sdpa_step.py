"""Prompts and decode steps in plain PyTorch, as one would write them for a CUDA graph: one product
for q, k and v and one for gate and up (cuBLAS), scaled_dot_product_attention over a static cache,
in steps with a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from fkjit.models.config import ModelConfig
from fkjit.models.weights import Affine, Layer, Weights
from fkjit.ops.rope.frequencies import rope_table


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """What `run` launches, as a CUDA graph."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


class SdpaStep:
    """A batch of sequences of one length. `tokens` [batch] and `position` [1] are its inputs, and
    `logits` [batch, vocabulary] what the last step made; it leaves the largest ones in `tokens`."""

    def __init__(self, config: ModelConfig, weights: Weights, batch: int, length: int) -> None:
        like = weights.embedding
        self.config, self.weights, self.batch = config, weights, batch
        shape = (config.layers, 2, batch, config.heads_kv, length, config.head_dim)
        self.cache = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=like.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.logits = like.new_zeros(batch, config.vocabulary)
        self._places = torch.arange(length, device=like.device)
        if config.theta is not None:
            table = torch.from_numpy(
                rope_table(length, config.head_dim, theta=config.theta, scaling=config.scaling)
            )
            cosine, sine = table.to(like.device, like.dtype).chunk(2, -1)
            self._cosine, self._sine = (torch.cat([x, x], -1) for x in (cosine, sine))

    @torch.no_grad()
    def __call__(self) -> None:
        """The position stays: whoever goes on adds 1."""
        weights = self.weights
        x = functional.embedding(self.tokens, weights.embedding)
        if weights.positions is not None:
            x = x + weights.positions[self.position]
        seen = (self._places <= self.position)[None, None, None]
        for number, layer in enumerate(weights.layers):
            x = x + functional.linear(self._attended(number, layer, x, seen), *layer.out)
            inner = functional.linear(self._norm(x, layer.mlp_norm), *layer.up)
            x = x + functional.linear(self._activated(inner), *layer.down)
        self.logits = functional.linear(self._norm(x, weights.norm), weights.head)
        self.tokens.copy_(self.logits.argmax(-1))

    @torch.no_grad()
    def prompt(self, tokens: Any) -> Any:
        """Sequences from their start, [batch, length]: keys and values into the cache, the largest
        logits into `tokens`, the next position. Returns the last logits."""
        weights, length = self.weights, tokens.shape[1]
        x = functional.embedding(tokens, weights.embedding)
        if weights.positions is not None:
            x = x + weights.positions[:length]
        for number, layer in enumerate(weights.layers):
            x = x + functional.linear(self._read(number, layer, x), *layer.out)
            inner = functional.linear(self._norm(x, layer.mlp_norm), *layer.up)
            x = x + functional.linear(self._activated(inner), *layer.down)
        self.logits = functional.linear(self._norm(x[:, -1], weights.norm), weights.head)
        self.tokens.copy_(self.logits.argmax(-1))
        self.position.fill_(length)
        return self.logits

    def _read(self, number: int, layer: Layer, x: Any) -> Any:
        """Attention of whole prompts."""
        config, length = self.config, x.shape[1]
        heads = functional.linear(self._norm(x, layer.norm), *layer.qkv)
        heads = heads.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        q, k, v = heads.split((config.heads_q, config.heads_kv, config.heads_kv), 1)
        if config.theta is not None:
            q, k = (self._turned(y, slice(length)) for y in (q, k))
        keys, values = self.cache[number]
        keys[:, :, :length], values[:, :, :length] = k, v
        made = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=config.heads_q != config.heads_kv
        )
        return made.transpose(1, 2).flatten(2)

    def _attended(self, number: int, layer: Layer, x: Any, seen: Any) -> Any:
        config = self.config
        heads = functional.linear(self._norm(x, layer.norm), *layer.qkv)
        heads = heads.view(self.batch, -1, 1, config.head_dim)
        q, k, v = heads.split((config.heads_q, config.heads_kv, config.heads_kv), 1)
        if config.theta is not None:
            q, k = (self._turned(y, self.position) for y in (q, k))
        keys, values = self.cache[number]
        keys.index_copy_(2, self.position, k)
        values.index_copy_(2, self.position, v)
        made = functional.scaled_dot_product_attention(
            q, keys, values, seen, enable_gqa=config.heads_q != config.heads_kv
        )
        return made.reshape(self.batch, -1)

    def _turned(self, x: Any, positions: Any) -> Any:
        a, b = x.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
        return x * self._cosine[positions] + turned * self._sine[positions]

    def _activated(self, x: Any) -> Any:
        if self.config.gated:
            gate, up = x.chunk(2, -1)
            return functional.silu(gate) * up
        return functional.gelu(x, approximate="tanh")

    def _norm(self, x: Any, norm: Affine) -> Any:
        if norm.bias is not None:
            return functional.layer_norm(x, x.shape[-1:], *norm, self.config.eps)
        return functional.rms_norm(x, x.shape[-1:], norm.weight, self.config.eps)
