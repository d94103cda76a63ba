"""Bugs planted in the portable products' kernels show: as races, memory faults or wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.mutations import Bug
from tests.core.sampling import ONLY_WITH_EVERY_VARIANT
from tests.core.test_mutations import check_found, each_planted, outcome

MMA_CU, FMA_CU, D = "kernels_cu/gemm/mma.cu", "kernels_cu/gemm/fma.cu", "templates/gemm/"
SYNC = "__syncthreads();"
SMALL: dict[str, Any] = {"block": (64, 128, 64), "dtype": "bf16", "x_layout": "mk"}
MMA: dict[str, Any] = {
    "kernel": "linear.mma",
    "params": {**SMALL, "activation": "none", "gate": False, "weight_layout": "nk"},
}
GATED: dict[str, Any] = {
    "kernel": "linear.mma",
    "params": {**SMALL, "gate": True, "weight_layout": "nk"},
}
GATED_KN: dict[str, Any] = {
    "kernel": "linear.mma",
    "params": {**SMALL, "gate": True, "weight_layout": "kn"},
}
TRANSPOSED: dict[str, Any] = {
    "kernel": "linear.mma",
    "params": {"block": (64, 128, 64), "x_layout": "km", "weight_layout": "kn"},
}
STAGED: dict[str, Any] = {"kernel": "linear.mma", "params": {"aligned": False, "gate": False}}
FMA: dict[str, Any] = {
    "kernel": "linear.fma",
    "params": {"block": (64, 64, 16), "activation": "none"},
}
FMA_GATED: dict[str, Any] = {
    "kernel": "linear.fma",
    "params": {"block": (64, 64, 16), "gate": True, "weight_layout": "kn", "aligned": True},
}
FMA_GATED_NK: dict[str, Any] = {
    "kernel": "linear.fma",
    "params": {"block": (64, 64, 16), "gate": True, "weight_layout": "nk"},
}
TF32_KM: dict[str, Any] = {
    "kernel": "linear.mma",
    "params": {"dtype": "fp32", "block": (64, 64, 32), "x_layout": "km", "weight_layout": "kn"},
}
FMA_UNALIGNED: dict[str, Any] = {
    "kernel": "linear.fma",
    "params": {"block": (64, 64, 16), "x_layout": "km", "aligned": False},
}
FMA_SPLIT: dict[str, Any] = {
    "kernel": "linear.fma",
    "params": {"block": (64, 64, 16), "split": 2},
}
FMA_LONG: dict[str, Any] = {"kernel": "linear.fma", "params": {"long_k": True}}
LONG_K = {"m": 32, "n": 32, "k": 1064, "x_stride": 1064, "weight_stride": 1064, "out_stride": 32}
CUT = {"n": 84, "out_stride": 160, "residual_stride": 160}  # half a chunk of columns
CUT_K = {"k": 156, "x_stride": 168, "weight_stride": 168}  # NaN behind it

BUGS = (
    # -- mma: barriers, waits, the ring
    Bug("no barrier before the first tile", MMA_CU, SYNC, "", by="race", nth=1, **MMA),
    Bug("no barrier before the next tile", MMA_CU, SYNC, "", by="race", **MMA),
    Bug("a wait too lax by one", MMA_CU, "cp_async_wait<STAGES - 2>();",
        "cp_async_wait<STAGES - 1>();", by="race", **MMA),
    Bug("no wait for the first tile", MMA_CU, "cp_async_wait<STAGES - 2>();", "", by="race", nth=1,
        **MMA),
    Bug("a commit left out", MMA_CU, "cp_async_commit();", "", by="race", **MMA),
    Bug("a tile into the stage in use", MMA_CU, "filled = stage, stage = next;",
        "filled = next, stage = next;", by="race", **MMA),
    Bug("the next tile's first fragments too early", MMA_CU, "if (!LAST) {",
        "if (STEP == STEPS - 3) product.load(f[1], next, next + WEIGHT_OFFSET, 0);\n"
        "  if (!LAST) {", by="race", **MMA),
    # -- mma: places, orders
    Bug("the weight's tile begins inside x's", MMA_CU, "WEIGHT_OFFSET = XTile::BYTES + GUARD",
        "WEIGHT_OFFSET = XTile::BYTES + GUARD - 1024", by="memory", **MMA),
    Bug("the same fragments twice", MMA_CU, "Product::multiply(acc, f[STEP % 2]);",
        "Product::multiply(acc, f[0]);", by="numbers", **MMA),
    Bug("half a swizzle", "templates/tile/swizzle.cuh", "row & 7", "row & 3", by="banks", **MMA),
    Bug("the copy's swizzle is another", D + "operand_copy.cuh",
        "place = Tile::offset(row, column / CHUNK);",
        "place = row * Tile::ROW_BYTES + column / CHUNK * 16;", by="numbers", **MMA),
    Bug("a warp's first output is another's", D + "warp_product.cuh",
        "weight(lane, first_output)", "weight(lane, 0)", by="numbers", **MMA),
    Bug("not transposed", D + "warp_product.cuh", "ldmatrix_x4_trans(r,", "ldmatrix_x4(r,",
        by="numbers", **TRANSPOSED),
    Bug("a panel too few", D + "operand_copy.cuh", "i % Tile::PANELS * Tile::PANEL_COLUMNS;", "0;",
        by="numbers", **TRANSPOSED),
    # -- edges
    Bug("one row of x too many", D + "operand_copy.cuh", "anew(outer_left) - 1",
        "anew(outer_left)", by="memory", **MMA),
    Bug("k past the end of a row", D + "operand_copy.cuh", "max(min(elements, CHUNK), 0)",
        "(elements > 0 ? CHUNK : 0)", by="numbers", problem=CUT_K, **MMA),
    Bug("k past the last row", D + "operand_copy.cuh", "return ks > 0 ?", "return ks > -1 ?",
        by="memory", **TRANSPOSED),
    Bug("one row of out too many", D + "store_fragments.cuh", "y, lane, r < rows,",
        "y, lane, r <= rows,", by="memory", **MMA),
    Bug("padding columns are stored", D + "store_fragments.cuh",
        "if (there && aligned && left >= 8)", "if (there && left > 0)", by="numbers", problem=CUT,
        **MMA),
    # -- gate and up
    Bug("gate twice", D + "operand_copy.cuh", "(Order::is_up(first) ? up : 0)", "0", by="numbers",
        **GATED_KN),
    Bug("up's rows are gate's", D + "operand_copy.cuh", "(Order::is_up(row(i)) ? up : 0)", "0",
        by="numbers", **GATED),
    Bug("up's bias is gate's", D + "pairs.cuh", "bias + n + column", "bias + column", by="numbers",
        **GATED),
    # -- by way of registers
    Bug("no barrier between staged tiles", D + "tile_walk.cuh", SYNC, "", by="race", nth=1,
        **STAGED),
    Bug("no barrier before the first staged tile", D + "tile_walk.cuh", SYNC, "", by="race",
        **STAGED),
    Bug("the next tile into the one in use", D + "tile_walk.cuh", "x.store(other, next_x)",
        "x.store(stage, next_x)", by="race", **STAGED),
    # -- fma
    Bug("no barrier in the ring", D + "tile_walk.cuh", SYNC, "", by="race", nth=2, **FMA),
    Bug("a wait too lax in the ring", D + "tile_walk.cuh", "cp_async_wait<STAGES - 2>();",
        "cp_async_wait<STAGES - 1>();", by="race", **FMA_GATED),
    Bug("the weight's floats begin inside x's", FMA_CU, "WEIGHT_OFFSET = XTile::BYTES + GUARD",
        "WEIGHT_OFFSET = XTile::BYTES + GUARD - 256", by="memory", **FMA),
    Bug("the next k's outputs too late", D + "thread_product.cuh",
        "weight.load(outputs[(k + 1) % 2], weight_tile, k + 1);", "", by="memory", **FMA),
    Bug("a product of the next k's row", D + "thread_product.cuh", "fmaf(rows[k % 2]",
        "fmaf(rows[(k + 1) % 2]", by="numbers", **FMA),
    Bug("the reader's swizzle is another", D + "thread_product.cuh", "turn = Tile::turn(k)",
        "turn = 0", by="numbers", **FMA),
    Bug("transposed without a swizzle", D + "float_tile.cuh", "return row / 4 % 4 * 2;",
        "return 0;", by="banks", **FMA),
    Bug("one row of floats of x too many", D + "transposing_copy.cuh", "outer_left - 1",
        "outer_left", by="memory", **FMA),
    Bug("k past the end of a row of floats", D + "transposing_copy.cuh", "row(i), left);",
        "row(i), 4);", by="numbers", problem=CUT_K, **FMA),
    Bug("up's floats are gate's", D + "transposing_copy.cuh",
        "(Order::is_up(first) ? outers : 0)", "0", by="numbers", **FMA_GATED_NK),
    Bug("the tile after the next", D + "transposing_copy.cuh", "store(tile, next);\n",
        "fetch(next, k_left), store(tile, next);\n", by="memory", **FMA),
    # -- tf32
    Bug("k in no order", D + "tf32_product.cuh", "(i & (3 - OUTER) ? 4 : 0)", "0", by="numbers",
        **TF32_KM),
    Bug("weights not transposed", D + "tf32_product.cuh", "? 1 : 2;", "? 1 : 1;", by="numbers",
        **TF32_KM),
    Bug("gate's floats twice", D + "operand_copy.cuh", "(Order::is_up(first) ? up : 0)", "0",
        by="numbers", **FMA_GATED),
    Bug("an element past the end", D + "operand_copy.cuh", "e < elements ? from + e : array, e <",
        "e <= elements ? from + e : array, e <=", by="memory", **FMA_UNALIGNED),
    # -- fma: k in parts, long runs
    Bug("both parts in one place", FMA_CU, "tile + blockIdx.y * PART", "tile", by="race",
        **FMA_SPLIT),
    Bug("no barrier before parts are published", FMA_CU, SYNC, "", by="race", **FMA_SPLIT),
    Bug("one counter for all tiles", FMA_CU, "counters + blockIdx.x", "counters", by="race",
        **FMA_SPLIT),
    Bug("every part begins at the first k", FMA_CU, "steps * blockIdx.y / SPLIT", "0", by="numbers",
        **FMA_SPLIT),
    Bug("totals left behind", FMA_CU, "if (IN_LONG_RUNS) long_totals.add_to(acc);", "",
        by="numbers", problem=LONG_K, **FMA_LONG),
    Bug("a run counted twice", FMA_CU, "for (float& sum : chunk_of(more, i)) sum = 0.f;", "",
        by="numbers", problem=LONG_K, **FMA_LONG),
    Bug("totals inside the ring", FMA_CU, "long_totals(ring + STAGES * STAGE_BYTES)",
        "long_totals(ring)", by="memory", problem=LONG_K, **FMA_LONG),
    Bug("one row of floats too many", FMA_CU, "if (r >= rows) continue;",
        "if (r > rows) continue;", by="memory", **FMA),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@ONLY_WITH_EVERY_VARIANT
@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS}))
def test_without_it_nothing_is_said(kernel, monkeypatch):
    runs = {f"{bug.params} {bug.problem}": bug for bug in BUGS if bug.kernel == kernel}
    for bug in runs.values():
        assert outcome(bug, monkeypatch, plant=False) == ""
