"""The kernels of products of few rows of 16-bit x with a weight of int8 or int4 groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.quantize import product
from fkjit.ops.quantize.product import CONTRACT, DTYPES, SMS, illegal_dtypes
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register

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
GemvTile = tuple[int, ...]
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

# ------------------------------------------------------------------ gemv_sm90

# Warps that multiply, groups of 128 of k that a warp has of a tile, stages, blocks of an SM.
_SM90_TILES: tuple[GemvTile, ...] = ((16, 2, 2, 1), (8, 2, 3, 2))
_LEAST_CODES = 1 << 25  # of a weight: with fewer the other kernel is as fast or faster
_SM90_BATCH = 4  # tiles whose sums are added up together
_WHOLE = 1024  # what k is a multiple of


def _sm90_shared(params: Params) -> SharedLayout:
    """Stages of rows of codes and of scales, bases, sums, barriers."""
    warps, groups, stages, _ = params["tile"]
    row = warps * groups * (16 * product.BITS[params["code"]] + 2)
    return [
        *((f"stage {i}", _GEMV_ROWS * row) for i in range(stages)),
        ("bases", warps * groups * 64),
        ("sums", _SM90_BATCH * warps * GEMV_ROWS * _GEMV_ROWS * 4),
        ("mbarriers", 16 * stages),
    ]


def _sm90_values(params: Params) -> dict[str, Any]:
    warps, groups, stages, blocks = params["tile"]
    return {**_values(params), "tile_rows": _GEMV_ROWS, "warps": warps, "groups": groups,
            "stages": stages, "resident": blocks, "batch": _SM90_BATCH}  # fmt: skip


def _sm90_grid(params: Params, problem: Problem) -> Dim3:
    tiles = -(-problem["n"] * (2 if params["gate"] else 1) // _GEMV_ROWS)
    return (min(tiles, params["tile"][3] * problem.get("multiprocessors", SMS)), 1, 1)


def _sm90_maps(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Codes as [k / span, rows, 64 bytes], scales as [rows, k / 128]."""
    warps, groups, *_ = params["tile"]
    bits, half, part = product.BITS[params["code"]], _GEMV_ROWS // 2, warps * groups
    rows, row = problem["n"] * (2 if params["gate"] else 1), problem["k"] * bits // 8
    spans, scales = 16 * bits // 64, problem["k"] // _GROUP
    return {
        **product.arguments(params, problem, arrays),
        "codes_map": TensorMap(
            arrays["weight"], "u8", (64, rows, row // 64, 1), (row, 64, 0),
            (64, half, part * spans, 1), "none",
        ),
        "scales_map": TensorMap(
            arrays["scales"], params["dtype"], (scales, rows, 1, 1), (2 * scales, 0, 0),
            (part, half, 1, 1), "none",
        ),
    }  # fmt: skip


GEMV_SM90 = KernelSpec(
    **{**CONTRACT, "arguments": _sm90_maps},
    name="gemv_sm90",
    source="quantize/gemv_sm90.cu",
    entry="quantized_gemv_sm90",
    doc="up to eight rows of x on Hopper: codes by TMA, k a multiple of 1024",
    params=(
        *DTYPES, Param("code", ("int4",), "codes of the weight, with a scale for 128 of k"),
        *epilogue.PARAMS,
        Param("tile", _SM90_TILES, "warps, groups of a warp, stages, blocks of an SM",
              tunable=True),
    ),
    derive=_sm90_values,
    illegal=illegal_dtypes,
    features=lambda params: frozenset({"wgmma"}),
    shared_layout=_sm90_shared,
    block=lambda params: (32 * (params["tile"][0] + 1), 1, 1),
    grid=_sm90_grid,
    verification="fkjit.ops.quantize.cases_linear:GEMV_SM90",
)  # fmt: skip
GEMV_SM90_AHEAD = _ahead(
    GEMV_SM90,
    [
        {"code": "int4", "tile": (16, 2, 2, 1)},
        {"code": "int4", "tile": (8, 2, 3, 2), **_SWIGLU, **_FINE},
    ],
)

# ------------------------------------------------------------------ gemv_digits

# Warps, groups of 128 of k that a warp has of a tile, tiles under way.
_DIGITS_TILES: tuple[GemvTile, ...] = ((16, 2, 2), (16, 4, 2), (8, 2, 3))
_DIGITS_ROWS = 2  # of x, whose digits are columns of one product
_DIGITS_BATCH = {2: 4, 4: 2}  # tiles whose sums are added up together, by groups
_PAIR = 256  # what k is a multiple of: scales come in words


def _digits_shared(params: Params) -> SharedLayout:
    """Slots of codes and scales, bases, a row's digits, two batches of sums."""
    warps, groups, depth = params["tile"]
    codes = 256 * product.BITS[params["code"]]
    return [
        ("slots", warps * depth * groups * (codes + 32)),
        ("bases", warps * groups * 64),
        ("digits", warps * groups * 384),
        ("sums", 2 * _DIGITS_BATCH[groups] * warps * 512),
    ]


def _digits_values(params: Params) -> dict[str, Any]:
    warps, groups, depth = params["tile"]
    return {**_values(params), "warps": warps, "groups": groups, "depth": depth,
            "batch": _DIGITS_BATCH[groups]}  # fmt: skip


def _digits_illegal(params: Params) -> str | None:
    if params["tile"][1] > 2 and params["code"] == "int8":
        return "has room for two groups of a warp"
    return illegal_dtypes(params)


def _digits_grid(params: Params, problem: Problem) -> Dim3:
    tiles = -(-problem["n"] * (2 if params["gate"] else 1) // _GEMV_ROWS)
    return (min(tiles, problem.get("multiprocessors", SMS)), 1, 1)


GEMV_DIGITS = KernelSpec(
    **CONTRACT,
    name="gemv_digits",
    source="quantize/gemv_digits.cu",
    entry="quantized_gemv_digits",
    doc="one or two rows of x as whole numbers, multiplied with codes by int8 tensor cores",
    params=(
        *DTYPES, _CODE, *epilogue.PARAMS,
        Param("tile", _DIGITS_TILES, "warps, groups of a warp, tiles under way", tunable=True),
    ),
    derive=_digits_values,
    illegal=_digits_illegal,
    features=lambda params: _FEATURES | {"cp_async"},
    shared_bytes=lambda params: sum(size for _, size in _digits_shared(params)),
    block=lambda params: (32 * params["tile"][0], 1, 1),
    grid=_digits_grid,
    verification="fkjit.ops.quantize.cases_linear:GEMV_DIGITS",
)  # fmt: skip
GEMV_DIGITS_AHEAD = _ahead(
    GEMV_DIGITS,
    [
        {"code": "int4", "tile": (16, 2, 2), **_FINE},
        {"code": "int4", "tile": (16, 4, 2), **_SWIGLU},
        {"code": "int8", "tile": (16, 2, 2), **_FINE, "out_dtype": "fp16"},
        {"code": "int8", "tile": (8, 2, 3), **_SWIGLU},
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


def _of_sm90(problem: Problem) -> GemvTile | None:
    """Its tile, where it is faster on an H200 (bench/notes/quantize.md); None where it is not, or
    scales of a row are no whole chunks on boundaries."""
    codes = problem["n"] * (2 if problem["gate"] else 1) * problem["k"]
    whole = problem["k"] % _WHOLE == 0 and problem.get("aligned_scales", True)
    if problem["code"] != "int4" or not whole or codes < _LEAST_CODES:
        return None
    return _SM90_TILES[0] if problem["k"] >= 4096 else _SM90_TILES[1]


def _of_digits(problem: Problem) -> GemvTile | None:
    """Its tile, where it is the fastest on an H200 (bench/notes/quantize.md): of k that warps hold
    at once, or of so few outputs that x comes for each part of it once."""
    k, whole = problem["k"], problem.get("aligned_scales", True)
    if problem["m"] > _DIGITS_ROWS or k % _PAIR or not whole:
        return None
    if k <= 4096:
        return (8, 2, 3) if k <= 2048 else (16, 2, 2)
    outputs = problem["n"] * (2 if problem["gate"] else 1)
    once = k <= 8192 or outputs <= 2 * _GEMV_ROWS * problem.get("multiprocessors", SMS)
    return (16, 4, 2) if problem["code"] == "int4" and once else None


def choose(
    problem: Problem, hopper: bool = True, impl: str = "auto"
) -> tuple[KernelSpec, dict[str, Any], tuple[int, int]] | None:
    """The kernel, its parameters and scratch memory; None for more rows than these take."""
    names = ("dtype", "out_dtype", "code", "activation", "gate")
    fixed = {name: problem[name] for name in names}
    digits = _of_digits(problem) if hopper and impl not in (GEMV.name, GEMV_SM90.name) else None
    if digits is not None:
        spec = epilogue.kernel_for(GEMV_DIGITS, problem["activation"])
        return spec, {**fixed, "tile": digits}, (0, 0)
    if problem["m"] <= GEMV_ROWS:
        tile = _of_sm90(problem) if hopper and impl != GEMV.name else None
        if tile is not None:
            spec = epilogue.kernel_for(GEMV_SM90, problem["activation"])
            return spec, {**fixed, "tile": tile}, (0, 0)
        spec = epilogue.kernel_for(GEMV, problem["activation"])
        return spec, {**fixed, "tile": _gemv_tile(problem, hopper)}, (0, 0)
    if problem["m"] > SKINNY_ROWS:
        return None
    tokens = next(tokens for tokens in TOKENS if problem["m"] <= tokens)
    params = {**fixed, "tokens": tokens}
    spec = epilogue.kernel_for(SKINNY, problem["activation"])
    return spec, params, skinny_scratch(params, problem)
