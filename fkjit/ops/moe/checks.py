"""What can be wrong with numbers and lists of a call that routes tokens to experts."""

from __future__ import annotations

from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.op.shapes import rows_of
from fkjit.runtime.interop import View


def whole(call: str, name: str, value: Any, low: int, high: int, where: str = "") -> int:
    """A whole number in a range."""
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ArgumentTypeError(f"{call}: {name}={value!r} is not a whole number")
        value = value.__index__()
    if not low <= value <= high:
        raise ParameterError(f"{call}: {name}={value}; allowed: {low} to {high}{where}")
    return value


def check_dense(call: str, name: str, view: View | None) -> None:
    """Rows that lie behind one another; None is fine."""
    if view is None:
        return
    rows, columns, step = rows_of(call, name, view)
    if rows > 1 and step != columns:
        raise ParameterError(f"{call}: {name} has gaps between its rows; pass a contiguous array")
