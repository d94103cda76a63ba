"""Bugs planted in the products' kernel for Hopper show: as races, faults or wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.mutations import Bug
from tests.core.sampling import ONLY_WITH_EVERY_VARIANT
from tests.core.test_mutations import check_found, each_planted, outcome

WGMMA_CU, D = "kernels_cu/gemm/wgmma.cu", "templates/gemm/sm90/"
CONSUME = D + "consume.cuh"
PLAIN: dict[str, Any] = {"gate": False, "activation": "none", "shares": False, "split": 1}


def _variant(**params: Any) -> dict[str, Any]:
    return {"kernel": "linear.wgmma", "params": {**PLAIN, **params}}


# Four stages, so that a block's tiles go round the ring.
WIDE = _variant(block=(128, 256), cluster=1, weight_layout="nk")
PAIRS = _variant(block=(128, 256), cluster=2, weight_layout="nk")
NARROW = _variant(block=(64, 48), cluster=1)
SPLIT = _variant(block=(64, 64), split=4)
SHARES = _variant(block=(128, 128), shares=True)
GATED = _variant(block=(64, 96), gate=True, activation="silu")
SWAPPED = _variant(block=(144, 128), schedule="swapped", split=2, activation="gelu_tanh")
PANELS = _variant(block=(128, 160), weight_layout="kn")
ADDED = _variant(block=(192, 96), residual=True, pre=True)
# A block whose consumers come to a second tile.
ADDED_AGAIN = _variant(
    block=(128, 256), residual=True, pre=True, gate=True, activation="silu", cluster=1
)
SWAPPED_KN = _variant(block=(144, 256), schedule="swapped", weight_layout="kn")
WAIT_FULL = "mbarrier_wait(stages.full(place.stage), place.parity);"
WAIT_EMPTY = "mbarrier_wait(stages.empty(place.stage), place.parity ^ 1);"

BUGS = (
    # -- the ring
    Bug("a stage is read before its bytes are there", CONSUME, WAIT_FULL, "", by="race", nth=1,
        **WIDE),
    Bug("a stage is filled while it is read", D + "produce.cuh", WAIT_EMPTY, "", by="race",
        **WIDE),
    Bug("a stage is released too early", CONSUME, "wgmma_wait<1>();", "wgmma_wait<2>();",
        by="race", **WIDE),
    Bug("too few warps release a stage", WGMMA_CU, "stages.begin(RELEASES, ",
        "stages.begin(RELEASES + 1, ", by="hang", **WIDE),
    Bug("one operand is waited for", "templates/tile/ring.cuh", "full(stage), arrivals);",
        "full(stage), 1);", by="barrier", **WIDE),
    Bug("no fence before products", CONSUME, "wgmma_fence();", "", by="wgmma", **WIDE),
    Bug("no turns", CONSUME, "turns.pass();", "", by="hang", **NARROW),
    # -- rows that are not there
    Bug("bytes of a whole tile are expected", WGMMA_CU, "rows * (BLOCK_K * 2)",
        "BLOCK_M * (BLOCK_K * 2)", by="barrier", **NARROW),
    Bug("a whole tile's box for the last rows", D + "operands.cuh", "if (asked == COUNT) {",
        "if (asked > 0) {", by="barrier", **NARROW),
    Bug("the last rows but a few", D + "operands.cuh", "ceil_div(left, GROUP)",
        "ceil_div(left - 7, GROUP)", by="numbers", problem={"m": 6}, **NARROW),
    Bug("rows that are not there are stored", D + "store.cuh", "if (half * 8 >= rows_left)",
        "if (false)", by="memory",
        **_variant(block=(128, 128), tma_store=False, weight_layout="kn")),
    Bug("the part of a panel is not loaded", D + "operands.cuh", "panel < ceil_div(COUNT, PANEL)",
        "panel < COUNT / PANEL", by="barrier", **PANELS),
    # -- gate and up, halves, parts
    Bug("gate twice", D + "weight_parts.cuh", "GATE ? n + column : column + PART",
        "column + 0 * PART", by="numbers", **GATED),
    Bug("up's bias is gate's", WGMMA_CU, "GATE ? n + column : column + BLOCK_N / 2",
        "column", by="numbers", **GATED),
    Bug("half of the weight to one block", D + "weight_parts.cuh",
        "second, high, k, expert,\n                                             ALL_BLOCKS",
        "second, high, k, expert, 0", by="barrier", **PAIRS),
    Bug("a block ends before the other", WGMMA_CU, "if (CLUSTER > 1) meet_cluster();", "",
        by="end", nth=1, **PAIRS),
    Bug("sums are read before they are there", D + "split_k.cuh",
        "meet_cluster();\n  if (rank > 0) return false;", "if (rank > 0) return false;",
        by="race", **SPLIT),
    Bug("a part's sums over the other's", D + "split_k.cuh", "((part - 1) * CONSUMERS",
        "(0 * (part - 1) * CONSUMERS", by="race", **SPLIT),
    Bug("a part is left out", D + "partials.cuh", "part < sharers.count; ++part",
        "part < sharers.count - 1; ++part", by="numbers", **SHARES),
    Bug("the counter before the sums", D + "partials.cuh",
        "named_barrier_wait_aligned<128>(barrier);\n    if (thread == 0)", "if (thread == 0)",
        by="race", **SHARES),
    # -- the way out
    Bug("bias is read before it is there", WGMMA_CU,
        "named_barrier_wait_aligned<WARPGROUP>(3 + consumer);", "", by="race", **NARROW),
    Bug("a box is filled while TMA reads it", D + "store.cuh",
        "if (lane == 0) bulk_wait_read<1>();", "", by="race", **WIDE),
    Bug("TMA reads what is not there yet", D + "store.cuh", "proxy_fence();\n  __syncwarp();",
        "__syncwarp();", by="race", **WIDE),
    # -- the residual
    Bug("the residual is not waited for", WGMMA_CU, "cp_async_wait<0>();", "", by="race", **ADDED),
    Bug("nor by the warp's other lanes", WGMMA_CU, "cp_async_wait<0>();\n        __syncwarp();",
        "cp_async_wait<0>();", by="race", **ADDED),
    Bug("it comes while TMA reads", WGMMA_CU, "if (own_lane == 0) bulk_wait_read();", "",
        by="race", **ADDED_AGAIN),
    Bug("sixteen columns of it for the next", D + "store.cuh", "residual[n / 2 % 2][i]",
        "residual[0][i]", by="numbers", **ADDED),
    Bug("rows of it that are not there", D + "residual.cuh", "row < rows ?", "row >= 0 ?",
        by="memory", **ADDED),
    Bug("half of its columns twice", D + "store_transposed.cuh", "residual[n % 2 * 2 + 1]",
        "residual[n % 2 * 2]", by="numbers", **SWAPPED),
    # -- operands swapped
    Bug("columns are not transposed", D + "store_transposed.cuh",
        "transposed_8x8(pack2<Out>(low.x, low.y))", "pack2<Out>(low.x, low.y)",
        by="numbers", **SWAPPED),
    Bug("neighbours keep what they have", D + "store_transposed.cuh", "__shfl_xor_sync(FULL_MASK, "
        "odd ? own_low : own_high, 1)", "odd ? own_low : own_high", by="numbers", **SWAPPED_KN),
    Bug("the bias of eight columns before", D + "store_transposed.cuh",
        "bias_of_column(bias, column + 8 + lane / 4, columns)", "bias_low", by="numbers",
        **SWAPPED),
    Bug("rows of out that are not there", D + "store_transposed.cuh", "if (at < rows)", "",
        by="memory", **SWAPPED_KN),
    Bug("sums of parts below one another", D + "split_k.cuh", "number % A_STAGE * BYTES",
        "0 * BYTES", by="race", **SWAPPED),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@ONLY_WITH_EVERY_VARIANT
@pytest.mark.parametrize("variant", [WIDE, SPLIT], ids=["wide", "split"])
def test_without_it_nothing_is_said(variant, monkeypatch):
    bug = next(bug for bug in BUGS if bug.params == variant["params"])
    assert outcome(bug, monkeypatch, plant=False) == ""
