"""fkjit.reduce_sum, reduce_max and reduce_mean without a GPU: numbers, edges, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fkjit
from fkjit.errors import ArgumentTypeError, FkjitError, ParameterError
from fkjit.jit.build import quiet
from fkjit.runtime.interop import numpy_dtype
from tests.core.sampling import one_in

TYPE, VALUE = ArgumentTypeError, ParameterError
CALLS = {
    "sum": (fkjit.reduce_sum, np.sum),
    "mean": (fkjit.reduce_mean, np.mean),
    "max": (fkjit.reduce_max, np.max),
}
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}


def normal(shape, dtype="fp32", seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))


def run(kind, x, axis=None, **options):
    with quiet():
        return CALLS[kind][0](x, axis, **options)


def check(kind, x, axis=None, dtype=None, **options):
    """Within one rounding of the result, and what fp32 sums of that many numbers lose."""
    found = run(kind, x, axis, **({"dtype": dtype} if dtype else {}), **options)
    exact = x.astype(np.float64)
    expected = CALLS[kind][1](exact, axis if x.ndim else None)
    assert found.shape == np.shape(expected)
    assert found.dtype == numpy_dtype(dtype) if dtype else found.dtype == x.dtype
    name = dtype or next(n for n in ROUNDING if numpy_dtype(n) == x.dtype)
    size = np.abs(exact).sum(axis if x.ndim else None) if kind != "max" else 0
    size = size / (x.size / max(np.size(expected), 1)) if kind == "mean" else size
    bound = ROUNDING[name] * np.abs(expected) + 2.0**-22 * size
    assert (np.abs(found.astype(np.float64) - expected) <= bound).all(), (kind, x.shape, axis)


@one_in(2)
@pytest.mark.parametrize("kind", list(CALLS))
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("axis", [None, -1])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5000,), (40_001,), (7, 13), (3, 4, 600)])
def test_any_shape(kind, dtype, axis, shape):
    check(kind, normal(shape, dtype), axis)


@pytest.mark.parametrize("kind", list(CALLS))
@pytest.mark.parametrize("columns", [1, 3, 8, 33, 257, 1000, 2100])
def test_many_rows(kind, columns):
    check(kind, normal((70, columns), "fp16"), -1)
    check(kind, normal((70, columns + 5), "fp32")[:, 5:], -1)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_any_strides_and_phases(data):
    rows, columns = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 70))
    start, pad = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    step = data.draw(st.sampled_from([1, 1, 2, -1]))
    dtype = data.draw(st.sampled_from(["fp16", "fp32"]))
    x = normal((rows, start + abs(step) * columns + pad), dtype)[:, start:][:, ::step][:, :columns]
    x = x.T if data.draw(st.booleans()) else x
    kind = data.draw(st.sampled_from(list(CALLS)))
    check(kind, x, data.draw(st.sampled_from([None, -1, 1])))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_sum_may_be_asked_for_in_fp32(dtype):
    x = np.abs(normal((3, 9000), dtype)) * 100
    check("sum", x, dtype="fp32")
    check("mean", x, -1, dtype="fp32")
    assert np.isinf(run("sum", np.full(70_000, 2, np.float16)))
    assert run("sum", np.full(70_000, 2, np.float16), dtype="fp32") == 140_000


@pytest.mark.parametrize("place", [0, 1, 4500, 39_999])
def test_nan_and_infinities_as_in_numpy(place):
    x = normal((40_000,))
    for value, big in ((np.nan, np.nan), (np.inf, np.inf), (-np.inf, x.max())):
        y = x.copy()
        y[place] = value
        expected = np.nan if value != value else value
        assert np.array_equal(run("sum", y), np.float32(expected), equal_nan=True)
        assert np.array_equal(run("mean", y), np.float32(expected), equal_nan=True)
        assert np.array_equal(run("max", y), np.float32(big), equal_nan=True)
        rows = y.reshape(100, 400)
        for kind, (_, exact) in CALLS.items():
            finite = np.isfinite(run(kind, rows, -1))
            assert np.array_equal(finite, np.isfinite(exact(rows.astype("f8"), -1)))
    both = x.copy()
    both[[0, place or 7]] = np.inf, -np.inf
    assert np.isnan(run("sum", both)) and run("max", both) == np.inf
    assert run("max", np.full(5000, -np.inf, np.float32)) == -np.inf


def test_the_largest_is_found_wherever_it_is():
    x = normal((9, 4099), "fp16")[:, 3:]
    for place in (0, 1, 7, 8, 2049, 4094, 4095):
        y = x.copy()
        y[:, place] = 100 + np.arange(9)
        assert np.array_equal(run("max", y, -1), y[:, place])
        assert run("max", y) == 108


def test_nothing_sums_to_zero_and_has_no_mean():
    for shape in ((0,), (3, 0), (0, 4)):
        x = np.zeros(shape, np.float32)
        assert run("sum", x) == 0 and np.isnan(run("mean", x))
    assert np.array_equal(run("sum", np.zeros((3, 0), np.float16), -1), np.zeros(3))
    assert np.isnan(run("mean", np.zeros((3, 0), np.float16), -1)).all()
    assert run("sum", np.zeros((0, 4), np.float32), -1).shape == (0,)
    assert run("max", np.zeros((0, 4), np.float32), -1).shape == (0,)


def test_kept_dimensions_and_given_outputs():
    x = normal((4, 5, 64))
    assert run("sum", x, keepdim=True).shape == (1, 1, 1)
    assert run("max", x, -1, keepdim=True).shape == (4, 5, 1)
    out = np.full((4, 5), np.nan, np.float32)
    assert run("mean", x, 2, out=out) is out and np.allclose(out, x.mean(-1), atol=1e-6)


def test_the_same_bits_at_every_call_and_none_of_the_input_changes():
    x = normal((100_003,))
    before = x.copy()
    found = {run("sum", x).tobytes() for _ in range(3)}
    assert len(found) == 1 and np.array_equal(x, before)


def test_torch_tensors_come_back_as_tensors():
    torch = pytest.importorskip("torch")
    x = torch.randn(6, 50, dtype=torch.bfloat16)
    assert torch.equal(run("max", x, -1), x.amax(-1))
    assert run("sum", x).shape == () and run("sum", x).dtype == torch.bfloat16


def test_no_races_where_blocks_meet():
    with fkjit.sanitize():
        check("sum", normal((20_001,)))
        check("max", normal((2, 33_000)), -1)


G = normal((6, 8))
HOLES = normal((5, 6, 7, 9))

# fmt: off
ERRORS = [  # id, call, arguments, options, error, what the message must say
    ("axis 0", "sum", (G, 0), {}, VALUE, r"axis=0 is not None \(all\) or -1"),
    ("axis text", "sum", (G, "1"), {}, TYPE, "axis='1' is not None or a whole number"),
    ("axis flag", "max", (G, True), {}, TYPE, "axis=True is not None or a whole number"),
    ("axes", "max", (G, (0, 1)), {}, TYPE, r"axis=\(0, 1\) is not None or a whole number"),
    ("dtype", "sum", (G,), {"dtype": "fp16"}, VALUE, "dtype='fp16' is not one of fp32 or None"),
    ("dtype down", "mean", (G.astype("f2"),), {"dtype": "bf16"}, VALUE, "not one of fp16, fp32"),
    ("dtype kind", "sum", (G,), {"dtype": np.float32}, VALUE, "dtype=<class .* is not one of"),
    ("keepdim", "sum", (G,), {"keepdim": "yes"}, TYPE, "keepdim='yes' is not True or False"),
    ("list", "max", ([1.0],), {}, TYPE, r"x is a builtins\.list"),
    ("integers", "sum", (G.astype("i4"),), {}, TYPE, "x is int32; allowed: fp16, bf16, fp32"),
    ("nothing", "max", (G[:0],), {}, VALUE, r"x has shape \(0, 8\): nothing has no maximum"),
    ("no column", "max", (G[:, :0], -1), {}, VALUE, "nothing has no maximum"),
    ("holes", "sum", (HOLES[:, ::2, ::3, :4],), {}, VALUE, "leave 3 dimensions; allowed: 2"),
    ("rows", "sum", (HOLES[:, ::2], -1), {}, VALUE, "x .* has rows at no one distance"),
    ("out shape", "sum", (G,), {"out": G[0]}, VALUE, r"out has shape \(8,\); allowed: the result"),
    ("out dtype", "sum", (G, -1), {"out": np.zeros(6, "f2")}, TYPE, "out is fp16; allowed: fp32"),
    ("out gaps", "max", (G, -1), {"out": np.zeros(12, "f4")[::2]}, VALUE, "is not contiguous"),
    ("overlap", "sum", (G, -1), {"out": G.reshape(-1)[:6]}, VALUE, "out overlaps x in memory"),
]
# fmt: on


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "error", "message"),
    [pytest.param(*c[1:], id=c[0]) for c in ERRORS],
)
def test_bad_input_gets_one_clear_typed_error(
    kind, arguments, options, error, message, monkeypatch
):
    monkeypatch.setattr("fkjit.ops.op.op.interpret", lambda *_: pytest.fail("something ran"))
    with pytest.raises(error, match=message) as caught:
        CALLS[kind][0](*arguments, **options)
    assert isinstance(caught.value, FkjitError)
    assert str(caught.value).startswith(f"reduce_{kind}: ")
