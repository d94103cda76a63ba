"""Quantization and products of codes on a CUDA GPU: to the bit as on a CPU, against float64, in
CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fkjit
from fkjit.jit.build import quiet
from fkjit.settings import settings

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.gpu
SCHEMES = ("fp8_tensor", "fp8_row", "fp8_block", "int8_row", "int8_group", "int4_group")
BYTES = ("fp8_tensor", "fp8_row", "fp8_block", "int8_row")


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


@pytest.fixture
def fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores for e4m3 (sm_89)")


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_those_of_the_cpu(scheme, weight, dtype):
    x = normal(150, 416, dtype=dtype) * 3
    x[3], x[5, 7] = 0, -0.0
    here = fkjit.quantize(x, scheme, weight=weight)
    there = fkjit.quantize(x.cpu(), scheme, weight=weight)
    assert torch.equal(here.data.view(torch.uint8).cpu(), there.data.view(torch.uint8))
    assert torch.equal(here.scales.cpu(), there.scales)
    back = fkjit.dequantize(here, "fp32").cpu()
    assert torch.equal(back, fkjit.dequantize(there, "fp32"))


def test_a_large_tensor_has_one_scale():
    x = normal(3000, 5000)
    x[2999, 4999] = 300
    made = fkjit.quantize(x, "fp8_tensor")
    assert made.scales.item() == pytest.approx(300 / 448)
    for wrong in (float("inf"), float("nan")):
        x[1234, 567] = wrong
        assert fkjit.quantize(x, "fp8_tensor").scales.isnan().all()


def errors(found, x, weight, activation=None, bias=None):
    z = x.double() @ fkjit.dequantize(weight, "fp32").double().T
    z = z if bias is None else z + bias.double()
    z = torch.nn.functional.silu(z) if activation else z
    return ((found.double() - z).norm() / z.norm()).item()


@pytest.mark.parametrize("k", [128, 1056, 4096, 14336])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 33, 64, 65])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["int4_group", "int8_group"])
def test_weights_of_groups(scheme, dtype, rows, k):
    x, bias = normal(rows, k, dtype=dtype), normal(520, dtype=dtype)
    weight = fkjit.quantize(normal(520, k, dtype=dtype), scheme)
    found = fkjit.linear(x, weight, bias, activation="silu")
    assert errors(found, x, weight, "silu", bias) < (4e-3 if dtype == torch.bfloat16 else 8e-4)
    assert torch.equal(found, fkjit.linear(x, weight, bias, activation="silu"))


@pytest.mark.parametrize("shape", [(1, 512, 512), (130, 392, 1040), (1000, 1280, 4096)])
@pytest.mark.parametrize("scheme", BYTES)
def test_codes_with_codes(fp8, scheme, shape):
    m, n, k = shape
    weight = fkjit.quantize(normal(n, k), scheme, weight=True)
    x = fkjit.quantize(normal(m, k), scheme)
    found = fkjit.linear(x, weight)
    assert errors(found, fkjit.dequantize(x, "fp32"), weight) < 4e-3
    assert torch.equal(found, fkjit.linear(x, weight))


@pytest.mark.parametrize("interval", [0, 1, 2, 4, 8])
def test_each_interval(interval):
    """Sums of 16,384 numbers: what the tensor core alone makes of them is worse than what fp32
    does, and still right."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs wgmma (compute capability 9.0)")
    from fkjit.ops.quantize import cases_linear
    from fkjit.ops.quantize.kernels_bytes import WGMMA

    params = {
        "dtype": "bf16", "out_dtype": "fp32", "code": "fp8", "scales": "rows",
        "activation": "none", "gate": False, "residual": False, "interval": interval,
        "block": (128, 128), "cluster": 2, "schedule": "cooperative",
    }  # fmt: skip
    x, weight = (fkjit.quantize(normal(256, 16_384), "fp8_row") for _ in range(2))
    problem = cases_linear.problem(params, 256, 256, 16_384, span="row", bias=False)
    out = torch.empty(256, 256, device="cuda")
    named = {"x": x.data.view(torch.uint8), "x_scales": x.scales, "scales": weight.scales,
             "weight": weight.data.view(torch.uint8), "out": out}  # fmt: skip
    fkjit.launch(WGMMA, params, problem, named)
    error = errors(out, fkjit.dequantize(x, "fp32"), weight)
    assert error < (1e-2 if interval == 0 else 2e-3)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_row", "fp8_block", "int8_row"])
