"""Runs a group's cases in worker processes, past cases that crash or hang."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.golden.case import Case
from tests.golden.groups import cases_of
from tests.golden.store import Outputs

ROOT = Path(__file__).parents[2]
MOST_WORKERS = 6  # of a group: when as many have died, something else is wrong than a case


def produce(engine: str, group: str, names: Sequence[str]) -> dict[str, Outputs | str]:
    """By case: its outputs, or what went wrong. `engine` is "gpu" or "interpreter"."""
    results: dict[str, Outputs | str] = {}
    left = list(names)
    known = cases_of(group)
    meant = sum(1 for name in names if name in known and known[name].fault)
    for _ in range(MOST_WORKERS + meant):
        found, said = _one_worker(engine, group, left)
        told = bool(found) and isinstance(found[-1], str)  # a CUDA error, told by the worker
        if len(found) < len(left) and not told:
            found.append(said)  # it died or hung at the case after the last that it finished
        results.update(zip(left, found, strict=False))
        left = left[len(found) :]
        if not left:
            break
    results.update((name, f"not run: {MOST_WORKERS} processes have died") for name in left)
    return results


def failure(case: Case, result: Outputs | str) -> str:
    """Why the result is no golden; empty where it is one, as an error is that must come."""
    if not case.fault:
        return result if isinstance(result, str) else ""
    if isinstance(result, str) and (case.fault in result or result.startswith("SanitizerError")):
        return ""
    told = result if isinstance(result, str) else "it gave a result"
    return f"it should have failed with {case.fault!r}: {told}"


def _one_worker(engine: str, group: str, names: Sequence[str]) -> tuple[list[Outputs | str], str]:
    """What one worker did of the cases, in order, and the end of what it printed."""
    command = [sys.executable, "-m", "tests.golden.worker", engine, group]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, folder], cwd=ROOT, input="\n".join(names), text=True, capture_output=True
        )
        said = f"the process ended with status {done.returncode}: {done.stderr[-500:]}"
        found: list[Outputs | str] = []
        for number in range(len(names)):
            result = _result(Path(folder) / str(number))
            if result is None:
                break
            found.append(result)
        return found, said


def _result(place: Path) -> Outputs | str | None:
    if place.with_suffix(".txt").exists():
        return place.with_suffix(".txt").read_text()
    if not place.with_suffix(".npz").exists():
        return None
    with np.load(place.with_suffix(".npz")) as stored:
        return {name: stored[name] for name in stored.files}
