"""A product with its epilogue: squares, layers of models, decoding, shapes drawn from layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fkjit.spec import Problem

from ..core.drawn import Drawn
from ..core.op import Op
from . import peers_linear, peers_quack, products
from .layers import LAYERS, SEED, Layer, drawn
from .products import every, problem

_GELU: dict[str, Any] = {"bias": True, "activation": "gelu_tanh"}
_SWIGLU: dict[str, Any] = {"gate": True, "activation": "silu"}
_DRAWN = 100
_DECODED = (1, 2, 4, 8, 16, 32, 64)  # tokens


def _layer(layer: Layer, tokens: int) -> dict[str, Any]:
    """A layer's product with all that its epilogue does."""
    return problem(
        tokens, layer.k, layer.n, bias=layer.bias, activation=layer.activation, gate=layer.gate,
        residual=layer.residual, weight_layout=layer.weight_layout,
    )  # fmt: skip


def _plain(layer: Layer, tokens: int) -> dict[str, Any]:
    """The product alone, with a bias where the layer has one: what cuBLAS does in one kernel."""
    wide = layer.n * (2 if layer.gate else 1)
    return problem(tokens, layer.k, wide, bias=layer.bias, weight_layout=layer.weight_layout)


def _default() -> list[dict[str, Any]]:
    return [
        problem(8192, 8192, 8192),
        problem(8192, 8192, 8192, weight_layout="kn"),
        problem(8192, 4096, 16_384, **_GELU),
        problem(8192, 4096, 16_384, weight_layout="kn", **_GELU),
        problem(4096, 768, 3072, **_GELU),
        problem(4096, 768, 3072, weight_layout="kn", **_GELU),
        problem(4096, 4096, 14_336, **_SWIGLU),
        problem(64, 4096, 16_384, **_GELU),
        problem(128, 4096, 14_336),
        problem(16, 8192, 8192),
        *(problem(m, 4096, 16_384) for m in (1, 2, 4, 8)),
        problem(1, 2048, 8192),
    ]


def _random(seed: int = SEED) -> list[dict[str, Any]]:
    return every([_plain(*one) for one in drawn(2 * _DRAWN, seed)])[:_DRAWN]


SETS: dict[str, Sequence[Problem]] = {
    "default": _default(),
    "quick": [problem(4096, 4096, 4096), problem(4096, 768, 3072, **_GELU), problem(1, 4096, 4096)],
    "square": every([
        problem(size, size, size, dtype=dtype, weight_layout=layout)
        for dtype in ("bf16", "fp16")
        for layout in ("nk", "kn")
        for size in (512, 1024, 2048, 4096, 6144, 8192, 16_384)
    ]),
    "fp32": [
        *(problem(size, size, size, dtype="fp32") for size in (512, 1024, 2048, 4096, 8192)),
        problem(8192, 8192, 8192, dtype="fp32", weight_layout="kn"),
        problem(8192, 8192, 8192, dtype="fp32", x_layout="km", weight_layout="kn"),
        problem(4096, 768, 3072, dtype="fp32", **_GELU),
        *(problem(size, size, size, dtype="fp32", precision="tf32") for size in (4096, 8192)),
    ],
    "gpt2": [_layer(layer, m) for m in (1, 512, 4096) for layer in LAYERS["gpt2"]],
    "llama": [
        _layer(layer, m)
        for model in ("llama-1b", "llama-8b", "llama-70b")
        for m in (512, 4096)
        for layer in LAYERS[model]
    ],
    "decode": [
        _layer(layer, m)
        for model in ("llama-1b", "llama-8b")
        for m in _DECODED
        for layer in LAYERS[model]
    ],
    "random": _random(),
    "drawn": Drawn(lambda rng: _random(rng.randrange(1 << 30))),
}  # fmt: skip

OP = Op(
    name="linear",
    sets=SETS,
    label=products.label,
    inputs=products.inputs,
    expected=products.expected,
    ours=products.ours,
    choose=products.choose,
    chosen=products.chosen,
    launch=products.launch,
    whole=products.whole,
    peers=(*peers_linear.PEERS, *peers_quack.PEERS),
)
