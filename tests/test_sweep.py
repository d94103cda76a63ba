"""The parameter sweep: every legal variant of every kernel compiles without spills for every
architecture, and computes the right thing, in the interpreter and on the GPU."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fkjit
from fkjit import ops
from fkjit.arch import DEFAULT_ARCHS, arch, target
from fkjit.build import build, quiet
from fkjit.settings import settings
from fkjit.spec import registered

ops.load()
SPECS = registered()
BASELINE = json.loads((Path(__file__).parent / "data" / "spill_baseline.json").read_text())


def variant_id(spec, params):
    return f"{spec.id} {spec.label(params)}"


def groups(name, specs=None):
    """(spec, arch name, head_dim or None): one test a group keeps the count of tests readable."""
    for spec in SPECS if specs is None else specs:
        dims = sorted({p.get("head_dim", 0) for p in spec.variants(arch(name))})
        for head_dim in dims:
            yield spec, name, head_dim


ALL_GROUPS = [group for name in DEFAULT_ARCHS for group in groups(name)]


def of_group(spec, name, head_dim):
    return [p for p in spec.variants(arch(name)) if p.get("head_dim", 0) == head_dim]


# Where every variant is compiled: what has most variants.
THOROUGH = ("sm_90a",)
SAMPLE = 6  # one variant in so many on the others
# Half of attention's variants each: 8.6 and 8.9 have the same instructions and limits, 10.0 and
# 12.0 the same instructions as far as these kernels go.
HALF = {"sm_86": 0, "sm_89": 1, "sm_100a": 0, "sm_120a": 1}


def to_compile(spec, name, head_dim, every_variant):
    """Attention's variants, everywhere; of the others a sample on some targets."""
    variants = of_group(spec, name, head_dim)
    if every_variant or name in THOROUGH:
        return variants
    if spec.op == "attention":
        return variants[HALF[name] :: 2] if name in HALF else variants
    return variants[DEFAULT_ARCHS.index(name) % SAMPLE :: SAMPLE]


