"""Triton twins: one file an operation, `bench/twins/<op>.py`, with `prepare(problem, arrays)`.

Such a file imports triton, so it is imported only when its twin is prepared.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from fkjit.spec import Problem

from ..op import Arrays, Candidate, Prepared

# Operations of ours that have no twin yet, and why.
MISSING: dict[str, str] = {
    "attention_backward_form": "the twin of attention_backward, with a line or two more for each",
    "decode_form": "the twin of attention_decode, with a line or two more for each form",
}


def names() -> list[str]:
    """The operations that have a twin."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def unaccounted(ops: Iterable[str]) -> list[str]:
    """Those of some operations that have neither a twin nor a reason in MISSING."""
    return [op for op in ops if op not in names() and op not in MISSING]


def source(op: str) -> Path:
    """The file of a twin."""
    return Path(__file__).parent / f"{op}.py"


def twin(op: str) -> Candidate | None:
    """The candidate "triton" of an operation; None where there is no twin."""
    if op not in names():
        return None

    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        return import_module(f"{__name__}.{op}").prepare(problem, arrays)

    return Candidate(name="triton", kind="twin", package="triton", module="triton", prepare=prepare)
