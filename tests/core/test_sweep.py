"""The parameter sweep: every legal variant of every kernel compiles without spills, and computes
the right thing, in the interpreter and on the GPU.

Each compiles for Hopper, and a sample for each other architecture (see `sweep_kit`); with
--every-variant for all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fkjit
from fkjit import ops
from fkjit.arch import DEFAULT_ARCHS, arch, target
from fkjit.cpu.run import GUARD
from fkjit.jit.build import quiet
from fkjit.settings import settings
from fkjit.spec import registered
from tests.core.sweep_kit import SOURCES, build_both, everywhere, heavy, plan, sources, virtual

ops.load()
SPECS = registered()
BASELINE = json.loads((Path(__file__).parents[1] / "data" / "spill_baseline.json").read_text())


def variant_id(spec, params):
    return f"{spec.id} {spec.label(params)}"


def groups(name, specs=None):
    """(spec, arch name, head_dim or None): one test a group keeps the count of tests readable."""
    for spec in SPECS if specs is None else specs:
        variants = list(spec.variants(arch(name)))
        dims = {p.get("head_dim") if heavy(spec) else None for p in variants}
        for head_dim in sorted(dims, key=str):
            yield spec, name, head_dim


def group_id(spec, name, head_dim):
    return f"{spec.id}-{name}" if head_dim is None else f"{spec.id}-{name}-{head_dim}"


THOROUGH = "sm_90a"  # where every variant is compiled
ALL_GROUPS = [group for name in DEFAULT_ARCHS for group in groups(name)]


def of_group(variants, spec, head_dim):
    return [p for p in variants if not heavy(spec) or p.get("head_dim") == head_dim]


def to_compile(spec, name, head_dim, every_variant):
    """All for Hopper; for the others a sample, see `sweep_kit`."""
    whole = every_variant or name == THOROUGH
    return of_group(spec.variants(arch(name)) if whole else plan(spec)[name], spec, head_dim)


def to_compute(spec, name, head_dim, every_variant):
    """What the interpreter runs: attention's variants, and half of the others' (a GPU runs all)."""
    variants = spec.variants(arch(name))
    if not every_variant and not heavy(spec):
        variants = plan(spec)["sm_90a"]
    return [p for p in of_group(variants, spec, head_dim) if is_for(p, spec, name)]


@pytest.mark.parametrize(
    ("spec", "name", "head_dim"), ALL_GROUPS, ids=[group_id(*g) for g in ALL_GROUPS]
)
def test_compiles_without_spills(spec, name, head_dim, every_variant):
    for params in to_compile(spec, name, head_dim, every_variant):
        with quiet():
            meta = build_both(spec, params, name).meta
        resources = meta["resources"]
        assert resources["registers"] <= 255
        excused = BASELINE.get(f"{variant_id(spec, params)} {name}", {"spill_stores": 0})
        assert resources["spill_stores"] == excused["spill_stores"], (params, meta["problems"])
        if not excused["spill_stores"]:
            assert meta["problems"] == [], params


@pytest.mark.parametrize("spec", SPECS, ids=[s.id for s in SPECS])
def test_the_sample_leaves_no_variant_and_no_target_out(spec):
    taken = {spec.label(params) for variants in plan(spec).values() for params in variants}
    assert taken == {spec.label(params) for params in everywhere(spec)}
    for name, variants in plan(spec).items():
        legal = {spec.label(params) for params in spec.variants(arch(name))}
        found = [spec.label(params) for params in variants]
        assert set(found) <= legal and len(found) == len(set(found)), name
        assert found or not legal, name


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
    inputs = spec.verification.inputs(params, problem, rng)
    arrays = {**inputs, **spec.verification.outputs(params, problem)}
    moved = {name: to_device(array) for name, array in arrays.items()}
    fkjit.launch(spec, params, problem, moved)
    assert spec.verification.reference is not None
    for name, expected in spec.verification.reference(problem, inputs).items():
        found = to_host(moved[name]).astype(np.float64)
        finite = np.isfinite(expected)
        assert np.array_equal(np.isneginf(found), np.isneginf(expected)), (params, name)
        error = np.abs(found[finite] - expected[finite]).max(initial=0.0)
        bound = spec.verification.tolerance(params) * max(
            1.0, np.abs(expected[finite]).max(initial=0.0)
        )
        assert error <= bound, (params, problem, name, error)


def is_new(params, spec, name):
    """Whether compute_80 was not already checked with this variant."""
    return name == "compute_80" or spec.why_not(params, arch("compute_80")) is not None


def is_for(params, spec, name):
    """Whether `name` is what this variant is interpreted for."""
    if not heavy(spec):
        return name == "compute_90a"
    return is_new(params, spec, name)


CPU_GROUPS = [g for name in SOURCES for g in groups(name)]
CPU_GROUPS = [g for g in CPU_GROUPS if to_compute(*g, True)]


@pytest.fixture
def interpreted(monkeypatch):
    """Which PTX the interpreter runs from now on, and whether with guards between arrays."""

    def choose(name, guarded=True):
        monkeypatch.setattr("fkjit.jit.build.settings", lambda: replace(settings(), target=name))
        monkeypatch.setattr("fkjit.cpu.run.GUARD", GUARD if guarded else 0)

    return choose


@pytest.mark.parametrize(
    ("spec", "name", "head_dim"), CPU_GROUPS, ids=[group_id(*g) for g in CPU_GROUPS]
)
def test_numbers_in_the_interpreter(spec, name, head_dim, every_variant, interpreted):
    for params in to_compute(spec, name, head_dim, every_variant):
        real = None if every_variant else sources(spec, name).get(spec.label(params))
        with quiet():
            if real:
                build_both(spec, params, real)
            interpreted(virtual(real) if real else name, guarded=not real)
            for problem in spec.verification.problems(params, "small"):
                check_numbers(spec, params, problem, np.copy, np.asarray)


RACE_STEP = 3  # every so many variants: neighbours differ in little
RACE_STEP_LATER = 12  # for targets whose PTX is much the same as one's before


def to_race(spec, name):
    """Some variants, mostly such as are compiled for `name` in any case."""
    if not heavy(spec):
        variants = plan(spec)[name.replace("compute", "sm")]
        return variants[:: 4 if name == "compute_90a" else 1]
    variants = [p for p in spec.variants(arch(name)) if spec.label(p) not in sources(spec, name)]
    first = [p for p in variants if is_for(p, spec, name)]
    return first[::RACE_STEP] or variants[::RACE_STEP_LATER]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("spec", SPECS, ids=[s.id for s in SPECS])
def test_no_races_in_the_interpreter(spec, name, interpreted):
    for params in to_race(spec, name):
        interpreted(name)
        with quiet(), fkjit.sanitize(race=True):
            if not heavy(spec):
                build_both(spec, params, name.replace("compute", "sm"))
            for problem in spec.verification.problems(params, "small"):
                check_numbers(spec, params, problem, np.copy, np.asarray)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=[s.id for s in SPECS])
def test_the_interpreter_agrees_with_the_gpu(spec, monkeypatch):
    """Every variant, on one problem: what CI computes is what a GPU computes."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    from fkjit.runtime.device import device_target

    here = device_target(0).arch
    same = target("compute_" + here.name.rpartition("_")[2])
    monkeypatch.setattr("fkjit.cpu.run.interpreter_target", lambda: same)
    variants = list(spec.variants(here))
    if not variants:
        pytest.skip("superseded on this GPU")
    for params in variants:
        compare_with_gpu(
            spec, params, next(iter(spec.verification.problems(params, "small"))), cupy
        )


