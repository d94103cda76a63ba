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

# Warps, groups of 128 of k that a warp has of a tile, blocks of a multiprocessor.
GemvTile = tuple[int, int, int]
_GEMV_TILES: tuple[GemvTile, ...] = ((8, 2, 2), (8, 4, 2), (16, 2, 1))
_GEMV_ROWS, _BATCH = 16, 4  # of the weight, a tile's; tiles whose sums are added up together
_SLOT = _GEMV_ROWS * 128 // 8  # bytes of a warp's group, for each bit of a code


def _gemv_shared(params: Params) -> int:
    """Slots of codes, sums, and what raised codes give."""
    warps, groups, _ = params["tile"]
    sums, bases = _BATCH * GEMV_ROWS * (_GEMV_ROWS + 4) * 4, groups * 32
    return warps * (groups * _SLOT * product.BITS[params["code"]] + sums + bases)


def _gemv_values(params: Params) -> dict[str, Any]:
    warps, groups, blocks = params["tile"]
    return {**_values(params), "tile_rows": _GEMV_ROWS, "warps": warps, "groups": groups,
            "resident": blocks, "batch": _BATCH}  # fmt: skip


def _gemv_grid(params: Params, problem: Problem) -> Dim3:
    tiles = -(-problem["n"] * (2 if params["gate"] else 1) // _GEMV_ROWS)
    return (min(tiles, params["tile"][-1] * problem.get("multiprocessors", SMS)), 1, 1)


# All that a call may take.
GEMV = KernelSpec(
    **CONTRACT,
    name="gemv",
    source="quantize/gemv.cu",
    entry="quantized_gemv",
    doc="up to eight rows of x: codes streamed from memory into the registers they are used in",
    params=(
        *DTYPES, _CODE, *epilogue.PARAMS,
        Param("tile", _GEMV_TILES, "warps, groups of a warp, blocks of an SM",
              tunable=True),
    ),
    derive=_gemv_values,
    illegal=illegal_dtypes,
    features=lambda params: _FEATURES | {"cp_async"},
    shared_bytes=_gemv_shared,
    block=lambda params: (32 * params["tile"][0], 1, 1),
    grid=_gemv_grid,
    verification="fkjit.ops.quantize.cases_linear:GEMV",
)  # fmt: skip
GEMV_AHEAD = _ahead(
    GEMV,
    [
        {"code": "int4", "tile": (8, 4, 2)},
        {"code": "int4", "tile": (16, 2, 1), **_SWIGLU, **_FINE},
        {"code": "int8", "tile": (8, 2, 2)},
        {"code": "int8", "tile": (8, 4, 2), **_FINE, "out_dtype": "fp16"},
    ],
)

# ------------------------------------------------------------------ skinny

TOKENS = (16, 32, 64)  # what rows of x are padded to
_ROWS, _GROUP = 128, 128  # outputs of a block, k of a stage
_WARP_ROWS = 16  # of the weight
# By rows of x: parts of them, each with warps of its own; stages; blocks of a multiprocessor.
_SKINNY = {16: (1, 4, 2), 32: (1, 4, 2), 64: (2, 3, 1)}
_LEAST_GROUPS, _MOST_SPLIT = 4, 16  # of a block that shares a tile; blocks that share one


def _skinny_values(params: Params) -> dict[str, Any]:
    parts, depth, resident = _SKINNY[params["tokens"]]
    return {**_values(params), "warp_rows": _WARP_ROWS, "parts": parts, "depth": depth,
            "resident": resident}  # fmt: skip


def _skinny_shared(params: Params) -> int:
    """Stages of x and of codes, or sums, which come where those were."""
    tokens, (_, depth, _) = params["tokens"], _SKINNY[params["tokens"]]
    codes = _ROWS * _GROUP * product.BITS[params["code"]] // 8
    return max(depth * (tokens * _GROUP * 2 + codes), tokens * (_ROWS + 4) * 4)


def tiles_of(params: Params, problem: Problem) -> int:
    """Tiles of outputs."""
    return -(-problem["n"] * (2 if params["gate"] else 1) // _ROWS)


def split_of(params: Params, problem: Problem) -> int:
    """Blocks that share the k of a tile: as many as multiprocessors hold."""
    blocks = _SKINNY[params["tokens"]][-1] * problem.get("multiprocessors", SMS)
    most = -(-problem["k"] // _GROUP) // _LEAST_GROUPS
    return max(min(blocks // tiles_of(params, problem), most, _MOST_SPLIT), 1)


def skinny_scratch(params: Params, problem: Problem) -> tuple[int, int]:
    """(bytes of workspace, counters): of sums that blocks leave to one another."""
    tiles, split = tiles_of(params, problem), split_of(params, problem)
    return (0, 0) if split == 1 else (4 * tiles * split * params["tokens"] * _ROWS, tiles)


SKINNY = KernelSpec(
    **CONTRACT,
    name="skinny",
    source="quantize/skinny.cu",
    entry="quantized_skinny",
    doc="up to 64 rows of x: codes of the weight dequantized in registers, x in shared memory",
    params=(
        *DTYPES, _CODE, *epilogue.PARAMS,
        Param("tokens", TOKENS, "rows of x, padded"),
    ),
    derive=_skinny_values,
    illegal=illegal_dtypes,
    features=lambda params: _FEATURES | {"cp_async"},
    shared_bytes=_skinny_shared,
    block=lambda params: (256 * _SKINNY[params["tokens"]][0], 1, 1),
    grid=lambda params, problem: (tiles_of(params, problem), split_of(params, problem), 1),
    verification="fkjit.ops.quantize.cases_linear:SKINNY",
)  # fmt: skip
SKINNY_AHEAD = _ahead(
    SKINNY,
    [
        {"code": "int4", "tokens": 64},
        {"code": "int4", "tokens": 32, **_SWIGLU, **_FINE},
        {"code": "int8", "tokens": 16, **_FINE, "out_dtype": "fp16"},
    ],
)


def _gemv_tile(problem: Problem, roomy: bool) -> GemvTile:
    """A warp's x stays in registers where k is short enough; the fastest on an H200
    (bench/notes/quantize.md). `roomy`: as much as that one has of shared memory, and registers."""
    groups = -(-problem["k"] // _GROUP)
    if groups <= 16:
        return (8, 2, 2)
    return (16, 2, 1) if roomy else (8, 4, 2)


def choose(
    problem: Problem, roomy: bool = True
) -> tuple[KernelSpec, dict[str, Any], tuple[int, int]] | None:
    """The kernel, its parameters and scratch memory; None for more rows than these take."""
    names = ("dtype", "out_dtype", "code", "activation", "gate")
    fixed = {name: problem[name] for name in names}
    if problem["m"] <= GEMV_ROWS:
        spec = epilogue.kernel_for(GEMV, problem["activation"])
        return spec, {**fixed, "tile": _gemv_tile(problem, roomy)}, (0, 0)
    if problem["m"] > SKINNY_ROWS:
        return None
    tokens = next(tokens for tokens in TOKENS if problem["m"] <= tokens)
    params = {**fixed, "tokens": tokens}
    spec = epilogue.kernel_for(SKINNY, problem["activation"])
    return spec, params, skinny_scratch(params, problem)
