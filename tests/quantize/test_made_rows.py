"""`fkjit.quantize_rms_norm`, `…_layer_norm`, `…_gated`: codes of rows as they are made."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from tests.core.mutations import Bug
from tests.core.sampling import one_in
from tests.core.test_mutations import check_found

SCHEMES = ("fp8_row", "int8_row", "fp8_block")


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def normal(*shape, dtype=torch.bfloat16):
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=made).to(dtype)


def close(found, exact, scheme):
    """Nearly all codes are those of the exact rows, the others their neighbours."""
    wanted = fkjit.quantize(exact.float(), scheme)
    assert found.shape == tuple(exact.shape) and found.scheme == scheme
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-5, atol=0)
    same = found.data.view(torch.uint8) == wanted.data.view(torch.uint8)
    assert same.float().mean() > 0.99
    a, b = (fkjit.dequantize(x, "fp32").double() for x in (found, wanted))
    assert (a - b).norm() < 3e-3 * b.norm()


@one_in(2)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("columns", [64, 328, 20_000])
def test_rms_norm(scheme, columns):
    x, weight = normal(2, 3, columns), normal(columns)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    close(fkjit.quantize_rms_norm(x, weight, scheme), exact * weight.double(), scheme)
    close(fkjit.quantize_rms_norm(x, weight.float(), scheme, weight_offset=1.0),
          exact * (1 + weight.double()), scheme)  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layer_norm_with_a_residual(scheme):
    x, residual, weight, bias = normal(4, 264), normal(4, 264) + 1, normal(264), normal(264)
    found, s = fkjit.quantize_layer_norm(x, weight, bias, scheme, residual=residual)
    assert torch.equal(s, x + residual)
    exact = torch.nn.functional.layer_norm(s.double(), (264,), weight.double(), bias.double(), 1e-5)
    close(found, exact, scheme)


@one_in(2)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_halves_of_a_product_become_codes(activation):
    both = normal(5, 2 * 264, dtype=torch.float16)
    gate, up = both[:, :264], both[:, 264:]
    of = torch.nn.functional
    act = {"silu": of.silu, "relu": torch.relu, "gelu": of.gelu,
           "gelu_tanh": lambda x: of.gelu(x, approximate="tanh")}[activation]  # fmt: skip
    exact = act(gate.double()) * up.double()
    for scheme in SCHEMES:
        close(fkjit.quantize_gated(gate, up, scheme, activation=activation), exact, scheme)


def test_products_take_what_is_made():
    x, weight = normal(16, 256), normal(64, 256)
    codes = fkjit.quantize(weight, "int8_row")
    found = fkjit.linear(fkjit.quantize_rms_norm(x, scheme="int8_row"), codes)
    wanted = fkjit.linear(fkjit.quantize(fkjit.rms_norm(x), "int8_row"), codes)
    assert (found.double() - wanted.double()).norm() < 0.01 * wanted.double().norm()


def test_zeros_nan_and_numpy():
    x = normal(3, 64)
    x[1], x[2, 5] = 0, torch.nan
    found = fkjit.quantize_rms_norm(x, scheme="int8_row")
    assert (found.data[1] == 0).all() and found.scales[1] == 1 and found.scales[2].isnan()
    made = fkjit.quantize_rms_norm(x.float().numpy().astype(np.float16), scheme="int8_row")
    assert isinstance(made.data, np.ndarray)
    assert fkjit.quantize_rms_norm(x[:0]).shape == (0, 64)


@pytest.mark.parametrize(("said", "message"), [
    ({"scheme": "int4_group"}, "scheme='int4_group' is not one of fp8_row, int8_row, fp8_block"),
    ({"x": normal(2, 60)}, "a multiple of 8"),
    ({"x": normal(2, 72)[:, 4:68]}, "16-byte boundaries"),
    ({"residual": normal(1, 64)}, "residual has shape (1, 64)"),
    ({"weight": normal(8)}, "weight has shape (8,)"),
    ({"eps": -1.0}, "eps=-1.0; allowed: a finite number from 0"),
    ({"weight_offset": 1.0}, "weight_offset=1.0; allowed: 0 without a weight"),
    ({"x": normal(2, 64).requires_grad_()}, "quantize_rms_norm: x requires grad"),
])  # fmt: skip
def test_errors(said, message):
    with pytest.raises(ParameterError) as caught:
        fkjit.quantize_rms_norm(**{"x": normal(2, 64), **said})
    assert message in str(caught.value)


def test_other_errors():
    x = normal(2, 64)
    with pytest.raises(ArgumentTypeError, match="fp32"):
        fkjit.quantize_rms_norm(x.float())
    with pytest.raises(ParameterError, match="bias is given without a weight"):
        fkjit.quantize_layer_norm(x, None, x[0])
    with pytest.raises(ParameterError, match="activation='tanh' is not one of gelu, gelu_tanh"):
        fkjit.quantize_gated(x, x, activation="tanh")


FILE = "kernels_cu/quantize/made_rows.cu"
ON = {"kernel": "quantize.made_rows"}
RMS = {**ON, "params": {"dtype": "bf16", "weight_dtype": "fp32", "source": "rms_norm",
                        "activation": "none", "code": "fp8", "span": "row",
                        "threads": 64, "held": 4}}  # fmt: skip
LAYER = {**ON, "params": {**RMS["params"], "source": "layer_norm", "span": "group"}}
GATED = {**ON, "params": {**RMS["params"], "weight_dtype": "bf16", "source": "gated",
                          "activation": "silu", "code": "int8"}}  # fmt: skip
BUGS = (
    Bug("no barrier before warps' sums are read", FILE, "__syncthreads();", "", by="race", **RMS),
    Bug("the mean of another sum", FILE, "block_sum(squares, sums[1])",
        "block_sum(squares, sums[0])", by="race", **LAYER),
    Bug("what is wide is left out of the sums", FILE,
        "squares = square(source(i, !CENTERED), i, squares)", "(void)0", by="numbers", **RMS),
    Bug("what is wide is left out of the maximum", FILE,
        "most = max(most, magnitude(made(source(i, false), i)))", "(void)0", by="numbers", **GATED),
    Bug("no residual", FILE, "s[k] += added[k];", ";", by="numbers", **RMS),
    Bug("one scale for all groups", FILE, "+ column_of(i) / 128]", "]", by="race", **LAYER),
    Bug("another number's code", "templates/quantize/scale.cuh", "word[i], word[i + 1], 0x0040",
        "word[i + 1], word[i], 0x0040", by="numbers", **GATED),
    Bug("no offset", FILE, "by[k] + weight_offset", "by[k]", by="numbers", **RMS),
)  # fmt: skip


@pytest.mark.sampled(key=lambda bug: bug.by)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
