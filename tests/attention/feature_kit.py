"""Attention in all its forms: random compositions from seeds, and what they mean in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.attention.kit import normal

# An expression of CUDA, what it reads, and the same in NumPy.
MODS: tuple[tuple[str, dict[str, Any], Any], ...] = (
    ("score + slope * (k_idx - q_idx)", {"slope": 0.03},
     lambda s, b, h, q, k, sq, sk: s + 0.03 * (k - q)),
    ("h % 2 == 0 ? score * weight[b] : score - 1.0f / (1 + q_idx)",
     {"weight": np.linspace(0.5, 1.5, 8, dtype=np.float32)},
     lambda s, b, h, q, k, sq, sk: np.where(h % 2 == 0, s * (0.5 + b / 7), s - 1 / (1 + q))),
    ("kind[k_idx] <= kind[q_idx] + limit ? score : NEG_INFINITY",
     {"kind": (np.arange(4096) // 7 % 3).astype(np.int32), "limit": 1},
     lambda s, b, h, q, k, sq, sk: np.where(k // 7 % 3 <= q // 7 % 3 + 1, s, -np.inf)),
    ("fmaxf(score, -2.f) + 0.1f * (seqlen_k - seqlen_q)", {},
     lambda s, b, h, q, k, sq, sk: np.maximum(s, -2) + 0.1 * (sk - sq)),
)  # fmt: skip
FEATURES = ("window", "softcap", "alibi_slopes", "bias", "mask", "sinks", "score_mod")


class Case(NamedTuple):
    """q, k, v [B, H, S, D] and options of `attention`; `mod` is its score_mod in NumPy."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    mod: Any


def draw(
    seed: int, batch: int, heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int],
    dtype: str = "fp16", features: Any = None,
) -> Case:  # fmt: skip
    """A composition; `features`: those that it has, else each with a chance of a half."""
    rng = np.random.default_rng(seed)
    (hq, hkv), (sq, sk), (d, dv) = heads, lengths, dims
    has = {n: rng.random() < 0.5 if features is None else n in features for n in FEATURES}
    some = rng.integers(1, sk + 2)
    sides = [(some - 1, rng.integers(4)), (None, 5), (some, -1), (2, 0)]
    options: dict[str, Any] = {"causal": bool(rng.random() < 0.5)}
    mod = None
    if has["window"]:
        options["window"] = tuple(s if s is None else int(s) for s in sides[rng.integers(4)])
    if has["softcap"]:
        options["softcap"] = float(rng.uniform(1, 5))
    if has["alibi_slopes"]:
        options["alibi_slopes"] = rng.uniform(-0.1, 0.3, (batch, hq)[rng.integers(2) :]).astype(
            "f4"
        )
    shapes = [[batch, hq, sq, sk], [1, hq, sq, sk], [batch, 1, 1, sk], [1, 1, sq, sk]]
    if has["bias"]:
        kind = ("fp16", "bf16", "fp32")[rng.integers(3)]
        options["bias"] = normal(tuple(shapes[rng.integers(4)]), kind, seed + 1)
    if has["mask"]:
        options["mask"] = rng.random(shapes[rng.integers(4)]) < 0.7
    if has["sinks"]:
        options["sinks"] = rng.standard_normal(hq).astype("f4")
    if has["score_mod"]:
        options["score_mod"], options["score_args"], mod = MODS[rng.integers(len(MODS))]
    rows = (normal((batch, h, s, w), dtype, seed + 2 + i) for i, (h, s, w) in enumerate(
        ((hq, sq, d), (hkv, sk, d), (hkv, sk, dv))))  # fmt: skip
    return Case(*rows, options, mod)


def exact(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) in float64, by the order that the docs give."""
    q, k, v = (np.asarray(x, np.float64) for x in case[:3])
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    score = final(case, q @ k.swapaxes(-1, -2) * q.shape[3] ** -0.5)
    sinks = case.options.get("sinks", np.full(q.shape[1], -np.inf)).astype(np.float64)
    whole = np.concatenate([score, np.broadcast_to(sinks[:, None, None], (*score.shape[:3], 1))], 3)
    top = whole.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(whole - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return (weights / np.where(total == 0, 1, total))[..., :-1] @ v, lse[..., 0]


def final(case: Case, score: np.ndarray) -> np.ndarray:
    """Scaled scores [B, H, Sq, Sk] -> final ones."""
    options = case.options
    batch, heads, sq, sk = score.shape
    b, h, i, j = np.ogrid[:batch, :heads, :sq, :sk]
    if options.get("softcap"):
        score = options["softcap"] * np.tanh(score / options["softcap"])
    if case.mod is not None:
        score = case.mod(score, b, h, i, j, sq, sk)
    apart = j - (i + sk - sq)
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"].astype(np.float64)
        score = score - np.broadcast_to(slopes, (batch, heads))[..., None, None] * abs(apart)
    if "bias" in options:
        score = score + options["bias"].astype(np.float64)
    left, right = options.get("window") or (None, None)
    hidden = np.zeros(score.shape, bool)
    if "mask" in options:
        hidden = hidden | ~options["mask"]
    hidden = hidden | (apart > 0 if options["causal"] else False)
    hidden = hidden | (apart < -left if left not in (None, -1) else False)
    hidden = hidden | (apart > right if right not in (None, -1) else False)
    return np.where(hidden, -np.inf, score)


def own_case(case: Case, b: int, length: int) -> Case:
    """One sequence of decoding as a case of its own: its first `length` keys, which a bias or a
    mask has at the beginning of its rows."""
    options, mod = dict(case.options), case.mod
    for name in ("bias", "mask"):
        if name in options:
            array = options[name]
            options[name] = (
                array[b : b + 1, ..., :length] if len(array) > 1 else array[..., :length]
            )
    if options.get("alibi_slopes", np.zeros(1)).ndim > 1:
        options["alibi_slopes"] = options["alibi_slopes"][b : b + 1]
    if mod is not None:
        whole = mod
        mod = lambda score, _, *rest: whole(score, b, *rest)  # noqa: E731
    rows = (x[b : b + 1, :, :length] for x in (case.k, case.v))
    return Case(case.q[b : b + 1], *rows, options, mod)
