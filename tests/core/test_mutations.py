"""The sanitizer finds bugs planted in the library's own kernels, and nothing in the kernels as they
are (tests/core/test_sweep.py runs them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

import fkjit
from fkjit import ops
from fkjit.arch import arch
from fkjit.errors import SanitizerError
from fkjit.jit import render as render_
from fkjit.jit.build import quiet
from fkjit.settings import settings
from fkjit.spec import find
from tests.core.mutations import BUGS, Bug
from tests.core.sampling import ONE_OF_EACH_KIND, ONLY_WITH_EVERY_VARIANT

Test = TypeVar("Test", bound=Callable[..., None])

ops.load()


def planted(bug: Bug, text: str) -> str:
    parts = text.split(bug.old)
    assert len(parts) > bug.nth + 1, f"{bug.file} has no {bug.old!r} number {bug.nth}"
    cut = bug.nth + 1
    return bug.old.join(parts[:cut]) + bug.new + bug.old.join(parts[cut:])


def outcome(bug: Bug, monkeypatch: pytest.MonkeyPatch, plant: bool) -> str:
    """ "race: …" or whatever the report says; "numbers" for a wrong result; "" if nothing shows."""
    read = render_._read
    if plant:
        monkeypatch.setattr(
            render_, "_read",
            lambda path, who: planted(bug, read(path, who))
            if str(path).endswith(bug.file) else read(path, who),
        )  # fmt: skip
    targets = {"sm75": "compute_75", "sm90": "compute_90a", "gmma": "compute_90a",
               "hole": "compute_90a", "held": "compute_90a", "ocks": "compute_90a"}  # fmt: skip
    target = targets.get(bug.kernel[-4:], "compute_80")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: replace(settings(), target=target))
    spec = find(bug.kernel)
    if bug.params.get("cluster", 1) > 1 or bug.kernel.startswith("streamed_"):
        target = "compute_90a"
    if bug.params.get("values") in ("fp8", "e5m2") and target == "compute_80":
        target = "compute_89"
    params = next(p for p in spec.variants(arch(target)) if bug.params.items() <= p.items())
    try:
        with quiet(), fkjit.sanitize(race=True, banks=1 if bug.by == "banks" else False):
            for problem in spec.verification.problems(params, "small"):
                if not right(spec, params, {**problem, **bug.problem}):
                    return "numbers"
    except SanitizerError as error:
        return str(error).split(": ", 1)[1]
    return ""


def right(spec, params, problem) -> bool:
    rng = np.random.default_rng(5)
    inputs = spec.verification.inputs(params, problem, rng)
    arrays = {**inputs, **spec.verification.outputs(params, problem)}
    arrays = {name: np.copy(x) for name, x in arrays.items()}  # some inputs are written, too
    fkjit.launch(spec, params, problem, arrays)
    for name, expected in spec.verification.reference(problem, inputs).items():
        finite = np.isfinite(expected)
        found = np.asarray(arrays[name], np.float64)
        if not np.array_equal(np.isfinite(found), finite):
            return False
        bound = spec.verification.tolerance(params) * max(
            1.0, np.abs(expected[finite]).max(initial=0.0)
        )
        if np.abs(found[finite] - expected[finite]).max(initial=0.0) > bound:
            return False
    return True


KINDS = {
    "race": ("race", "missing wait", "missing fence", "uninitialised", "mbarrier over-arrival"),
    "memory": ("out-of-bounds", "misaligned", "uninitialised", "write to a read-only"),
    "banks": ("bank conflict",),
    "hang": ("deadlock",),
    "end": ("block ended", "access to the shared memory of a block that may have ended"),
    "barrier": ("mbarrier", "uninitialised mbarrier", "deadlock"),
    "wgmma": ("register", "missing wgmma.fence", "operand", "race", "missing wait"),
    "numbers": ("numbers",),
}


def each_planted(bugs: Sequence[Bug]) -> Callable[[Test], Test]:
    """A decorator: the test takes a `bug`, each of these in turn."""
    cases = pytest.mark.parametrize("bug", bugs, ids=lambda bug: bug.name)
    return lambda test: ONE_OF_EACH_KIND(cases(test))


def check_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is said of the planted bug, which must be of its kind."""
    said = outcome(bug, monkeypatch, plant=True)
    assert said.startswith(KINDS[bug.by]), said or "nothing was found"
    return said


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    said = check_found(bug, monkeypatch)
    if bug.by != "numbers":
        assert "kernels_cu/attention/" in said or "templates/" in said


@ONLY_WITH_EVERY_VARIANT
@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS}))
def test_without_it_nothing_is_said(kernel, monkeypatch):
    runs = {}  # of bugs that are looked for in one and the same run, one
    for bug in BUGS:
        if bug.kernel == kernel and (bug.problem or bug.by == "banks"):
            runs.setdefault((str(bug.params), str(bug.problem), bug.by == "banks"), bug)
    for bug in runs.values():
        assert outcome(bug, monkeypatch, plant=False) == ""


def test_there_are_enough_bugs_of_every_kind():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 35
    assert sum(bug.by in ("race", "memory", "banks") for bug in BUGS) >= 30
