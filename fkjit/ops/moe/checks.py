"""What can be wrong with arrays of a call that routes tokens to experts."""

from __future__ import annotations

from fkjit.errors import ParameterError
from fkjit.ops.op.shapes import rows_of
from fkjit.runtime.interop import View


def check_dense(call: str, name: str, view: View | None) -> None:
    """Rows that lie behind one another; None is fine."""
    if view is None:
        return
    rows, columns, step = rows_of(call, name, view)
    if rows > 1 and step != columns:
        raise ParameterError(f"{call}: {name} has gaps between its rows; pass a contiguous array")
