"""One process of `fkjit.warm`: jobs come pickled on stdin, outcomes go pickled to stdout.

A process of its own kind, not of `multiprocessing`: it never imports the caller's main module, and
a compiler that crashes takes one variant with it.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fkjit.arch import Target, target
from fkjit.cpu.run import GUARD
from fkjit.jit.build import build, quiet
from fkjit.jit.compiler import compilers
from fkjit.spec import KernelSpec, Param, Params


@dataclass(frozen=True)
class Job:
    """One variant for one target: what a build needs of a spec, without its functions."""

    op: str
    name: str
    source: str
    entry: str
    root: Path | None
    params: dict[str, Any]
    derived: dict[str, Any]  # all template values
    target: str

    @property
    def spec(self) -> KernelSpec:
        """A spec with this one variant; its cache key is the full spec's."""
        return self.with_values({})

    def with_values(self, values: dict[str, Any]) -> KernelSpec:
        """The same with some template values replaced."""
        derived = {**self.derived, **values}
        return KernelSpec(
            op=self.op,
            name=self.name,
            source=self.source,
            entry=self.entry,
            root=self.root,
            params=tuple(Param(name, (value,), "") for name, value in self.params.items()),
            derive=lambda params: derived,
            block=lambda params: (1, 1, 1),
            grid=lambda params, problem: (1, 1, 1),
        )

    @property
    def label(self) -> str:
        """As messages name it: "attention.flash fp16 block=64 sm_90a"."""
        return f"{self.op}.{self.name} {self.spec.label(self.params)} {self.target}"


def job_of(spec: KernelSpec, params: Params, to: Target) -> Job:
    """One variant of a kernel; whether it is legal was looked at before."""
    return Job(
        op=spec.op,
        name=spec.name,
        source=spec.source,
        entry=spec.entry,
        root=spec.root,
        params=dict(params),
        derived=spec.template_values(params),
        target=to.name,
    )


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    origin: str  # compiled | disk | bundle | memory | failed
    seconds: float = 0.0
    stored: bool = True  # whether the next process will find it
    problems: tuple[str, ...] = ()  # spills and the like
    error: str = ""


def do(job: Job) -> Outcome:
    """Build one job. Every exception becomes an outcome."""
    try:
        to = target(job.target)
        with quiet():
            entry = build(job.spec, job.params, to)
            if to.kind == "ptx" and "guard" in job.derived:  # what the interpreter runs
                build(job.with_values({"guard": GUARD}), job.params, to)
    except Exception as error:  # whatever it was, the other variants go on
        return Outcome(job, "failed", error=str(error) or repr(error))
    problems = tuple(entry.meta["problems"])
    return Outcome(job, entry.origin, entry.seconds, _stored(entry), problems)


def _stored(entry: Any) -> bool:
    return entry.path is not None or entry.origin == "bundle"


def main(timeout: float | None) -> None:
    """Until stdin ends. What the kernels' toolchain prints goes to stderr. timeout: see
    `fkjit.compile_timeout`."""
    compilers.timeout = timeout
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(do(job), answers)
        answers.flush()
