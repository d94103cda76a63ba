"""`fkjit check`: the variants of registered kernels in the CPU interpreter, with its checks on, and
what they compute held against their references."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fkjit.arch import Target
from fkjit.cli import console as report
from fkjit.cli import findings
from fkjit.cli.select import Selection, selection, targets
from fkjit.cpu.run import interpret
from fkjit.errors import InterpreterError, ParameterError, SanitizerError, did_you_mean
from fkjit.jit.build import interpreter_target, quiet
from fkjit.numerics import Difference, differences, drawn
from fkjit.sanitizer import Sanitizer, sanitize
from fkjit.spec import KernelSpec, Params, Problem

_COLUMNS = (
    "kernel", "target", ">variants", ">time", ">error /\ntolerance", ">banks", "verdict",
)  # fmt: skip
WARN_BANKS = 4.0  # times the ideal wavefronts: above, a line warns


@dataclass(frozen=True)
class Looking:
    """What to look for. `banks`: None to warn of conflicts, else the most that is no fault."""

    mem: bool = True
    race: bool = True
    banks: float | None = None

    def sanitize(self) -> AbstractContextManager[Sanitizer]:
        """The interpreter's part of it; wrong numbers are looked for in any case."""
        return sanitize(mem=self.mem, race=self.race, banks=self.banks or True)


@dataclass
class Checked:
    """What was seen of one kernel on one target; the first fault ends it."""

    spec: KernelSpec
    to: Target
    takes: Callable[[Problem], bool] = lambda problem: True
    variants: int = 0  # run
    of: int = 0  # legal on the target
    problems: int = 0
    seconds: float = 0.0
    error: str = ""  # the fault in full
    location: str = ""  # of the fault: "kernels_cu/attention/flash.cu:120"
    params: Params | None = None  # of the variant that was run last
    verdict: str = "nothing to run"
    ratio: float | None = None  # the greatest error, in tolerances; None without a reference
    banks: tuple[float, str] = (1.0, "")  # the worst ratio to the ideal wavefronts, and its line
    counted: bool = False  # whether shared memory was accessed at all

    def row(self) -> tuple[Any, ...]:
        """Of the table."""
        return (
            self.spec.id,
            self.to.name,
            f"{self.variants} of {self.of}",
            report.duration(self.seconds),
            "-" if self.ratio is None else f"{self.ratio:.3g}",
            f"{self.banks[0]:.2f}" if self.counted else "-",
            self.verdict,
        )


def run(
    words: Sequence[str],
    arch: str | None,
    count: int | None,
    looking: Looking | None = None,
    format_: str = "text",
) -> int:
    """Run what `words` select and print a table; the exit status: 1 when there was a fault, or
    nothing to run.

    `count`: about so many variants of each kernel. `format_`: "text", or "json" and "sarif" for
    programs.
    """
    if format_ not in findings.FORMATS:
        raise ParameterError(
            f"check: --format {format_!r} is not one of {', '.join(findings.FORMATS)}"
            f"{did_you_mean(format_, findings.FORMATS)}"
        )
    if count is not None and count < 1:
        raise ParameterError(f"check: --variants {count} is not a number above 0")
    found = []
    err = report.console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        for checked, variants in _chosen(selection("check", words), _targets(arch)):
            found.append(checked)
            sample = _sample(variants, count)
            label = f"{checked.spec.id} {checked.to.name}"
            task = bar.add_task(label, total=len(sample))
            if not err.is_terminal:
                err.print(f"{label}: {len(sample)} variants")
            _check(checked, sample, looking or Looking(), lambda t=task: bar.advance(t))
    if format_ == "text":
        _print(found)
    else:
        print(findings.text(found, format_))
    ran = any(checked.problems or checked.error for checked in found)
    return 1 if not ran or any(checked.error for checked in found) else 0


