"""The kernels of products of few rows of 16-bit x with a weight of int8 or int4 groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.quantize import product
from fkjit.ops.quantize.product import CONTRACT, DTYPES, SMS, illegal_dtypes
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, register

GEMV_ROWS, SKINNY_ROWS = 8, 64  # of x, at most
_CODE = Param("code", ("int4", "int8"), "codes of the weight, with a scale for 128 of k")
_FEATURES = frozenset({"bf16_mma"})
_PLAIN = {"dtype": "bf16", "out_dtype": "bf16", "activation": "none", "gate": False}
_SWIGLU = {"activation": "silu", "gate": True}
_FINE = {"dtype": "fp16", "out_dtype": "fp32"}


def _values(params: Params) -> dict[str, Any]:
    kind = {"int4": "Int4Weights", "int8": "Int8Weights"}[params["code"]]
    return {**epilogue.values(params["activation"]), "weights": f"{kind}<elem_t>"}


def _ahead(spec: KernelSpec, shown: list[Mapping[str, Any]]) -> KernelSpec:
    return register(replace(spec, ahead=[{**_PLAIN, **more} for more in shown]))


# ------------------------------------------------------------------ gemv

# Rows of the weight, warps, groups of 128 of k that a warp has of a tile, groups of it under way,
# blocks of a multiprocessor.
GemvTile = tuple[int, int, int, int, int, int]
_GEMV_TILES: tuple[GemvTile, ...] = tuple(
    (rows, warps, groups, slots, blocks, prefetch)
    for rows in (16, 32) for warps in (4, 8, 16) for groups in (1, 2, 4) for slots in (2, 4, 8)
    for blocks in (1, 2, 3, 4, 6) for prefetch in (0, 32, 64, 128)
    if slots % groups == 0 and warps * blocks <= 24
)  # fmt: skip


_BATCH = 4  # tiles whose sums are added up together


def _slot_bytes(params: Params) -> int:
    """Of a warp's codes of a group."""
    return params["tile"][0] * 16 * product.BITS[params["code"]]


def _gemv_shared(params: Params) -> int:
    rows, warps, groups, slots, *_ = params["tile"]
    sums, bases = _BATCH * GEMV_ROWS * (rows + 4) * 4, groups * 32
    return warps * (slots * _slot_bytes(params) + sums + bases)


