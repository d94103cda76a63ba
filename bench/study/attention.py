"""Errors of attention in few bits: some queries of many keys, emulated in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from . import kernel
from .codes import HALVES, KINDS, as_e4m3, coded, error, rounded
from .tensor_core import BITS, EXACT, Sums, product

HEADS, DIM = 2, 64
ROWS, MANY, _SHORT = 16, 64, 16384  # queries: of longer sequences fewer
LENGTHS = (1024, 4096, 16384, 65536, 131072)
INTERVALS = (0, 8192, 1024, 256, 128, 64)
WIDTHS = (10, 12, 13, 14, 16, 22)  # bits of the accumulator
SHIFTS = {"around 0": 0.0, "around 1": 1.0}  # what values lie around
_KEYS = 64  # of a block that has one scale
_TOP = 256.0  # what the greatest probability becomes in e4m3
RARE = "rare outliers"
_BIAS = 30.0  # of an outlier channel of K: in all tokens alike


class Form(NamedTuple):
    """How q and k are stored, how v (and so the probabilities), and who shares a scale.

    `scales`: "tensor", "head", or "block": a row of q, 64 keys of k, a column of v.
    """

    name: str
    scores: str
    values: str
    scales: str = ""
    smooth: bool = False
    rotate: bool = False


FORMS = (
    Form("fp16", "fp16", "fp16"),
    Form("bf16", "bf16", "bf16"),
    Form("fp8, tensor", "fp8", "fp8", "tensor"),
    Form("fp8, head", "fp8", "fp8", "head"),
    Form("fp8, block", "fp8", "fp8", "block"),
    Form("fp8, block, rotated", "fp8", "fp8", "block", rotate=True),
    Form("fp8, block, smooth", "fp8", "fp8", "block", smooth=True),
    Form("fp8, block, smooth, rotated", "fp8", "fp8", "block", smooth=True, rotate=True),
    Form("int8, tensor", "int8", "bf16", "tensor"),
    Form("int8, block", "int8", "bf16", "block"),
    Form("int8, block, rotated", "int8", "bf16", "block", rotate=True),
    Form("int8, block, smooth", "int8", "bf16", "block", smooth=True),
    Form("int8_fp8, block, smooth", "int8", "fp8", "block", smooth=True),
)
NAMED = {form.name: form for form in FORMS}


class Seen(NamedTuple):
    """q [heads, rows, dim]; k, v [heads, keys, dim]; mask [rows, keys], True where a row looks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None


def exact(seen: Seen) -> torch.Tensor:
    """In float64."""
    q, k, v, mask = seen
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(_masked(scores, mask), -1) @ v.double()


def attend(seen: Seen, form: Form, sums: Sums = EXACT) -> torch.Tensor:
    """As a kernel of this form does it, in fp32; `sums` are those of e4m3 products."""
    dtype = "fp16" if form.scores == "fp16" else "bf16"
    q, k, v = (rounded(x, dtype) for x in seen[:3])
    scores = _masked(_scores(q, k, form, sums) * q.shape[-1] ** -0.5, seen.mask)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    if form.values != "fp8":
        return rounded(weights, form.values) @ v / total
    over = {"tensor": (0, 1, 2), "head": (1, 2), "block": (1,)}[form.scales]
    codes, scale = coded(v, "fp8", over)
    found = product(as_e4m3(_TOP * weights), codes.transpose(-1, -2), sums)
    return found * (scale / _TOP) / total


def _scores(q: torch.Tensor, k: torch.Tensor, form: Form, sums: Sums) -> torch.Tensor:
    """[heads, rows, keys], each row but for a constant, which softmax does not feel."""
    if form.smooth:
        k = k - k.mean(-2, keepdim=True)
    if form.rotate:
        q, k = rotated(q), rotated(k)
    if form.scores in HALVES:
        return rounded(q, form.scores) @ rounded(k, form.scores).transpose(-1, -2)
    over = {"tensor": (0, 1, 2), "head": (1, 2), "block": (2,)}[form.scales]
    own, of_q = coded(q, form.scores, over)
    keys, of_k = _keys(k, form.scores) if form.scales == "block" else coded(k, form.scores, over)
    short = sums if form.scores == "fp8" else EXACT  # int8's are exact
    return product(own, keys, short) * of_q * of_k.transpose(-1, -2)


