"""What attention_decode and paged_attention refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, FkjitError, ParameterError
from fkjit.jit.build import quiet
from fkjit.settings import settings

TYPE, VALUE = ArgumentTypeError, ParameterError
Q = np.zeros((2, 4, 1, 64), np.float16)
ONE = Q[:, :, 0]
K = np.zeros((2, 2, 30, 64), np.float16)
LENS = np.array([30, 7], np.int32)
PAGES = np.zeros((6, 16, 2, 64), np.float16)
BOTH = (PAGES, PAGES)
TABLE = np.arange(6, dtype=np.int32).reshape(2, 3)
WIDE = np.zeros((2, 2, 30, 264), np.float16)
CODES, ONES, THREE = K.astype(np.int8), np.ones(2, np.float32), np.ones(3, np.float32)

# fmt: off
CONTIGUOUS = [  # id, arguments, options, error, message
    ("fp32", (Q.astype("f4"), K, K), {}, TYPE, "q is fp32; allowed: bf16, fp16"),
    ("dtypes", (Q, K.astype("f4"), K), {}, TYPE, "k is fp32; allowed: fp16, uint8, int8"),
    ("sides", (Q, K, CODES), {}, TYPE, "v is int8; allowed: fp16"),
    ("no scales", (Q, CODES, CODES), {}, VALUE, "k_scale and v_scale are None, but keys"),
    ("scales", (Q, K, K), {"v_scale": ONES}, VALUE, "v_scale is given, but keys"),
    ("scale shape", (Q, CODES, CODES), {"k_scale": THREE, "v_scale": ONES}, VALUE, "k_scale"),
    ("dimensions", (Q[0, 0], K, K), {}, VALUE, r"q has shape \(1, 64\); allowed: \[B, H, D\]"),
    ("tokens", (np.zeros((2, 4, 17, 64), "f2"), K, K), {}, VALUE, "17 tokens a sequence; allowed"),
    ("batch", (Q[:1], K, K), {}, VALUE, r"q has shape \(1, 4, 1, 64\), k \(2, 2, 30, 64\)"),
    ("heads", (Q[:, :3], K, K), {}, VALUE, "q has 3 heads, not a multiple of k's 2"),
    ("head_dim", (Q[..., :32], K, K), {}, VALUE, "q has head_dim 32, k 64"),
    ("wide", (WIDE[:, :, 0], WIDE, K), {}, VALUE, "head_dim=264 is not in 1"),
    ("lengths", (Q, K, K, LENS[:1]), {}, VALUE, r"seq_lens has shape \(1,\)"),
    ("length type", (Q, K, K, LENS.astype("f4")), {}, TYPE, "seq_lens is fp32; allowed: int32"),
    ("layout", (Q, K, K), {"layout": "nhd"}, VALUE, "layout='nhd' is not one of bhsd, bshd"),
    ("odd rows", (Q[..., :60], K[..., :60], K), {}, VALUE, "q .* do not fill whole 16 bytes"),
    ("stride", (Q, K[..., ::2], K), {}, VALUE, "k has stride 2 in its last dimension"),
    ("split", (Q, K, K), {"split_size": 100}, VALUE, "split_size=100; allowed: 128, 256 …"),
    ("split type", (Q, K, K), {"split_size": 1.5}, TYPE, "split_size=1.5 is not a whole number"),
    ("causal", (Q, K, K), {"causal": "yes"}, TYPE, "causal='yes' is not True or False"),
    ("scale", (Q, K, K), {"softmax_scale": float("nan")}, VALUE, "softmax_scale=nan"),
    ("scale type", (Q, K, K), {"softmax_scale": "1"}, TYPE, "softmax_scale='1' is not a plain"),
    ("out", (Q, K, K), {"out": np.zeros((2, 4, 64), "f2")}, VALUE, r"out has shape \(2, 4, 64\)"),
    ("no array", ([1], K, K), {}, TYPE, "q is a builtins.list"),
]
PAGED = [  # id, arguments, options, error, message
    ("no table", (ONE, BOTH), {}, TYPE, "page_table is a builtins.NoneType"),
    ("cache", (ONE, PAGES, TABLE, LENS), {}, TYPE, "cache is a ndarray"),
    ("page size", (ONE, (PAGES[:, :12],) * 2, TABLE, LENS), {}, VALUE, "page_size a power of two"),
    ("table type", (ONE, BOTH, TABLE.astype("f4"), LENS), {}, TYPE, "page_table is fp32"),
    ("table", (ONE, BOTH, TABLE[0], LENS), {}, VALUE, r"page_table has shape \(3,\)"),
    ("rows", (Q[:1, :, 0], BOTH, TABLE, LENS), {}, VALUE, "pass rows: which row each"),
    ("row list", (Q[:1, :, 0], BOTH, TABLE, LENS), {"rows": LENS}, VALUE, r"rows has shape \(2,\)"),
    ("layout", (ONE, BOTH, TABLE, LENS), {"layout": "bshd"}, VALUE, "is not one of nhd, hnd"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [c[1:] for c in CONTIGUOUS],
                         ids=[c[0] for c in CONTIGUOUS])  # fmt: skip
def test_attention_decode(arguments, options, error, message):
    for call in (fkjit.attention_decode, fkjit.attention_decode.prepare):
        with pytest.raises(error, match=message) as caught:
            call(*arguments, **options)
        assert isinstance(caught.value, FkjitError) and "attention_decode: " in str(caught.value)


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [c[1:] for c in PAGED],
                         ids=[c[0] for c in PAGED])  # fmt: skip
def test_paged_attention(arguments, options, error, message):
    with pytest.raises(error, match=message) as caught:
        fkjit.paged_attention(*arguments, **options)
    assert "paged_attention: " in str(caught.value)


def test_a_caches_own_tables():
    cache = fkjit.PagedKVCache(
        4, page_size=16, num_kv_heads=2, head_dim=64, dtype="fp16", device="cpu", framework="numpy"
    )
    with pytest.raises(ArgumentTypeError, match=r"rows is None; pass cache\.rows"):
        fkjit.paged_attention(ONE, cache)
    with pytest.raises(ParameterError, match="are the cache's own"):
        fkjit.paged_attention(ONE, cache, TABLE, LENS, rows=LENS)


def test_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_75")
    )
    with quiet(), pytest.raises(ParameterError, match=r"needs .*cp_async.* has not"):
        fkjit.attention_decode(Q, K, K)


def test_several_frameworks_and_overlaps():
    torch = pytest.importorskip("torch", reason="needs torch")
    with pytest.raises(ArgumentTypeError, match="k is a numpy array but q is a torch array"):
        fkjit.attention_decode(torch.from_numpy(Q), K, K)
    with pytest.raises(ParameterError, match="o overlaps q in memory"):
        fkjit.attention_decode(Q, K, K, out=Q)
