"""Finite inputs give finite outputs at any magnitude: scores that fp32 holds to few places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fkjit
from fkjit import compat
from fkjit.jit.build import quiet
from fkjit.runtime.interop import numpy_dtype
from fkjit.settings import settings
from tests.attention.kit import normal, reference
from tests.core.sampling import one_in

TARGETS = ("compute_75", "compute_80", "compute_90a")
DTYPES = ("bf16", "fp16")
SHAPES = ((64, 1), (64, 300), (128, 200))  # head dimension, keys
SCALES = (1e3, 1e5, 1e8, 1e15)


@pytest.fixture(params=TARGETS)
def target(request, monkeypatch):
    found = replace(settings(), target=request.param)
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: found)
    return request.param


def run(q, k, v, **options):
    with quiet():
        o, lse = fkjit.attention(q, k, v, return_lse=True, **options)
    return np.asarray(o).astype("f8"), np.asarray(lse).astype("f8")


@one_in(4, target=TARGETS, dtype=DTYPES, shape=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_that_are_alike(target, dtype, shape):
    """Scores of 4e11 (fp16: 5e8) and more: the mean of the values, as for any other magnitude."""
    (dim, keys), size = shape, 133120.0 if dtype == "bf16" else 8192.0
    q, k = (np.full((1, 1, n, dim), size, numpy_dtype(dtype)) for n in (3, keys))
    v = normal((1, 1, keys, dim), dtype, 1)
    o, lse = run(q, k, v)
    assert np.abs(o - v.astype("f8").mean(2, keepdims=True)).max() <= 4e-3
    assert np.allclose(lse, size * size * dim**0.5, rtol=1e-6)


@one_in(4, target=TARGETS, scale=SCALES, causal=(False, True))
@pytest.mark.parametrize("scale", SCALES, ids="{:g}".format)
@pytest.mark.parametrize("causal", [False, True])
def test_the_largest_score_takes_it_all(target, scale, causal):
    """Against float64, of scores that fp32 has exactly: a key's number, many times."""
    rows, keys, dim = 40, 330, 64
    q, k = (np.zeros((1, 1, n, dim), "f4") for n in (rows, keys))
    q[..., 0], q[:, :, ::3, 0] = 1, -1
    rng = np.random.default_rng(5)
    k[..., 0] = rng.permutation(np.arange(keys) % 100)
    q, k = (x.astype(numpy_dtype("bf16")) for x in (q, k))
    v = normal((1, 1, keys, dim), "bf16", 1)
    o, lse = run(q, k, v, causal=causal, softmax_scale=scale)
    expected, sums = reference(q, k, v, causal, scale)
    assert np.abs(o - expected).max() <= 2e-2
    assert np.allclose(lse, sums, rtol=1e-6)


@one_in(2)
def test_the_least_number_as_a_bias_is_a_mean_of_all(target):
    """As of a padded row of models that hide keys by adding the least finite number. In fp32's
    kernel, which older GPUs have, it hides them all."""
    q, k, v = (normal((1, 2, n, 64), "bf16", i) for i, n in enumerate((20, 70, 70)))
    bias = np.zeros((1, 1, 20, 70), "f4")
    bias[:, :, :, 50:] = bias[:, :, 7] = np.finfo("f4").min
    o, _ = run(q, k, v, bias=bias)
    mean = v.astype("f8").mean(2) * (target != "compute_75")
    assert np.isfinite(o).all() and np.abs(o[:, :, 7] - mean).max() <= 4e-3
    expected, _ = run(q, k[:, :, :50], v[:, :, :50])
    others = np.arange(20) != 7
    assert np.abs((o - expected)[:, :, others]).max() <= 4e-3


@one_in(2, dtype=DTYPES, paged=(False, True))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paged", [False, True])
def test_decoding(dtype, paged):
    size, keys = (133120.0 if dtype == "bf16" else 8192.0), 700
    kind = numpy_dtype(dtype)
    q, k = np.full((1, 1, 4, 64), size, kind), np.full((1, keys, 2, 64), size, kind)
    k[:, 600:] = 0
    v = normal((1, keys, 2, 64), dtype, 1)
    with quiet():
        if paged:
            pages = tuple(np.pad(x[0], ((0, 4), (0, 0), (0, 0))).reshape(44, 16, 2, 64)
                          for x in (k, v))  # fmt: skip
            table = np.arange(44, dtype="i4")[None]
            o = fkjit.paged_attention(q, pages, table, np.array([keys], "i4"))
        else:
            o = fkjit.attention_decode(q, k, v, layout="bshd")
    mean = v[:, :600].astype("f8").mean(1, keepdims=True).repeat(2, 2)
    assert np.abs(o.astype("f8") - mean).max() <= 4e-3


@one_in(2, target=TARGETS, dtype=("bfloat16", "float16"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients(target, dtype):
    torch = pytest.importorskip("torch", reason="needs torch")
    size = 133120.0 if dtype == "bfloat16" else 8192.0
    if (target, dtype) == ("compute_75", "bfloat16"):
        pytest.skip("bf16 is fp32's kernel before 8.0")
    kind = getattr(torch, dtype)
    x = torch.full((1, 1, 70, 64), size, dtype=kind).requires_grad_()
    with quiet():
        o = compat.scaled_dot_product_attention(x, x, x)
        (dx,) = torch.autograd.grad(o, x, torch.ones_like(o))
    assert torch.equal(o, x) and dx.isfinite().all()
