"""Ladders of the gallery: steps that can be launched, times that stand in the record."""

from __future__ import annotations

import json
from dataclasses import replace
from urllib.parse import parse_qs

import pytest

from bench.report import gallery as record
from fkjit.arch import target
from fkjit.errors import DeviceError, ParameterError
from fkjit.gallery import catalog, page
from fkjit.gallery.changes import launch_changes, source_changes
from fkjit.gallery.climb import Row, climb, sizes
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


def test_every_step_was_measured_as_it_is(ladder):
    found = [measured(ladder, step) for step in ladder.steps]
    assert all(one is not None and one.microseconds > 0 for one in found)
    assert len({(one.gpu, one.date) for one in found}) == 1


def test_a_step_that_has_changed_has_no_time():
    ladder = catalog.find("rope")
    step = ladder.steps[-1]
    other = replace(step, params={**step.params, "threads": 2 * step.params["threads"]})
    assert measured(ladder, step) and measured(ladder, other) is None
    assert measured(replace(ladder, sizes={**ladder.sizes, "length": 7}), step) is None


def test_the_file_is_as_the_tool_writes_it(monkeypatch):
    stored = record.FILE.read_text(encoding="utf-8")
    assert record.text(json.loads(stored)) == stored
    row = Row(catalog.find("rope").steps[0], None, error=1.5, seconds=1e-3)
    with pytest.raises(DeviceError, match=r"rope: .*: error 1\.5 tolerances"):
        record._timed(catalog.find("rope"), row)
    monkeypatch.setattr(record, "environment", lambda: {"gpu": None, "gpu_missing": "no driver"})
    with pytest.raises(DeviceError, match="gallery: no driver"):
        record.measure()


def test_ratios_are_of_the_same_work_alone():
    ladder = catalog.find("attention")
    times = [100.0, None, 20.0, 10.0, 80.0, 40.0, 7.0]
    found = ratios(ladder, times)
    assert found == [
        (None, None), (None, None), (5, 5), (10, 2), (None, None), (None, 2), (None, None),
    ]  # fmt: skip


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
    assert "-constexpr int K_STAGES = 2, V_STAGES = 2;  // tiles of K, V in shared memory" in diff
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
