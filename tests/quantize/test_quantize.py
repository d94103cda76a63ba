"""`fkjit.quantize` and `dequantize`: codes and scales to the bit, and what is no plain number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.quantize import cases
from fkjit.ops.quantize.schemes import SCHEMES, Scheme
from fkjit.runtime.interop import numpy_dtype
from tests.core.sampling import one_in

RNG = np.random.default_rng()
BLOCK = Scheme("fp8", "block")
DTYPES, WRONG = ("fp16", "bf16", "fp32"), ("nan", "-nan", "inf", "-inf")


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def codes_of(data: np.ndarray) -> np.ndarray:
    return data if data.dtype == np.int8 else data.view(np.uint8)


def normal(*shape: int, dtype: str = "fp16") -> np.ndarray:
    return RNG.standard_normal(shape).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_and_scales_are_numpys(scheme):
    x = normal(2, 3, 288, dtype="bf16" if scheme.startswith("int") else "fp32")
    how, rows = SCHEMES[scheme], x.reshape(6, 288)
    made = fkjit.quantize(x, scheme)
    scales = cases.scales_of(rows, how)
    assert made.shape == x.shape and made.scheme == scheme
    np.testing.assert_array_equal(np.asarray(made.scales).reshape(scales.shape), scales)
    np.testing.assert_array_equal(
        codes_of(made.data).reshape(6, -1), cases.encode(rows, scales, how)
    )


@pytest.mark.parametrize(("scheme", "steps"), [("fp8_row", 16), ("int8_row", 0.5),
                                               ("int4_group", 0.5)])  # fmt: skip
def test_numbers_come_back_within_half_a_step(scheme, steps):
    """Of e4m3 a step is up to 1/16 of the number's power of two: 16 of the greatest 448."""
    x = normal(4, 256, dtype="fp32")
    made = fkjit.quantize(x, scheme)
    scale = cases.spread(made.scales, SCHEMES[scheme], x.shape)
    back = fkjit.dequantize(made, "fp32")
    assert back.dtype == np.float32
    assert (np.abs(back.astype(np.float64) - x) <= steps * scale * (1 + 1e-6)).all()


def test_a_weight_has_a_scale_for_128_by_128():
    w = normal(200, 300)
    made = fkjit.quantize(w, "fp8_block", weight=True)
    assert made.scales.shape == (2, 3)
    np.testing.assert_array_equal(made.scales, cases.scales_of(w, BLOCK))
    np.testing.assert_array_equal(codes_of(made.data), cases.encode(w, made.scales, BLOCK))
    back = fkjit.dequantize(made, "fp32")
    np.testing.assert_array_equal(back, cases.decode(codes_of(made.data), made.scales, BLOCK))


