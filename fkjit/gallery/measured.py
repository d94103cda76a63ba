"""What was measured of a step, out of measured.json, which `python -m bench.report.gallery` makes
on a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from fkjit.gallery.ladder import Ladder, Step


@dataclass(frozen=True)
class Measured:
    """A step's time on a GPU: a median in a CUDA graph. `speed`: in the ladder's unit,
    where its kernel counts its work."""

    microseconds: float
    speed: float | None
    gpu: str
    date: str  # 2026-11-22


@lru_cache(maxsize=1)
def _stored() -> dict[str, Any]:
    text = files("fkjit.gallery").joinpath("measured.json").read_text(encoding="utf-8")
    return json.loads(text)


def entry(ladder: Ladder, step: Step) -> dict[str, Any]:
    """What has to be the same for a stored time to be the step's."""
    own = {
        "title": step.title, "kernel": step.kernel, "params": dict(step.params),
        "sizes": ladder.sizes_of(step, False),
    }  # fmt: skip
    return json.loads(json.dumps(own))  # lists for tuples


def measured(ladder: Ladder, step: Step) -> Measured | None:
    """The stored time of a step; None: it was not measured, or was another variant then."""
    own, run = entry(ladder, step), _stored()
    for found in run["steps"].get(ladder.name, ()):
        if own.items() <= found.items():
            return Measured(found["microseconds"], found["speed"], run["gpu"], run["date"])
    return None


def ratios(ladder: Ladder, times: list[float | None]) -> list[tuple[float | None, float | None]]:
    """Of each step how many times as fast it is as the first one that was timed, and as the last
    one timed before it; None where those do other work, or nothing was timed."""
    made: list[tuple[float | None, float | None]] = []
    for number, (step, time) in enumerate(zip(ladder.steps, times, strict=True)):
        before = [
            other
            for one, other in zip(ladder.steps[:number], times, strict=False)
            if other is not None and ladder.alike(one, step)
        ]
        first_too = before and ladder.alike(ladder.steps[0], step)
        if time is None or not before:
            made.append((None, None))
        else:
            made.append((before[0] / time if first_too else None, before[-1] / time))
    return made
