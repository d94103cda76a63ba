"""What tests of decoding share: random sequences in pages, and what attention to them should be."""

from __future__ import annotations

import numpy as np

import fkjit
from fkjit.ops.attention.decode.cases import attend
from fkjit.ops.kv import cases as kv
from fkjit.runtime.interop import numpy_dtype

CODES = {"fp8": np.uint8, "int8": np.int8}
NAN_CODE = 127  # of e4m3; int8's greatest


class Batch:
    """Sequences of some lengths, their pages in any order, poison where no token is."""

    def __init__(
        self, lengths, *, seed=0, heads_q=4, heads_kv=2, tokens=1, dim=64, dtype="fp16",
        storage="same", page_size=16, layout="nhd", spare=2,
    ):  # fmt: skip
        self.rng = np.random.default_rng([seed, len(lengths), sum(lengths)])
        self.dtype, self.storage, self.layout = numpy_dtype(dtype), storage, layout
        self.lengths = np.array(lengths, np.int32)
        batch, width = len(lengths), max(1, -(-max(lengths) // page_size))
        pages = self.rng.permutation(batch * width + spare)
        self.table = pages[: batch * width].reshape(batch, width).astype(np.int32)
        past = np.arange(width) * page_size >= self.lengths[:, None]
        self.table[past] = self.rng.choice([-1, len(pages), 2**31 - 1])  # nobody looks there
        self.q = self.normal(batch, tokens, heads_q, dim)
        self.k = [self.normal(n, heads_kv, dim) for n in lengths]
        self.v = [self.normal(n, heads_kv, dim) for n in lengths]
        self.scales = {}
        if storage != "same":
            top = kv.GREATEST[storage]
            for side in ("k", "v"):
                scale = self.rng.uniform(2, 5, heads_kv).astype(np.float32) / top
                self.scales[f"{side}_scale"] = scale
        shape = (len(pages), page_size, heads_kv, dim)
        self.pages = tuple(self._paged(side, shape) for side in ("k", "v"))

    def normal(self, *shape):
        """N(0, 1)."""
        return self.rng.standard_normal(shape, dtype=np.float32).astype(self.dtype)

    def _paged(self, side, shape):
        poison = np.full(shape, np.nan, self.dtype)
        if self.storage != "same":
            poison = np.full(shape, NAN_CODE, CODES[self.storage])
        for b, tokens in enumerate(getattr(self, side)):
            scale = self.scales.get(f"{side}_scale")
            codes = kv.encode(tokens, self.storage, scale)
            at = np.arange(len(tokens))
            poison[self.table[b, at // shape[1]], at % shape[1]] = codes
            kept = kv.decode(codes, self.storage, scale, "fp32")
            getattr(self, side)[b] = kept.astype(np.float64)
        return poison if self.layout == "nhd" else poison.transpose(0, 2, 1, 3).copy()

    def call(self, **options):
        """The public call."""
        q = self.q[:, 0] if options.pop("one_token", False) else self.q
        given = {"layout": self.layout, **self.scales, **options}
        return fkjit.paged_attention(q, self.pages, self.table, self.lengths, **given)

    def expected(self, softmax_scale=None, causal=True):
        """(o [B, S, Hq, D], lse [B, Hq, S]) in float64."""
        scale = self.q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        found = [
            attend(
                q.astype(np.float64).swapaxes(0, 1),
                k.swapaxes(0, 1),
                v.swapaxes(0, 1),
                scale,
                causal,
            )
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]
        return np.stack([o.swapaxes(0, 1) for o, _ in found]), np.stack([lse for _, lse in found])


LIMITS = {"float16": 2e-3, "bfloat16": 1.6e-2}


def check(batch, o, lse=None, **options):
    """Values and shapes."""
    want, want_lse = batch.expected(**options)
    assert o.shape == want.shape and o.dtype == batch.dtype
    limit = LIMITS[batch.dtype.name] * max(1.0, np.abs(want).max(initial=0))
    assert np.abs(o.astype(np.float64) - want).max(initial=0) <= limit
    if lse is not None:
        assert lse.shape == want_lse.shape and lse.dtype == np.float32
        seen = np.isfinite(want_lse)
        assert np.array_equal(np.isneginf(lse), ~seen)
        assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) <= 2e-5