def _chosen(
    asked: Selection, targets: Sequence[Target]
) -> Iterator[tuple[Checked, Sequence[Params]]]:
    """Kernel after kernel, each on every target, with its legal variants."""
    specs = asked.specs()
    narrowed = bool(asked.given or asked.where)
    if narrowed:
        asked.check_fields({field for spec in specs for field in _fields(spec)})
    fitting = {to.name: asked.variants(to) if narrowed else [] for to in targets}
    for spec in specs:
        for to in targets:
            found = [v for s, v in fitting[to.name] if s is spec]
            if found or not narrowed:
                variants = found[0] if found else list(spec.variants(to.arch))
                yield Checked(spec, to, asked.takes, of=len(variants)), variants


def _fields(spec: KernelSpec) -> Collection[str]:
    """Of the problems that a kernel is checked with."""
    params = next(spec.variants(), None)
    problems = [] if params is None else spec.verification.problems(params, "small")
    return {field for problem in problems for field in problem}


def _targets(arch: str | None) -> list[Target]:
    """PTX for what was asked for, or what the interpreter runs by itself."""
    if arch is None:
        return [interpreter_target()]
    names = ["compute_" + to.name.rpartition("_")[2] for to in targets(arch)]
    return targets(",".join(names))


def _sample(every: Sequence[Params], count: int | None) -> Sequence[Params]:
    """The variants to run, spread evenly over the legal ones."""
    if count is None or count >= len(every):
        return every
    return [every[i * len(every) // count] for i in range(count)]


def _check(
    checked: Checked, variants: Sequence[Params], looking: Looking, done: Callable[[], None]
) -> None:
    rng, begin = np.random.default_rng(0), time.perf_counter()
    try:
        for params in variants:
            checked.params = params
            for problem in checked.spec.verification.problems(params, "small"):
                if checked.takes(problem):
                    _run_one(checked, params, problem, looking, rng)
                    checked.problems += 1
            checked.variants += 1
            done()
        if checked.problems:
            checked.verdict = "ok" if checked.ratio is not None else "ok, but has no reference"
    except _Wrong as wrong:
        checked.error, checked.verdict = str(wrong), f"wrong numbers: {wrong.worst.name}"
    except SanitizerError as error:
        checked.error, checked.verdict = str(error), error.kind
        checked.location = error.location
    except InterpreterError as error:
        checked.error, checked.verdict = str(error), "not run: InterpreterError"
    checked.seconds = time.perf_counter() - begin


class _Wrong(Exception):
    """An output beyond its tolerance."""

    def __init__(self, title: str, problem: Problem, worst: Difference) -> None:
        sizes = " ".join(f"{name}={value}" for name, value in problem.items())
        super().__init__(f"{title}: wrong numbers: {worst}; problem: {sizes}")
        self.worst = worst


def _run_one(
    checked: Checked, params: Params, problem: Problem, looking: Looking, rng: np.random.Generator
) -> None:
    spec, cases = checked.spec, checked.spec.verification
    inputs, arrays = drawn(spec, params, problem, rng)
    with quiet(), looking.sanitize() as counted:
        interpret(spec, params, problem, arrays, checked.to)
    for line in counted.reports[:1]:
        checked.counted = True
        checked.banks = max(checked.banks, (line.ratio, f"{line.location}, {line.instruction}"))
    if cases.reference is None:
        return
    for worst in differences(spec, params, cases.reference(problem, inputs), arrays)[:1]:
        checked.ratio = max(checked.ratio or 0.0, worst.ratio)
        if worst.ratio > 1:
            raise _Wrong(f"{spec.id} {spec.label(params)}", problem, worst)


def _print(found: Sequence[Checked]) -> None:
    out, err = report.console(), report.console(stderr=True)
    out.print(report.add_rows(report.table(*_COLUMNS), [one.row() for one in found]))
    for one in found:
        ratio, line = one.banks
        if ratio > WARN_BANKS and not one.error:
            text = (
                f"{one.spec.id}: bank conflicts: {ratio:.2f} times the ideal wavefronts at {line}"
            )
            err.print(
                f"{text} (`--banks {WARN_BANKS:g}` makes it a fault)",
                style="yellow",
                soft_wrap=True,
            )
    for one in found:
        if one.error:
            err.print(one.error, style="red", soft_wrap=True)
            if lines := findings.window(one):
                err.print(lines, soft_wrap=True)