def test_sums_are_those_of_the_interpreter(scheme, monkeypatch):
    """To the bit: of e4m3 too, whose sums Hopper's tensor cores cut off."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs wgmma (compute capability 9.0)")
    target = replace(settings(), target="compute_90a")
    weight = fkjit.quantize(normal(136, 1040), scheme, weight=True)
    x = fkjit.quantize(normal(40, 1040), scheme)
    here = fkjit.linear(x, weight, out_dtype="fp32")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: target)
    cpu = [y._replace(data=y.data.cpu(), scales=y.scales.cpu()) for y in (x, weight)]
    assert torch.equal(here.cpu(), fkjit.linear(*cpu, out_dtype="fp32"))


@pytest.mark.parametrize("scheme", ["int4_group", "int8_row"])
@pytest.mark.parametrize("rows", [4, 40])
def test_in_a_cuda_graph(scheme, rows):
    weight, x = fkjit.quantize(normal(256, 1024), scheme), normal(rows, 1024)
    wanted = fkjit.linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fkjit.linear(x, weight)
    found.zero_()
    graph.replay()
    assert torch.equal(found, wanted)


def test_gate_and_residual(fp8):
    for scheme in ("int4_group", *BYTES):
        weight, x = fkjit.quantize(normal(512, 640), scheme, weight=True), normal(24, 640)
        residual = normal(24, 256)
        if scheme in BYTES:
            x = fkjit.quantize(x, scheme)
        numbers = x if torch.is_tensor(x) else fkjit.dequantize(x, "fp32")
        z = numbers.double() @ fkjit.dequantize(weight, "fp32").double().T / 8
        wanted = torch.nn.functional.silu(z[:, :256]) * z[:, 256:] + residual.double()
        found = fkjit.linear(x, weight, gate=True, activation="silu", residual=residual,
                             scale=0.125)  # fmt: skip
        assert ((found.double() - wanted).norm() / wanted.norm()).item() < 4e-3


@pytest.mark.parametrize("shape", [(3, 264), (700, 4096), (64, 20_000)])
@pytest.mark.parametrize("scheme", ["fp8_row", "int8_row", "fp8_block"])
def test_rows_as_they_are_made(scheme, shape):
    x, residual, both = normal(*shape), normal(*shape), normal(shape[0], 2 * shape[1])
    weight, bias = normal(shape[1]), normal(shape[1])
    gate, up = both[:, : shape[1]], both[:, shape[1] :]
    of = torch.nn.functional
    for _ in range(2):  # the second time by a plan
        found, s = fkjit.quantize_rms_norm(x, weight, scheme, residual=residual)
        layer = fkjit.quantize_layer_norm(x, weight, bias, scheme)
        gated = fkjit.quantize_gated(gate, up, scheme)
    assert torch.equal(s, x + residual)
    rms = (s.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = (
        (found, s.double() * rms * weight.double()),
        (layer, of.layer_norm(x.double(), shape[1:], weight.double(), bias.double(), 1e-5)),
        (gated, of.silu(gate.double()) * up.double()),
    )
    for codes, numbers in exact:
        wanted = fkjit.quantize(numbers.float(), scheme)
        same = codes.data.view(torch.uint8) == wanted.data.view(torch.uint8)
        assert same.float().mean() > 0.99
        torch.testing.assert_close(codes.scales, wanted.scales, rtol=1e-5, atol=0)
