"""An expression of CUDA that a caller has compiled into a kernel: what may stand in it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from fkjit.errors import ArgumentTypeError, CompileError, ParameterError

_LEGAL = re.compile(r"[\w\s.,()\[\]+\-*/%<>=!&|^~?:]*", re.ASCII)
_COMMENT = re.compile(r"//|/\*|\*/")
_STATEMENT = re.compile(r"\b(asm|__asm__|__asm|return|sizeof|operator|template|this)\b")
_PAIRS = {")": "(", "]": "["}


def expression(call: str, argument: str, text: Any, names: str, example: str) -> str:
    """The text on one line. `names`: what it is of, as errors say it; `example`: one that is right.

    ArgumentTypeError unless it is a str, ParameterError for anything that could be more than an
    expression.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"{call}: {argument}={text!r} is not a str: an expression of CUDA of {names}"
        )
    return _on_one_line(call, argument, text, example)


@lru_cache(maxsize=256)
def _on_one_line(call: str, argument: str, text: str, example: str) -> str:
    line = " ".join(text.split())
    found = _LEGAL.fullmatch(line) and not _COMMENT.search(line) and not _STATEMENT.search(line)
    if not line or not found or not _is_balanced(line):
        raise ParameterError(
            f"{call}: {argument}={text!r} is not one expression; allowed: names, numbers, "
            "operators, calls and subscripts, each ( and [ closed; no ; { } # or quotes, no "
            f'comments, no statements (example: "{example}")'
        )
    return line


def _is_balanced(text: str) -> bool:
    """Whether each parenthesis closes one that is open."""
    open_ones: list[str] = []
    for char in text:
        if char in "([":
            open_ones.append(char)
        elif char in _PAIRS and (not open_ones or open_ones.pop() != _PAIRS[char]):
            return False
    return not open_ones


def does_not_compile(call: str, argument: str, text: Any, error: CompileError) -> ParameterError:
    """What NVRTC has against an expression."""
    return ParameterError(f"{call}: {argument}={text!r} does not compile: {error}")
