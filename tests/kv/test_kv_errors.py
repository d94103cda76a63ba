"""What the calls of the paged KV cache refuse, and that refusing changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.errors import (
    ArgumentTypeError,
    DeviceError,
    FkjitError,
    ParameterError,
    PoolExhaustedError,
    SequenceTooLongError,
    UnknownSequenceError,
)
from fkjit.ops.kv.memory import Memory
from tests.kv.kit import DIM, HEADS, append, silent, small, tokens  # noqa: F401

TYPE, VALUE = ArgumentTypeError, ParameterError
K = tokens(3, 1)
SLOTS = np.array([0, 1, 2], np.int32)
PAGES = np.zeros((2, 16, HEADS, DIM), np.float16)

# fmt: off
CREATE = [  # id, options, error, message
    ("page size", {"page_size": 24}, VALUE, "page_size=24 is not one of 1, 2, 4, 8, 16, 32"),
    ("no pages", {"num_pages": 0}, VALUE, "num_pages=0; allowed: 1 to "),
    ("half a head", {"num_kv_heads": 0.5}, TYPE, "num_kv_heads=0.5 is not a whole number"),
    ("layout", {"layout": "dhn"}, VALUE, "layout='dhn' is not one of nhd, hnd"),
    ("dtype", {"dtype": "fp64"}, TYPE, "dtype='fp64'; allowed: fp16, bf16, fp32, fp8"),
    ("device", {"device": "tpu"}, DeviceError, "device='tpu'; allowed"),
    ("framework", {"framework": "jax"}, VALUE, "framework='jax' is not one of torch"),
    ("mixed", {"framework": "cupy"}, DeviceError, "framework='cupy' has no arrays on cpu"),
    ("too many", {"num_pages": 2**27}, VALUE, r"must be below 2\^31"),
    ("scale", {"k_scale": 0.5}, VALUE, "k_scale goes with dtype fp8 and int8, not fp16"),
    ("zero scale", {"dtype": "fp8", "v_scale": 0.0}, VALUE, "v_scale=0.0; allowed: finite"),
    ("scales", {"dtype": "fp8", "k_scale": [1, 2, 3]}, VALUE, r"k_scale is not .* \[layers, heads"),
]
APPEND = [  # id, (k, v, cache or None, slots), options, error, message
    ("shape", (K, K[:2], None, SLOTS), {}, VALUE, r"v has shape \(2, 2, 8\); allowed: \[tokens"),
    ("heads", (K[:, :1],) * 2 + (None, SLOTS), {}, VALUE, r"k has shape \(3, 1, 8\); allowed"),
    ("dtype", (K.astype("f4"),) * 2 + (None, SLOTS), {}, TYPE, "k_pages is fp16; allowed: fp32"),
    ("dtypes", (K, K.astype("f4"), None, SLOTS), {}, TYPE, "v is fp32 but k is fp16"),
    ("slot dtype", (K, K, None, SLOTS.astype("f4")), {}, TYPE, "slot_mapping is fp32; allowed"),
    ("slot shape", (K, K, None, SLOTS[None]), {}, VALUE, r"slot_mapping has shape \(1, 3\)"),
    ("beyond", (K, K, None, SLOTS + 190), {}, VALUE, "slot 192, but the pages have slots 0 to 191"),
    ("twice", (K, K, None, SLOTS // 2), {}, VALUE, "slot_mapping has slot 0 more than once"),
    ("layer", (K, K, None, SLOTS), {"layer": 1}, VALUE, "layer=1; allowed: 0 to 0"),
    ("layout", (K, K, None, SLOTS), {"layout": "hnd"}, VALUE, "the cache knows its own"),
    ("cache", (K, K, K, SLOTS), {}, TYPE, "cache is a ndarray; allowed: a PagedKVCache, or a pair"),
    ("pages", (K, K, (PAGES[0], PAGES[0]), SLOTS), {}, VALUE, r"k_pages has shape \(16, 2, 8\)"),
    ("page size", (K, K, (PAGES[:, :5], PAGES[:, 5:10]), SLOTS), {}, VALUE, "pages of 5 tokens"),
    ("overlap", (K, K, (PAGES, PAGES), SLOTS), {}, VALUE, "k_pages overlaps v_pages"),
    ("columns", (K[..., ::-1], K, None, SLOTS), {}, VALUE, "k has stride -1 in its last"),
]
# fmt: on


@pytest.mark.parametrize(("options", "error", "message"), [c[1:] for c in CREATE],
                         ids=[c[0] for c in CREATE])  # fmt: skip
def test_what_no_cache_can_be(options, error, message):
    with pytest.raises(error, match=message) as caught:
        small(**options)
    assert isinstance(caught.value, FkjitError) and "PagedKVCache: " in str(caught.value)


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [a[1:] for a in APPEND],
                         ids=[a[0] for a in APPEND])  # fmt: skip
def test_append_refuses(arguments, options, error, message):
    k, v, cache, slots = arguments
    with pytest.raises(error, match=message) as caught:
        fkjit.kv_append(k, v, small() if cache is None else cache, slots, **options)
    assert isinstance(caught.value, FkjitError) and str(caught.value).startswith("kv_append: ")


def test_read_refuses():
    cache = small()
    with pytest.raises(TYPE, match="dtype='fp64'; allowed: fp16, bf16, fp32"):
        fkjit.kv_read(cache, SLOTS, dtype="fp64")
    with pytest.raises(TYPE, match="dtype='fp32', but the cache holds fp16"):
        fkjit.kv_read(cache, SLOTS, dtype="fp32")
    with pytest.raises(VALUE, match=r"k has shape \(2, 2, 8\); allowed: \[tokens"):
        fkjit.kv_read(cache, SLOTS, out=(K[:2].copy(), K.copy()))
    with pytest.raises(VALUE, match="slot 192, but the pages have slots 0 to 191"):
        fkjit.kv_read(cache, SLOTS + 190)


def test_slots_refuse():
    cache = small()
    rows = np.array([0, 1], np.int32)
    with pytest.raises(TYPE, match="cache is a tuple; allowed: a PagedKVCache"):
        fkjit.kv_slots((PAGES, PAGES), rows)
    with pytest.raises(VALUE, match="cu_seqlens and num_tokens go together"):
        fkjit.kv_slots(cache, rows, np.array([0, 1, 2], np.int32))
    with pytest.raises(VALUE, match=r"cu_seqlens=\[0, 1, 2\]; allowed: 0 to num_tokens \(3\)"):
        fkjit.kv_slots(cache, rows, np.array([0, 1, 2], np.int32), num_tokens=3)
    with pytest.raises(VALUE, match=r"rows=\[1, 1\] has a row more than once"):
        fkjit.kv_slots(cache, np.array([1, 1], np.int32))
    with pytest.raises(TYPE, match="rows is int64; allowed: int32"):
        fkjit.kv_slots(cache, rows.astype(np.int64))


def test_what_fails_changes_nothing():
    cache = small(max_length=60)
    a = cache.allocate()
    k, _ = append(cache, [a], [50], 1)
    b = cache.fork(a)
    for error, call in (
        (SequenceTooLongError, lambda: cache.extend([a, b], [1, 15])),
        (SequenceTooLongError, lambda: cache.advance([a], 1)),
        (UnknownSequenceError, lambda: cache.read([a, 7])),
        (PoolExhaustedError, lambda: [cache.allocate() for _ in range(5)]),
        (ParameterError, lambda: cache.rows([a, a])),
    ):
        with pytest.raises(error):
            call()
        assert np.array_equal(cache.read([a])[0], k) and np.array_equal(cache.read([b])[0], k)
        assert cache.free_pages == 8
    cache.free(a)
    with pytest.raises(UnknownSequenceError, match="was freed already"):
        cache.free(a)


def test_rope_kv_append_refuses():
    q, at = tokens(3, 5, heads=4), np.arange(3, dtype=np.int32)
    for error, arguments, options, message in (
        (TYPE, (q, K, K, SLOTS, at.astype("f4")), {}, "positions is fp32; allowed: int32, int64"),
        (VALUE, (q, K, K, SLOTS, at[:2]), {}, r"positions has shape \(2,\); allowed: \[tokens"),
        (VALUE, (q[..., :4], K, K, SLOTS, at), {}, r"q has shape \(3, 4, 4\); allowed: \[tokens"),
        (VALUE, (q, K, K, SLOTS, at), {"rotary_dim": 3}, "rotary_dim=3 is not an even number"),
        (VALUE, (q, K, K, SLOTS, at), {"rotary_dim": 16}, "rotary_dim=16 is above q's head_dim, 8"),
        (VALUE, (q, K, K, SLOTS, at), {"inplace": True, "out_q": q}, "inplace=True and out_q"),
        (VALUE, (q, K, K, SLOTS // 2, at), {}, "slot_mapping has slot 0 more than once"),
    ):
        q_, k, v, slots, positions = arguments
        with pytest.raises(error, match=message) as caught:
            fkjit.rope_kv_append(q_, k, v, small(), slots, positions, **options)
        assert str(caught.value).startswith("rope_kv_append: ")


def test_of_a_devices_error_the_first_line_is_told(monkeypatch):
    def fails(*args, **named):
        raise RuntimeError("CUDA error: invalid device ordinal\nCompile with TORCH_USE_CUDA_DSA")

    torch = pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(DeviceError, match=r"cannot be used: CUDA error: invalid device ordinal$"):
        Memory("call", "torch", "cpu")
