"""Arrays of any strides as few dimensions as possible, for kernels that loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fkjit.errors import ParameterError
from fkjit.runtime.interop import View

MAX_GRID = 2**31 - 1  # blocks of a launch, in x


def coalesce(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The same elements of several arrays of one shape, in as few dimensions as possible.

    Dimensions are ordered by the last array's strides, the smallest one at the end; neighbours that
    are one dimension in every array are joined. At least one dimension is left. No size is 0.
    """
    count = len(strides)
    elements = _contiguous_elements(shape, strides[0]) if count else 0
    if elements and all([step == strides[0] for step in strides]):
        return (elements,), [(1,)] * count
    steps = zip(*strides, strict=True) if strides else iter(())
    dims = [(n, step) for n, step in zip(shape, steps, strict=True) if n > 1]
    dims.sort(key=lambda dim: [-abs(step) for step in reversed(dim[1])])
    joined: list[tuple[int, tuple[int, ...]]] = []
    for n, step in dims:
        if joined and joined[-1][1] == tuple([i * n for i in step]):
            joined[-1] = (joined[-1][0] * n, step)
        else:
            joined.append((n, step))
    joined = joined or [(1, (1,) * count)]
    sizes = tuple([n for n, _ in joined])
    return sizes, [tuple([step[i] for _, step in joined]) for i in range(count)]


def _contiguous_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements a contiguous array has; 0 for any other array."""
    elements = 1
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if step != elements:
            return 0
        elements *= n
    return elements


def rows_of(call: str, name: str, view: View) -> tuple[int, int, int]:
    """(rows, columns, elements from one row to the next) of an array [..., columns].

    Its last dimension must be contiguous, and the others one dimension: ParameterError otherwise.
    A single number is a row of one column.
    """
    dimensions = len(view.shape)
    if dimensions in (1, 2) and view.strides[-1] == 1:  # nearly all are such
        rows, columns = view.shape if dimensions == 2 else (1, view.shape[0])
        return rows, columns, view.strides[0] if rows > 1 and columns else columns
    check_columns(call, name, view)
    rows, step = leading_rows(call, name, view)
    return rows, view.shape[-1] if view.shape else 1, step


def check_columns(call: str, name: str, view: View) -> None:
    """ParameterError unless the last dimension is contiguous."""
    if view.shape and view.shape[-1] > 1 and view.strides[-1] != 1 and 0 not in view.shape:
        raise ParameterError(
            f"{call}: {name} has stride {view.strides[-1]} in its last dimension; it must be "
            f"contiguous: pass a contiguous copy of {name}"
        )


def leading_rows(call: str, name: str, view: View) -> tuple[int, int]:
    """(rows, elements from one row to the next) of an array [..., columns] of any column stride."""
    shape, strides = tuple(view.shape), tuple(view.strides)
    if 0 in shape:
        return prod(shape[:-1]), shape[-1]
    rows, step = 1, shape[-1] if shape else 1
    for n, stride in reversed(list(zip(shape[:-1], strides[:-1], strict=True))):
        if n == 1:
            continue
        if rows == 1:
            step = stride
        elif stride != rows * step:
            raise ParameterError(
                f"{call}: {name} (shape {shape}, strides {strides}) has rows at no one distance; "
                f"pass a contiguous copy of {name}"
            )
        rows *= n
    return rows, step


def log2_ceil(number: int) -> int:
    """The least e with 2^e >= number; number > 0."""
    return (number - 1).bit_length()
