"""Bugs planted in the norms' kernels show: as races, memory faults or wrong numbers."""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found, each_planted, outcome

K, D = "kernels_cu/norm/", "templates/"
SYNC = "__syncthreads();"
ROWS = {"kernel": "layer_norm.rows", "params": {"tile": (128, 2, 1), "vector": True}}
WARPS = {"kernel": "layer_norm.rows", "params": {"tile": (32, 4, 1), "vector": False}}
PIPELINED = {"kernel": "rms_norm.rows", "params": {"tile": (256, 2, 1), "vector": True}}
BACKWARD = {"kernel": "layer_norm.backward", "params": {"tile": (128, 2, 1), "vector": True}}
WIDE = {"kernel": "layer_norm.wide", "params": {"vector": False}}
SUM = {"kernel": "layer_norm.sum_parts"}

BUGS = (
    Bug("no barrier where warps meet", D + "norm/moments.cuh", SYNC, "", by="race", **ROWS),
    Bug("rows meet in one place", K + "rows.cu", "turn ^= 1", "turn ^= 0", by="race", **ROWS),
    Bug("no barrier of sums", D + "tile/warp_sums.cuh", SYNC, "", by="race", **BACKWARD),
    Bug("sums in one place", K + "backward.cu", "turn ^= 1", "turn ^= 0", by="race", **BACKWARD),
    Bug("no barrier of parts", K + "sum_partials.cu", SYNC, "", by="race", **SUM),
    Bug("a column too many", D + "tile/row.cuh",
        "WIDE ? 0 : k) < columns", "WIDE ? 0 : k) <= columns",
        by="memory", **WARPS),
    Bug("what is past the end counts", D + "norm/moments.cuh",
        "R::WIDE || R::has(thread, i, 2 * pair, columns) ? x.x - pilot : 0.f", "x.x - pilot",
        by="numbers", **WARPS),
    Bug("every warp has as many elements", D + "norm/moments.cuh", "counts[turn][warp] = n",
        "counts[turn][warp] = 512.f", by="numbers", **ROWS),
    Bug("the first row again", K + "rows.cu", "if (PIPELINED) s = next;", "", by="numbers",
        **PIPELINED),
    Bug("the mean of a part", K + "wide.cu", "if (CENTERED) n += ", "if (CENTERED) n = ",
        by="numbers", **WIDE),
    Bug("dx without its slope", K + "backward.cu", "- h1 * slope", "", by="numbers", **BACKWARD),
    Bug("dweight of the last row alone", K + "backward.cu", "dw.x + d.x * h0", "d.x * h0",
        by="numbers", **BACKWARD),
    Bug("a part left out", K + "sum_partials.cu", "part + i * WARPS < parts",
        "part + i * WARPS < parts - 1", by="numbers", **SUM),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS}))
def test_without_it_nothing_is_said(kernel, monkeypatch):
    bug = next(bug for bug in BUGS if bug.kernel == kernel)
    assert outcome(bug, monkeypatch, plant=False) == ""
