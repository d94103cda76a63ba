"""The parameter sweep on a CUDA GPU: every variant that is legal there, a few a test, so that the
tests spread over processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fkjit
from fkjit import ops
from fkjit.arch import arch, target
from fkjit.jit.build import quiet
from fkjit.settings import settings
from fkjit.spec import registered
from tests.core.sweep_kit import check_numbers, cut, everywhere, heavy, whole

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="needs CuPy")
ops.load()
SPECS = registered()


def cases(chosen):
    """(spec, variants): some ten seconds of compiling, interpreting and comparing."""
    return [
        pytest.param(spec, variants, id=f"{spec.id}-{number}")
        for spec in SPECS
        for number, variants in enumerate(cut(chosen(spec), 3 if heavy(spec) else 5))
    ]


EVERYWHERE = pytest.mark.parametrize(("spec", "variants"), cases(everywhere))


def legal_here(spec, variants):
    from fkjit.runtime.device import device_target

    found = [p for p in variants if spec.why_not(p, device_target(0).arch) is None]
    if not found:
        pytest.skip("superseded or not legal on this GPU")
    return found


@EVERYWHERE
def test_numbers_on_the_gpu(spec, variants):
    for params in legal_here(spec, variants):
        for problem in spec.verification.problems(params, "full"):
            with quiet():
                check_numbers(spec, params, problem, cupy.asarray, cupy.asnumpy)


@EVERYWHERE
def test_the_interpreter_agrees_with_the_gpu(spec, variants, monkeypatch):
    """On one problem: what CI computes is what a GPU computes."""
    from fkjit.runtime.device import device_target

    same = target("compute_" + device_target(0).arch.name.rpartition("_")[2])
    monkeypatch.setattr("fkjit.cpu.run.interpreter_target", lambda: same)
    for params in legal_here(spec, variants):
        compare_with_gpu(spec, params, next(iter(spec.verification.problems(params, "small"))))


def compare_with_gpu(spec, params, problem):
    inputs = spec.verification.inputs(params, problem, np.random.default_rng(11))
    ours = {**inputs, **spec.verification.outputs(params, problem)}
    theirs = {name: cupy.asarray(array) for name, array in ours.items()}
    with quiet():
        fkjit.launch(spec, params, problem, ours)
        fkjit.launch(spec, params, problem, theirs)
    for name in spec.verification.outputs(params, problem):
        both = (np.asarray(ours[name]), cupy.asnumpy(theirs[name]))
        seen = (spec.verification.numbers(params, name, array) for array in both)
        one, two = (np.asarray(array, np.float64) for array in seen)
        finite = np.isfinite(one)
        assert np.array_equal(finite, np.isfinite(two)), (params, name)
        bound = spec.verification.tolerance(params) * max(1.0, np.abs(one[finite]).max(initial=0.0))
        assert np.abs(one[finite] - two[finite]).max(initial=0.0) <= bound, (params, name)


def some_of_8_0(spec):
    return whole(spec)["sm_80"][::7]


def only_of_7_5(spec):
    """What 8.0 has not."""
    return [p for p in whole(spec)["sm_75"] if spec.why_not(p, arch("sm_80")) is not None]


@pytest.fixture
def driver_compiled(monkeypatch):
    """The path of a GPU newer than NVRTC, forced: PTX of a target, finished by the driver."""
    from fkjit.runtime import device

    def choose(name):
        monkeypatch.setattr("fkjit.jit.build.settings", lambda: replace(settings(), target=name))
        device.forget()
        device.device_target.cache_clear()

    yield choose
    device.forget()
    device.device_target.cache_clear()


@pytest.mark.parametrize(("spec", "variants"), cases(some_of_8_0))
def test_numbers_from_driver_compiled_ptx_of_8_0(spec, variants, driver_compiled):
    driver_compiled("compute_80")
    check_first_two(spec, variants)


@pytest.mark.parametrize(("spec", "variants"), cases(only_of_7_5))
def test_numbers_from_driver_compiled_ptx_of_7_5(spec, variants, driver_compiled):
    driver_compiled("compute_75")
    check_first_two(spec, variants)


def check_first_two(spec, variants):
    for params in variants:
        for problem in list(spec.verification.problems(params, "full"))[:2]:
            with quiet():
                check_numbers(spec, params, problem, cupy.asarray, cupy.asnumpy)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_portable_kernel_under_a_99_kb_cap(head_dim, monkeypatch):
    """A stand-in for sm_86, sm_89 and sm_120: their shared-memory limit chooses the tiles."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from fkjit.ops.attention.forward import _ATTENTION
    from fkjit.runtime import device

    real = device.device_target(0)
    small = arch("sm_120a")
    capped = replace(
        real,
        arch=replace(
            real.arch, shared_per_block=small.shared_per_block, shared_per_sm=small.shared_per_sm
        ),
    )
    monkeypatch.setattr("fkjit.ops.op.request.device_target", lambda device: capped)
    monkeypatch.setattr(device, "device_target", lambda device: capped)
    device.forget()
    _ATTENTION.plans.forget()
    q, k, v = (torch.randn(2, 4, 700, head_dim, device="cuda").half() for _ in range(3))
    o = fkjit.attention(q, k, v, causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    assert (o.double() - expected).abs().max().item() < 4e-3
    assert device._loaded and all(
        kernel.shared_bytes <= 101_376 for kernel in device._loaded.values()
    )
    device.forget()
    _ATTENTION.plans.forget()
