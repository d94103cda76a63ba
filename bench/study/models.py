"""Small language models of the shapes of GPT-2 and Llama, on bytes, whose products and attention
are given: how logits and perplexity change when these are of few bits.

Weights are plain tensors by name. All between products is fp32 (float64 in the reference); the
embedding is the head as well, and stays as it is, as quantized models leave it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

VOCABULARY = 256  # bytes
Weights = dict[str, torch.Tensor]


class Shape(NamedTuple):
    """Llama's where `gated`: RMSNorm, rotary positions, SwiGLU, no biases; else GPT-2's."""

    gated: bool
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context: int = 256


class Calls(NamedTuple):
    """x [rows, k], weight [n, k] -> [rows, n]; q, k, v [B, heads, S, D], causal -> o."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


PLAIN = Calls(F.linear, _attention)


def drawn(shape: Shape, seed: int) -> Weights:
    """Random weights: 1 / sqrt(k) in each product, so that numbers keep their size."""
    made = torch.Generator().manual_seed(seed)
    inner = shape.width // shape.heads * (shape.heads + 2 * shape.kv_heads)
    sizes = {
        "qkv": (inner, shape.width), "out": (shape.width, shape.width),
        "up": (shape.hidden * (1 + shape.gated), shape.width),
        "down": (shape.width, shape.hidden),
    }  # fmt: skip
    weights = {"embedding": torch.randn(VOCABULARY, shape.width, generator=made) * 0.1}
    if not shape.gated:
        weights["positions"] = torch.randn(shape.context, shape.width, generator=made) * 0.02
    for layer in range(shape.layers):
        for name, (n, k) in sizes.items():
            weights[f"{layer}.{name}"] = torch.randn(n, k, generator=made) * k**-0.5
            if not shape.gated:
                weights[f"{layer}.{name}.bias"] = torch.zeros(n)
        for name in ("before", "between"):
            weights |= _norm(f"{layer}.{name}", shape)
    return weights | _norm("last", shape)


def _norm(name: str, shape: Shape) -> Weights:
    made = {name: torch.ones(shape.width)}
    return made if shape.gated else {**made, f"{name}.bias": torch.zeros(shape.width)}


def logits(
    weights: Weights, shape: Shape, tokens: torch.Tensor, calls: Calls = PLAIN
) -> torch.Tensor:
    """tokens [B, S] of bytes -> [B, S, VOCABULARY], in the weights' dtype."""
    x = weights["embedding"][tokens]
    if not shape.gated:
        x = x + weights["positions"][: tokens.shape[1]]
    for layer in range(shape.layers):
        own = {name.partition(".")[2]: value for name, value in weights.items()
               if name.startswith(f"{layer}.")}  # fmt: skip
        x = x + _attend(own, shape, _normed(own, "before", x), calls)
        x = x + _expand(own, shape, _normed(own, "between", x), calls)
    return F.linear(_normed(weights, "last", x), weights["embedding"])


def _normed(own: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    if f"{name}.bias" in own:
        return F.layer_norm(x, x.shape[-1:], own[name], own[f"{name}.bias"])
    return F.rms_norm(x, x.shape[-1:], own[name], 1e-6)


def _multiply(own: Weights, name: str, x: torch.Tensor, calls: Calls) -> torch.Tensor:
    made = calls.product(x.flatten(0, -2), own[name]).to(x.dtype)
    return (made + own.get(f"{name}.bias", 0.0)).reshape(*x.shape[:-1], -1)


def _attend(own: Weights, shape: Shape, x: torch.Tensor, calls: Calls) -> torch.Tensor:
    dim = shape.width // shape.heads
    heads = _multiply(own, "qkv", x, calls).unflatten(-1, (-1, dim)).transpose(1, 2)
    q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    if shape.gated:
        q, k = _turned(q), _turned(k)
    k, v = (y.repeat_interleave(shape.heads // shape.kv_heads, 1) for y in (k, v))
    o = calls.attention(q, k, v).to(x.dtype)
    return _multiply(own, "out", o.transpose(1, 2).flatten(2), calls)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves of a head turned together."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rates
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _expand(own: Weights, shape: Shape, x: torch.Tensor, calls: Calls) -> torch.Tensor:
    up = _multiply(own, "up", x, calls)
    if shape.gated:
        gate, up = up.chunk(2, -1)
        return _multiply(own, "down", F.silu(gate) * up, calls)
    return _multiply(own, "down", F.gelu(up, approximate="tanh"), calls)


def with_outliers(weights: Weights, shape: Shape, times: float) -> Weights:
    """The same function with channels as large models have them: two channels of each norm are so
    many times as large, and the columns that read them as many times smaller."""
    made = {name: value.clone() for name, value in weights.items()}
    for layer in range(shape.layers):
        for norm, reader in (("before", "qkv"), ("between", "up")):
            some = [(7 * layer + 3) % shape.width, (31 * layer + 64) % shape.width]
            made[f"{layer}.{norm}"][some] *= times
            if not shape.gated:
                made[f"{layer}.{norm}.bias"][some] *= times
            made[f"{layer}.{reader}"][:, some] /= times
    return made


def loss(found: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next byte, in nats. tokens [B, S + 1]."""
    return F.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


def perplexity(found: torch.Tensor, tokens: torch.Tensor) -> float:
    """Of a byte."""
    return math.exp(float(loss(found.double(), tokens)))
