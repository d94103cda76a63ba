"""`fkjit gallery`: tables, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import ClassVar

import pytest

from fkjit.arch import target
from fkjit.gallery import catalog, climb
from fkjit.gallery.measured import measured
from fkjit.runtime import device, gpus
from tests.cli.kit import run


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def stored(name, number):
    """Microseconds of a step, from 0."""
    ladder = catalog.find(name)
    return measured(ladder, ladder.steps[number]).microseconds


def test_all_ladders():
    done = run("gallery")
    assert done.status == 0 and max(map(len, done.out.splitlines())) <= 80
    assert [line.split()[0] for line in done.out.splitlines()[1:]] == list(catalog.NAMES)
    named = [one["name"] for one in json.loads(run("gallery", "--json").out)]
    assert named == list(catalog.NAMES)


def test_a_ladder_without_a_gpu():
    done = run("gallery", "reduction", "--arch", "sm_90a")
    lines = done.out.splitlines()
    assert done.status == 0 and max(map(len, lines)) <= 80, done.out
    second = next(line for line in lines if line.startswith("2"))
    assert "16 bytes a load" in second and f" {stored('reduction', 1):.0f} us" in second
    assert "CPU interpreter" in done.err and "counted, steps 1 and 2: 0.268 GFLOP" in done.err


def test_the_same_for_programs():
    found = json.loads(run("gallery", "reduction", "--arch", "sm_90a", "--json").out)
    assert (found["target"], found["timed"]) == ("sm_90a", False)
    assert found["steps"][1]["measured"]["microseconds"] == stored("reduction", 1)
    assert all(step["error"] <= 1 and step["resources"]["registers"] for step in found["steps"])
    assert [step["microseconds"] for step in found["steps"]] == [None] * 5


def test_steps_for_other_gpus_say_why(monkeypatch):
    whole = catalog.find("attention")
    monkeypatch.setattr(catalog, "find", lambda name: replace(whole, steps=whole.steps[3:5]))
    done = run("gallery", "attention", "--arch", "sm_80")
    lines = done.out.splitlines()
    assert done.status == 0 and lines[-2:] == [
        f"{number}: attention.flash_sm90 needs wgmma, which sm_80 has not" for number in (1, 2)
    ]
    assert f"{stored('attention', 0):.1f} us" in done.out  # measured elsewhere


def test_other_sizes_have_no_stored_times():
    done = run("gallery", "reduction", "--arch", "sm_90a", "--shape", "rows=3 columns=128")
    assert done.status == 0 and " us" not in done.out, done.out


class FakeReplay:
    """Launches that the interpreter runs, 50 us each; only the one of small sizes is looked at."""

    made: ClassVar[list[int]] = []

    def __init__(self, spec, params, problem, arrays, launches):
        if problem["columns"] == 66_000:
            climb.interpret(spec, params, problem, arrays, target("compute_90a"))
        self.found = arrays
        self.made.append(launches)

    def seconds(self):
        return 50e-6


def test_a_ladder_on_a_gpu(monkeypatch):
    """All but the launches themselves."""
    whole = catalog.find("reduction")
    monkeypatch.setattr(catalog, "find", lambda name: replace(whole, steps=whole.steps[:2]))
    monkeypatch.setattr(gpus, "gpus", lambda: (["a GPU"], None))
    monkeypatch.setattr(device, "multiprocessors", lambda number: 132)
    monkeypatch.setattr(device, "device_target", lambda number: target("sm_90a"))
    monkeypatch.setattr(climb, "Replay", FakeReplay)
    done = run("gallery", "reduction", "--shape", "columns=1048576")
    assert done.status == 0 and max(map(len, done.out.splitlines())) <= 80, done.out
    second = " ".join(done.out.splitlines()[-1].split())
    assert second == "2 16 bytes a load 50.0 us 0.084 1.00x 1.00x 64"
    assert "columns=1048576" in done.err and "CUDA graph" in done.err
    assert FakeReplay.made == [1, 1, 20] * 2  # checked, a first time, times


def test_wrong_numbers_are_status_1(monkeypatch):
    right = climb.interpret

    def wrong(spec, params, problem, arrays, to):
        right(spec, params, problem, arrays, to)
        arrays["out"] *= 1.5

    monkeypatch.setattr(climb, "interpret", wrong)
    done = run("gallery", "reduction", "--arch", "sm_90a")
    assert done.status == 1, done.out


def test_what_differs():
    done = run("gallery", "attention", "--diff", "6")
    assert done.status == 0 and done.out.splitlines()[1].split() == ["optimistic", "False", "True"]
    assert "+constexpr int K_STAGES = 3, V_STAGES = 2;" in done.out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("atention",), "did you mean attention"),
        (("attention", "--arch", "compute_999"), "999"),
        (("--shape", "rows=2"), "go with the name of a ladder"),
        (("--diff", "2"), "goes with the name of a ladder"),
        (("attention", "--diff", "1"), "no step before its first"),
        (("attention", "--diff", "8"), "has the steps 1 to 7"),
        (("attention", "--diff", "2", "--json"), "take a name alone"),
    ],
)
def test_what_is_refused(given, says):
    done = run("gallery", *given)
    assert done.status not in (0, 1) or done.err, done
    assert says in done.err + done.out
