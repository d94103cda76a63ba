"""Bugs planted in what grouped products add to linear's kernels show."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.mutations import Bug
from tests.core.sampling import ONLY_WITH_EVERY_VARIANT
from tests.core.test_mutations import check_found, each_planted, outcome

GROUPS, WGMMA_CU = "templates/gemm/groups.cuh", "kernels_cu/gemm/wgmma.cu"
MMA_CU = "kernels_cu/gemm/mma.cu"
STREAM_CU, PRODUCT = "kernels_cu/gemm/expert_stream.cu", "templates/gemm/expert_product.cuh"
WALK, SYNC = "templates/gemm/expert_walk.cuh", "__syncthreads();"


def _variant(kernel: str, **params: Any) -> dict[str, Any]:
    return {"kernel": f"grouped_linear.{kernel}", "params": params}


NARROW = _variant("wgmma", groups="ROWS", block=(64, 64), tma_store=True)
HALF = _variant("wgmma", groups="ROWS", block=(128, 128), weight_layout="nk", gather=False)
DEPTH = _variant("wgmma", groups="DEPTH", block=(128, 256))
MMA_ROWS = _variant("mma", groups="ROWS", gate=True, aligned=True)
MASKED = _variant("wgmma", groups="MASKED", block=(128, 128))
MMA_MASKED = _variant("mma", groups="MASKED", block=(64, 128, 64))
MMA_DEPTH = _variant("mma", groups="DEPTH", aligned=True)
STREAM = _variant("stream", gather=True, rows=8, tile=(16, 8, 4), activation="silu")
STREAM_MORE = _variant("stream", gather=True, rows=32)
GATHER = _variant("wgmma", groups="ROWS", gather=True, block=(128, 128))
GATHERED = "templates/gemm/sm90/gathered_rows.cuh"
FP8 = _variant("fp8_wgmma", gate=True, block=(128, 128))
CODED = _variant("fp8_wgmma_blocks", coded=True)
BLOCKS = _variant("fp8_wgmma_blocks", coded=False, block=(128, 256))
ROWS_OF_CODES = "templates/quantize/coded_rows.cuh"
FP8_CU, BLOCKS_CU = "kernels_cu/quantize/wgmma.cu", "kernels_cu/quantize/wgmma_blocks.cu"
RAGGED_CU, OF_RAGGED = "kernels_cu/gemm/ragged.cu", "templates/gemm/sm90/ragged_"
RAGGED = _variant("ragged_wgmma", codes=False, activation="silu", block=(160, 128))
RAGGED_SHARED = _variant("ragged_wgmma", dtype="fp16", block=(304, 128))
RAGGED_KEPT = _variant("ragged_wgmma", pre=True, gate=True)
RAGGED_KN = _variant("ragged_wgmma", weight_layout="kn")
RAGGED_CODES = _variant("ragged_wgmma", codes=True, activation="silu", block=(304, 128))

BUGS = (
    Bug("all rows by the first expert", GROUPS, "tile.column, base + lane, end}",
        "tile.column, 0, end}", by="numbers", **NARROW),
    Bug("an expert's tiles begin with the first's", GROUPS,
        "number - __shfl_sync(FULL_MASK, first, lane)", "number", by="race", **NARROW),
    Bug("rows that are not there", GROUPS, "round_up(offsets[expert], LEAST_ROWS)", "capacity",
        by="numbers", **MMA_MASKED),
    Bug("experts without room between them", GROUPS, "min(expert, experts) * capacity",
        "min(expert, experts) * LEAST_ROWS", by="numbers", **MASKED),
    Bug("counts past the last expert's", GROUPS, "if (expert < experts) row_end", "row_end",
        by="memory", **MMA_MASKED),
    Bug("the bias of the first expert", GROUPS, "array + expert * size", "array", by="numbers",
        **NARROW),
    Bug("rows of the next expert", WGMMA_CU, "if (row >= tile.end) continue;",
        "if (row >= m) continue;", by="race", **HALF),
    Bug("an empty expert is multiplied", WGMMA_CU,
        "if (depth.count == 0) return {whole.tile, whole.steps * SLICES, 1};",
        "if (depth.count == 0) return {whole.tile, 0, 1};", by="numbers", **DEPTH),
    Bug("k of the next expert", GROUPS, "depth(number, 0).count % 64 / 16", "0", by="numbers",
        **DEPTH),
    Bug("outputs over the first one", WGMMA_CU, "Order::OF_K ? tile.expert * m : 0", "0",
        by="race", **DEPTH),
    Bug("k of all experts", GROUPS, "offsets[own + 1] - offsets[own]", "k", by="memory",
        **MMA_DEPTH),
    Bug("the weight of the first expert", MMA_CU, "order.own(weight, tile.expert, weights)",
        "weight", by="numbers", **MMA_ROWS),
    Bug("every part by the first expert", STREAM_CU, "weight + part.expert * (outputs * k)",
        "weight", by="numbers", **STREAM),
    Bug("warps' sums are read without a barrier", STREAM_CU, SYNC, "", by="race", **STREAM),
    Bug("sums of the next part over those of this one", STREAM_CU, SYNC, "", by="race", nth=1,
        **STREAM),
    Bug("the next part's bias", STREAM_CU, "bias + part.expert", "bias + next.expert",
        by="numbers", **STREAM),
    Bug("rows that an expert has not", WALK, "offsets[expert] + counts[expert]",
        "offsets[expert + 1]", by="memory", **STREAM),
    Bug("rows that are more than a part takes", WALK, "row += ROWS", "row += block_size",
        by="numbers", **STREAM),
    Bug("sums of the part before", PRODUCT, "[i % 4] = 0.f;", "[i % 4] += 0.f;", by="numbers",
        **STREAM),
    Bug("rows of choices", PRODUCT, "choices[place] / top_k", "choices[place]", by="memory",
        **STREAM),
    Bug("the last eight rows", PRODUCT, "if (i * 8 < rows) Weight::multiply",
        "if (i * 8 + 8 <= rows) Weight::multiply", by="numbers", **STREAM_MORE),
    Bug("a stage before it has landed", GATHERED, "cp_async_wait<LATER>();",
        "cp_async_wait<LATER + 1>();", by="race", **GATHER),
    Bug("a stage without a fence", GATHERED, "proxy_fence();", "", by="race", **GATHER),
    Bug("a stage that is in use", GATHERED,
        "mbarrier_wait(stages.empty(place.stage), place.parity ^ 1);", "", by="race",
        problem={"multiprocessors": 1}, **GATHER),
    Bug("the last stages are not announced", GATHERED,
        "for (; unannounced > 0; --unannounced) announce<0>();", "", by="hang", **GATHER),
    Bug("rows of nobody", GATHERED, "found < tokens ? found : -1", "found", by="memory",
        **GATHER),
    Bug("another lane's token", GATHERED, "i % WARP_SIZE + row", "i % WARP_SIZE", by="numbers",
        **GATHER),
    Bug("k behind its end", GATHERED, "inside && token >= 0", "token >= 0", by="memory",
        **GATHER),
    Bug("codes of the first expert", FP8_CU, "k, column, expert, 0);", "k, column, 0, 0);",
        by="numbers", **FP8),
    Bug("scales of the first expert", FP8_CU, "Order::own(scales, tile.expert,",
        "Order::own(scales, 0,", by="numbers", **FP8),
    Bug("a stage that a consumer without rows keeps", FP8_CU,
        "ring.release(place.stage, lane);\n        }", "}", by="hang",
        problem={"multiprocessors": 1}, **FP8),
    Bug("a scale of one lane's columns", ROWS_OF_CODES, "lanes_most<4>(most)", "most",
        by="numbers", **CODED),
    Bug("codes of the other eight", ROWS_OF_CODES, "0x7632", "0x5410", by="numbers", **CODED),
    Bug("a scale in the place of another's", ROWS_OF_CODES, "+ column / WIDTH] = scale",
        "] = scale", by="race", **CODED),
    Bug("gate and up by one scale", BLOCKS_CU, "(WIDE ? time : 0)", "0", by="numbers", **CODED),
    Bug("both halves of the weight's tile are its first", BLOCKS_CU,
        "WIDE ? time * (128 * BLOCK_K / 16) : 0", "0", by="numbers", **CODED),
    Bug("blocks: codes of the first expert", BLOCKS_CU, "k, column, expert, 0);",
        "k, column, 0, 0);", by="numbers", **BLOCKS),
    Bug("blocks: scales of the first expert", BLOCKS_CU, "Order::own(scales, tile.expert,",
        "Order::own(scales, 0,", by="numbers", **BLOCKS),
    Bug("blocks: a stage that a consumer without rows keeps", BLOCKS_CU,
        "          at.release(lane);\n          at.advance();\n        }",
        "at.advance();\n        }", by="hang", problem={"multiprocessors": 1}, **BLOCKS),
    Bug("ragged: every tile begins with the expert", f"{OF_RAGGED}tiles.cuh",
        "(whole.row - begin) / MOST * each", "0", by="race", **RAGGED),
    Bug("ragged: rows of the next expert", f"{OF_RAGGED}tiles.cuh",
        "min(tile.row + each, whole.end)", "tile.row + each", by="race",
        **RAGGED_SHARED),
    Bug("ragged: the second half's columns are the first's", f"{OF_RAGGED}products.cuh",
        "COLUMNS * STEP_BYTES >> 4", "0", by="numbers", **RAGGED_SHARED),
    Bug("ragged: the second 64 rows are the first", f"{OF_RAGGED}products.cuh",
        "APART ? PANEL_OF_64 >> 4 : 0", "0", by="numbers", **RAGGED),
    Bug("ragged: a stage is let go too early", f"{OF_RAGGED}products.cuh",
        "wgmma_wait<1>();", "", by="race", problem={"multiprocessors": 1}, **RAGGED),
    Bug("ragged: the weight of the first expert", RAGGED_CU, "k, column, tile.expert, 0);",
        "k, column, 0, 0);", by="numbers", **RAGGED_SHARED),
    Bug("ragged: the last boxes of x", RAGGED_CU, "for (; row < rows;", "for (; row + 16 < rows;",
        by="hang", **RAGGED),
    Bug("ragged: up by gate's scale", f"{OF_RAGGED}store.cuh", "b.x * (by.x * scales.y)",
        "b.x * (by.x * scales.x)", by="numbers", **RAGGED_CODES),
    Bug("ragged: both rows by the first's scale", f"{OF_RAGGED}store.cuh",
        "a.y * (by.y * scales.x)", "a.y * (by.x * scales.x)", by="numbers", **RAGGED_CODES),
    Bug("ragged: blocks are not transposed", f"{OF_RAGGED}store.cuh", "stmatrix_x4_trans(at",
        "stmatrix_x4(at", by="numbers", **RAGGED),
    Bug("ragged: what is kept of up over gate's", f"{OF_RAGGED}store.cuh",
        "to.pre_stride, to.half, to.rows", "to.pre_stride, 8, to.rows", by="race", **RAGGED_KEPT),
    Bug("ragged: the second panel is the first", RAGGED_CU, "column + 64, k,", "column, k,",
        by="numbers", **RAGGED_KN),
    Bug("x behind its end", PRODUCT, "own.row[i] >= 0 && at < k", "own.row[i] >= 0", by="memory",
        **STREAM),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@ONLY_WITH_EVERY_VARIANT
@pytest.mark.parametrize("variant", [HALF, DEPTH], ids=["rows", "depth"])
def test_without_it_nothing_is_said(variant, monkeypatch):
    bug = next(bug for bug in BUGS if bug.params == variant["params"])
    assert outcome(bug, monkeypatch, plant=False) == ""
