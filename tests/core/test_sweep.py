"""The parameter sweep: variants of every kernel compile without spills, and compute the right thing
in the interpreter without a race. test_sweep_gpu.py runs them on a GPU.

By default a sample of them, which `sweep_kit` tells; with --every-variant all for every target."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fkjit
from fkjit import ops
from fkjit.arch import DEFAULT_ARCHS, arch
from fkjit.cpu.run import GUARD
from fkjit.jit.build import quiet
from fkjit.settings import settings
from fkjit.spec import registered
from tests.core.sweep_kit import (
    FAMILIES,
    SOURCES,
    build_both,
    check_numbers,
    combinations,
    cut,
    elders,
    everywhere,
    has_guards,
    home_of,
    in_turns,
    plan,
    runs_on,
    to_assemble,
    to_interpret,
    values,
    virtual,
    whole,
)

ops.load()
SPECS = registered()
BASELINE = json.loads((Path(__file__).parents[1] / "data" / "spill_baseline.json").read_text())


def cases(found, names, most):
    """(spec, target, variants): a few variants a test, so that tests spread over processes."""
    made = []
    for spec, name in itertools.product(SPECS, names):
        parts = cut(found(spec, name), most)
        for number, part in enumerate(parts):
            tail = f"-{number}" if len(parts) > 1 else ""
            made.append(pytest.param(spec, name, part, id=f"{spec.id}-{name}{tail}"))
    return made


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("--every-variant")
    if metafunc.function is test_compiles_without_spills:
        assembled = whole if every else to_assemble
        found = cases(lambda spec, name: assembled(spec)[name], DEFAULT_ARCHS, 12)
        metafunc.parametrize(("spec", "name", "variants"), found)
    if metafunc.function is test_is_right_and_free_of_races_in_the_interpreter:
        found = cases(lambda spec, name: to_interpret(spec, name, every), SOURCES, 8)
        metafunc.parametrize(("spec", "name", "cubins"), found)


def test_compiles_without_spills(spec, name, variants):
    for params in variants:
        with quiet():
            meta = build_both(spec, params, name).meta
        resources = meta["resources"]
        assert resources["registers"] <= 255
        shared = resources["shared"] + spec.shared_bytes(params)
        assert shared <= arch(name).shared_per_block, params
        excused = BASELINE.get(f"{spec.id} {spec.label(params)} {name}", {"spill_stores": 0})
        assert resources["spill_stores"] == excused["spill_stores"], (params, meta["problems"])
        if not excused["spill_stores"]:
            assert meta["problems"] == [], params


@pytest.mark.parametrize("spec", SPECS, ids=[s.id for s in SPECS])
def test_the_sample_leaves_no_value_and_no_family_of_targets_out(spec):
    for name, variants in plan(spec).items():
        legal, labels = whole(spec)[name], [spec.label(params) for params in variants]
        assert all(params in legal for params in variants) and len(set(labels)) == len(labels)
    of_the_source = [*elders(spec), spec]
    for family in FAMILIES:
        chosen = any(plan(one)[name] for one in of_the_source for name in family)
        assert chosen == any(runs_on(one, family) for one in of_the_source), family
    taken = [params for one in of_the_source for params in itertools.chain(*plan(one).values())]
    assert all_of(values, taken) >= all_of(values, everywhere(spec))
    each, home = combinations(spec), home_of(spec)
    at_home = all_of(each, plan(spec)[home]) | all_of(values, taken)
    assert at_home >= all_of(each, whole(spec)[home])
    assert plan(spec)[home]


def all_of(each, variants):
    return set().union(*map(each, variants))


@pytest.mark.parametrize("name", DEFAULT_ARCHS)
def test_every_target_is_compiled_for(name):
    assert sum(bool(plan(spec)[name]) for spec in SPECS) >= len(SPECS) // 6


def test_the_baseline_holds_nothing_stale_and_gives_reasons():
    known = {
        f"{spec.id} {spec.label(params)} {name}"
        for spec in SPECS
        for name, variants in whole(spec).items()
        for params in variants
    }
    assert set(BASELINE) <= known
    assert all(entry["reason"] and entry["spill_stores"] > 0 for entry in BASELINE.values())


@pytest.fixture
def interpreted(monkeypatch):
    """Which PTX the interpreter runs from now on, whether it looks for races, and whether with
    guards between arrays in shared memory, which is another PTX than the cubin's."""

    def choose(name, race, guards):
        monkeypatch.setattr("fkjit.jit.build.settings", lambda: replace(settings(), target=name))
        monkeypatch.setattr("fkjit.cpu.run.GUARD", GUARD if guards else 0)
        return fkjit.sanitize(race=True) if race else contextlib.nullcontext()

    return choose


def test_is_right_and_free_of_races_in_the_interpreter(
    spec, name, cubins, interpreted, every_variant
):
    assembled = whole(spec) if every_variant else to_assemble(spec)
    for (real, params), problem, race in in_turns(spec, cubins, every_variant):
        all_guarded = every_variant and spec.shared_layout is not None
        guards = all_guarded or has_guards(spec, real, params)
        with quiet():
            if params in assembled[real] and not guards:
                build_both(spec, params, real)
            with interpreted(virtual(real), race, guards):
                check_numbers(spec, params, problem, np.copy, np.asarray)
