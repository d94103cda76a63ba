"""Bugs planted in the kernels that route to experts show: races, memory faults, wrong numbers."""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found, each_planted, outcome

K, D = "kernels_cu/moe/", "templates/"
SYNC = "__syncthreads();"
ROUTE = {"kernel": "moe_route.lanes", "params": {"dtype": "fp32", "tile": (8, 8)}}
GROUPED = {**ROUTE, "params": {**ROUTE["params"], "plain": False}}
BOTH = {"kernel": "moe_route_and_regroup.grid", "params": {"dtype": "fp32", "tile": (8, 8)}}
SORT = {"kernel": "moe_regroup.grid", "params": {"ids": "int32", "tile": (512, 512)}}
FEW = {"kernel": "moe_regroup.grid", "params": {"ids": "int32", "tile": (512, 64)}}
STAGED = {"kernel": "moe_route_and_regroup.grid", "params": {"dtype": "fp32", "tile": (2, 32)}}
WIDE = {"kernel": "moe_regroup.grid", "params": {"ids": "int32", "tile": (256, 1024)}}
BACK = {"kernel": "moe_combine.backward", "params": {"dtype": "fp32", "vector": True}}
COMBINE = {"kernel": "moe_combine.rows", "params": {"dtype": "fp32", "vector": False}}
PERMUTE = {"kernel": "moe_permute.rows", "params": {"dtype": "fp32", "vector": True}}

BUGS = (
    Bug("sums of the earlier groups are left out", D + "tile/grid_sums.cuh", "first + i < group()",
        "false", by="race", **SORT),
    Bug("later blocks of the group are told nothing", D + "tile/grid_sums.cuh",
        "count + numbers.x", "count + (turn > 0 ? 0 : numbers.x)", by="race", **SORT),
    Bug("no barrier before the scan of warps", D + "moe/groups.cuh", SYNC, "", by="race", **SORT),
    Bug("no barrier behind offsets", D + "moe/groups.cuh", SYNC, "", nth=1, by="race", **BOTH),
    Bug("no barrier of chunks", D + "moe/groups.cuh", SYNC, "", nth=1, by="race", **WIDE),
    Bug("no barrier before the order", D + "moe/groups.cuh", SYNC, "", nth=2, by="race", **BOTH),
    Bug("no barrier behind the order", D + "moe/groups.cuh", SYNC, "", nth=3, by="race", **FEW),
    Bug("one warp too many before", D + "moe/groups.cuh", "first >= 4 ? ~0u", "first >= 3 ? ~0u",
        by="race", **FEW),
    Bug("bits are read before all are there", D + "moe/groups.cuh", "__syncwarp();", "", nth=3,
        by="race", **BOTH),
    Bug("rows are read before they are there", K + "route_and_regroup.cu", "cp_async_wait<0>();",
        "", by="race", **STAGED),
    Bug("rows go while they are read", K + "route_and_regroup.cu", "__syncwarp();", "", nth=1,
        by="race", **STAGED),
    Bug("a warp's lanes count at once", D + "moe/groups.cuh", "__syncwarp();", "", nth=1, by="race",
        **SORT),
    Bug("a warp counts before it has read", D + "moe/groups.cuh", "__syncwarp();", "", nth=2,
        by="race", **SORT),
    Bug("ids are read before they are written", K + "route_and_regroup.cu", "__syncwarp();", "",
        nth=2, by="race", **BOTH),
    Bug("ranks backwards", D + "moe/groups.cuh", "alike & ((1u << lane) - 1)",
        "alike & ~((2u << lane) - 1)", by="numbers", **SORT),
    Bug("no blocks before", D + "moe/groups.cuh", "from.y + from.x + rank", "from.y + rank",
        by="race", **SORT),
    Bug("one more than fits", D + "moe/groups.cuh", "rank < how.capacity ?",
        "rank <= how.capacity ?", by="race", **SORT),
    Bug("a group's third expert alone", D + "moe/route.cuh", "sum + score(most) * taken",
        "score(most) * taken", by="numbers", problem={"group_topk": 3}, **GROUPED),
    Bug("ties to the higher expert", D + "moe/route.cuh", "1 << (PART - 1 - i)", "1 << i",
        by="numbers", **ROUTE),
    Bug("NaN is chosen", D + "moe/route.cuh", "fmaxf(chunk[j].get(i), least)", "chunk[j].get(i)",
        by="numbers", **ROUTE),
    Bug("sums in one place", K + "combine_backward.cu", "warps[k % 2]", "warps[0]", by="race",
        **BACK),
    Bug("dropped choices count", K + "combine.cu", "place >= 0 && ", "", by="memory",
        **COMBINE),
    Bug("nobody's rows are left", K + "permute.cu", "clear_rows<elem_t, VECTOR>", "(void)sizeof",
        by="numbers", **PERMUTE),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS}))
def test_without_it_nothing_is_said(kernel, monkeypatch):
    bug = next(bug for bug in BUGS if bug.kernel == kernel)
    assert outcome(bug, monkeypatch, plant=False) == ""
