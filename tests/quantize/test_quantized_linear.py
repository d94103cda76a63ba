"""`fkjit.linear` of a QuantizedTensor, in the interpreter against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.quantize import kernels_bytes, kernels_few
from fkjit.settings import settings
from tests.core.sampling import one_in

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS, GROUPS = (1, 8, 9, 37, 70), ("int4_group", "int8_group")
CODED = {"dtype": "bf16", "out_dtype": "bf16", "activation": "none", "gate": False, "span": "row",
         "residual": False}  # fmt: skip
SHORT = 2.0**-9  # of the greatest: what Hopper's sums of e4m3 products may lose
STEP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-20}  # of a result, rounded once


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


@pytest.fixture
def on(monkeypatch):
    """Run as a GPU of this name would."""

    def choose(target):
        monkeypatch.setattr("fkjit.jit.build.settings", lambda: replace(settings(), target=target))

    return choose


def normal(*shape, dtype="bf16"):
    return torch.randn(*shape).to(TORCH[dtype])


def numbers(x):
    return fkjit.dequantize(x, "fp32").double() if isinstance(x, tuple) else x.double()


def check(
    x, weight, bias=None, *, residual=None, scale=1.0, gate=False, activation=None,
    lost=2.0**-18, **more,
):  # fmt: skip
    """Against float64, of the numbers that codes stand for. `lost`: by sums, of the greatest."""
    found = fkjit.linear(x, weight, bias, residual=residual, scale=scale, gate=gate,
                         activation=activation, **more)  # fmt: skip
    z = scale * numbers(x) @ numbers(weight).T + (0 if bias is None else bias.double())
    if gate:
        n = z.shape[-1] // 2
        z = torch.nn.functional.silu(z[..., :n]) * z[..., n:]
    elif activation == "gelu":
        z = torch.nn.functional.gelu(z)
    wanted = z + (0 if residual is None else residual.double())
    step = {v: STEP[k] for k, v in TORCH.items()}[found.dtype]
    bound = step * wanted.abs() + lost * wanted.abs().max()
    assert found.shape == wanted.shape
    assert ((found.double() - wanted).abs() <= bound).all()
    return found


# ------------------------------------------------------------------ weights alone


@one_in(2, rows=ROWS, scheme=GROUPS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scheme", GROUPS)
def test_x_of_16_bits(scheme, rows):
    weight = fkjit.quantize(normal(72, 288, dtype="fp16"), scheme)
    x, bias = normal(rows, 288, dtype="fp16"), normal(72, dtype="fp16")
    if rows > 64:  # the weight is dequantized, rounded to fp16
        rounded = fkjit.dequantize(weight, "fp16")
        assert torch.equal(fkjit.linear(x, weight, bias), fkjit.linear(x, rounded, bias))
    else:
        check(x, weight, bias, activation="gelu")


def test_all_of_an_epilogue():
    weight = fkjit.quantize(normal(48, 160), "int4_group")
    x, residual = normal(2, 3, 160), torch.randn(2, 3, 24)
    found = check(x, weight, normal(48), residual=residual, gate=True, activation="silu",
                  scale=0.125)  # fmt: skip
    assert found.dtype == torch.float32
    out = torch.empty(6, 64, dtype=torch.bfloat16)[:, :48]
    made = fkjit.linear(x.reshape(6, 160), weight, out=out)
    assert made is out and torch.equal(out, fkjit.linear(x, weight).reshape(6, 48))


def test_an_expression_of_ones_own():
    weight = fkjit.quantize(normal(16, 128), "int8_group")
    x = normal(4, 128)
    found = fkjit.linear(x, weight, epilogue_mod="x > 0.f ? x : 0.5f * x", out_dtype="fp32")
    plain = (x.double() @ numbers(weight).T).float()
    torch.testing.assert_close(found, torch.where(plain > 0, plain, 0.5 * plain))


def test_rows_of_x_do_not_see_each_other():
    """A NaN stays in its row; the same row has the same bits beside any others."""
    weight = fkjit.quantize(normal(40, 256), "int4_group")
    x = normal(12, 256)
    x[5, 7] = float("nan")
    found = fkjit.linear(x, weight)
    assert found[5].isnan().all() and found.isnan().sum() == 40
    assert torch.equal(found[3:4], fkjit.linear(x[[3] * 12], weight)[:1])


# ------------------------------------------------------------------ codes with codes


@pytest.mark.sampled(key=lambda scheme, target: scheme[:3])
@pytest.mark.parametrize(("scheme", "target"), [
    ("fp8_tensor", "sm_90a"), ("fp8_row", "sm_89"), ("fp8_block", "sm_90a"),
    ("fp8_block", "sm_120a"), ("int8_row", "sm_80"), ("int8_row", "sm_90a"),
])  # fmt: skip
def test_codes_with_codes(on, scheme, target):
    on(target.replace("sm_", "compute_"))
    weight = fkjit.quantize(normal(72, 272), scheme, weight=True)
    x = fkjit.quantize(normal(13, 272), scheme)
    short = scheme[:3] == "fp8" and target == "sm_90a"
    lost = {"lost": SHORT} if short else {}
    found = check(x, weight, normal(72), activation="gelu", **lost)
    assert found.dtype == torch.bfloat16


def test_x_is_quantized_by_the_call(on):
    on("compute_90a")
    weight = fkjit.quantize(normal(40, 128), "fp8_tensor")
    x = normal(5, 128)
    found = fkjit.linear(x, weight)
    assert torch.equal(found, fkjit.linear(fkjit.quantize(x, "fp8_row"), weight))
    check(fkjit.quantize(x, "fp8_tensor"), weight, lost=SHORT)


def test_codes_out_of_a_gate(on):
    """What quantize makes of the same sums, to the bit: of two dimensions before the rows, with a
    ragged last tile of them and several of columns."""
    on("compute_90a")
    weight = fkjit.quantize(normal(512, 272), "fp8_block", weight=True)
    x, bias = normal(2, 70, 272), normal(512)
    said = {"gate": True, "activation": "silu", "scale": 0.5}
    found = fkjit.linear(x, weight, bias, out_scheme="fp8_block", **said)
    wanted = fkjit.quantize(fkjit.linear(x, weight, bias, out_dtype="fp32", **said), "fp8_block")
    assert found.scheme == "fp8_block" and tuple(found.scales.shape) == (2, 70, 2)
    assert torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
    fkjit.prepare("linear", x, weight, bias, out_scheme="fp8_block", **said)
    on("compute_89")
    with pytest.raises(ParameterError, match="'wgmma_blocks', which is not there on sm_89"):
        fkjit.linear(x, weight, bias, out_scheme="fp8_block", **said)


# ------------------------------------------------------------------ errors


@cache
def w4():
    return fkjit.quantize(torch.ones(16, 128, dtype=torch.bfloat16), "int4_group")


@cache
def w8():
    return fkjit.quantize(torch.ones(16, 128), "fp8_row")


X = torch.ones(4, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: fkjit.linear(X, (1, 2)), ArgumentTypeError, "weight is a tuple; allowed: a Quan"),
        (lambda: fkjit.linear(X.float(), w4()), ArgumentTypeError, "x is float32; allowed: bf16"),
        (lambda: fkjit.linear(X.half(), w4()), ArgumentTypeError,
         "weight.scales is bf16 but x is fp16; quantize the weight in x's dtype"),
        (lambda: fkjit.linear(X[:, :96], w4()), ParameterError, r"x has shape \(4, 96\)"),
        (lambda: fkjit.linear(fkjit.quantize(X, "int8_row"), w4()), ParameterError,
         "x is quantized by 'int8_row', weight by 'int4_group'; allowed: x of 16 bits"),
        (lambda: fkjit.linear(fkjit.quantize(X, "int8_row"), w8()), ParameterError,
         "allowed: x by fp8_tensor or fp8_row"),
        (lambda: fkjit.linear(X, w8()), ParameterError, "needs fp8_mma, which sm_80 has not"),
        (lambda: fkjit.linear(X, fkjit.quantize(torch.ones(16, 128), "fp8_block")),
         ParameterError, "weight=True"),
        (lambda: fkjit.linear(X, w4(), weight_layout="kn"), ParameterError,
         "weight_layout='kn' with a quantized weight; allowed: 'nk'"),
        (lambda: fkjit.linear(X, X, out_scheme="fp8_block"), ParameterError,
         "with a weight of numbers, gate=False; allowed: a weight quantized by 'fp8_block', gate"),
        (lambda: fkjit.linear(X, w4(), out_scheme="fp8_row", gate=True), ParameterError,
         "out_scheme='fp8_row'; allowed: None, or 'fp8_block' .* fkjit.quantize_gated of gate and"),
        (lambda: fkjit.linear(X, w4(), precision="short"), ParameterError,
         "precision='short' is not one of ieee"),
        (lambda: fkjit.linear(X, w4(), impl="wgmma"), ParameterError, "allowed: 'auto' or 'gemv'"),
        (lambda: fkjit.linear(X, w4(), out_dtype="fp16"), ParameterError, "out_dtype='fp16'"),
        (lambda: fkjit.linear(X.clone().requires_grad_(), w4()), ParameterError,
         "x requires grad, but a product with a quantized weight has no backward"),
        (lambda: fkjit.linear(X, w4()._replace(data=w4().data[None])), ParameterError,
         "weight.scales has shape"),
        (lambda: fkjit.linear(X[:, :24].contiguous(), fkjit.quantize(X[:, :24].contiguous(),
         "int8_group")), ParameterError, "k=24 with weight of int8_group; allowed: a multiple"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_numpy_and_the_empty():
    weight = fkjit.quantize(np.ones((16, 128), np.float16), "int8_group")
    found = fkjit.linear(np.ones((2, 128), np.float16), weight)
    np.testing.assert_array_equal(found, np.full((2, 16), 128, np.float16))
    assert fkjit.linear(np.ones((0, 128), np.float16), weight).shape == (0, 16)
    fkjit.prepare("linear", np.ones((2, 128), np.float16), weight)


@pytest.mark.parametrize(
    ("m", "k", "code", "tile"),
    [(4, 2048, "int8", (8, 2, 2)), (8, 4096, "int4", (16, 2, 1)), (1, 8192, "int8", (16, 2, 1)),
     (512, 4096, "fp8", (128, 128)),
     (4096, 4096, "fp8", (192, 128)), (8192, 4096, "int8", (128, 128))],
)  # fmt: skip
def test_tiles_are_those_that_were_fastest(m, k, code, tile):
    problem = {**CODED, "m": m, "n": 8192, "k": k, "code": code}
    few = kernels_few.choose(problem, True, "gemv")
    found = kernels_bytes.choose(problem, True) if m > 64 else few
    assert found is not None and tile in (found[1].get("tile"), found[1].get("block"))


@pytest.mark.parametrize(
    ("k", "hopper", "more", "kernel"),
    [(4096, True, {}, "gemv_sm90"), (4096, False, {}, "gemv"), (4224, True, {}, "gemv"),
     (4096, True, {"aligned_scales": False}, "gemv"), (4096, True, {"code": "int8"}, "gemv"),
     (4096, True, {"n": 4096}, "gemv")],
)  # fmt: skip
def test_tma_brings_rows_of_whole_chunks_of_large_weights(k, hopper, more, kernel):
    problem = {**CODED, "m": 4, "n": 8192, "k": k, "code": "int4", "span": "group", **more}
    assert kernels_few.choose(problem, hopper)[0].name == kernel


@pytest.mark.parametrize(
    ("k", "more", "tile"),
    [(4096, {}, (16, 2, 2)), (2048, {}, (8, 2, 3)), (4096, {"code": "int8"}, (16, 2, 2)),
     (8192, {}, (16, 4, 2)), (14336, {"n": 4096}, (16, 4, 2)), (14336, {}, None),
     (8192, {"code": "int8"}, None), (4224, {}, None), (4096, {"m": 3}, None),
     (4096, {"aligned_scales": False}, None)],
)  # fmt: skip
def test_one_and_two_rows_are_digits(k, more, tile):
    problem = {**CODED, "m": 2, "n": 8192, "k": k, "code": "int4", "span": "group", **more}
    spec, params, _ = kernels_few.choose(problem, True)
    assert (params["tile"] if spec.name == "gemv_digits" else None) == tile
    assert kernels_few.choose(problem, True, "gemv")[0].name == "gemv"
    assert kernels_few.choose(problem, False)[0].name == "gemv"


@pytest.mark.parametrize("code", ["int4", "int8"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_digits_hold_numbers_of_all_sizes(on, code, kind):
    """Products in fp32 are as exact as sums of it; zeros, small rows, infinities and NaN."""
    on("compute_90a")
    x = normal(2, 1024).to(kind)
    x[0] *= torch.logspace(-3, 1, 1024).to(kind)
    weight = fkjit.quantize(normal(24, 1024).to(kind), f"{code}_group")
    numbers = fkjit.dequantize(weight, "fp32").double()
    found = fkjit.linear(x, weight, out_dtype="fp32")
    exact, most = x.double() @ numbers.T, x.double().abs() @ numbers.abs().T
    assert ((found - exact).abs() <= 1e-6 * most).all()
    x[1] = 0
    assert (fkjit.linear(x, weight, out_dtype="fp32")[1] == 0).all()
    x[1] = 2.0**-14
    found = fkjit.linear(x, weight, out_dtype="fp32")[1]
    assert torch.allclose(found.double(), x[1].double() @ numbers.T, rtol=1e-5, atol=1e-7)
    for strange in (float("inf"), float("nan")):
        x[1, 5] = strange
        found = fkjit.linear(x, weight, out_dtype="fp32")
        assert found[0].isfinite().all() and not found[1].isfinite().any()


def test_short_sums_where_asked_for(on):
    """Consumers take turns where there are tiles enough; there are no sums in fp32."""
    on("compute_90a")
    problem = {**CODED, "m": 8192, "n": 8192, "k": 4096, "code": "fp8"}
    _, usual, _ = kernels_bytes.choose(problem, True)
    _, short, _ = kernels_bytes.choose({**problem, "short": True}, True)
    assert (usual["interval"], usual["schedule"]) == (4, "cooperative")
    assert (short["interval"], short["schedule"]) == (0, "pingpong")
    weight = fkjit.quantize(normal(40, 1024), "fp8_row")
    x = fkjit.quantize(normal(13, 1024), "fp8_row")
    found = check(x, weight, lost=SHORT, precision="short", out_dtype="fp32")
    assert not torch.equal(found, fkjit.linear(x, weight, out_dtype="fp32"))
