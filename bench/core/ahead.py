"""Before a run: what its cases will launch is compiled, many variants at a time.

One after the other, when each is first called, a hundred products would take a core a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from fkjit.arch import Target
from fkjit.errors import FkjitError
from fkjit.warm_worker import Job, job_of
from fkjit.warming import Warmed, compile_jobs, processes

from .cases import Case
from .op import Candidate, Refused


def work(
    cases: Sequence[Case], candidates: Mapping[str, Sequence[Candidate]], to: Target
) -> list[Job]:
    """Each variant once, of the candidates that know theirs before they have arrays."""
    found: dict[str, Job] = {}
    for case in cases:
        for candidate in candidates[case.op.name]:
            if candidate.variant is None:
                continue
            try:
                spec, params = candidate.variant(case.problem)
            except (FkjitError, Refused):
                continue  # said where it is prepared
            job = job_of(spec, params, to)
            found.setdefault(job.label, job)
    return list(found.values())


def compile_ahead(
    jobs: list[Job], say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
) -> Warmed | None:
    """What was done; None where there is next to nothing to do. A variant that fails does so again,
    and is told, where its candidate is prepared."""
    if len(jobs) < 2:
        return None
    say(f"compiling up to {len(jobs)} variants on {processes(None, len(jobs))} processes")
    done = compile_jobs(jobs)
    say(f"compiled {done.compiled}, had {done.present}, in {done.seconds:.1f} s")
    return done
