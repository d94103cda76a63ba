"""The groups of cases; each is a module here and a file of goldens."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from tests.golden.case import Case

GROUPS = ("cvt", "float", "integer", "warp", "atomics", "copy", "matrix", "mma", "wmma", "barrier",
          "bulk", "tma", "cluster", "wgmma")  # fmt: skip


@cache
def cases_of(group: str) -> dict[str, Case]:
    """The cases of a group by name, which must not occur twice."""
    cases = import_module(f"tests.golden.cases_{group}").CASES
    named = {case.name: case for case in cases}
    assert len(named) == len(cases), f"{group}: two cases of one name"
    return named
