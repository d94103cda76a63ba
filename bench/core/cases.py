"""Which cases a run has: sets of an operation's problems, and filters on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fkjit.errors import ParameterError
from fkjit.spec import Problem

from .op import Op


@dataclass(frozen=True)
class Case:
    """One problem of one operation."""

    op: Op
    problem: Problem

    @property
    def label(self) -> str:
        """Unique within the operation; results are matched by it."""
        return self.op.label(self.problem)


def select(
    ops: Sequence[Op], sets: Sequence[str], where: Sequence[str], only: Sequence[str]
) -> list[Case]:
    """The cases of these sets ("all": every one), each once, that pass every filter.

    An operation without a set "quick" has its "default" there.

    `where`: "head_dim=64,128", a problem's value must be one of these. `only`: words that the label
    must have, all of a text's. ParameterError for an unknown set or field, and where no case is
    left.
    """
    _check_sets(ops, sets)
    wanted = [_condition(text, ops) for text in where]
    made: dict[tuple[str, str], Case] = {}
    for op in ops:
        for name in _names(op, sets):
            for problem in op.sets.get(name, ()):
                case = Case(op, problem)
                made.setdefault((op.name, case.label), case)
    left = [
        case
        for case in made.values()
        if all(_text(case.problem.get(name)) in values for name, values in wanted)
        and all(set(text.split()) <= set(case.label.split()) for text in only)
    ]
    if not left:
        raise ParameterError(
            f"bench: no case of {', '.join(op.name for op in ops)} in --set {' '.join(sets)} "
            f"passes the filters {' '.join([*where, *only]) or '(none)'}; --list shows the sets"
        )
    return left


def _check_sets(ops: Sequence[Op], sets: Sequence[str]) -> None:
    known = dict.fromkeys(name for op in ops for name in op.sets)
    for name in sets:
        if name not in {*known, "quick", "all"}:
            raise ParameterError(f"bench: --set {name!r} is not one of all, {', '.join(known)}")


def _names(op: Op, sets: Sequence[str]) -> list[str]:
    """The sets of an operation that are meant."""
    if "all" in sets:
        return list(op.sets)
    return ["default" if name == "quick" and name not in op.sets else name for name in sets]


def _condition(text: str, ops: Sequence[Op]) -> tuple[str, set[str]]:
    name, equals, values = text.partition("=")
    fields = {key for op in ops for problems in op.sets.values() for p in problems for key in p}
    if not equals or name not in fields:
        raise ParameterError(
            f"bench: --where {text!r} is not FIELD=VALUE[,VALUE] with a field of "
            f"{', '.join(sorted(fields))}"
        )
    return name, {_text(value.strip()) for value in values.split(",")}


def _text(value: Any) -> str:
    return str(value).lower()
