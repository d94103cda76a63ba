"""Ladders of the gallery: steps that can be launched, times that stand in the record."""

from __future__ import annotations

import json
from dataclasses import replace
from urllib.parse import parse_qs

import pytest

from bench.report import gallery as record
from fkjit.arch import target
from fkjit.errors import ParameterError
from fkjit.gallery import catalog, page
from fkjit.gallery.changes import launch_changes, source_changes
from fkjit.gallery.climb import climb, sizes
from fkjit.gallery.ladder import Cell, Profiled, Quote
from fkjit.gallery.measured import measured, ratios
from fkjit.playground import server
from fkjit.playground.request import variants

HOPPER = target("sm_90a")


@pytest.fixture(params=catalog.NAMES)
def ladder(request):
    return catalog.find(request.param)


def test_every_step_is_a_legal_variant_of_its_own_problem(ladder):
    for step in ladder.steps:
        assert set(step.params) == {param.name for param in step.spec.params}, step.title
        assert step.spec.why_not(step.params, HOPPER.arch) is None, step.title
        flops, moved = ladder.work_of(step, 132)
        assert moved > 0 and flops >= 0
    assert len({step.title for step in ladder.steps}) == len(ladder.steps)


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.sampled(key=lambda name: "one" if name == "reduction" else None)
def test_every_step_computes_what_its_reference_says(name):
    rows = list(climb(catalog.find(name), HOPPER, False, {}, lambda done, what: None))
    assert [row.error for row in rows if row.error is None or not 0 <= row.error <= 1] == []
    assert all(row.resources["spilled"] == 0 for row in rows), name


def test_stored_times_are_those_of_the_record():
    assert record.FILE.read_text(encoding="utf-8") == record.text()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Cell("bench/results/2026-11-22-nvidia-h200-3a8eea1.jsonl", "rope", "no such"), "no such"),
        (Cell("bench/results/2026-11-22-nvidia-h200-ab1237c.jsonl", "rope",
              "bf16 bshd B4 S4096 H32/32 D128 table"), "rope.table"),
        (Profiled("attention", "bf16 D128 S1024 B4 H16 full", "fkjit naive"), "attention_naive"),
        (Quote("bench/notes/decode.md", "1 x 4096 144.6 / 10.9", 144.6), "does not say so"),
    ],
)  # fmt: skip
def test_a_time_of_something_else_is_refused(monkeypatch, wrong, says):
    ladder = catalog.find("rope")
    step = replace(ladder.steps[-1], measured=wrong)
    monkeypatch.setattr(record.catalog, "NAMES", ("rope",))
    monkeypatch.setattr(record.catalog, "find", lambda name: replace(ladder, steps=(step,)))
    with pytest.raises(ParameterError, match=says):
        record.text()


def test_ratios_are_of_the_same_work_alone():
    ladder = catalog.find("attention")
    times = [100.0, None, 20.0, 10.0, 80.0, 40.0, 7.0]
    found = ratios(ladder, times)
    assert found == [
        (None, None), (None, None), (5, 5), (10, 2), (None, None), (None, 2), (None, None),
    ]  # fmt: skip


def test_a_step_without_a_measurement_has_none():
    ladder = catalog.find("rope")
    first, second = (measured(ladder, step) for step in ladder.steps[:2])
    assert first is None and second is not None and second.microseconds == 132.7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colums=4", "did you mean columns"),
        ("rows", "not a whole number"),
        ("rows=0", "not a whole number"),
        ("rows=2.5", "not a whole number"),
        ("rows=true", "not a whole number"),
        ("columns=130", "a whole number times 4"),
    ],
)
def test_sizes_are_refused(text, says):
    with pytest.raises(ParameterError, match=says):
        sizes(catalog.find("reduction"), text)


def test_sizes_are_taken():
    ladder = catalog.find("attention")
    assert sizes(ladder, "seqlen=64, causal=true") == {"seqlen": 64, "causal": True}
    with pytest.raises(ParameterError, match="true or false"):
        sizes(ladder, "causal=1")
    with pytest.raises(ParameterError, match="takes batch, heads, seqlen, causal"):
        sizes(ladder, "head_dim=64")  # the variants are of 128


def test_sizes_that_make_a_step_stay():
    ladder = catalog.find("gemm")
    given = sizes(ladder, "m=256 n=512")
    last, first = (ladder.sizes_of(ladder.steps[at], False, given) for at in (-1, 0))
    assert first == {"m": 256, "n": 512, "k": 8192} and last == {"m": 1, "n": 3072, "k": 2048}


@pytest.mark.parametrize("name", ["atention", "", "rope/5"])
def test_unknown_ladders(name):
    with pytest.raises(ParameterError, match="is not one of"):
        catalog.find(name)


@pytest.mark.parametrize("name", ["rope", "rope/0", "rope/5", "rope/x", "rope/1/1"])
def test_unknown_steps(name):
    with pytest.raises(ParameterError, match="has the steps 1 to 4"):
        catalog.step(name)


def test_every_step_opens_in_the_playground(ladder):
    for number, step in enumerate(ladder.steps, 1):
        state = server.opened(page.state(f"{ladder.name}/{number}"))
        (found,) = variants({"a": _asked(state)})
        assert (found.spec, found.params) == (step.spec, dict(step.params))


def _asked(state: str) -> dict:
    """What the page asks for with this state."""
    found = {name: values[0] for name, values in parse_qs(state.removeprefix("#")).items()}
    return {**found, "params": json.loads(found["params"])}


@pytest.mark.parametrize("state", ["attention.flash", "kernel=", "#arch=sm_90a"])
def test_other_states_are_refused(state):
    with pytest.raises(ParameterError, match="--open"):
        server.opened(state)


def test_changes_of_one_template_are_of_what_it_renders_to():
    ladder = catalog.find("attention")
    before, step = ladder.steps[4:6]
    assert ("optimistic", "False", "True") in launch_changes(ladder, step, before)
    diff = source_changes(step, before)
    assert "-constexpr int K_STAGES = 2;      // tiles of K in shared memory" in diff
    assert not [line for line in diff if line.lstrip("+- ").startswith("#line")]


def test_changes_of_two_templates_are_of_both():
    ladder = catalog.find("attention")
    rows = dict(
        (name, (old, new)) for name, old, new in launch_changes(ladder, *ladder.steps[1::-1])
    )
    assert rows["kernel"] == ("attention.naive", "attention.tiled") and rows["block"] == ("", "64")
    diff = source_changes(*ladder.steps[1::-1])
    assert diff[:2] == [
        "--- kernels_cu/attention/naive.cu", "+++ kernels_cu/attention/tiled.cu",
    ]  # fmt: skip
