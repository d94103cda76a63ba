"""What can be wrong with pages, page tables and lengths of a cache that attention reads."""

from __future__ import annotations

from collections.abc import Sequence

from fkjit.errors import ParameterError
from fkjit.ops.op.checks import check_dtype, check_shape
from fkjit.runtime.interop import View

MOST_TOKENS = 256  # of a page


def page_size(call: str, k: Sequence[int], v: Sequence[int], tokens_at: int) -> int:
    """Of pages of these shapes, whose tokens stand at `tokens_at`."""
    size = k[tokens_at]
    if tuple(k[:3]) != tuple(v[:3]) or size < 1 or size & (size - 1) or size > MOST_TOKENS:
        raise ParameterError(
            f"{call}: k_pages has shape {tuple(k)}, v_pages {tuple(v)}; allowed: alike, "
            '[num_pages, page_size, heads, D] (layout="nhd") or [num_pages, heads, page_size, D] '
            f'("hnd"), page_size a power of two up to {MOST_TOKENS}'
        )
    return size


def check_table(call: str, table: View) -> tuple[int, int, int]:
    """Rows, pages of a row, and elements from row to row."""
    check_dtype(call, "page_table", table, ("int32",))
    if len(table.shape) != 2 or (table.shape[1] > 1 and table.strides[1] != 1):
        raise ParameterError(
            f"{call}: page_table has shape {tuple(table.shape)}, strides {tuple(table.strides)}; "
            "allowed: [sequences, pages], rows contiguous"
        )
    rows, pages = table.shape
    return rows, pages, table.strides[0] if rows > 1 else pages


def check_list(call: str, name: str, view: View, size: int) -> None:
    """int32, one for each of `size` sequences."""
    check_dtype(call, name, view, ("int32",))
    check_shape(call, name, view, (size,), "one for each sequence, here")
    if size > 1 and view.strides[0] != 1:
        raise ParameterError(f"{call}: {name} must be contiguous")
