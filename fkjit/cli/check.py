"""`fkjit check`: the variants of registered kernels in the CPU interpreter, with its checks on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fkjit import ops
from fkjit.arch import Target
from fkjit.cli import console as report
from fkjit.cli.select import targets
from fkjit.cpu.run import interpret
from fkjit.errors import FkjitError, InterpreterError, ParameterError, SanitizerError
from fkjit.jit.build import interpreter_target, quiet
from fkjit.sanitizer import sanitize
from fkjit.spec import KernelSpec, Params, registered

_COLUMNS = ("kernel", "target", ">variants", ">problems", ">time", "verdict")


@dataclass
class Checked:
    """What was seen of one kernel on one target; the first fault ends it."""

    spec: KernelSpec
    to: Target
    variants: int = 0  # run
    of: int = 0  # legal on the target
    problems: int = 0
    seconds: float = 0.0
    error: FkjitError | None = None
    worst: list[tuple[float, str]] = field(default_factory=list)  # ratio and line, of each launch

    @property
    def verdict(self) -> str:
        """ "ok", the kind of fault, or why nothing ran."""
        if isinstance(self.error, SanitizerError):
            return self.error.kind
        if self.error is not None:
            return "not run: " + type(self.error).__name__
        return "ok" if self.problems else "nothing to run"


def run(
    names: Sequence[str], mem: bool, race: bool, banks: bool, arch: str | None, count: int | None
) -> int:
    """Run them and print a table; the exit status: 1 when there was a fault.

    No choice of checks means mem and race. `count`: about so many variants of each kernel.
    """
    if count is not None and count < 1:
        raise ParameterError(f"check: --variants {count} is not a number above 0")
    if not (mem or race or banks):
        mem = race = True
    found = []
    err = report.console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        for spec in _chosen(names):
            for to in _targets(arch):
                checked = Checked(spec, to)
                found.append(checked)
                chosen = _sample(checked, count)
                task = bar.add_task(f"{spec.id} {to.name}", total=len(chosen))
                if not err.is_terminal:
                    err.print(f"{spec.id} {to.name}: {len(chosen)} variants")
                _check(checked, chosen, (mem or race, race, banks), lambda t=task: bar.advance(t))
    _print(found, banks)
    return 1 if any(checked.error for checked in found) else 0


def _chosen(names: Sequence[str]) -> list[KernelSpec]:
    """`attention`, `attention.flash`, or `attention flash tiled`."""
    first = ops.kernels("check", names[0])
    if len(names) == 1:
        return first
    ids = {spec.id for spec in registered()}
    rest = [f"{first[0].op}.{name}" for name in names[1:]]
    rest = [own if own in ids else name for own, name in zip(rest, names[1:], strict=True)]
    whole = names[0] == first[0].op and any(one in {s.id for s in first} for one in rest)
    every = [spec for name in ([] if whole else names[:1]) for spec in ops.kernels("check", name)]
    return every + [spec for name in rest for spec in ops.kernels("check", name)]


def _targets(arch: str | None) -> list[Target]:
    """PTX for what was asked for, or what the interpreter runs by itself."""
    if arch is None:
        return [interpreter_target()]
    names = ["compute_" + to.name.rpartition("_")[2] for to in targets(arch)]
    return targets(",".join(names))


def _sample(checked: Checked, count: int | None) -> Sequence[Params]:
    """The variants to run, spread evenly over the legal ones."""
    every = list(checked.spec.variants(checked.to.arch))
    checked.of = len(every)
    if count is None or count >= len(every):
        return every
    return [every[i * len(every) // count] for i in range(count)]


def _check(
    checked: Checked,
    variants: Sequence[Params],
    checks: tuple[bool, bool, bool],
    done: Callable[[], None],
) -> None:
    spec, rng, begin = checked.spec, np.random.default_rng(0), time.perf_counter()
    mem, race, banks = checks
    try:
        for params in variants:
            for problem in spec.verification.problems(params, "small"):
                arrays = {
                    **spec.verification.inputs(params, problem, rng),
                    **spec.verification.outputs(params, problem),
                }
                with quiet(), sanitize(mem=mem, race=race, banks=banks) as counted:
                    interpret(spec, params, problem, arrays, checked.to)
                checked.problems += 1
                checked.worst += [(line.ratio, line.location) for line in counted.reports[:1]]
            checked.variants += 1
            done()
    except (SanitizerError, InterpreterError) as error:
        checked.error = error
    checked.seconds = time.perf_counter() - begin


def _print(found: Sequence[Checked], banks: bool) -> None:
    out, err = report.console(), report.console(stderr=True)
    made = report.table(*_COLUMNS, *((">banks",) if banks else ()))
    for one in found:
        row = [
            one.spec.id,
            one.to.name,
            f"{one.variants} of {one.of}",
            one.problems,
            report.duration(one.seconds),
            one.verdict,
        ]
        if banks:
            row.append(f"{max(one.worst)[0]:.2f}" if one.worst else "-")
        report.add_rows(made, [row])
    out.print(made)
    for one in found:
        ratio, line = max(one.worst, default=(1.0, ""))
        if ratio > 1:
            out.print(f"{one.spec.id}: {ratio:.2f} times the ideal wavefronts at {line}")
    for one in found:
        if one.error is not None:
            err.print(str(one.error), style="red")
