"""What few bits do to language models: errors of logits, and perplexity."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from fkjit.ops.quantize.schemes import SCHEMES

from . import train
from .attention import NAMED, Seen, attend
from .codes import error, rounded
from .models import Calls, Shape, Weights, drawn, logits, perplexity, with_outliers
from .products import multiplied
from .tensor_core import BITS, EXACT, Sums

SMALL = {
    "Llama": Shape(True, 4, 128, 4, 2, 384),
    "GPT-2": Shape(False, 4, 128, 4, 4, 512),
}
DEEP = {
    "Llama": Shape(True, 16, 256, 4, 2, 768),
    "GPT-2": Shape(False, 12, 256, 4, 4, 1024),
}
OUTLIERS = 30.0  # times that two channels of each norm are larger
_WINDOWS = 8  # of text


class Way(NamedTuple):
    """A scheme of products, a form of attention, and the sums of both where they are e4m3's."""

    products: str
    attention: str
    sums: Sums | None = None


WAYS = (
    Way("fp16", "fp16"),
    Way("bf16", "bf16"),
    *(Way(scheme, "bf16") for scheme in SCHEMES),
    *(Way("bf16", name) for name in (
        "fp8, tensor", "fp8, block", "fp8, block, smooth, rotated", "int8, block, smooth")),
    Way("fp8_row", "fp8, block"),
    Way("int8_row", "int8, block, smooth"),
)  # fmt: skip
SHORT = (
    Way("fp8_row", "fp8, block", Sums(BITS, 0)),
    Way("fp8_row", "fp8, block", Sums(BITS, 128)),
)


def calls(way: Way) -> Calls:
    """What a model of this way multiplies and attends with."""
    form = NAMED[way.attention]
    dtype = "fp16" if form.scores == "fp16" else "bf16"

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[-2], q.shape[-2]).tril().bool()
        heads = [x.flatten(0, 1).float() for x in (q, k, v)]
        seen = Seen(heads[0], heads[1], heads[2], mask)
        return rounded(attend(seen, form, way.sums or EXACT), dtype).reshape(q.shape)

    return Calls(lambda x, w: multiplied(x, w, way.products, way.sums), attention)


def records(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """A record a model and way. Training is shown on stderr."""
    learnt, kept = train.parts(quick)
    every = bytes(torch.cat([learnt, kept]).tolist())
    yield {"part": "text", "bytes": len(every), "sha256": hashlib.sha256(every).hexdigest()}
    seed = int(rng.integers(1 << 31))
    windows = 2 if quick else _WINDOWS
    for name in ("Llama", "GPT-2"):
        deep = DEEP[name]._replace(layers=2) if quick else DEEP[name]
        yield from _judged(f"{name}, {deep.layers} layers, random", deep, drawn(deep, seed),
                           train.judged(deep, kept, windows), WAYS)  # fmt: skip
        small = SMALL[name]._replace(layers=1, context=64) if quick else SMALL[name]
        print(f"  training {name}", file=sys.stderr, flush=True)
        weights = train.trained(small, learnt, seed, 10 if quick else train.STEPS)
        trained = f"{name}, {small.layers} layers, trained"
        tokens = train.judged(small, kept, windows)
        yield from _judged(trained, small, weights, tokens, (*WAYS, *SHORT))
        large = with_outliers(weights, small, OUTLIERS)
        yield from _judged(f"{trained}, outlier channels", small, large, tokens, (*WAYS, *SHORT))


def _judged(
    model: str, shape: Shape, weights: Weights, tokens: torch.Tensor, ways: tuple[Way, ...]
) -> Iterator[dict[str, Any]]:
    """The model in float64, then each way beside it, on windows of text."""
    whole = {name: value.double() for name, value in weights.items()}
    right = logits(whole, shape, tokens[:, :-1])
    made = {"part": "models", "model": model}
    yield {**made, "products": "float64", "attention": "float64", "error": 0.0,
           "perplexity": perplexity(right, tokens)}  # fmt: skip
    for way in ways:
        found = logits(weights, shape, tokens[:, :-1], calls(way))
        interval = {} if way.sums is None else {"interval": way.sums.interval}
        yield {**made, "products": way.products, "attention": way.attention, **interval,
               "error": error(_centred(found), _centred(right)),
               "perplexity": perplexity(found, tokens)}  # fmt: skip


def _centred(found: torch.Tensor) -> torch.Tensor:
    """Logits less their mean, which softmax does not feel."""
    return found.double() - found.double().mean(-1, keepdim=True)
