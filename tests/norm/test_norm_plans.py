"""The warm path of the norms, on CPU tensors and with kernels that only note their arguments."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.ops.norm import call as norm  # noqa: E402
from fkjit.runtime import workspace  # noqa: E402
from fkjit.runtime.device import flatten  # noqa: E402
from fkjit.runtime.interop import Pointer, view  # noqa: E402
from tests.norm.kit import normal  # noqa: E402
from tests.op.plan_kit import STREAM, Kernel, driver  # noqa: E402, F401


@pytest.fixture
def plan(monkeypatch, driver):  # noqa: F811
    """Make a call's plan as the first call on a GPU does; returns the kernels and the request."""
    monkeypatch.setattr(workspace, "find", lambda *_: (0, 0, None))
    made = []

    def make(op, arrays, options=()):
        request = op._request(op._views(arrays), options)
        kernels = [Kernel(launch.spec, launch.params) for launch in request.launches]
        op.plans.store(arrays, options, request, kernels, op._pairs(request))
        made.append(op)
        return kernels, request

    yield make
    for op in made:
        op.plans.forget()


def assert_launched(kernels, request, arrays):
    """Each kernel once, with what its spec says of these arrays; None is a null pointer."""
    stand_ins = {n: Pointer(None if x is None else view(x, "test", n)) for n, x in arrays.items()}
    for kernel, launch in zip(kernels, request.launches, strict=True):
        named = launch.spec.arguments(launch.params, launch.problem, stand_ins)
        named = {n: getattr(value, "pointer", value) for n, value in named.items()}
        packing = kernel.packing
        values = packing.unpack(packing.pack(*flatten(kernel.names, named)))
        assert kernel.launches == [
            (launch.spec.grid(launch.params, launch.problem), values, STREAM)
        ]


NOTHING = dict.fromkeys(("bias", "residual", "sum", "mean", "rstd"))


def test_layer_norm(plan):
    x, weight, bias = normal(6, 64), normal(64), normal(64, seed=1)
    kernels, request = plan(norm._LAYER, [x, weight, bias, *[None] * 5], (1e-5, 0.0))
    out = fkjit.layer_norm(x, weight, bias)
    arrays = {**NOTHING, "x": x, "weight": weight, "bias": bias, "out": out}
    assert_launched(kernels, request, arrays)


def test_rms_norm_with_a_residual_in_place(plan):
    x, weight, residual = normal(6, 64), normal(64), normal(6, 64, seed=1)
    kernels, request = plan(norm._RMS, [x, weight, None, residual, x, *[None] * 3], (1e-6, 0.0))
    out, s = fkjit.rms_norm(x, weight, residual=residual, out=x)
    assert out is x and s.shape == x.shape and s.data_ptr() != residual.data_ptr()
    arrays = {**NOTHING, "x": x, "weight": weight, "residual": residual, "out": x, "sum": s}
    assert_launched(kernels, request, arrays)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_training_step(plan, op):
    x, weight = normal(6, 64), normal(64)
    call = norm._with_statistics(op)
    kernels, request = plan(call, [x, weight, *[None] * 6], (1e-5, 0.0))
    out, *statistics = call((x, weight, None, None), (None,) * 4, (1e-5, 0.0))
    rstd, mean = statistics[-1], statistics[0] if op == "layer_norm" else None
    assert rstd.shape == (6,) and rstd.dtype == torch.float32
    arrays = {**NOTHING, "x": x, "weight": weight, "out": out, "mean": mean, "rstd": rstd}
    assert_launched(kernels, request, arrays)


@pytest.mark.parametrize("columns", [64, 10_000])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_backward(plan, op, columns, monkeypatch):
    x, dy, weight = normal(6, columns), normal(6, columns, seed=1), normal(columns)
    rstd, mean = normal(6), normal(6, seed=2) if op == "layer_norm" else None
    call, wanted = norm.gradient(op), (True, op == "layer_norm")
    inputs = (dy, None, x, weight, mean, rstd, weight)
    kernels, request = plan(call, [*inputs, *[None] * 5], wanted)
    assert len(kernels) == (2 if columns == 64 else 3)
    parts = []

    def empty_like(like):
        parts.append(torch.zeros(like.shape, dtype=like.dtype))
        return parts[-1]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    call.plans.forget()
    kernels, request = plan(call, [*inputs, *[None] * 5], wanted)
    parts.clear()
    dx, dweight, *dbias = call(inputs, (None,) * 5, wanted)
    fp32 = iter(
        part for part in parts if part.shape == (request.launches[0].problem["parts"], columns)
    )
    arrays = {
        **dict(zip(call.inputs, inputs, strict=True)),
        **{"dx": dx, "dweight": dweight, "dbias": dbias[0] if dbias else None},
        "dweight_parts": next(fp32),
        "dbias_parts": next(fp32) if dbias else None,
    }
    assert_launched(kernels, request, arrays)
