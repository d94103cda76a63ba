"""fkjit.linear and fkjit.gelu_linear in the interpreter, against float64."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.gemm.kit import (  # noqa: E402
    ACTIVATIONS,
    DTYPES,
    assert_close,
    double,
    inputs,
    linear,
    normal,
    theirs,
)

IMPLEMENTATIONS = {
    "fp16": ("auto", "mma", "skinny", "gemv", "tiled"),
    "bf16": ("auto", "mma", "skinny", "gemv", "tiled"),
    "fp32": ("auto", "fma", "gemv", "tiled"),
}  # fmt: skip


def expected(x, weight, bias=None, residual=None, **options):
    return theirs(*double(x, weight, bias), residual=double(residual)[0], **options)


@one_in(6)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_product_with_its_epilogue(dtype, activation, gate):
    x, weight, bias = inputs(19, 24, 40, dtype, gate)
    residual = normal(19, 24, dtype=dtype, seed=3)
    options = {"activation": activation, "gate": gate, "scale": 0.5, "residual": residual}
    y = linear(x, weight, bias, **options)
    assert_close(y, expected(x, weight, bias, **options), dtype)


@one_in(6)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(
    ("dtype", "impl"), [(dtype, impl) for dtype, impls in IMPLEMENTATIONS.items() for impl in impls]
)
def test_every_kernel_gives_the_same(dtype, impl, layout):
    x, weight, bias = inputs(5, 136, 264, dtype, layout=layout)
    residual = normal(5, 136, dtype=dtype, seed=3)
    options = {"activation": "silu", "residual": residual, "weight_layout": layout}
    y = linear(x, weight, bias, impl=impl, **options)
    assert_close(y, expected(x, weight, bias, **options), dtype)
    assert torch.equal(y, linear(x, weight, bias, impl=impl, **options))


def a_case(seed):
    """A call of any size, layout, stride and epilogue: (arguments, options, dtype)."""
    rng = random.Random(seed)
    dtype = rng.choice(list(DTYPES))
    m, n, k = (rng.choice(sizes) for sizes in ((1, 2, 7, 16, 33, 70), (1, 5, 8, 66), (1, 3, 8, 72)))
    gate, layout = rng.random() < 0.3, rng.choice(["nk", "kn"])
    x, weight, bias = inputs(m, n, k, dtype, gate, layout=layout)
    if rng.random() < 0.5:
        x = normal(m, k + rng.choice([1, 8]), dtype=dtype)[:, :k]
    if rng.random() < 0.3:
        weight = weight.t().contiguous().t()
    out_dtype = rng.choice([None, "fp32"])
    residual = normal(m, n, dtype=out_dtype or dtype, seed=3) if rng.random() < 0.5 else None
    options = {
        "activation": rng.choice(list(ACTIVATIONS)), "gate": gate, "weight_layout": layout,
        "scale": rng.choice([1.0, -0.3]), "residual": residual,
    }  # fmt: skip
    return (x, weight, bias if rng.random() < 0.7 else None), options, dtype, out_dtype


@one_in(4)
@pytest.mark.parametrize("seed", range(32))
def test_takes_any_shape_layout_and_stride(seed):
    arrays, options, dtype, out_dtype = a_case(seed)
    y = linear(*arrays, **options, out_dtype=out_dtype)
    # What is rounded to 16 bits on its way out is rounded once.
    assert_close(y, expected(*arrays, **options), out_dtype or dtype)


@pytest.mark.parametrize("shape", [(3, 4, 40), (40,), (2, 1, 3, 40), (0, 40), (3, 0, 40)])
def test_leading_dimensions(shape):
    x, (_, weight, bias) = normal(*shape), inputs(1, 24, 40)
    y = linear(x, weight, bias)
    assert y.shape == (*shape[:-1], 24)
    assert_close(y, expected(x, weight, bias), "fp32")


def test_rows_at_no_one_distance_are_copied():
    _, weight, bias = inputs(1, 24, 40)
    x = normal(4, 3, 5, 40).transpose(0, 1)  # whose rows are not one dimension
    residual = normal(4, 3, 5, 24).transpose(0, 1)
    y = linear(x, weight, bias, residual=residual)
    assert_close(y, expected(x, weight, bias, residual=residual), "fp32")


def test_a_transposed_x_is_read_where_it_lies():
    _, weight, bias = inputs(1, 24, 40)
    x = normal(40, 18).t()
    assert_close(linear(x, weight, bias), expected(x, weight, bias), "fp32")


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_either_layout_may_be_a_view_of_the_other(layout):
    x, weight, bias = inputs(9, 24, 40, "bf16", layout=layout)
    view = weight.t().contiguous().t()
    found, same = (linear(x, w, bias, weight_layout=layout) for w in (weight, view))
    assert torch.equal(found, same) or (found - same).abs().max() < 0.02


def test_out_is_written_and_may_be_the_residual():
    x, weight, bias = inputs(9, 24, 40)
    residual, out = normal(9, 24, seed=3), torch.full((9, 30), torch.nan)
    want = expected(x, weight, bias, residual=residual)
    assert linear(x, weight, bias, residual=residual, out=out[:, :24]).data_ptr() == out.data_ptr()
    assert_close(out[:, :24], want, "fp32")
    assert out[:, 24:].isnan().all()
    assert linear(x, weight, bias, residual=residual, out=residual) is residual
    assert_close(residual, want, "fp32")


@pytest.mark.parametrize("given", ["out", "residual", "out_dtype"])
def test_the_result_of_16_bits_may_be_fp32(given):
    x, weight, bias = inputs(9, 24, 40, "bf16")
    wide = {"out": torch.zeros(9, 24), "residual": normal(9, 24, seed=3), "out_dtype": "fp32"}
    y = linear(x, weight, bias, **{given: wide[given]})
    residual = wide["residual"] if given == "residual" else None
    assert y.dtype == torch.float32
    want = theirs(*double(x, weight, bias), residual=double(residual)[0])
    assert (y - want).abs().max() < 1e-5


def test_gelu_linear_is_the_tanh_form():
    x, weight, bias = inputs(9, 24, 40)
    with quiet():
        y = fkjit.gelu_linear(x, weight, bias)
    assert_close(y, expected(x, weight, bias, activation="gelu_tanh"), "fp32")
    assert (y - linear(x, weight, bias, activation="gelu")).abs().max() > 1e-5


def test_an_expression_of_the_caller():
    x, weight, bias = inputs(9, 24, 40)
    y = linear(x, weight, bias, epilogue_mod="x > 0.f ? x * x : 0.f", scale=0.5)
    z = expected(x, weight, bias, scale=0.5)
    assert_close(y, z.relu().square(), "fp32")


def test_numpy_arrays():
    x, weight, bias = (t.numpy() for t in inputs(9, 24, 40))
    y = linear(x, weight, bias, activation="relu")
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y, np.maximum(x @ weight.T + bias, 0), atol=2e-6)
    stepped = np.ascontiguousarray(np.broadcast_to(x, (3, 9, 40)))[::2].transpose(1, 0, 2)
    np.testing.assert_allclose(linear(stepped, weight), stepped @ weight.T, atol=2e-6)


def test_nan_and_infinity_are_carried_on():
    x, weight, bias = inputs(9, 24, 40, "fp16")
    x[3, 7], x[5, 0] = torch.nan, torch.inf
    y = linear(x, weight, bias, activation="relu")
    assert y[3].isnan().all() and not y[[0, 1, 2, 4, 6, 7, 8]].isnan().any()
    assert torch.equal(y[5].isinf(), weight[:, 0] > 0)


# ------------------------------------------------------------------ what is refused

X, WEIGHT, BIAS = normal(4, 8), normal(6, 8), normal(6)
REFUSED = {
    "x_columns": ((normal(4, 7), WEIGHT), {}, r"x has 7 columns, weight \(6, 8\) is of 8"),
    "weight_layout": ((X, WEIGHT), {"weight_layout": "kn"}, r"x has 8 columns.*is of 6"),
    "weight_3d": ((X, normal(1, 6, 8)), {}, r"allowed: x \[\.\.\., K\], weight \[N, K\]"),
    "no_k": ((normal(4, 0), normal(6, 0)), {}, r"k=0.*n and k from 1"),
    "no_n": ((X, normal(0, 8)), {}, r"n=0.*n and k from 1"),
    "strided": ((X, normal(6, 16)[:, ::2]), {}, r"weight has strides .*contiguous copy of weight"),
    "bias_shape": ((X, WEIGHT, normal(5)), {}, r"bias has shape \(5,\); allowed:.*\(6,\)"),
    "residual": ((X, WEIGHT), {"residual": normal(4, 5)}, r"residual has shape \(4, 5\)"),
    "out": ((X, WEIGHT), {"out": normal(4, 5)}, r"out has shape \(4, 5\); allowed"),
    "overlap": ((X, WEIGHT), {"out": X[:, :6]}, r"out overlaps x in memory"),
    "odd_gate": ((X, normal(5, 8)), {"gate": True}, r"gate=True, but weight .* 5 outputs"),
    "activation": ((X, WEIGHT), {"activation": "tanh"}, r"activation='tanh' is not None or one of"),
    "impl": ((X, WEIGHT), {"impl": "cublas"}, r"impl='cublas' is not one of auto, wgmma"),
    "not_here": ((X, WEIGHT), {"impl": "wgmma"}, r"impl='wgmma' takes dtype of bf16, fp16"),
    "too_many_rows": ((normal(9, 8), WEIGHT), {"impl": "gemv"}, r"impl='gemv' takes up to 8 rows"),
    "layout": ((X, WEIGHT), {"weight_layout": "mn"}, r"weight_layout='mn' is not one of nk, kn"),
    "block": ((X, WEIGHT), {"block": 48}, r"block=48 is not one of \["),
    "out_dtype": ((X, WEIGHT), {"out_dtype": "fp16"}, r"out_dtype='fp16' is not one of fp32"),
    "scale": ((X, WEIGHT), {"scale": float("inf")}, r"scale=inf is not a finite"),
    "two": ((X, WEIGHT), {"activation": "relu", "epilogue_mod": "x"}, r"and an epilogue_mod are"),
    "lonely": ((X, WEIGHT), {"epilogue_mod_grad": "1.f"}, r"but no epilogue_mod that it is of"),
    "statement": ((X, WEIGHT), {"epilogue_mod": "x; x"}, r"'x; x' is not one expression"),
    "unknown": ((X, WEIGHT), {"epilogue_mod": "y * x"}, r"epilogue_mod='y \* x' does not compile"),
}  # fmt: skip


def test_rows_too_far_apart_are_refused_before_they_are_read():
    row = np.zeros(16, np.float32)
    far = np.lib.stride_tricks.as_strided(row, (2, 16), (1 << 31, 4))
    near = np.zeros((8, 16), np.float32)
    with pytest.raises(ParameterError, match=r"^linear: x has rows 2,147,483,648 bytes apart"):
        fkjit.linear(far, near)
    with pytest.raises(ParameterError, match=r"^linear: weight has rows .* contiguous copy"):
        fkjit.linear(near, far)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_parameter_errors(name):
    arrays, options, message = REFUSED[name]
    with pytest.raises(ParameterError, match=rf"^linear: .*{message}"):
        linear(*arrays, **options)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((X, WEIGHT.half()), {}, "weight is fp16 but x is fp32"),
        ((X, WEIGHT, BIAS.bfloat16()), {}, "bias is bf16 but x is fp32"),
        ((X.int(), WEIGHT.int()), {}, "x is int32; allowed"),
        ((X, WEIGHT.numpy()), {}, "weight is a numpy array but x is a torch array"),
        ((X, [1.0]), {}, "weight is a builtins.list"),
        ((X, WEIGHT), {"residual": normal(4, 6, dtype="fp16")}, "residual is fp16; allowed: fp32"),
        ((X, WEIGHT), {"scale": "2"}, "scale='2' is not a plain number"),
        ((X, WEIGHT), {"gate": "yes"}, "gate='yes' is not True or False"),
        ((X, WEIGHT), {"epilogue_mod": 3}, "epilogue_mod=3 is not a str"),
    ],
)
def test_wrong_types_are_argument_type_errors(arrays, options, message):
    with pytest.raises(ArgumentTypeError, match=rf"^linear: {message}"):
        linear(*arrays, **options)


def test_one_device():
    with pytest.raises(DeviceError, match=r"^linear: weight is a .* tensor on meta"):
        linear(X, WEIGHT.to("meta"))
