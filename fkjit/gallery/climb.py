"""Going up a ladder here: each step checked, and timed where there is a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from fkjit.arch import Target, target
from fkjit.cpu.run import interpret
from fkjit.errors import ParameterError, did_you_mean
from fkjit.gallery.ladder import Ladder, Step
from fkjit.jit.build import build, quiet
from fkjit.numerics import differences, drawn
from fkjit.playground.request import Variant
from fkjit.playground.stages import ptx_target, resources
from fkjit.replay import Replay
from fkjit.spec import Arrays, Problem

SMALL_SMS = 2  # that a small problem is for
_REPLAYS, _LAUNCHES, _SHORT = 7, 20, 2e-3  # of graphs; seconds of a launch that needs no others


@dataclass(frozen=True)
class Row:
    """What was found of a step. `error`: the greatest one, in tolerances."""

    step: Step
    why_not: str | None = None  # the step is not for this target
    error: float | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None  # of a launch on this GPU
    speed: float | None = None  # in the ladder's unit


Told = Callable[[int, str], None]  # (steps done, the one under way)


def climb(
    ladder: Ladder, to: Target, gpu: bool, given: Mapping[str, Any], told: Told
) -> Iterator[Row]:
    """Each step on target `to`: with a GPU timed at the ladder's sizes, and in any case checked at
    small ones, there or in the interpreter. `given`: sizes in place of the ladder's."""
    for number, step in enumerate(ladder.steps):
        why_not = step.spec.why_not(step.params, to.arch)
        if why_not:
            yield Row(step, why_not)
            continue
        told(number, step.title)
        with quiet():
            entry = build(step.spec, step.params, to)
        used = resources(Variant(step.spec, dict(step.params), to), entry)
        error = _error(ladder, step, to, gpu, {} if gpu else given)
        if not gpu:
            yield Row(step, None, error, used)
            continue
        seconds, speed = _timed(ladder, step, given)
        yield Row(step, None, error, used, seconds, speed)


def sizes(ladder: Ladder, text: str) -> dict[str, Any]:
    """ "seqlen=1024 causal=true" as sizes of a ladder. ParameterError for others."""
    made: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        if name not in ladder.free:
            near = did_you_mean(name, ladder.free)
            raise ParameterError(
                f"gallery: --shape {word!r}: {ladder.name} takes {', '.join(ladder.free)}{near}"
            )
        made[name] = _value(word, value, ladder.sizes[name], ladder.free[name])
    return made


def _value(word: str, text: str, like: Any, multiple: int) -> Any:
    """A whole number from 1 on, or true or false."""
    try:
        value = json.loads(text.lower())
    except ValueError:
        value = None
    of = f" times {multiple}" if multiple > 1 else ""
    if type(value) is not type(like) or (type(value) is int and (value < 1 or value % multiple)):
        wanted = "true or false" if isinstance(like, bool) else f"a whole number{of}, from 1 on"
        raise ParameterError(f"gallery: --shape {word!r} is not {wanted}")
    return value


def _error(
    ladder: Ladder, step: Step, to: Target, gpu: bool, given: Mapping[str, Any]
) -> float | None:
    """Of the small problem, in tolerances."""
    problem = ladder.problem_of(step, True, SMALL_SMS, given)
    inputs, arrays = _drawn(step, problem)
    with quiet():
        if gpu:
            found = Replay(step.spec, step.params, problem, arrays, 1).found
        else:
            interpret(step.spec, step.params, problem, arrays, ptx_target(to))
            found = arrays
    reference = step.spec.verification.reference
    assert reference is not None, f"{step.kernel} has no reference"
    every = differences(step.spec, step.params, reference(problem, inputs), found)
    return every[0].ratio if every else None


def _drawn(step: Step, problem: Problem) -> tuple[Arrays, Arrays]:
    return drawn(step.spec, step.params, problem, np.random.default_rng(0))


def _timed(ladder: Ladder, step: Step, given: Mapping[str, Any]) -> tuple[float, float | None]:
    """Seconds of a launch at the ladder's sizes, and the speed in its unit."""
    from fkjit.runtime.device import multiprocessors

    sms = multiprocessors(0)
    seconds = _seconds(step, ladder.problem_of(step, False, sms, given))
    flops, moved = ladder.work_of(step, sms, given)
    amount = flops if ladder.unit == "TFLOP/s" else moved
    return seconds, amount / seconds * 1e-12 if amount else None


def _seconds(step: Step, problem: Problem) -> float:
    """The median of replays of a graph; of one launch where that takes long."""
    _, arrays = _drawn(step, problem)
    made = Replay(step.spec, step.params, problem, arrays, 1)
    if made.seconds() < _SHORT:
        made = Replay(step.spec, step.params, problem, arrays, _LAUNCHES)
    return median(made.seconds() for _ in range(_REPLAYS))


def chosen_target(name: str | None, default: str) -> Target:
    """The target of `--arch`. ParameterError for one that is no GPU's."""
    to = target((name or default).replace("compute_", "sm_"))
    if to.kind != "cubin":
        raise ParameterError(f"gallery: --arch {name!r} is not a target such as sm_90a")
    return to
