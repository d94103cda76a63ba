"""fkjit.vector_add without a GPU, and with it what simple ops share: shapes, strides, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fkjit
from fkjit.errors import ArgumentTypeError, FkjitError, ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.op.shapes import coalesce
from fkjit.runtime.interop import numpy_dtype

TYPE, VALUE = ArgumentTypeError, ParameterError


def normal(shape, dtype="fp32", seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))


def add(a, b, **options):
    with quiet():
        return fkjit.vector_add(a, b, **options)


def rounded_sum(a, b):
    """The sum in fp32, rounded once."""
    return (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (8191,), (3, 5, 7), (2, 0, 4), (40, 64)])
def test_any_shape_exactly(shape, dtype):
    a, b = normal(shape, dtype), normal(shape, dtype, 1)
    o = add(a, b)
    assert o.dtype == a.dtype and o.shape == shape and np.array_equal(o, rounded_sum(a, b))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_strides_and_phases(data):
    """Slices, steps, transposes and reversed views of wider arrays; out may be given."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(shape))))

    def array(seed):
        views = []
        for n in shape:
            step = data.draw(st.sampled_from([1, 1, 1, 2, -1]))
            start = data.draw(st.sampled_from([0, 0, 1, 4]))
            views.append((n * abs(step) + start + 5, start, step))
        wide = normal([size for size, _, _ in views], "fp16", seed)
        part = wide[tuple(slice(start, None) for _, start, _ in views)]
        part = part[tuple(slice(None, None, step) for _, _, step in views)]
        return part[tuple(slice(n) for n in shape)].transpose(order)

    a, b, out = array(0), array(1), array(2)
    expected = rounded_sum(a, b)
    assert np.array_equal(add(a, b), expected)
    assert add(a, b, out=out) is out and np.array_equal(out, expected)


@pytest.mark.parametrize("start", [1, 3, 8])
@pytest.mark.parametrize("length", [2, 7, 4099])
def test_rows_equally_far_from_a_boundary_are_vectors_still(start, length):
    a, b, out = (normal((length + start,), "fp16", i)[start:] for i in range(3))
    assert np.array_equal(add(a, b, out=out), rounded_sum(a, b))


def test_nan_infinity_and_overflow_are_as_in_numpy():
    special = np.array([np.nan, np.inf, -np.inf, 65504, 0, -0.0], np.float16)
    a, b = (x.copy() for x in np.meshgrid(special, special))
    with np.errstate(all="ignore"):
        expected = rounded_sum(a, b)
    o = add(a, b)
    assert np.array_equal(o, expected, equal_nan=True)
    assert np.array_equal(np.signbit(o[o == 0]), np.signbit(expected[expected == 0]))


def test_in_place_and_with_itself():
    a, b = normal((1001,)), normal((1001,), seed=1)
    expected = a + b
    assert add(a, b, out=a) is a and np.array_equal(a, expected)
    assert np.array_equal(add(b, b, out=b), 2 * normal((1001,), seed=1))


def test_interleaved_arrays_do_not_overlap():
    both = normal((50, 16))
    left, right = both[:, :8], both[:, 8:]
    expected = left + left
    add(left, left, out=right)
    assert np.array_equal(right, expected)


