"""A score_mod: what a user may write as an expression of one score, and what it may read."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.arguments import shown
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.features import MAX_ARRAYS
from fkjit.ops.op import expression as expressions

NAMES = ("score", "b", "h", "q_idx", "k_idx", "seqlen_q", "seqlen_k")  # that an expression may use
_MEANT = f"{', '.join(NAMES)} and the names in score_args"
_EXAMPLE = "score + slope * (k_idx - q_idx)"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TAKEN = {*NAMES, "float", "int", "const", "bool", "double", "char", "long", "short", "void"}
_INT = 2**31


def expression(call: str, text: Any, argument: str = "score_mod") -> str:
    """The text on one line. ParameterError for anything that could be more than an expression."""
    return expressions.expression(call, argument, text, _MEANT, _EXAMPLE)


def arguments(
    call: str, given: Any
) -> tuple[dict[str, Any], tuple[tuple[str, str, float | int], ...]]:
    """score_args -> arrays by name, and (name, "float" or "int", value) of each number."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"{call}: score_args={shown(given)} is not a mapping of names to values"
        )
    arrays: dict[str, Any] = {}
    scalars: list[tuple[str, str, float | int]] = []
    for name, value in given.items():
        _check_name(call, name)
        if value is None:
            raise ArgumentTypeError(f"{call}: score_args: {name} is None; allowed: numbers, arrays")
        if isinstance(value, (bool, int, np.integer, np.bool_)):
            scalars.append((name, "int", _whole(call, name, int(value))))
        elif isinstance(value, (float, np.floating)):
            scalars.append((name, "float", float(value)))
        else:
            arrays[name] = value
    if len(arrays) > MAX_ARRAYS:
        raise ParameterError(
            f"{call}: score_args has {len(arrays)} arrays; allowed: up to {MAX_ARRAYS}"
        )
    return arrays, tuple(scalars)


def _check_name(call: str, name: Any) -> None:
    fits = isinstance(name, str) and _NAME.fullmatch(name) and not keyword.iskeyword(name)
    if not fits or name in _TAKEN:
        raise ParameterError(
            f"{call}: score_args: {name!r} is not a name that an expression can use; allowed: "
            f"letters, digits and _, a letter first, none of {', '.join(NAMES)} and CUDA's words"
        )


def _whole(call: str, name: str, value: int) -> int:
    if not -_INT <= value < _INT:
        raise ParameterError(f"{call}: score_args: {name}={value} is not a 32-bit number")
    return value