def _keys(k: torch.Tensor, code: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and the scale of each key: that of its block."""
    heads, keys, dim = k.shape
    padded = torch.nn.functional.pad(k, (0, 0, 0, -keys % _KEYS))
    codes, scale = coded(padded.reshape(heads, -1, _KEYS, dim), code, (2, 3))
    scale = scale.expand(-1, -1, _KEYS, 1).reshape(heads, -1, 1)
    return codes.reshape(padded.shape)[:, :keys], scale[:, :keys]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rows by an orthogonal matrix: Hadamard's, columns' signs changed as a fixed draw says."""
    dim = x.shape[-1]
    i = torch.arange(dim)
    both = i[:, None] & i[None, :]
    odd = torch.stack([both >> bit & 1 for bit in range(dim.bit_length())]).sum(0) % 2
    signs = torch.from_numpy(np.random.default_rng(dim).choice([-1.0, 1.0], dim)).to(x.dtype)
    return (x * signs) @ (1.0 - 2.0 * odd).to(x.dtype) * dim**-0.5


def _masked(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def rare(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """N(0, 1), and one number in a thousand of N(0, 101), as FlashAttention-3's paper has them."""
    large = 10.0 * rng.standard_normal((rows, k)) * (rng.random((rows, k)) < 1e-3)
    return rng.standard_normal((rows, k)) + large


def drawn(rng: np.random.Generator, kind: str, keys: int, rows: int = ROWS) -> Seen:
    """Heads of a kind. Outlier channels: one of k lies around 30 in all tokens."""
    if kind == "outlier channels":
        q, k, v = (rng.standard_normal((HEADS, n, DIM)) for n in (rows, keys, keys))
        k[..., 5] += _BIAS
    else:
        draw = rare if kind == RARE else KINDS[kind]
        q, k, v = (draw(rng, HEADS * n, DIM).reshape(HEADS, n, DIM) for n in (rows, keys, keys))
    return Seen(*(torch.from_numpy(x).float() for x in (q, k, v)))


def look_back(keys: int, rows: int = ROWS) -> torch.Tensor:
    """The mask of queries spread over the sequence, the last one at its end."""
    last = (torch.arange(rows) + 1) * keys // rows
    return torch.arange(keys)[None] < last[:, None]


def stored(seen: Seen, form: Form) -> torch.Tensor:
    """With exact sums, as 16 bits hold it."""
    return rounded(attend(seen, form), "fp16" if form.scores == "fp16" else "bf16")


# What the table of forms has a row of. None: not of such heads.
CALLS: dict[str, Callable[[Seen], torch.Tensor | None]] = {
    **{form.name: partial(stored, form=form) for form in FORMS},
    **{f"the kernel, {scheme}, block, smooth": partial(kernel.attention, scheme=scheme)
       for scheme in ("fp8", "int8_fp8", "int8")},
}  # fmt: skip


def schemes(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """A record a form, kind, length, causal or not; sums exact."""
    for keys in (128, 512) if quick else LENGTHS:
        for kind in (*KINDS, RARE):
            rows = MANY if keys <= _SHORT else ROWS
            made = drawn(rng, kind, keys, rows)
            for causal in (False, True):
                seen = made._replace(mask=look_back(keys, rows) if causal else None)
                right = exact(seen)
                found = {name: call(seen) for name, call in CALLS.items()}
                for name, one in found.items():
                    if one is not None:
                        yield {"part": "attention", "scheme": name, "kind": kind, "keys": keys,
                               "causal": causal, "error": error(one, right)}  # fmt: skip


def short_sums(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """What the accumulator adds to "fp8, block", by length, interval and bits."""
    form = NAMED["fp8, block"]
    for keys in (128, 512) if quick else LENGTHS:
        plain = drawn(rng, "N(0, 1)", keys)
        for values, shift in SHIFTS.items():
            seen = plain._replace(v=plain.v + shift)
            right = attend(seen, form)
            most = [(BITS, n) for n in INTERVALS if n < keys]
            if keys == 16384:
                most += [(bits, n) for bits in WIDTHS if bits != BITS for n in (0, 128)]
            for bits, interval in most:
                found = attend(seen, form, Sums(bits, interval))
                yield {"part": "attention sums", "values": values, "keys": keys, "bits": bits,
                       "interval": interval, "error": error(found, right)}  # fmt: skip