def to_compute(spec, name, head_dim, every_variant):
    """What the interpreter runs: attention's variants, and half of the others' (a GPU runs all),
    drawn so that each value of each parameter is among them."""
    variants = of_group(spec, name, head_dim)
    if every_variant or spec.op == "attention":
        return variants
    seen, first, rest = set(), [], []
    for params in random.Random(f"{spec.id} {head_dim}").sample(variants, len(variants)):
        (rest if seen.issuperset(params.items()) else first).append(params)
        seen.update(params.items())
    return (first + rest)[: max(len(first), len(variants) // 2)]


@pytest.mark.parametrize(
    ("spec", "name", "head_dim"), ALL_GROUPS, ids=[f"{s.id}-{n}-{d}" for s, n, d in ALL_GROUPS]
)
def test_compiles_without_spills(spec, name, head_dim, every_variant):
    for params in to_compile(spec, name, head_dim, every_variant):
        with quiet():
            meta = build(spec, params, target(name)).meta
        resources = meta["resources"]
        assert resources["registers"] <= 255
        excused = BASELINE.get(f"{variant_id(spec, params)} {name}", {"spill_stores": 0})
        assert resources["spill_stores"] == excused["spill_stores"], (params, meta["problems"])
        if not excused["spill_stores"]:
            assert meta["problems"] == [], params


def test_the_baseline_holds_nothing_stale_and_gives_reasons():
    known = {
        f"{variant_id(spec, params)} {name}"
        for name in DEFAULT_ARCHS
        for spec in SPECS
        for params in spec.variants(arch(name))
    }
    assert set(BASELINE) <= known
    assert all(entry["reason"] and entry["spill_stores"] > 0 for entry in BASELINE.values())


def check_numbers(spec, params, problem, to_device, to_host):
    rng = np.random.default_rng([len(spec.id), problem.get("seqlen_q", 0)])
    inputs = spec.inputs(params, problem, rng)
    arrays = {**inputs, **spec.outputs(params, problem)}
    moved = {name: to_device(array) for name, array in arrays.items()}
    fkjit.launch(spec, params, problem, moved)
    assert spec.reference is not None
    for name, expected in spec.reference(problem, inputs).items():
        found = to_host(moved[name]).astype(np.float64)
        finite = np.isfinite(expected)
        assert np.array_equal(np.isneginf(found), np.isneginf(expected)), (params, name)
        error = np.abs(found[finite] - expected[finite]).max(initial=0.0)
        bound = spec.tolerance(params) * max(1.0, np.abs(expected[finite]).max(initial=0.0))
        assert error <= bound, (params, problem, name, error)


def is_new(params, spec, name):
    """Whether compute_80 was not already checked with this variant."""
    return name == "compute_80" or spec.why_not(params, arch("compute_80")) is not None


CPU_GROUPS = [g for name in ("compute_80", "compute_75", "compute_90a") for g in groups(name)]
CPU_GROUPS = [g for g in CPU_GROUPS if any(is_new(p, g[0], g[1]) for p in of_group(*g))]


@pytest.mark.parametrize(
    ("spec", "name", "head_dim"), CPU_GROUPS, ids=[f"{s.id}-{n}-{d}" for s, n, d in CPU_GROUPS]
)
def test_numbers_in_the_interpreter(spec, name, head_dim, every_variant, monkeypatch):
    monkeypatch.setattr("fkjit.build.settings", lambda: replace(settings(), target=name))
    for params in to_compute(spec, name, head_dim, every_variant):
        for problem in spec.problems(params, "small") if is_new(params, spec, name) else ():
            with quiet():
                check_numbers(spec, params, problem, np.copy, np.asarray)


RACE_TARGETS = ("compute_75", "compute_80", "compute_90a")
RACE_STEP = 5  # every so many variants: neighbours differ in little


@pytest.mark.parametrize("name", RACE_TARGETS)
@pytest.mark.parametrize("spec", SPECS, ids=[s.id for s in SPECS])
def test_no_races_in_the_interpreter(spec, name, monkeypatch):
    monkeypatch.setattr("fkjit.build.settings", lambda: replace(settings(), target=name))
    variants = list(spec.variants(arch(name)))
    if name == "compute_90a":  # few, where compute_80's PTX is much the same
        variants = variants[::4]
    for params in variants[::RACE_STEP]:
        for problem in spec.problems(params, "small"):
            with quiet(), fkjit.sanitize(race=True):
                check_numbers(spec, params, problem, np.copy, np.asarray)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=[s.id for s in SPECS])
def test_the_interpreter_agrees_with_the_gpu(spec, monkeypatch):
    """Every variant, on one problem: what CI computes is what a GPU computes."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    from fkjit.device import device_target

    here = device_target(0).arch
    same = target("compute_" + here.name.rpartition("_")[2])
    monkeypatch.setattr("fkjit.interpret.interpreter_target", lambda: same)
    variants = list(spec.variants(here))
    if not variants:
        pytest.skip("superseded on this GPU")
    for params in variants:
        compare_with_gpu(spec, params, next(iter(spec.problems(params, "small"))), cupy)


def compare_with_gpu(spec, params, problem, cupy):
    inputs = spec.inputs(params, problem, np.random.default_rng(11))
    ours = {**inputs, **spec.outputs(params, problem)}
    theirs = {name: cupy.asarray(array) for name, array in ours.items()}
    with quiet():
        fkjit.launch(spec, params, problem, ours)
        fkjit.launch(spec, params, problem, theirs)
    for name in spec.outputs(params, problem):
        one = np.asarray(ours[name], np.float64)
        two = np.asarray(cupy.asnumpy(theirs[name]), np.float64)
        finite = np.isfinite(one)
        assert np.array_equal(finite, np.isfinite(two)), (params, name)
        bound = spec.tolerance(params) * max(1.0, np.abs(one[finite]).max(initial=0.0))
        assert np.abs(one[finite] - two[finite]).max(initial=0.0) <= bound, (params, name)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=[s.id for s in SPECS])
def test_numbers_on_the_gpu(spec):
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    from fkjit.device import device_target

    variants = list(spec.variants(device_target(0).arch))
    if not variants:
        pytest.skip("superseded on this GPU; the compute_75 sweep below runs it as PTX")
    for params in variants:
        for problem in spec.problems(params, "full"):
            with quiet():
                check_numbers(spec, params, problem, cupy.asarray, cupy.asnumpy)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["compute_80", "compute_75"])
@pytest.mark.parametrize("spec", SPECS, ids=[s.id for s in SPECS])
def test_numbers_from_driver_compiled_ptx(spec, name, monkeypatch):
    """The path of a GPU newer than NVRTC, forced: PTX, finished by the driver.

    A sample of compute_80's variants, and all that only compute_75 has.
    """
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    from fkjit import device

    monkeypatch.setattr("fkjit.build.settings", lambda: replace(settings(), target=name))
    device.forget()
    device.device_target.cache_clear()
    variants = [p for p in spec.variants(arch(name)) if is_new(p, spec, name)]
    try:
        for params in variants[:: 7 if name == "compute_80" else 1]:
            for problem in list(spec.problems(params, "full"))[:2]:
                with quiet():
                    check_numbers(spec, params, problem, cupy.asarray, cupy.asnumpy)
    finally:
        device.forget()
        device.device_target.cache_clear()


@pytest.mark.gpu
def test_the_portable_kernel_under_a_99_kb_cap(monkeypatch):
    """A stand-in for sm_86, sm_89 and sm_120: their shared-memory limit chooses the tiles."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from fkjit import device
    from fkjit.ops import attention_plan

    real = device.device_target(0)
    small = arch("sm_120a")
    capped = replace(
        real,
        arch=replace(
            real.arch, shared_per_block=small.shared_per_block, shared_per_sm=small.shared_per_sm
        ),
    )
    monkeypatch.setattr("fkjit.ops.attention_checks.device_target", lambda device: capped)
    monkeypatch.setattr(device, "device_target", lambda device: capped)
    device.forget()
    attention_plan.plans.clear()
    for head_dim in (64, 128, 256):
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
    attention_plan.plans.clear()
