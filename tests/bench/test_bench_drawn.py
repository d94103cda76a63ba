"""Sets that each run draws anew: by the seed alone, within what they promise."""

from __future__ import annotations

import random

from bench.attention import short_queries
from bench.core.drawn import Drawn
from fkjit.ops.attention.problem import traffic


def test_the_seed_decides(monkeypatch):
    monkeypatch.setattr(Drawn, "seed", 7)
    first, again = Drawn(short_queries.drawn), Drawn(short_queries.drawn)
    assert list(first) == list(again)
    monkeypatch.setattr(Drawn, "seed", 8)
    assert list(Drawn(short_queries.drawn)) != list(first)
    assert list(first) == list(again)  # what has been read stays


def test_cells_are_of_the_sizes_that_the_set_promises():
    cells = [cell for seed in range(20) for cell in short_queries.drawn(random.Random(seed))]
    assert len(cells) == 20 * short_queries.CELLS
    for cell in cells:
        assert 1 <= cell["seqlen_q"] <= 4096 and 64 <= cell["seqlen_k"] <= 131_072
        assert cell["heads_q"] % cell["heads_kv"] == 0 and 1 <= cell["batch"] <= 64
        assert not cell["causal"] or cell["seqlen_q"] <= cell["seqlen_k"]
        assert traffic(cell) <= 4e9
    assert {cell["causal"] for cell in cells} == {True, False}
    assert {cell["seqlen_q"] < 33 for cell in cells} == {True, False}
    assert any(cell["heads_q"] > cell["heads_kv"] for cell in cells)
