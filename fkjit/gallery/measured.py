"""What was measured of a step, out of measured.json, which `python -m bench.report.gallery` makes
of the runs and the record that stand in the checkout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from fkjit.gallery.ladder import Ladder, Step


@dataclass(frozen=True)
class Measured:
    """A step's time on a GPU. `speed` in the ladder's unit, where it was stored."""

    microseconds: float
    speed: float | None
    gpu: str
    date: str  # 2026-11-22
    source: str  # the file
    how: str  # "graph": median of launches in a CUDA graph; "profile": one launch; "script"


@lru_cache(maxsize=1)
def _stored() -> dict[str, dict[str, Any]]:
    text = files("fkjit.gallery").joinpath("measured.json").read_text(encoding="utf-8")
    return json.loads(text)


def measured(ladder: Ladder, step: Step) -> Measured | None:
    """What stands in the record of a step; None: it was not measured."""
    found = None if step.measured is None else _stored().get(step.measured.key)
    if found is None:
        return None
    speed = found.get({"TFLOP/s": "tflops", "TB/s": "tbs"}[ladder.unit])
    how = ("microseconds", "gpu", "date", "source", "how")
    return Measured(speed=speed, **{name: found[name] for name in how})


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
