"""What the benchmarks of whole layers, of their products and of their gradients share.

Which experts a token goes to follows from `skew` and `seed` alone: work, active experts and padded
places of a case are numbers, the same on every machine. With a skew of s the r-th most popular
expert is drawn in proportion to r^-s (Zipf's law), with 0 all are alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Problem

from ..core.accuracy import LIMITS, Expected
from ..core.op import Arrays

_ROWS = 64  # tokens that are checked
SEED = 20_261_123

# experts, choices of a token, hidden size, an expert's width
MODELS: Mapping[str, tuple[int, int, int, int]] = {
    "mixtral-8x7b": (8, 2, 4096, 14_336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "olmoe-1b-7b": (64, 8, 2048, 1024),
    "deepseek-v3": (256, 8, 7168, 2048),
}
WIDE, SHORT = (128, 8, 7168, 2048), (64, 2, 4096, 1536)  # of many tokens: 4096, 32,768
DECODED = ((128, 8, 4096, 768), (256, 8, 7168, 2048))


def problem(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, *, dtype: str = "bf16",
    skew: float = 0.0, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """A layer: softmax over all experts, SwiGLU, no shared expert; logits are fp32."""
    return {
        "tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden, "width": width,
        "dtype": dtype, "skew": skew, "seed": seed,
    }  # fmt: skip


def label(p: Problem) -> str:
    """ "bf16 T4096 E128 K8 H7168 F2048 zipf1"."""
    words = [p["dtype"], f"T{p['tokens']}", f"E{p['experts']}", f"K{p['top_k']}"]
    return " ".join([*words, f"H{p['hidden']}", f"F{p['width']}", *drawn_by(p)])


def drawn_by(p: Problem) -> list[str]:
    """What a label says of choices that are not the usual ones."""
    skew = [f"zipf{p['skew']:g}"] if p["skew"] else []
    return skew + ([f"seed{p['seed']}"] if p["seed"] else [])


def drawn(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Layers of sizes between those of models; a layer's weights have at most 8 GiB, the rows of
    all choices 4 GiB."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        experts = rng.choice((8, 16, 24, 60, 64, 96, 128, 160, 256))
        top_k = rng.choice([k for k in (1, 2, 4, 6, 8) if k < experts])
        hidden, width = 256 * rng.randint(4, 28), 64 * rng.randint(6, 64)
        tokens = int(2 ** rng.uniform(0, 15))
        made = problem(tokens, experts, top_k, hidden, width, skew=rng.choice((0.0, 0.0, 0.5, 1.0)))
        rows = 2 * tokens * top_k * (hidden + width)
        if weight_bytes(made, experts) <= 8 << 30 and rows <= 4 << 30:
            found[label(made)] = made
    return list(found.values())


# ------------------------------------------------------------------ choices


def logits(p: Problem) -> np.ndarray:
    """fp32 [tokens, experts]; their best top_k are drawn without replacement (Gumbel's trick)."""
    rng = np.random.default_rng([p["seed"], p["tokens"], p["experts"]])
    ranks = rng.permutation(p["experts"]) + 1.0
    noise = rng.gumbel(size=(p["tokens"], p["experts"])) - p["skew"] * np.log(ranks)
    return noise.astype(np.float32)


def counts(p: Problem) -> np.ndarray:
    """[experts]: how many choices each has."""
    return _counts(*(p[name] for name in ("tokens", "experts", "top_k", "skew", "seed")))


@lru_cache(maxsize=256)
def _counts(tokens: int, experts: int, top_k: int, skew: float, seed: int) -> np.ndarray:
    drawn_from = logits({"tokens": tokens, "experts": experts, "skew": skew, "seed": seed})
    best = np.argpartition(-drawn_from, top_k - 1, 1)[:, :top_k]
    return np.bincount(best.ravel(), minlength=experts)


def active(p: Problem) -> int:
    """Experts that have a choice."""
    return int((counts(p) > 0).sum())


def padded(p: Problem, rows: int = 64) -> int:
    """Places, where each expert has whole tiles of so many rows."""
    return int((-(-counts(p) // rows) * rows).sum())


# ------------------------------------------------------------------ work


def choices(p: Problem) -> int:
    """Rows of products: tokens times top_k."""
    return p["tokens"] * p["top_k"]


def weight_bytes(p: Problem, experts: int) -> int:
    """Of so many experts."""
    return 3 * experts * p["hidden"] * p["width"] * ITEMSIZE[p["dtype"]]


def flops(p: Problem) -> float:
    """Of three products of each choice; padding is not counted."""
    return 2.0 * choices(p) * 3 * p["hidden"] * p["width"]


def traffic(p: Problem) -> float:
    """Bytes of the active experts' weights, of x, out and logits, once."""
    rows = 2 * p["tokens"] * p["hidden"] * ITEMSIZE[p["dtype"]]
    return float(weight_bytes(p, active(p)) + rows + 4 * p["tokens"] * p["experts"])


# ------------------------------------------------------------------ arrays and what is right


def normal(device: Any, dtype: str, *shape: int, scale: float = 1.0) -> Any:
    """N(0, scale^2) on the device; in place, since weights take a third of its memory."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    return torch.randn(*shape, dtype=kind, device=place).mul_(scale)


def inputs(p: Problem, device: Any) -> Arrays:
    """Fresh x, and weights such that sums are N(0, 1); the problem's logits."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    experts, hidden, width, dtype = (p[n] for n in ("experts", "hidden", "width", "dtype"))
    return {
        "x": normal(device, dtype, p["tokens"], hidden),
        "logits": torch.from_numpy(logits(p)).to(place),
        "w_gate_up": normal(device, dtype, experts, 2 * width, hidden, scale=hidden**-0.5),
        "w_down": normal(device, dtype, experts, hidden, width, scale=math.sqrt(2 / width)),
    }


def some_tokens(p: Problem, array: Any) -> Any:
    """Indices of tokens that are checked, spread over all."""
    import torch

    tokens = p["tokens"]
    return torch.linspace(0, tokens - 1, min(tokens, _ROWS)).long().unique().to(array.device)


def swiglu(z: Any) -> Any:
    """silu(gate) * up of [rows, 2 width], gate first."""
    import torch

    gate, up = z.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def in_float64(p: Problem, x: Any, logits: Any, arrays: Arrays) -> Any:
    """The layer's output of such rows of x and logits, in float64, an expert at a time."""
    import torch

    best = torch.softmax(logits.double(), -1).topk(p["top_k"])
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in best.indices.unique().tolist():
        token, choice = (best.indices == expert).nonzero(as_tuple=True)
        hidden = swiglu(x[token].double() @ arrays["w_gate_up"][expert].double().t())
        rows = hidden @ arrays["w_down"][expert].double().t()
        out = out.index_add(0, token, rows * best.values[token, choice, None])
    return out


def expected(p: Problem, arrays: Arrays) -> Expected:
    """Some tokens, in float64."""
    rows = some_tokens(p, arrays["x"])
    made = in_float64(p, arrays["x"][rows], arrays["logits"][rows], arrays)
    return Expected([(rows, made)], LIMITS[p["dtype"]])
