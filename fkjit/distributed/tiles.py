"""What of two ranks' tokens see each other, as calls of attention that have it in full.

A tile is a range of a rank's queries against a range of a rank's keys, with a mask that
`fkjit.attention` knows: none, causal, or a window, aligned to the bottom right of the two ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Range = tuple[int, int]
Window = tuple[int | None, int | None]  # keys to the left and right of a query; None: all


class Tile(NamedTuple):
    """Ranges of local rows. left, right: the window. diagonal: it has its queries' own keys."""

    q: Range
    k: Range
    left: int | None = None
    right: int | None = None
    diagonal: bool = False

    @property
    def full(self) -> bool:
        return self.left is self.right is None

    @property
    def causal(self) -> bool:
        return self.left is None and self.right == 0


def band(rows: int, keys: int, lowest: int | None, highest: int | None) -> Tile | None:
    """The tile of the pairs with lowest <= key - row <= highest; None where there are none.

    Rows that see no key and keys that no row sees are cut off, so that what is left is a window.
    """
    low = max(-rows, -rows if lowest is None else lowest)
    high = min(keys, keys if highest is None else highest)
    first_key, first_row = max(low, 0), max(-high, 0)
    low, high = low - first_key + first_row, high - first_key + first_row
    rows, keys = rows - first_row, keys - first_key
    rows, keys = min(rows, keys - low), min(keys, rows + high)
    if rows <= 0 or keys <= 0 or low > high:
        return None
    left, right = keys - rows - low, high - (keys - rows)
    return Tile(
        (first_row, first_row + rows), (first_key, first_key + keys),
        None if left >= keys - 1 else left, None if right >= rows - 1 else right,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def tiles(
    of_q: Sequence[int], of_k: Sequence[int], length: int, window: Window = (None, None)
) -> tuple[Tile, ...]:
    """Tiles of a rank's chunks `of_q` and a rank's chunks `of_k`, each of `length` tokens.

    window: of the whole sequence; causal is a right of 0.
    """
    left, right = window
    if of_q == of_k and left is None and right == 0:
        rows = (0, len(of_q) * length)
        return (Tile(rows, rows, None, 0, True),)
    found = []
    for i, q in enumerate(of_q):
        row: list[Tile] = []
        for j, k in enumerate(of_k):
            ahead = (q - k) * length  # of a query's key in its place
            lowest = None if left is None else ahead - left
            tile = band(length, length, lowest, None if right is None else ahead + right)
            if tile is not None:
                row.append(_moved(tile, i * length, j * length, q == k))
        found += _joined(row, "k")
    return tuple(_joined(found, "q"))


def _moved(tile: Tile, row: int, key: int, diagonal: bool) -> Tile:
    (a, b), (c, d) = tile.q, tile.k
    return tile._replace(q=(a + row, b + row), k=(c + key, d + key), diagonal=diagonal)


def _joined(found: Sequence[Tile], side: str) -> list[Tile]:
    """Full tiles that are neighbours on one side and alike on the other as one."""
    other, made = "q" if side == "k" else "k", []
    for tile in found:
        last = made[-1] if made else None
        if (
            last is not None and last.full and tile.full
            and getattr(last, other) == getattr(tile, other)
            and getattr(last, side)[1] == getattr(tile, side)[0]
        ):  # fmt: skip
            whole = (getattr(last, side)[0], getattr(tile, side)[1])
            diagonal = last.diagonal or tile.diagonal
            made[-1] = last._replace(**{side: whole, "diagonal": diagonal})
        else:
            made.append(tile)
    return made


def slots(found: Sequence[Tile]) -> Iterator[int]:
    """For each tile the first slot in which no tile before has some of its rows."""
    taken: list[list[Range]] = []
    for tile in found:
        start, end = tile.q
        free = (
            n for n, ranges in enumerate(taken) if all(end <= a or b <= start for a, b in ranges)
        )
        slot = next(free, len(taken))
        if slot == len(taken):
            taken.append([])
        taken[slot].append(tile.q)
        yield slot


@lru_cache(maxsize=4096)
def endings(found: Sequence[Tile], rows: int) -> tuple[Range, ...] | None:
    """For each tile which of its rows, counted from its first, no later one has. None where they
    are no range, or some of the rows are in no tile at all."""
    left, made = np.ones(rows, bool), []
    for tile in reversed(found):
        start, end = tile.q
        last = np.flatnonzero(left[start:end])
        left[start:end] = False
        if len(last) and last[-1] - last[0] + 1 != len(last):
            return None
        made.append((int(last[0]), int(last[-1]) + 1) if len(last) else (0, 0))
    return None if left.any() else tuple(reversed(made))
