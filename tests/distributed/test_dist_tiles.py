"""Tiles of chunks cover what is visible, once, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.distributed.order import LAYOUTS, chunk_count, chunks_of, owner_of
from fkjit.distributed.tiles import Tile, band, endings, slots, tiles


def seen(tile: Tile, shape: tuple[int, int]) -> np.ndarray:
    """What a tile's window lets be seen, of all pairs, as fkjit.attention defines it."""
    (a, b), (c, d) = tile.q, tile.k
    i, j = np.mgrid[0 : b - a, 0 : d - c]
    ahead = j - i - ((d - c) - (b - a))
    inside = np.ones_like(ahead, bool)
    if tile.left is not None:
        assert tile.left >= 0
        inside &= ahead >= -tile.left
    if tile.right is not None:
        assert tile.right >= 0
        inside &= ahead <= tile.right
    found = np.zeros(shape, int)
    found[a:b, c:d] = inside
    return found


@pytest.mark.parametrize("rows,keys", [(1, 1), (4, 4), (3, 7), (7, 3)])
def test_a_band_is_one_window(rows, keys):
    i, j = np.mgrid[0:rows, 0:keys]
    sides = [None, *range(-9, 10)]
    for low in sides:
        for high in sides:
            wanted = np.ones((rows, keys), int)
            wanted &= 1 if low is None else j - i >= low
            wanted &= 1 if high is None else j - i <= high
            tile = band(rows, keys, low, high)
            made = np.zeros_like(wanted) if tile is None else seen(tile, wanted.shape)
            assert (made == wanted).all(), (low, high, tile)
            if tile is not None:  # nothing that could be left out
                assert (
                    wanted[slice(*tile.q)].any(1).all() and wanted[:, slice(*tile.k)].any(0).all()
                )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "window", [(None, None), (None, 0), (3, 0), (0, 0), (9, None), (2, 5), (30, 0)]
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_tiles_of_all_pairs_of_ranks_cover_what_is_visible_once(layout, window, size):
    length = 5
    total = chunk_count(layout, size) * length
    i, j = np.mgrid[0:total, 0:total]
    wanted = np.ones((total, total), bool)
    wanted &= True if window[0] is None else j >= i - window[0]
    wanted &= True if window[1] is None else j <= i + window[1]
    for r in range(size):
        rows = [c * length + n for c in chunks_of(layout, r, size) for n in range(length)]
        diagonal = np.zeros(len(rows), int)
        for s in range(size):
            keys = [c * length + n for c in chunks_of(layout, s, size) for n in range(length)]
            shape, made = (len(rows), len(keys)), tiles(
                chunks_of(layout, r, size), chunks_of(layout, s, size), length, window
            )  # fmt: skip
            assert (sum((seen(t, shape) for t in made), np.zeros(shape, int))
                    == wanted[np.ix_(rows, keys)]).all()  # fmt: skip
            for tile in made:
                diagonal[slice(*tile.q)] += tile.diagonal
        assert (diagonal == 1).all()  # what has a row's sink


def test_causal_zigzag_has_one_tile_a_step_and_as_much_for_every_rank():
    for size in (2, 4):
        for r in range(size):
            for s in range(size):
                made = tiles(
                    chunks_of("zigzag", r, size), chunks_of("zigzag", s, size), 8, (None, 0)
                )
                (tile,) = made
                assert tile.causal if r == s else tile.full
                assert r == s or (tile.q[1] - tile.q[0]) * (tile.k[1] - tile.k[0]) == 128


@pytest.mark.parametrize("layout", LAYOUTS)
def test_owners_are_where_chunks_are(layout):
    for size in (1, 2, 5):
        found = [owner_of(layout, c, size) for c in range(chunk_count(layout, size))]
        assert all(chunks_of(layout, r, size)[n] == c for c, (r, n) in enumerate(found))


def test_slots_keep_rows_apart():
    found = [Tile((0, 8), (0, 8)), Tile((0, 4), (0, 4)), Tile((4, 8), (0, 4)), Tile((2, 5), (0, 4))]
    assert list(slots(found)) == [0, 1, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [(None, None), (None, 0)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_row_is_done_once_and_by_its_last_tile(layout, window, size):
    length, rows = 3, 3 * chunk_count(layout, size) // size
    for r in range(size):
        found = [
            tile
            for step in range(size)
            for tile in tiles(
                chunks_of(layout, r, size), chunks_of(layout, (r - step) % size, size), length,
                window,
            )
        ]  # fmt: skip
        made = endings(tuple(found), rows)
        assert made is not None
        done = np.full(rows, -1)
        for n, (tile, (first, end)) in enumerate(zip(found, made, strict=True)):
            assert (done[slice(*tile.q)] == -1).all()  # no tile has a row that is done
            done[tile.q[0] + first : tile.q[0] + end] = n
        assert (done >= 0).all()


def test_rows_that_end_in_two_places_or_nowhere_have_no_endings():
    whole, middle = Tile((0, 9), (0, 9)), Tile((3, 6), (0, 9))
    assert endings((middle, whole), 9) == ((0, 0), (0, 9))
    assert endings((whole, middle), 9) is None
    assert endings((middle,), 9) is None