def test_torch_tensors_come_back_as_tensors():
    torch = pytest.importorskip("torch")
    a, b = torch.randn(5, 9, dtype=torch.bfloat16), torch.randn(5, 9, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    assert torch.equal(add(a, b), a + b)
    assert add(a, b, out=out) is out and torch.equal(out, a + b)


G = normal((6, 8))
READ_ONLY = normal((6, 8))
READ_ONLY.flags.writeable = False
SAME = np.broadcast_to(normal((1, 8)), (6, 8))
CELLS = normal((4, 4, 4, 4, 4, 2))[..., 0]
FIVE = CELLS.transpose(4, 2, 0, 3, 1)

# fmt: off
CALLS = [  # id, arguments, options, error, what the message must say
    ("shapes", (G, G[:3]), {}, VALUE, r"b has shape \(3, 8\); allowed: a's .* \(6, 8\)"),
    ("broadcast", (G, G[0]), {}, VALUE, r"b has shape \(8,\); allowed: a's \(nothing is broadcast"),
    ("number", (G, 1.0), {}, TYPE, r"b is a builtins\.float; allowed: a torch"),
    ("none", (None, G), {}, TYPE, r"a is a builtins\.NoneType"),
    ("dtypes", (G, G.astype("f2")), {}, TYPE, "b is fp16 but a is fp32"),
    ("integers", (G.astype("i4"),) * 2, {}, TYPE, "a is int32; allowed: fp16, bf16, fp32"),
    ("float64", (G.astype("f8"),) * 2, {}, TYPE, "a is fp64; allowed"),
    ("out shape", (G, G), {"out": G[:, :4]}, VALUE, r"out has shape \(6, 4\); allowed: the result"),
    ("out dtype", (G, G), {"out": G.astype("f2")}, TYPE, "out is fp16; allowed: fp32"),
    ("out read-only", (G, G), {"out": READ_ONLY}, VALUE, "out is read-only"),
    ("out list", (G, G), {"out": []}, TYPE, r"out is a builtins\.list"),
    ("out repeated", (G, G), {"out": SAME}, VALUE, "out is read-only"),
    ("overlap", (G[1:], G[1:]), {"out": G[:-1]}, VALUE, "out overlaps a in memory; only the very"),
    ("reversed", (G, G), {"out": G[::-1]}, VALUE, "out overlaps a in memory"),
    ("dimensions", (CELLS, FIVE), {}, VALUE, r"leave 5 dimensions; allowed: 4; pass contiguous"),
]
# fmt: on


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"), [pytest.param(*c[1:], id=c[0]) for c in CALLS]
)
def test_bad_input_gets_one_clear_typed_error(arguments, options, error, message, monkeypatch):
    monkeypatch.setattr("fkjit.ops.op.op.interpret", lambda *_: pytest.fail("something ran"))
    with pytest.raises(error, match=message) as caught:
        fkjit.vector_add(*arguments, **options)
    assert isinstance(caught.value, FkjitError) and str(caught.value).startswith("vector_add: ")


def test_an_output_with_elements_that_share_memory_is_refused():
    wide = np.zeros(20, np.float32)
    twice = np.lib.stride_tricks.as_strided(wide, (6, 8), (4, 4))
    with pytest.raises(VALUE, match=r"out .* has elements that share memory"):
        fkjit.vector_add(G, G, out=twice)


def test_gradients_are_refused():
    torch = pytest.importorskip("torch")
    x = torch.randn(4)
    with pytest.raises(VALUE, match="b requires grad, but vector_add has no backward"):
        fkjit.vector_add(x, x.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(add(x, x.clone().requires_grad_()), 2 * x)


def test_mixed_frameworks_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TYPE, match="b is a torch array but a is a numpy array"):
        fkjit.vector_add(G, torch.zeros(6, 8))


def test_prepare_takes_the_same_arguments_and_checks_them():
    fkjit.prepare("vector_add", G, G, out=G.copy())
    with pytest.raises(VALUE, match="b has shape"):
        fkjit.prepare("vector_add", G, G[:2])


COALESCED = [  # shape, strides of each array, sizes, strides
    ((4, 5), [(5, 1)], (20,), [(1,)]),
    ((4, 5), [(8, 1)], (4, 5), [(8, 1)]),
    ((4, 1, 5), [(5, 99, 1), (5, 7, 1)], (20,), [(1,), (1,)]),
    ((4, 5), [(1, 4)], (20,), [(1,)]),
    ((4, 5), [(1, 4), (5, 1)], (4, 5), [(1, 4), (5, 1)]),
    ((2, 3, 4), [(0, 4, 1), (12, 4, 1)], (2, 12), [(0, 1), (12, 1)]),
    ((1, 1), [(3, 4)], (1,), [(1,)]),
    ((), [()], (1,), [(1,)]),
]


@pytest.mark.parametrize(("shape", "strides", "sizes", "expected"), COALESCED)
def test_coalesce_joins_what_lies_behind_each_other(shape, strides, sizes, expected):
    assert coalesce(shape, strides) == (sizes, expected)
