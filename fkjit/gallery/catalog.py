"""The ladders by name."""

from __future__ import annotations

from importlib import import_module

from fkjit import ops
from fkjit.errors import ParameterError, did_you_mean
from fkjit.gallery.ladder import Ladder, Step

NAMES = ("attention", "gemm", "reduction", "norm", "rope", "moe", "decode", "paged_append")


def find(name: str) -> Ladder:
    """The ladder of that name. ParameterError for a name that there is not."""
    known = name.replace("-", "_")
    if known not in NAMES:
        near = did_you_mean(known, NAMES)
        raise ParameterError(f"gallery: {name!r} is not one of {', '.join(NAMES)}{near}")
    ops.load()
    return import_module(f"fkjit.gallery.ladders.{known}").LADDER


def step(name: str) -> tuple[Step, Step | None]:
    """ "attention/4": that step, and the one before it. ParameterError where there is none."""
    of, _, number = name.partition("/")
    steps = find(of).steps
    if number not in map(str, range(1, len(steps) + 1)):
        raise ParameterError(f"gallery: {name!r}: {of} has the steps 1 to {len(steps)}")
    place = int(number) - 1
    return steps[place], steps[place - 1] if place else None
