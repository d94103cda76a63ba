"""Bugs to plant in the library's kernels: one edit of one source file each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

K, D = "kernels_cu/attention/", "templates/"
SM90_HEADERS = D + "attention/sm90/"


@dataclass(frozen=True)
class Bug:
    """`old` -> `new` in a file (its `nth` occurrence), and where it has to show."""

    name: str
    file: str
    old: str
    new: str
    kernel: str
    by: str  # race, memory, banks, end: what the sanitizer must say; numbers: a wrong result
    nth: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    problem: dict[str, Any] = field(default_factory=dict)


SYNC = "__syncthreads();"
FLASH: dict[str, Any] = {"kernel": "attention.flash", "params": {"head_dim": 64, "block": 64}}
SM75: dict[str, Any] = {"kernel": "attention.flash_sm75", "params": {"head_dim": 64, "block": 32}}
FP32: dict[str, Any] = {"kernel": "attention.flash_fp32", "params": {"block": 32, "aligned": True}}
TILED: dict[str, Any] = {"kernel": "attention.tiled", "params": {"block": 32}}
SM90: dict[str, Any] = {
    "kernel": "attention.flash_sm90", "params": {"head_dim": 128, "block": (128, 64)},
}  # fmt: skip
SM90_256: dict[str, Any] = {  # one tile of Q
    "kernel": "attention.flash_sm90", "params": {"head_dim": 256, "block": (128, 80)},
}  # fmt: skip
NAIVE: dict[str, Any] = {"kernel": "attention.naive"}
NEGATIVE = {"softmax_scale": -0.125}
RAGGED = {"head_dim": 61, "head_dim_v": 59, "batch": 1, "heads_q": 1, "heads_kv": 1}
ONE_HEAD = {"batch": 1, "heads_q": 1, "heads_kv": 1}
ONE_TILE = {**ONE_HEAD, "seqlen_q": 7}

BUGS = (
    # -- flash: barriers, waits, the ring
    Bug("no barrier before K and V are read", K + "flash.cu", SYNC, "", by="race", nth=2, **FLASH),
    Bug("no barrier before Q is read", K + "flash.cu", SYNC, "", by="race", nth=1, **FLASH),
    Bug(
        "no barrier before Q's sign is turned", K + "flash.cu", SYNC, "", by="race",
        problem=NEGATIVE, **FLASH,
    ),
    Bug(
        "no wait for the tile", K + "flash.cu", "cp_async_wait<STAGES - 2>();", "", by="race",
        nth=1, **FLASH,
    ),
    Bug(
        "a wait too lax by one", K + "flash.cu", "cp_async_wait<STAGES - 2>();",
        "cp_async_wait<STAGES - 1>();", by="race", nth=1, **FLASH,
    ),
    Bug(
        "no wait before Q's sign is turned", K + "flash.cu", "cp_async_wait<0>();", "", by="race",
        problem=NEGATIVE, **FLASH,
    ),
    Bug(
        "a barrier before the wait", K + "flash.cu",
        "cp_async_wait<STAGES - 2>();\n    __syncthreads();\n    if (tile",
        "__syncthreads();\n    cp_async_wait<STAGES - 2>();\n    if (tile", by="race", **FLASH,
    ),
    Bug("a commit left out", K + "flash.cu", "cp_async_commit();", "", by="race", nth=1, **FLASH),
    Bug(
        "the next tile into the stage in use", K + "flash.cu",
        "const u32 stage = ring + (t % STAGES) * STAGE_BYTES;",
        "const u32 stage = ring + ((t + 1) % STAGES) * STAGE_BYTES;", by="race", **FLASH,
    ),
    Bug("no __syncwarp() before O is stored", K + "flash.cu", "__syncwarp();", "", by="race",
        **FLASH),
    # -- flash: places and bounds
    Bug(
        "the ring begins inside Q", K + "flash.cu", "ring = q_tile + QTile::BYTES + GUARD",
        "ring = q_tile + QTile::BYTES + GUARD - 128", by="memory", **FLASH,
    ),
    Bug(
        "V overlaps K", K + "flash.cu", "V_OFFSET = KTile::BYTES + GUARD",
        "V_OFFSET = KTile::BYTES + GUARD - 1024", by="memory", **FLASH,
    ),
    Bug(
        "one row too many is loaded", D + "tile/tile_copy.cuh", "Order::row(row) < rows_left ? min",
        "Order::row(row) <= rows_left ? min", by="memory", problem=ONE_HEAD, **FLASH,
    ),
    Bug(
        "one row too many is stored", D + "tile/tile_copy.cuh", "row >= rows_left || elements",
        "row > rows_left || elements", by="memory", problem=ONE_HEAD, **FLASH,
    ),
    Bug(
        "padding columns are loaded", D + "tile/tile_copy.cuh",
        "min(max(columns_left - column - chunk * 8, 0), 8) : 0", "8 : 0", by="memory",
        problem=ONE_HEAD | {"head_dim": 56, "head_dim_v": 56}, **FLASH,
    ),
    Bug(
        "padding columns are stored", D + "tile/tile_copy.cuh", "min(columns_left - column * 8, 8)",
        "8", by="memory", problem=ONE_HEAD | {"head_dim": 56, "head_dim_v": 56}, **FLASH,
    ),
    Bug(
        "one lse too many", D + "attention/mma.cuh", "row < rows_left", "row <= rows_left",
        by="memory", problem=ONE_HEAD, **FLASH,
    ),
    Bug(
        "the writer's swizzle only", D + "tile/tile_copy.cuh",
        "Tile::offset(row0 + pass * ROWS_A_PASS, chunk)",
        "((row0 + pass * ROWS_A_PASS) * Tile::ROW_BYTES + chunk * 16)", by="numbers", **FLASH,
    ),
    Bug("half a swizzle", D + "tile/swizzle.cuh", "row & 7", "row & 3", by="banks", **FLASH),
    Bug(
        "one tile is not masked", K + "flash.cu", "tile >= unmasked_tiles",
        "tile > unmasked_tiles", by="numbers", **FLASH,
    ),
    Bug(
        "O is not rescaled", K + "flash.cu", "scale_rows(acc, correction);", ";", by="numbers",
        **FLASH,
    ),
    # -- the Turing form
    Bug("no barrier before V is read", K + "flash_sm75.cu", SYNC, "", by="race", nth=1, **SM75),
    Bug("no barrier before the next K", K + "flash_sm75.cu", SYNC, "", by="race", nth=2, **SM75),
    Bug("no barrier before the first K", K + "flash_sm75.cu", SYNC, "", by="race", **SM75),
    Bug("no __syncwarp() before O is stored (Turing)", K + "flash_sm75.cu", "__syncwarp();", "",
        by="race", **SM75),
    Bug(
        "K is stored before every warp is done", K + "flash_sm75.cu",
        "if (PREFETCH) next_v.store(v_tile);", "if (PREFETCH) next_v.store(k_tile);", by="race",
        **SM75,
    ),
    # -- fp32
    Bug("no barrier before the first tile", K + "flash_fp32.cu", SYNC, "", by="race", **FP32),
    Bug("no barrier before P and V", K + "flash_fp32.cu", SYNC, "", by="race", nth=1, **FP32),
    Bug("no barrier after P and V", K + "flash_fp32.cu", SYNC, "", by="race", nth=2, **FP32),
    Bug(
        "P ends in V", K + "flash_fp32.cu", "p_tile = v_tile + V_FLOATS + GUARD",
        "p_tile = v_tile + V_FLOATS + GUARD - 4", by="memory", **FP32,
    ),
    Bug(
        "one row of O too many", K + "flash_fp32.cu", "row > last_row", "row > last_row + 1",
        by="memory", problem=ONE_HEAD, **FP32,
    ),
    Bug(
        "the next K too early", K + "flash_fp32.cu", "    fetch_v(tile);\n",
        "    fetch_v(tile);\n    if (tile + 1 < tiles) fetch_k(tile + 1);\n", by="race", **FP32,
    ),
    # -- tiled
    Bug("no barrier before the next tile", K + "tiled.cu", SYNC, "", by="race", **TILED),
    Bug("no barrier before K", K + "tiled.cu", SYNC, "", by="race", nth=1, **TILED),
    Bug("no barrier before V overwrites K", K + "tiled.cu", SYNC, "", by="race", nth=2, **TILED),
    Bug("no barrier before V", K + "tiled.cu", SYNC, "", by="race", nth=3, **TILED),
    Bug(
        "one column too many", K + "tiled.cu", "column < columns_left", "column <= columns_left",
        by="memory", problem=RAGGED, **TILED,
    ),
    Bug(
        "a row of P too far", K + "tiled.cu", "p_tile[(row0 + i) * BLOCK_K",
        "p_tile[(row0 + i + 1) * BLOCK_K", by="memory", **TILED,
    ),
    # -- Hopper
    Bug("K is read without a wait", K + "flash_sm90.cu",
        "mbarrier_wait(barriers.k_full(k_place.stage), k_place.parity);", "", by="race",
        **SM90),
    Bug("V is read without a wait", K + "flash_sm90.cu",
        "mbarrier_wait(barriers.v_full(v_place.stage), v_place.parity);", "", by="race", **SM90),
    Bug("Q is read without a wait", K + "flash_sm90.cu",
        "mbarrier_wait(barriers.q_full(q_place.stage), q_place.parity);", "", by="race", **SM90),
    Bug("K is overwritten without a wait", SM90_HEADERS + "producer.cuh",
        "mbarrier_wait(barriers.k_empty(k_place.stage), k_place.parity ^ 1);\n          if (asks)",
        "if (asks)", by="barrier", **SM90),
    Bug("the wrong phase of an empty stage", SM90_HEADERS + "producer.cuh",
        "v_empty(place.stage), place.parity ^ 1);\n      tma_load_rows",
        "v_empty(place.stage), place.parity);\n      tma_load_rows", by="hang", **SM90),
    Bug("a stage that is never given back", K + "flash_sm90.cu",
        "release(v_place, barriers.v_empty(v_place.stage), signals);", "v_place.advance();",
        by="hang", **SM90),
    Bug("one consumer's arrivals suffice", SM90_HEADERS + "work.cuh",
        "mbarrier_init(k_empty(stage), CONSUMERS * 4);",
        "mbarrier_init(k_empty(stage), 4);", by="race", **SM90),
    Bug("too many arrivals expected", SM90_HEADERS + "work.cuh",
        "mbarrier_init(v_empty(stage), CONSUMERS * 4);",
        "mbarrier_init(v_empty(stage), CONSUMERS * 4 + 1);", by="hang", **SM90),
    Bug("a barrier that nobody makes", SM90_HEADERS + "work.cuh",
        "mbarrier_init(q_full(stage), tails ? WARP_SIZE : 1);", "", by="barrier", **SM90),
    Bug("too few bytes expected", D + "tile/tma_tile.cuh",
        "mbarrier_expect(barrier, Tile::BYTES);",
        "mbarrier_expect(barrier, Tile::BYTES / 2);", by="barrier", **SM90),
    Bug("too many bytes expected", D + "tile/tma_tile.cuh",
        "mbarrier_expect(barrier, Tile::BYTES);",
        "mbarrier_expect(barrier, Tile::BYTES + 16);", by="hang", **SM90),
    Bug("S is read without a wait", K + "flash_sm90.cu", "wgmma_wait<1>();", "", by="wgmma",
        **SM90),
    Bug("a wait too lax for O", K + "flash_sm90.cu",
        "wgmma_wait<0>();  // so that", "wgmma_wait<1>();  // so that", by="wgmma", **SM90),
    Bug("no fence before the last product", K + "flash_sm90.cu", "wgmma_fence();", "",
        by="wgmma", nth=2, **SM90),
    Bug("a wait too lax for the last product", K + "flash_sm90.cu",
        "wgmma_wait<AHEAD ? 1 : 0>();", "wgmma_wait<2>();", by="wgmma", **SM90),
    Bug("no proxy fence before O is stored", SM90_HEADERS + "epilogue.cuh",
        "proxy_fence();", "", by="race",
        **SM90),
    Bug("the next Q over an O that is being stored", SM90_HEADERS + "epilogue.cuh",
        "bulk_wait_read();", "",
        by="race", problem={"batch": 4}, **SM90),
    Bug("the next Q over one whose scores are not made yet", K + "flash_sm90.cu",
        "if (!AHEAD) release_q(q_stage);", "", by="hang", problem={"batch": 3}, **SM90_256),
    Bug("one tile of Q, and nobody waits until it is free", SM90_HEADERS + "producer.cuh",
        "mbarrier_wait(barriers.q_empty(q_place.stage), q_place.parity ^ 1);", "", by="race",
        problem={"batch": 3}, **SM90_256),
    Bug("rows of the output that are not there", D + "attention/store_sums.cuh",
        "return row < rows_left;", "return true;", by="memory", problem=ONE_HEAD, **SM90_256),
    Bug("a block that ends before its O is stored", K + "flash_sm90.cu",
        "if (signals) bulk_wait_read();", "", by="end", **SM90),
    Bug("a turn that is never given", K + "flash_sm90.cu",
        "        pingpong.pass();\n        wgmma_wait<1>();", "        wgmma_wait<1>();", by="hang",
        problem=ONE_TILE, **SM90),
    Bug("V's panels too close", K + "flash_sm90.cu",
        "wgmma_tile(shared + Rings::V, Rings::VTile::PANEL_BYTES)",
        "wgmma_tile(shared + Rings::V, Rings::VTile::PANEL_BYTES / 2)", by="numbers", **SM90),
    Bug("O where the next Q is", K + "flash_sm90.cu", "q_stage * Rings::Q_STAGE + warp_row",
        "(q_stage ^ 1) * Rings::Q_STAGE + warp_row", by="race", **SM90),
    Bug("no __syncwarp() before O is stored (Hopper)", SM90_HEADERS + "epilogue.cuh",
        "proxy_fence();\n  __syncwarp();", "proxy_fence();", by="race", **SM90),
    # -- naive, and the reductions
    Bug("one query too many", K + "naive.cu", "if (row >= seqlen_q) return;",
        "if (row > seqlen_q) return;", by="memory", problem=ONE_HEAD, **NAIVE),
    Bug("one key too many", K + "naive.cu", "key < keys; ++key) row_max",
        "key <= keys; ++key) row_max", by="memory", problem=ONE_HEAD, **NAIVE),
    Bug("half a reduction", D + "tile/reduce.cuh", "distance > 0;", "distance > 1;", by="numbers",
        **NAIVE),
)  # fmt: skip
