"""`fkjit run`: one variant of a kernel on the GPU or in the CPU interpreter, with its numbers held
against the reference and, on a GPU, its time."""

from __future__ import annotations

import time
from ast import literal_eval
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from fkjit.arch import Target
from fkjit.cli import console as report
from fkjit.cli.select import Selection, selection
from fkjit.cpu.run import GUARD, interpret
from fkjit.errors import DeviceError, ParameterError, did_you_mean
from fkjit.jit.build import build, interpreter_target, quiet
from fkjit.numerics import differences, drawn
from fkjit.replay import Replay
from fkjit.runtime.gpus import gpus
from fkjit.spec import Arrays, KernelSpec, Params, Problem

DEVICES = ("gpu", "cpu")
_COLUMNS = ("problem", ">error /\ntolerance", ">time", "verdict")
_LAUNCHES, _REPLAYS = 20, 7  # of a CUDA graph; how often it is replayed

Arrived = tuple[Mapping[str, Any], float]  # what a kernel wrote, by name; seconds


def run(words: Sequence[str], device: str | None, sizes: Sequence[str], seed: int) -> int:
    """Run the first variant that is meant of each kernel on its problems, and print a table of
    them; the exit status: 1 where numbers are wrong.

    `device`: "gpu" or "cpu"; None: the GPU where there is one. `sizes`: "seqlen_q=512", fields of
    the problems to change.
    """
    on_gpu = _on_gpu(device)
    asked = selection("run", words)
    to = _gpu_target() if on_gpu else interpreter_target()
    right = True
    for spec, (params, *_) in asked.variants(to):
        right &= _run_kernel(asked, spec, params, on_gpu, sizes, np.random.default_rng(seed))
    _explain_time(on_gpu)
    return 0 if right else 1


def _on_gpu(device: str | None) -> bool:
    if device not in (None, *DEVICES):
        near = did_you_mean(device, DEVICES)
        raise ParameterError(f"run: --device {device!r} is not one of {', '.join(DEVICES)}{near}")
    if device == "cpu":
        return False
    found, why = gpus()
    if device == "gpu" and not found:
        raise DeviceError(f"run: there is no GPU ({why}); --device cpu runs the interpreter")
    return bool(found)


def _gpu_target() -> Target:
    from fkjit.runtime.device import device_target

    return device_target(0)


def _run_kernel(
    asked: Selection,
    spec: KernelSpec,
    params: Params,
    on_gpu: bool,
    sizes: Sequence[str],
    rng: np.random.Generator,
) -> bool:
    """Print a table of the kernel's problems; whether all numbers are right."""
    problems = list(spec.verification.problems(params, "full" if on_gpu else "small"))
    asked.check_fields({field for problem in problems for field in problem})
    chosen = _resized(spec, [p for p in problems if asked.takes(p)], sizes)
    if not chosen:
        raise ParameterError(f"run: {spec.id} has no problem of these to run")
    made, right = report.table(*_COLUMNS), True
    for problem in chosen:
        inputs, arrays = drawn(spec, params, problem, rng)
        with quiet():
            execute = _execute_on_gpu if on_gpu else _execute_on_cpu
            found, seconds = execute(spec, params, problem, arrays)
        ratio, verdict = _verdict(spec, params, problem, inputs, found)
        right &= not verdict.startswith("wrong")
        shown = " ".join(f"{n}={report.value(v)}" for n, v in problem.items())
        report.add_rows(made, [(shown, ratio, report.duration(seconds), verdict)])
    out = report.console()
    out.print(f"{spec.id} {spec.label(params)}", soft_wrap=True)
    out.print(made)
    return right


def _resized(
    spec: KernelSpec, problems: Sequence[Problem], sizes: Sequence[str]
) -> list[dict[str, Any]]:
    """The problems with these fields changed, each once. ParameterError for an unknown field."""
    made: list[dict[str, Any]] = []
    for problem in problems:
        changed = dict(problem)
        for text in sizes:
            name, _, value = text.partition("=")
            name = name.strip().replace("-", "_")
            if name not in problem:
                raise ParameterError(
                    f"run: --size {text!r}: {spec.id} has no field of a problem of that name"
                    f"{did_you_mean(name, problem)} (has: {', '.join(problem)})"
                )
            changed[name] = _like(text, value, problem[name])
        made += [changed] if changed not in made else []
    return made


def _like(text: str, value: str, old: Any) -> Any:
    """A field's value as the command line writes it, of the type that it has."""
    if isinstance(old, str):
        return value
    try:
        found = literal_eval(value.strip().capitalize() if isinstance(old, bool) else value)
    except (SyntaxError, ValueError):
        found = None
    kinds = (int, float) if isinstance(old, float) else (type(old),)
    if type(found) not in kinds:
        kind = {bool: "true or false", int: "a whole number"}.get(type(old), type(old).__name__)
        raise ParameterError(f"run: --size {text!r} is not {kind}, as {old!r} is")
    return found


def _execute_on_cpu(spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays) -> Arrived:
    build(spec, params, interpreter_target(), guard=GUARD)  # compiling is no part of the time
    begin = time.perf_counter()
    interpret(spec, params, problem, arrays)
    return arrays, time.perf_counter() - begin


def _execute_on_gpu(spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays) -> Arrived:
    """The first launch has the numbers; the time is that of a graph of launches after it."""
    made = Replay(spec, params, problem, arrays, _LAUNCHES)
    return made.found, median(made.seconds() for _ in range(_REPLAYS))


def _verdict(
    spec: KernelSpec, params: Params, problem: Problem, inputs: Arrays, found: Mapping[str, Any]
) -> tuple[str, str]:
    """The worst error in tolerances, and what it means."""
    if spec.verification.reference is None:
        return "-", "has no reference"
    expected = spec.verification.reference(problem, inputs)
    worst = next(iter(differences(spec, params, expected, found)), None)
    if worst is None:
        return "-", "ok, nothing to compare"
    return f"{worst.ratio:.3g}", "ok" if worst.ratio <= 1 else f"wrong numbers: {worst}"


def _explain_time(on_gpu: bool) -> None:
    """On stderr, so that a table in a file is a table."""
    text = (
        f"time: on the GPU, caches warm: the median of {_REPLAYS} replays of a graph of "
        f"{_LAUNCHES} launches; `fkjit bench` measures beside peers"
        if on_gpu
        else "time: of the CPU interpreter, which says nothing of a GPU's"
    )
    report.console(stderr=True).print(text, soft_wrap=True)
