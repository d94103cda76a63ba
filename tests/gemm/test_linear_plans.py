"""The warm path of linear, on CPU tensors and with kernels that only note their arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.ops.gemm import call as gemm  # noqa: E402
from fkjit.ops.gemm.options import LinearOptions  # noqa: E402
from fkjit.runtime import workspace  # noqa: E402
from fkjit.runtime.device import flatten  # noqa: E402
from fkjit.runtime.interop import Pointer, view  # noqa: E402
from fkjit.runtime.tensor_map import BYTES, TensorMap  # noqa: E402
from fkjit.settings import settings  # noqa: E402
from tests.gemm.kit import inputs, normal  # noqa: E402
from tests.op.plan_kit import STREAM, Kernel, driver  # noqa: E402, F401


@pytest.fixture
def plan(monkeypatch, driver):  # noqa: F811
    """Make a call's plan as the second call on a GPU does; returns its kernel and the launch."""
    monkeypatch.setattr(workspace, "find", lambda *_: (4096, 8192, None))

    def make(arrays, **options):
        said = tuple(LinearOptions(**options))
        request = gemm._LINEAR._request(gemm._LINEAR._views(arrays), said)
        (launch,) = request.launches
        kernels = [Kernel(launch.spec, launch.params)]
        pairs = gemm._LINEAR._pairs(request)
        gemm._LINEAR.plans.store(arrays, said, request, kernels, pairs)
        return kernels[0], launch

    yield make
    gemm._LINEAR.plans.forget()


def assert_launched(kernel, launch, **arrays):
    """Once, with what the spec says of these arrays; None is a null pointer."""
    names = ("x", "weight", "bias", "residual", "out", "pre")
    seen = {n: Pointer(None if arrays.get(n) is None else view(arrays[n], "", n)) for n in names}
    seen |= {"workspace": 4096, "counters": 8192}
    named = launch.spec.arguments(launch.params, launch.problem, seen)
    named = {n: getattr(value, "pointer", value) for n, value in named.items()}
    named = {n: named[n] for n in kernel.names}
    packing = kernel.packing
    values = packing.unpack(packing.pack(*flatten(kernel.names, named)))
    grid = launch.spec.grid(launch.params, launch.problem)
    assert kernel.launches == [(grid, values, STREAM)]


@pytest.mark.parametrize("impl", ["mma", "skinny", "gemv", "tiled"])
def test_every_kernel(plan, impl):
    x, weight, bias = inputs(5, 24, 16_384, "bf16")  # k long enough for sums in memory
    kernel, launch = plan([x, weight, bias, None, None, None], impl=impl, activation="gelu")
    out = fkjit.linear(x, weight, bias, impl=impl, activation="gelu")
    assert kernel.spec.name == impl and out.shape == (5, 24) and out.dtype == torch.bfloat16
    assert_launched(kernel, launch, x=x, weight=weight, bias=bias, out=out)


def test_out_is_the_residual(plan):
    x, weight, _ = inputs(5, 24, 40)
    residual = normal(5, 24)
    kernel, launch = plan([x, weight, None, residual, residual, None], scale=0.5)
    assert fkjit.linear(x, weight, residual=residual, out=residual, scale=0.5) is residual
    assert_launched(kernel, launch, x=x, weight=weight, residual=residual, out=residual)


def test_another_alignment_is_another_call(plan, monkeypatch):
    """Its kernel may copy 16 bytes at a time."""
    buffer, weight = torch.zeros(5 * 64 + 1, dtype=torch.bfloat16), normal(24, 64, dtype="bf16")
    aligned, shifted = buffer[:-1].view(5, 64), buffer[1:].view(5, 64)
    kernel, _ = plan([aligned, weight, None, None, None, None], impl="tiled")
    fkjit.linear(aligned, weight, impl="tiled")
    assert len(kernel.launches) == 1
    fkjit.linear(shifted, weight, impl="tiled")  # in the interpreter
    assert len(kernel.launches) == 1


def test_gelu_linear_shares_the_plan(plan):
    x, weight, bias = inputs(5, 24, 40)
    kernel, launch = plan([x, weight, bias, None, None, None], activation="gelu_tanh")
    out = fkjit.gelu_linear(x, weight, bias)
    assert_launched(kernel, launch, x=x, weight=weight, bias=bias, out=out)


@pytest.mark.parametrize("block, schedule", [((64, 48), "pingpong"), ((144, 128), "swapped")])
def test_maps_are_of_their_arrays(plan, monkeypatch, block, schedule):
    """Where operands are swapped `x_map` is a map of the weight, at the weight's address."""
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_90a")
    )
    monkeypatch.setattr(
        TensorMap, "encode", lambda one, at: f"{one.dims} {at + one.origin}".encode().ljust(BYTES)
    )
    x, weight, bias = inputs(130, 256, 64, "bf16")
    kernel, launch = plan([x, weight, bias, None, None, None], impl="wgmma", block=block)
    assert launch.params["schedule"] == schedule
    out = fkjit.linear(x, weight, bias, impl="wgmma", block=block)
    assert_launched(kernel, launch, x=x, weight=weight, bias=bias, out=out)
    here = f"{x.data_ptr()}".encode() in kernel.launches[0][1][0]
    assert here is (schedule != "swapped")
