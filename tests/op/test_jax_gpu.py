"""Calls inside and outside `jax.jit` on a GPU, where JAX has one."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def jax():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        found = pytest.importorskip("jax", reason="needs JAX: pip install jax")
        if found.default_backend() not in ("gpu", "cuda"):
            pytest.skip("needs JAX with CUDA")
        yield found


def drawn(jax, *shape, dtype="bfloat16", seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def same(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_arrays_are_taken_where_they_lie(jax, dtype):
    x = drawn(jax, 3, 64, dtype=dtype)
    y = fkjit.rms_norm(x, jax.numpy.ones(64, dtype))
    assert isinstance(y, jax.Array) and y.dtype == x.dtype and y.device == x.device
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_inside_jit_a_call_has_the_bits_that_it_has_outside(jax, dtype):
    q, k, v = (drawn(jax, 2, 4, 200, 64, dtype=dtype, seed=seed) for seed in range(3))

    def call(q, k, v):
        return fkjit.attention(q, k, v, causal=True, return_lse=True)

    program = jax.jit(lambda q, k, v: [2 * one for one in call(q + q, k, v)])
    for found, expected in zip(program(q, k, v), call(q + q, k, v), strict=True):
        same(found, 2 * expected)


def test_calls_keep_their_place_among_xlas_own_kernels(jax):
    """A race with XLA's stream would show: each of 200 steps needs the one before."""
    weight, x = drawn(jax, 256, 256) / 16, drawn(jax, 512, 256, seed=1)
    scale = jax.numpy.ones(256, "bfloat16")

    def step(x, _):
        return jax.numpy.tanh(fkjit.rms_norm(fkjit.linear(x, weight), scale)), None

    program = jax.jit(lambda x: jax.lax.scan(step, x, None, length=200)[0])
    expected = x
    for _ in range(200):
        expected = step(expected, None)[0]
    for _ in range(5):
        same(program(x), expected)


def test_vmap_makes_the_call_for_each_element(jax):
    x, weight = drawn(jax, 3, 5, 64), drawn(jax, 64, seed=1)
    same(jax.vmap(lambda rows: fkjit.rms_norm(rows, weight))(x), fkjit.rms_norm(x, weight))


def test_programs_run_again_with_other_sizes(jax):
    program = jax.jit(lambda x, w: fkjit.rms_norm(x, w, eps=1e-3))
    for seed, rows in enumerate((3, 3, 5000, 0)):
        x, weight = drawn(jax, rows, 64, seed=seed), drawn(jax, 64, seed=9)
        same(program(x, weight), fkjit.rms_norm(x, weight, eps=1e-3))
