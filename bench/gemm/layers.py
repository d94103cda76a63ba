"""Products of models: what their layers multiply, and shapes drawn from them."""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 20_260_101
MOST = 16_384  # tokens


@dataclass(frozen=True)
class Layer:
    """One product: x [tokens, k] by a weight of n outputs (with gate: of n each of gate and up)."""

    model: str
    name: str
    k: int
    n: int
    bias: bool = False
    activation: str = "none"
    gate: bool = False
    residual: bool = False
    weight_layout: str = "nk"


def _gpt2() -> list[Layer]:
    """GPT-2 124M: weights as [k, n], as its checkpoints have them."""
    width = 768
    shapes = (
        ("qkv", width, 3 * width, "none", False),
        ("output", width, width, "none", True),
        ("up", width, 4 * width, "gelu_tanh", False),
        ("down", 4 * width, width, "none", True),
    )
    made = [
        Layer("gpt2", name, k, n, True, activation, residual=residual, weight_layout="kn")
        for name, k, n, activation, residual in shapes
    ]
    return [*made, Layer("gpt2", "head", width, 50_257)]


def _llama(model: str, width: int, kv: int, hidden: int, heads: int | None = None) -> list[Layer]:
    """A block as in Llama: queries, keys and values together, SwiGLU. `kv`: outputs of K and V."""
    queries = heads or width
    return [
        Layer(model, "qkv", width, queries + 2 * kv),
        Layer(model, "output", queries, width, residual=True),
        Layer(model, "gate-up", width, hidden, activation="silu", gate=True),
        Layer(model, "down", hidden, width, residual=True),
    ]


LAYERS = {
    "gpt2": _gpt2(),
    "llama-1b": _llama("llama-1b", 2048, 512, 8192),
    "llama-8b": _llama("llama-8b", 4096, 1024, 14_336),
    "llama-70b": _llama("llama-70b", 8192, 1024, 28_672),
    "qwen3-8b": _llama("qwen3-8b", 4096, 1024, 12_288),
    "qwen3-32b": _llama("qwen3-32b", 5120, 1024, 25_600, heads=8192),
    "mixtral": _llama("mixtral", 4096, 1024, 14_336),  # and each expert: Llama 8B's sizes
}


def drawn(count: int, seed: int = SEED) -> list[tuple[Layer, int]]:
    """(layer, tokens): `count` of all, each pair once; tokens 1 to MOST, each size as likely as its
    double. The same at every call with a seed."""
    rng = random.Random(seed)
    layers = [layer for model in LAYERS.values() for layer in model]
    found: dict[tuple[Layer, int], None] = {}
    while len(found) < count:
        tokens = min(MOST, int(2 ** rng.uniform(0, MOST.bit_length())))
        found.setdefault((rng.choice(layers), tokens))
    return list(found)
