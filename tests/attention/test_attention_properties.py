"""Calls of attention drawn by hypothesis: a good one is accepted, whatever its shapes, strides and
forms; one flaw, anywhere, is one typed error that names it. Kernels are not run."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.runtime.interop import numpy_dtype

FORMS = ("window", "softcap", "alibi_slopes", "bias", "mask", "sinks")
EXAMPLES = settings(max_examples=50)


def nothing_runs():
    """Only the checks."""
    return mock.patch("fkjit.ops.op.op.interpret", lambda *_, **__: None)


def strided(draw, shape, dtype):
    """Zeros with any distances between rows, the last dimension contiguous."""
    order = draw(st.permutations(range(len(shape) - 1)))
    padding = draw(st.sampled_from((0, 0, 3, 8)))
    places = [shape[axis] for axis in order] + [shape[-1] + padding]
    array = np.zeros(places, dtype)[..., : shape[-1]]
    return array.transpose([*np.argsort(order), len(shape) - 1])


@st.composite
def calls(draw):
    """(q, k and v by name, options), all of it legal."""
    b, group, hkv = (draw(st.integers(*ends)) for ends in ((0, 3), (1, 4), (1, 3)))
    sq, sk = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    d, dv = draw(st.integers(1, 256)), draw(st.integers(1, 256))
    dtype = numpy_dtype(draw(st.sampled_from(("fp16", "bf16", "fp32"))))
    hq = group * hkv
    shapes = {"q": (b, hq, sq, d), "k": (b, hkv, sk, d), "v": (b, hkv, sk, dv)}
    arrays = {name: strided(draw, shape, dtype) for name, shape in shapes.items()}
    options = {"causal": draw(st.booleans()), "return_lse": True}
    side = st.one_of(st.none(), st.integers(-1, 50))
    paired = [tuple(draw(st.sampled_from((1, n))) for n in (b, hq, sq)) + (sk,) for _ in "bm"]
    every = {
        "window": (draw(side), draw(side)),
        "softcap": draw(st.one_of(st.just(0), st.floats(1e-6, 1e30))),
        "alibi_slopes": np.zeros(draw(st.sampled_from(((hq,), (b, hq)))), "f4"),
        "bias": np.zeros(paired[0], draw(st.sampled_from(("f2", "f4")))),
        "mask": np.ones(paired[1], bool),
        "sinks": np.zeros(hq, "f4"),
    }
    return arrays, options | {name: every[name] for name in FORMS if draw(st.booleans())}


@EXAMPLES
@given(calls(), st.booleans())
def test_a_good_call_has_results_of_its_shapes(call, heads_last):
    arrays, options = call
    b, hq, sq, _ = arrays["q"].shape
    shape = (b, hq, sq, arrays["v"].shape[-1])
    if heads_last:
        arrays = {name: array.swapaxes(1, 2) for name, array in arrays.items()}
        options, shape = {**options, "layout": "bshd"}, (b, sq, hq, shape[-1])
    with nothing_runs():
        o, lse = fkjit.attention(*arrays.values(), **options)
    assert o.shape == shape and o.dtype == arrays["q"].dtype
    assert lse.shape == (b, hq, sq) and lse.dtype == np.float32


def longer(array, axis, by=1):
    """One element more along an axis."""
    shape = list(array.shape)
    shape[axis] += by
    return np.zeros(shape, array.dtype)


# What goes wrong with q, k or v: of the array's name and itself.
ROWS = {
    "a dimension too few": lambda array: array[0] if array.shape[0] else array.reshape(0, 1, 1),
    "another batch": lambda array: longer(array, 0),
    "a head too many": lambda array: longer(array, 1, 5),
    "integers": lambda array: array.astype("i4"),
    "float64": lambda array: array.astype("f8"),
    "a list": lambda array: array.tolist(),
    "nothing": lambda array: None,
    "too wide": lambda array: longer(array, 3, 600),
    "big-endian": lambda array: array.astype(">f4"),
}


@EXAMPLES
@given(calls(), st.sampled_from(("q", "k", "v")), st.sampled_from(sorted(ROWS)))
def test_one_flaw_of_the_rows_is_one_error(call, name, flaw):
    arrays, options = call
    if flaw == "a head too many" and name == "q":  # five more may be legal again
        assume((arrays["q"].shape[1] + 5) % arrays["k"].shape[1])
    arrays[name] = ROWS[flaw](arrays[name])
    with nothing_runs(), pytest.raises((ParameterError, ArgumentTypeError)) as error:
        fkjit.attention(*arrays.values(), **options)
    said = str(error.value)
    assert said.startswith("attention: ") and any(
        word in said for word in ("q ", "k ", "v ", "head_dim")
    )


# Values that are never legal, by option: of hq, and of [B, Hq, Sq, Sk].
OPTIONS = {
    "causal": lambda h, s: ("False", 2, None, np.ones(3)),
    "return_lse": lambda h, s: ("yes", 2),
    "softmax_scale": lambda h, s: (float("nan"), float("inf"), "1", 10**400),
    "block": lambda h, s: (48, 0, (64, 48), 32.0, "32", (1, 2, 3)),
    "impl": lambda h, s: ("fast", np.ones(2)),
    "layout": lambda h, s: ("sbhd", 1),
    "window": lambda h, s: (5, (1, 2, 3), (1.5, 2), (3, -2), "ab"),
    "softcap": lambda h, s: ("1", float("nan"), -1.0, 1e-9, 1e31),
    "alibi_slopes": lambda h, s: (0.5, np.zeros(h, "i4"), np.zeros(h + 1, "f4")),
    "bias": lambda h, s: (
        np.zeros(s, "f8"), np.zeros(s[1:], "f4"), np.zeros((*s[:3], s[3] + 1), "f4"),
        np.zeros((s[0], s[1] + 2, *s[2:]), "f4"),
    ),
    "mask": lambda h, s: (np.zeros(s, "f4"), np.ones(s[2:], bool)),
    "sinks": lambda h, s: (np.zeros(h, "i4"), np.zeros(h + 1, "f4"), np.zeros((1, h), "f4")),
}  # fmt: skip


@EXAMPLES
@given(calls(), st.sampled_from(sorted(OPTIONS)), st.data())
def test_one_flaw_of_the_options_is_one_error_that_names_it(call, name, data):
    arrays, options = call
    b, hq, sq, _ = arrays["q"].shape
    values = OPTIONS[name](hq, (b, hq, sq, arrays["k"].shape[2]))
    value = values[data.draw(st.integers(0, len(values) - 1))]
    empty = not b or not sq
    assume(name != "block" or not empty)  # of no rows there is no tile
    with nothing_runs(), pytest.raises((ParameterError, ArgumentTypeError)) as error:
        fkjit.attention(*arrays.values(), **{**options, name: value})
    said = str(error.value)
    assert said.startswith("attention: ") and name in said
