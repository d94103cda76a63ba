"""What can be wrong with the numbers of a call that routes tokens to experts."""

from __future__ import annotations

from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError


def whole(call: str, name: str, value: Any, low: int, high: int, where: str = "") -> int:
    """A whole number in a range."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{call}: {name}={value!r} is not a whole number")
    value = value.__index__()
    if not low <= value <= high:
        raise ParameterError(f"{call}: {name}={value}; allowed: {low} to {high}{where}")
    return value