def _gemv_values(params: Params) -> dict[str, Any]:
    rows, warps, groups, slots, blocks, prefetch = params["tile"]
    return {**_values(params), "prefetch": prefetch << 10, "tile_rows": rows, "warps": warps, "groups": groups,
            "slots": slots, "resident": max(blocks, 16 // warps), "batch": _BATCH}  # fmt: skip


def _gemv_grid(params: Params, problem: Problem) -> Dim3:
    rows, blocks = params["tile"][0], params["tile"][4]
    tiles = -(-problem["n"] * (2 if params["gate"] else 1) // rows)
    return (min(tiles, blocks * problem.get("multiprocessors", SMS)), 1, 1)


# All that a call may take.
GEMV = KernelSpec(
    **CONTRACT,
    name="gemv",
    source="quantize/gemv.cu",
    entry="quantized_gemv",
    doc="up to eight rows of x: codes streamed from memory into the registers they are used in",
    params=(
        *DTYPES, _CODE, *epilogue.PARAMS,
        Param("tile", _GEMV_TILES, "rows of the weight, warps, groups of a warp, those under way",
              tunable=True),
    ),
    derive=_gemv_values,
    illegal=illegal_dtypes,
    features=lambda params: _FEATURES | {"cp_async"},
    shared_bytes=_gemv_shared,
    block=lambda params: (32 * params["tile"][1], 1, 1),
    grid=_gemv_grid,
    verification="fkjit.ops.quantize.cases_linear:GEMV",
)  # fmt: skip
GEMV_AHEAD = _ahead(
    GEMV,
    [
        {"code": "int4", "tile": (16, 16, 2, 4, 1, 32)},
        {"code": "int4", "tile": (16, 16, 1, 4, 1, 32), **_SWIGLU, **_FINE},
        {"code": "int8", "tile": (16, 8, 4, 4, 2, 32)},
        {"code": "int8", "tile": (32, 8, 2, 2, 1, 32), **_FINE, "out_dtype": "fp16"},
    ],
)

_OLD_TILES = ((16, 8, 3), (16, 4, 3), (32, 8, 2))
GEMV_OLD = replace(
    GEMV, name="gemv_old", source="quantize/gemv_old.cu",
    params=(*DTYPES, _CODE, *epilogue.PARAMS, Param("tile", _OLD_TILES, "old")),
    derive=lambda p: {**_values(p), "tile_rows": p["tile"][0], "warps": p["tile"][1],
                      "unroll": p["tile"][2], "resident": 16 // p["tile"][1]},
    shared_bytes=lambda p: 0,
    grid=lambda params, problem: (-(-problem["n"] * (2 if params["gate"] else 1) // params["tile"][0]), 1, 1),
)

# ------------------------------------------------------------------ skinny

TOKENS = (16, 32, 64)  # what rows of x are padded to
_GROUP = 128  # k of a stage
# Rows of the weight of a warp, parts of the rows of x, stages, blocks of a multiprocessor.
SkinnyTile = tuple[int, int, int, int]
_SKINNY_TILES: tuple[SkinnyTile, ...] = tuple(
    (rows, parts, depth, resident)
    for rows in (16, 32) for parts in (1, 2) for depth in (2, 3, 4, 6) for resident in (1, 2, 3)
)
_LEAST_GROUPS, _MOST_SPLIT = 4, 16  # of a block that shares a tile; blocks that share one


def _skinny_values(params: Params) -> dict[str, Any]:
    rows, parts, depth, resident = params["tile"]
    return {**_values(params), "warp_rows": rows, "parts": parts, "depth": depth,
            "resident": resident}  # fmt: skip


def _rows(params: Params) -> int:
    """Outputs of the weight of a block."""
    return 8 * params["tile"][0]


def _skinny_shared(params: Params) -> int:
    """Stages of x and of codes, or sums, which come where those were."""
    tokens, rows, (_, _, depth, _) = params["tokens"], _rows(params), params["tile"]
    codes = rows * _GROUP * product.BITS[params["code"]] // 8
    return max(depth * (tokens * _GROUP * 2 + codes), tokens * (rows + 4) * 4)


def tiles_of(params: Params, problem: Problem) -> int:
    """Tiles of outputs."""
    return -(-problem["n"] * (2 if params["gate"] else 1) // _rows(params))


def split_of(params: Params, problem: Problem) -> int:
    """Blocks that share the k of a tile: as many as multiprocessors hold."""
    blocks = params["tile"][-1] * problem.get("multiprocessors", SMS)
    most = -(-problem["k"] // _GROUP) // _LEAST_GROUPS
    return max(min(blocks // tiles_of(params, problem), most, _MOST_SPLIT), 1)


def skinny_scratch(params: Params, problem: Problem) -> tuple[int, int]:
    """(bytes of workspace, counters): of sums that blocks leave to one another."""
    tiles, split = tiles_of(params, problem), split_of(params, problem)
    return (0, 0) if split == 1 else (4 * tiles * split * params["tokens"] * _rows(params), tiles)


SKINNY = KernelSpec(
    **CONTRACT,
    name="skinny",
    source="quantize/skinny.cu",
    entry="quantized_skinny",
    doc="up to 64 rows of x: codes of the weight dequantized in registers, x in shared memory",
    params=(
        *DTYPES, _CODE, *epilogue.PARAMS,
        Param("tokens", TOKENS, "rows of x, padded"),
        Param("tile", _SKINNY_TILES, "rows of a warp, stages, blocks of a multiprocessor",
              tunable=True),
    ),
    derive=_skinny_values,
    illegal=illegal_dtypes,
    features=lambda params: _FEATURES | {"cp_async"},
    shared_bytes=_skinny_shared,
    block=lambda params: (256 * params["tile"][1], 1, 1),
    grid=lambda params, problem: (tiles_of(params, problem), split_of(params, problem), 1),
    verification="fkjit.ops.quantize.cases_linear:SKINNY",
)  # fmt: skip
SKINNY_AHEAD = _ahead(
    SKINNY,
    [
        {"code": "int4", "tokens": 64, "tile": (32, 1, 2, 1)},
        {"code": "int4", "tokens": 32, "tile": (16, 2, 2, 1), **_SWIGLU, **_FINE},
        {"code": "int8", "tokens": 16, "tile": (16, 1, 4, 2), **_FINE, "out_dtype": "fp16"},
    ],
)


def _gemv_tile(problem: Problem) -> GemvTile:
    """As many groups a warp as it takes to hold all of x, up to four."""
    warps = 16 if problem["code"] == "int4" else 8
    groups = -(-problem["k"] // _GROUP)
    return 16, warps, next((g for g in (1, 2) if g * warps >= groups), 4), 4, 16 // warps, 32


def _skinny_tile(problem: Problem, tokens: int) -> SkinnyTile:
    return 16, 1, 3 if problem["code"] == "int4" else 2, 1


def choose(problem: Problem) -> tuple[KernelSpec, dict[str, Any], tuple[int, int]] | None:
    """The kernel, its parameters and scratch memory; None for more rows than these take."""
    names = ("dtype", "out_dtype", "code", "activation", "gate")
    fixed = {name: problem[name] for name in names}
    if problem["m"] <= GEMV_ROWS:
        spec = epilogue.kernel_for(GEMV, problem["activation"])
        return spec, {**fixed, "tile": _gemv_tile(problem)}, (0, 0)
    if problem["m"] > SKINNY_ROWS:
        return None
    tokens = next(tokens for tokens in TOKENS if problem["m"] <= tokens)
    params = {**fixed, "tokens": tokens, "tile": _skinny_tile(problem, tokens)}
    spec = epilogue.kernel_for(SKINNY, problem["activation"])
    return spec, params, skinny_scratch(params, problem)
