"""A variant in the CPU interpreter: faults, errors against the reference, banks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fkjit.arch import Target
from fkjit.cpu.run import GUARD, interpret
from fkjit.errors import FkjitError, InterpreterError, SanitizerError
from fkjit.jit.build import build, quiet
from fkjit.jit.render import Rendered
from fkjit.numerics import Difference, differences
from fkjit.playground.banks import Watch
from fkjit.playground.listing import Ptx
from fkjit.playground.marks import mark
from fkjit.playground.request import Variant
from fkjit.sanitizer import sanitize
from fkjit.spec import Arrays, KernelSpec, Params, Problem

Load = Callable[..., Rendered]
WARN_BANKS = 1.5  # wavefronts to ideal ones: above, the line gets a mark
_SWIZZLE, _TURNED, _PLAIN = "tile/swizzle.cuh", "(chunk ^ turn)", "(chunk + 0 * turn)"


class Check:
    """Problem after problem of a variant; each tells the page what is known by then."""

    def __init__(
        self,
        variant: Variant,
        to: Target,
        rendered: Rendered,
        load: Load,
        emit: Callable[..., None],
    ) -> None:
        self.variant, self.to, self.rendered = variant, to, rendered
        self.load, self.emit = load, emit
        self.watch = Watch()
        self.worst: Difference | None = None
        self.findings: list[dict[str, Any]] = []

    def run(self) -> None:
        """All small problems; the first fault ends it."""
        spec, params = self.variant.spec, self.variant.params
        problems = list(spec.verification.problems(params, "small"))
        rng = np.random.default_rng(0)
        for number, problem in enumerate(problems, 1):
            begin = time.perf_counter()
            try:
                self._run_one(problem, rng)
            except (SanitizerError, InterpreterError) as error:
                self.findings.append(self._finding(error))
            self._tell(number, len(problems), problem, time.perf_counter() - begin)
            if self.findings:
                return
        if problems:
            self._without_swizzle(problems[0])
        else:
            self._tell(0, 0, {}, 0.0)

    def _run_one(self, problem: Problem, rng: np.random.Generator) -> None:
        spec, params = self.variant.spec, self.variant.params
        cases = spec.verification
        inputs, arrays = self._interpret(problem, rng)
        if cases.reference is None:
            return
        for worst in differences(spec, params, cases.reference(problem, inputs), arrays)[:1]:
            if self.worst is None or worst.ratio > self.worst.ratio:
                self.worst = worst
            if worst.ratio > 1:
                self.findings.append({"kind": "wrong numbers", "text": str(worst), "lines": []})

    def _interpret(
        self, problem: Problem, rng: np.random.Generator, race: bool = True
    ) -> tuple[Arrays, Arrays]:
        """The inputs, and all arrays after the launch."""
        spec, params = self.variant.spec, self.variant.params
        inputs = spec.verification.inputs(params, problem, rng)
        arrays = {name: copy(array) for name, array in inputs.items()}  # some are written in place
        arrays.update(spec.verification.outputs(params, problem))
        with quiet(), sanitize(mem=True, race=race):
            interpret(spec, params, problem, arrays, self.to, self.watch, self.load)
        return inputs, arrays

    def _without_swizzle(self, problem: Problem) -> None:
        """The same accesses where fkjit's tiles lie in plain rows: run again, not computed."""
        if _SWIZZLE not in self.rendered.headers:
            return
        load, self.load = self.load, partial(without_swizzle, self.load)
        own, self.watch = self.watch, Watch()
        with suppress(FkjitError):
            self._interpret(problem, np.random.default_rng(0), race=False)
            self.emit("unswizzled", banks=self._banks())
        self.load, self.watch = load, own

    def _tell(self, number: int, of: int, problem: Problem, seconds: float) -> None:
        rows = self._banks()
        self.emit(
            "check",
            number=number,
            of=of,
            problem=" ".join(f"{name}={value}" for name, value in problem.items()),
            seconds=seconds,
            findings=self.findings,
            error=None if self.worst is None else _error(self.worst),
            banks=rows,
            marks=[*self._fault_marks(), *_bank_marks(rows)],
        )

    def _banks(self) -> list[dict[str, Any]]:
        with suppress(FkjitError):
            return self.watch.lines(Ptx(self._image()), self.rendered.name)
        return []

    def _image(self) -> str:
        """The PTX that ran, with guards between arrays in shared memory."""
        guard = GUARD if self.variant.spec.shared_layout is not None else 0
        with quiet():
            made = build(self.variant.spec, self.variant.params, self.to, None, guard, self.load)
        return made.image.decode()

    def _finding(self, error: SanitizerError | InterpreterError) -> dict[str, Any]:
        if isinstance(error, InterpreterError):
            return {"kind": "not run", "text": str(error), "lines": []}
        ptx, name = Ptx(self._image()), self.rendered.name
        found = (ptx.template_lines(name, line)[:1] for line in error.ptx_lines)
        lines = list(dict.fromkeys(line for some in found for line in some))
        text = str(error).removeprefix(f"{error.kernel}: ")  # which the page says already
        return {"kind": error.kind, "text": text, "lines": lines}

    def _fault_marks(self) -> list[dict[str, Any]]:
        return [
            mark(line, one["kind"], one["text"])
            for one in self.findings
            for line in one["lines"] or [1]
        ]


def without_swizzle(load: Load, spec: KernelSpec, params: Params, guard: int = 0) -> Rendered:
    """The source with tiles in plain rows: 16-byte chunk c of a row stays in position c."""
    rendered = load(spec, params, guard)
    header = rendered.headers[_SWIZZLE].replace(_TURNED, _PLAIN)
    return replace(rendered, headers={**rendered.headers, _SWIZZLE: header})


def _error(worst: Difference) -> dict[str, Any]:
    ratio = worst.ratio if np.isfinite(worst.ratio) else None
    return {"ratio": ratio, "text": str(worst), "output": worst.name, "bound": worst.bound}


def _bank_marks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        line = next(iter(row["lines"]), 0)
        if row["ratio"] > WARN_BANKS and line and line not in found:
            text = (
                f"bank conflicts: {row['ratio']:.2f} times the ideal wavefronts "
                f"({row['instruction']})"
            )
            found[line] = mark(line, "bank conflicts", text, "warning")
    return list(found.values())
