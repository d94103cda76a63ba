"""JAX's own arrays on the CPU, where JAX is installed; a stand-in is in test_attention.py."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.errors import ArgumentTypeError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax", reason="needs JAX: pip install jax")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_arrays_come_back_as_jax_has_them(jax, dtype):
    x = jax.random.normal(jax.random.key(0), (3, 64), dtype)
    y = fkjit.rms_norm(x, jax.numpy.ones(64, dtype))
    assert isinstance(y, jax.Array) and y.dtype == x.dtype
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, atol=0.02, rtol=0)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_what_jax_traces_is_refused(jax, transform):
    def call(x):
        return fkjit.rms_norm(x, x).sum()

    with pytest.raises(ArgumentTypeError, match="call it outside jit"):
        getattr(jax, transform)(call)(jax.numpy.ones((2, 64)))


def test_arrays_of_another_framework_are_named(jax):
    x = jax.numpy.ones((2, 64))
    with pytest.raises(ArgumentTypeError, match="weight is a numpy array but x is a jax array"):
        fkjit.rms_norm(x, np.ones(64, np.float32))