def test_ties_go_to_even():
    """Halves between whole numbers, and the same of e4m3: 17 is between 16 and 18."""
    halves = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], np.float32)
    assert fkjit.quantize(halves, "int8_row").data.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]
    between = np.array([[448, 17, 19, 21, -17, -19, 2.0**-10, 3 * 2.0**-10]], np.float32)
    made = fkjit.quantize(between, "fp8_row")
    assert made.scales.tolist() == [1.0]
    assert made.data.astype(np.float32).tolist() == [[448, 16, 20, 20, -16, -20, 0, 2.0**-8]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_have_the_scale_one(scheme):
    x = np.zeros((2, 128), np.float32)
    x[1, 5] = -0.0
    made = fkjit.quantize(x, scheme)
    assert (np.asarray(made.scales) == 1).all()
    back = fkjit.dequantize(made, "fp32")
    assert (back == 0).all()
    assert np.signbit(back[1, 5]) == scheme.startswith("fp8")


@one_in(4, wrong=WRONG, scheme=tuple(SCHEMES))
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_finite_is_nan_with_all_that_shares_its_scale(scheme, wrong):
    x = normal(2, 256, dtype="fp32")
    x[0, 3] = float(wrong)
    made = fkjit.quantize(x, scheme)
    back = fkjit.dequantize(made, "fp32")
    span = SCHEMES[scheme].span
    lost = {"tensor": np.s_[:], "row": np.s_[:1], "group": np.s_[:1, :128]}[span]
    assert np.isnan(back[lost]).all()
    assert np.isnan(back).sum() == back[lost].size


@one_in(3, dtype=DTYPES, scheme=("fp8_row", "int8_group", "int4_group"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["fp8_row", "int8_group", "int4_group"])
def test_the_least_numbers_there_are(scheme, dtype):
    """Scales below what their type holds would be 0, and all numbers infinite or NaN."""
    kind = numpy_dtype(dtype)
    least = np.array([1], np.uint32 if dtype == "fp32" else np.uint16).view(kind)
    x = np.zeros((1, 128), kind)
    x[0, :3] = least[0], -least[0], np.float32(2) * least.astype(np.float32)[0]
    back = fkjit.dequantize(fkjit.quantize(x, scheme), "fp32")
    assert np.isfinite(back).all()
    assert (np.abs(back - x.astype(np.float32)) <= 2 * least.astype(np.float32)[0]).all()


def test_torch_tensors_and_strides():
    x = torch.randn(4, 6, 256).to(torch.bfloat16)
    made = fkjit.quantize(x[:, 2], "fp8_row")
    assert made.data.dtype == torch.float8_e4m3fn and made.scales.dtype == torch.float32
    alike = fkjit.quantize(x[:, 2].contiguous(), "fp8_row")
    assert torch.equal(made.data.view(torch.uint8), alike.data.view(torch.uint8))
    back = fkjit.dequantize(made)
    assert back.dtype == torch.bfloat16 and back.shape == (4, 256)
    assert (back - x[:, 2]).abs().max() < 0.2
    assert fkjit.quantize(x[:0], "int8_row").data.shape == (0, 6, 256)


# ------------------------------------------------------------------ errors

X = np.ones((4, 128), np.float16)
Q = fkjit.QuantizedTensor(np.ones((4, 128), np.int8), np.ones((4,), np.float32), "int8_row")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: fkjit.quantize(X, "fp8_rows"), ParameterError, "scheme='fp8_rows' is not one of"),
        (lambda: fkjit.quantize(X, None), ParameterError, "scheme=None is not one of"),
        (lambda: fkjit.quantize(X.astype("i4"), "fp8_row"), ArgumentTypeError, "x is int32"),
        (lambda: fkjit.quantize(X[:, ::2], "fp8_row"), ParameterError, "it must be contiguous"),
        (lambda: fkjit.quantize(X[:, :40], "int4_group"), ParameterError, "a multiple of 32"),
        (lambda: fkjit.quantize(X[0, :0], "int8_row"), ParameterError, "K from 1"),
        (lambda: fkjit.quantize(X[None], "fp8_block", weight=True), ParameterError, r"\[N, K\]"),
        (lambda: fkjit.quantize(X, "fp8_row", weight=3), ArgumentTypeError, "weight=3 is not True"),
        (lambda: fkjit.quantize(torch.ones(2, 128, requires_grad=True), "int8_row"),
         ParameterError, "x requires grad, but quantize has no backward"),
        (lambda: fkjit.dequantize(X), ArgumentTypeError, "allowed: a QuantizedTensor"),
        (lambda: fkjit.dequantize(Q, "int8"), ParameterError, "dtype='int8'; allowed: fp16"),
        (lambda: fkjit.dequantize(Q._replace(scales=np.ones(3, "f4"))), ParameterError,
         r"quantized.scales has shape \(3,\); allowed: int8_row's \(4,\)"),
        (lambda: fkjit.dequantize(Q._replace(scales=np.ones(4, "f2"))), ArgumentTypeError,
         "quantized.scales is fp16; allowed: fp32"),
        (lambda: fkjit.dequantize(Q._replace(data=X)), ArgumentTypeError,
         "quantized.data is fp16; allowed: int8"),
        (lambda: fkjit.dequantize(Q._replace(data=np.ones((4, 256), "i1")[:, ::2])),
         ParameterError, "quantized.data has strides"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(make, error, match):
    with pytest.raises(error, match=match):
        make()