def compare_with_gpu(spec, params, problem, cupy):
    inputs = spec.verification.inputs(params, problem, np.random.default_rng(11))
    ours = {**inputs, **spec.verification.outputs(params, problem)}
    theirs = {name: cupy.asarray(array) for name, array in ours.items()}
    with quiet():
        fkjit.launch(spec, params, problem, ours)
        fkjit.launch(spec, params, problem, theirs)
    for name in spec.verification.outputs(params, problem):
        one = np.asarray(ours[name], np.float64)
        two = np.asarray(cupy.asnumpy(theirs[name]), np.float64)
        finite = np.isfinite(one)
        assert np.array_equal(finite, np.isfinite(two)), (params, name)
        bound = spec.verification.tolerance(params) * max(1.0, np.abs(one[finite]).max(initial=0.0))
        assert np.abs(one[finite] - two[finite]).max(initial=0.0) <= bound, (params, name)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=[s.id for s in SPECS])
def test_numbers_on_the_gpu(spec):
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    from fkjit.runtime.device import device_target

    variants = list(spec.variants(device_target(0).arch))
    if not variants:
        pytest.skip("superseded on this GPU; the compute_75 sweep below runs it as PTX")
    for params in variants:
        for problem in spec.verification.problems(params, "full"):
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
    from fkjit.runtime import device

    monkeypatch.setattr("fkjit.jit.build.settings", lambda: replace(settings(), target=name))
    device.forget()
    device.device_target.cache_clear()
    variants = [p for p in spec.variants(arch(name)) if is_new(p, spec, name)]
    try:
        for params in variants[:: 7 if name == "compute_80" else 1]:
            for problem in list(spec.verification.problems(params, "full"))[:2]:
                with quiet():
                    check_numbers(spec, params, problem, cupy.asarray, cupy.asnumpy)
    finally:
        device.forget()
        device.device_target.cache_clear()


@pytest.mark.gpu
def test_the_portable_kernel_under_a_99_kb_cap(monkeypatch):
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
    _ATTENTION.plans.forget()
