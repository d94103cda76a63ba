"""JAX's own arrays on the CPU, where JAX is installed; a stand-in is in test_attention.py."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.elementwise.vector_add import _OP
from tests.core.sampling import one_in

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax", reason="needs JAX: pip install jax")


def drawn(jax, *shape, dtype="float32", seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@one_in(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_arrays_come_back_as_jax_has_them(jax, dtype):
    x = drawn(jax, 3, 64, dtype=dtype)
    y = fkjit.rms_norm(x, jax.numpy.ones(64, dtype))
    assert isinstance(y, jax.Array) and y.dtype == x.dtype
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, atol=0.02, rtol=0)


@one_in(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_inside_jit_a_call_has_the_bits_that_it_has_outside(jax, dtype):
    q, k, v = (drawn(jax, 2, 2, 40, 32, dtype=dtype, seed=seed) for seed in range(3))

    def call(q, k, v):
        return fkjit.attention(q, k, v, causal=True, return_lse=True)

    program = jax.jit(lambda q, k, v: [2 * one for one in call(q + q, k, v)])
    for found, expected in zip(program(q, k, v), call(q + q, k, v), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(2 * expected))
    assert "fkjit_call" in program.lower(q, k, v).as_text()


def test_subnormal_numbers_stay_what_they_are(jax):
    small = np.array([2.0**-140, -(2.0**-149), 1.0, 0.0], np.float32)
    found = jax.jit(lambda x: fkjit.vector_add(x, 0 * x))(jax.numpy.asarray(small))
    np.testing.assert_array_equal(np.asarray(found), small)


def test_programs_run_again_with_other_numbers_and_sizes(jax):
    program = jax.jit(lambda x, w: fkjit.rms_norm(x, w, eps=1e-3))
    for seed, rows in enumerate((3, 3, 5, 0)):
        x, weight = drawn(jax, rows, 64, seed=seed), drawn(jax, 64, seed=9)
        found, expected = program(x, weight), fkjit.rms_norm(x, weight, eps=1e-3)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_one_program_has_several_calls(jax):
    weight = drawn(jax, 64)

    def layers(x):
        for _ in range(3):
            x = fkjit.layer_norm(x, weight) + fkjit.vector_add(x, x)
        return x

    x = drawn(jax, 4, 64, seed=1)
    np.testing.assert_allclose(jax.jit(layers)(x), layers(x), rtol=1e-5, atol=1e-5)


def test_vmap_makes_the_call_for_each_element(jax):
    x, weight = drawn(jax, 3, 5, 64), drawn(jax, 64, seed=1)
    found = jax.vmap(lambda rows: fkjit.rms_norm(rows, weight))(x)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(fkjit.rms_norm(x, weight)))


def test_gradients_that_jax_is_given(jax):
    @jax.custom_vjp
    def twice(x):
        return fkjit.vector_add(x, x)

    twice.defvjp(lambda x: (twice(x), None), lambda _, grad: (2 * grad,))
    found = jax.jit(jax.grad(lambda x: (twice(x) ** 2).sum()))(drawn(jax, 70))
    np.testing.assert_allclose(found, 8 * drawn(jax, 70), rtol=1e-6)


@pytest.mark.parametrize("transform", ["grad", "jit and grad"])
def test_without_them_the_error_says_what_to_do(jax, transform):
    call = jax.grad(lambda x: fkjit.rms_norm(x, x[0]).sum())
    with pytest.raises(ArgumentTypeError, match=r"rms_norm: its gradient.*jax\.custom_vjp"):
        (call if transform == "grad" else jax.jit(call))(jax.numpy.ones((2, 64)))


def test_bad_shapes_are_refused_while_jax_traces(jax):
    with pytest.raises(ParameterError, match=r"rms_norm: weight has shape \(5,\)"):
        jax.jit(fkjit.rms_norm)(jax.numpy.ones((2, 64)), jax.numpy.ones(5))


def test_what_is_written_in_place_is_refused(jax, monkeypatch):
    x = jax.numpy.ones((3, 8))
    with pytest.raises(ParameterError, match="out is given"):
        jax.jit(lambda x: fkjit.vector_add(x, x, out=x))(x)
    monkeypatch.setattr(_OP, "written", _OP.written | {"a"})
    with pytest.raises(ArgumentTypeError, match="vector_add: writes a in place"):
        jax.jit(fkjit.vector_add)(x, x)


def test_an_error_at_run_time_is_told_by_jax(jax, monkeypatch):
    def fail(*_):
        raise MemoryError("vector_add: no room")

    program = jax.jit(lambda x: fkjit.vector_add(x, x))
    x = jax.numpy.ones(300)
    program(x).block_until_ready()
    monkeypatch.setattr("fkjit.ops.op.op.interpret", fail)
    with pytest.raises(Exception, match="MemoryError: vector_add: no room"):
        program(x).block_until_ready()
    monkeypatch.undo()
    assert program(x).sum() == 600


def test_arrays_of_another_framework_are_named(jax):
    x = jax.numpy.ones((2, 64))
    with pytest.raises(ArgumentTypeError, match="weight is a numpy array but x is a jax array"):
        fkjit.rms_norm(x, np.ones(64, np.float32))
