"""The kernels of products with few rows of x: what they are compiled for, and how k is shared out.

Both take x with contiguous rows.
"""

from __future__ import annotations

from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.gemm.problem import CONTRACT
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, register

_LAYOUTS = Param("weight_layout", ("nk", "kn"), "nk: as nn.Linear's")


def _dtypes(*names: str) -> tuple[Param, Param]:
    return (
        Param("dtype", names, "element type of x, weight, bias and pre"),
        Param("out_dtype", ("bf16", "fp16", "fp32"), "element type of residual and out"),
    )


def _illegal_dtypes(params: Params) -> str | None:
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"is not {params['dtype']} or fp32"
    return None


def _is_plain(params: Params) -> bool:
    return (params["activation"], params["gate"]) == epilogue.SHIPPED[0]


def _outputs(params: Params) -> int:
    """Columns of out that a block has."""
    return params["tile"][0] // (2 if params["gate"] else 1)


# ------------------------------------------------------------------ gemv

GEMV_ROWS = 8  # of x, at most

GemvTile = tuple[int, int, int]  # rows of the weight, warps, spans of a warp under way
# By layout of the weight and bytes of its elements: the product, its span of k, its tiles.
_GEMV: dict[tuple[str, int], tuple[str, int, tuple[GemvTile, ...]]] = {
    ("nk", 2): ("RowsMma", 32, ((16, 8, 4), (8, 16, 4), (32, 8, 2), (24, 8, 4))),
    ("kn", 2): ("ColumnsMma", 32, ((64, 16, 1),)),
    ("nk", 4): ("RowsFma", 32, ((16, 8, 2), (8, 8, 4))),
    ("kn", 4): ("ColumnsFma", 4, ((128, 8, 2),)),
}
_GEMV_TILES = tuple(dict.fromkeys(tile for *_, tiles in _GEMV.values() for tile in tiles))


def _gemv(params: Params) -> tuple[str, int, tuple[GemvTile, ...]]:
    return _GEMV[params["weight_layout"], 4 if params["dtype"] == "fp32" else 2]


def gemv_span(params: Params) -> int:
    """k that a warp takes at a time."""
    return _gemv(params)[1]


def _gemv_values(params: Params) -> dict[str, Any]:
    rows, warps, unroll = params["tile"]
    return {
        **epilogue.values(params["activation"]),
        **{"product": f"{_gemv(params)[0]}<elem_t, TILE, HALVES>", "tile_rows": rows},
        **{"warps": warps, "unroll": unroll, "resident": 16 // warps},
        "rows_of_k": params["weight_layout"] == "nk",
    }


def _gemv_illegal(params: Params) -> str | None:
    if params["tile"] not in _gemv(params)[2]:
        return "is never the fastest tile"
    return _illegal_dtypes(params)


def _gemv_shown(params: Params) -> str | None:
    """What the types and the epilogue add does not depend on one another."""
    usual = (params["dtype"], params["out_dtype"]) in (("bf16", "bf16"), ("fp32", "fp32"))
    special = (not usual) + (not _is_plain(params))
    if special > 1 or (special and params["tile"] != _gemv(params)[2][0]):
        return "is compiled when called"
    return _gemv_illegal(params)


# All that a call may take.
GEMV = KernelSpec(
    name="gemv",
    source="gemm/gemv.cu",
    entry="linear_gemv",
    doc="up to eight rows of x: the weight streamed from memory into the registers it is used in",
    params=(
        *_dtypes("bf16", "fp16", "fp32"), _LAYOUTS, *epilogue.PARAMS,
        Param(
            "tile", _GEMV_TILES, "rows of the weight, warps, spans of a warp under way",
            tunable=True,
        ),
    ),
    derive=_gemv_values,
    illegal=_gemv_illegal,
    features=lambda params: frozenset(() if params["dtype"] == "fp32" else {"bf16_mma"}),
    pdl=True,
    block=lambda params: (32 * params["tile"][1], 1, 1),
    grid=lambda params, problem: (-(-problem["n"] // _outputs(params)), 1, 1),
    verification="fkjit.ops.gemm.cases_small:GEMV",
    **CONTRACT,
)  # fmt: skip


# ------------------------------------------------------------------ skinny

TOKENS = (16, 32, 64, 128)  # what rows of x are padded to
_WARPS = 8
_HALF_SM = 113 * 1024  # bytes of shared memory
_LEAST_STEPS = 8  # of k, of a block that shares a tile with others
_SMS = 132  # where there is no GPU to ask

SkinnyTile = tuple[int, int, int]  # rows of the weight, k of a stage, stages
# By what rows of x are padded to. Most have as many stages as two blocks of an SM have room for.
_SKINNY: dict[int, tuple[SkinnyTile, ...]] = {
    16: ((64, 128, 4), (32, 256, 4), (64, 64, 4), (128, 64, 4)),
    32: ((64, 128, 4), (32, 256, 3), (64, 64, 4), (128, 64, 4)),
    64: ((64, 128, 3), (64, 64, 4), (128, 64, 4)),
    128: ((64, 64, 4),),
}
_SKINNY_TILES = tuple(dict.fromkeys(tile for tiles in _SKINNY.values() for tile in tiles))


def _skinny_bytes(params: Params) -> int:
    rows, block_k, stages = params["tile"]
    return 2 * stages * block_k * (rows + params["tokens"])


def resident(params: Params) -> int:
    """Blocks that share an SM."""
    few = params["tokens"] * params["tile"][0] <= 64 * 128 and _skinny_bytes(params) <= _HALF_SM
    return 2 if few else 1


def _skinny_values(params: Params) -> dict[str, Any]:
    rows, block_k, stages = params["tile"]
    return {
        **epilogue.values(params["activation"]),
        "rows_of_k": params["weight_layout"] == "nk",
        **{"rows": rows, "block_k": block_k, "stages": stages, "resident": resident(params)},
        "cluster": params["cluster"],
    }


def _skinny_illegal(params: Params) -> str | None:
    rows, kn, gate = params["tile"][0], params["weight_layout"] == "kn", params["gate"]
    least = 128 if kn and gate else 64 if kn or gate else 32
    if rows < least:
        return "has no panels of its own for gate and up, or of rows of k"
    if params["tile"] not in _SKINNY[params["tokens"]] or rows > max(least, 64):
        return "is never the fastest tile"
    return _illegal_dtypes(params)


def _skinny_shown(params: Params) -> str | None:
    """One tile of all, and all tiles of one."""
    usual = (params["dtype"], params["out_dtype"]) == ("bf16", "bf16")
    special = (not usual) + (not _is_plain(params))
    special += (not params["aligned"]) + (params["cluster"] > 1)
    if special > 1 or (special and (params["tile"] != _SKINNY[64][0] or params["tokens"] != 64)):
        return "is compiled when called"
    return _skinny_illegal(params)


def split(params: Params, problem: Problem) -> int:
    """Blocks that share a tile: a cluster, or as many as run at the same time, each with k enough.
    What a problem says goes before that."""
    given = params["cluster"] if params["cluster"] > 1 else problem.get("split")
    if given:
        return given
    tiles = -(-problem["n"] // _outputs(params))
    steps = -(-problem["k"] // params["tile"][1])
    slots = problem.get("multiprocessors", _SMS) * resident(params)
    return max(1, min(slots // tiles, steps // _LEAST_STEPS))


def _skinny_grid(params: Params, problem: Problem) -> Dim3:
    return (-(-problem["n"] // _outputs(params)), split(params, problem), 1)


def skinny_scratch(params: Params, problem: Problem) -> tuple[int, int]:
    """(bytes of workspace, counters) of a problem."""
    tiles, parts, _ = _skinny_grid(params, problem)
    if parts == 1 or params["cluster"] > 1:
        return 0, 0
    return 4 * tiles * parts * params["tokens"] * params["tile"][0], tiles


def _skinny_features(params: Params) -> frozenset[str]:
    needed = {"cp_async", "ldmatrix", "bf16_mma"}
    return frozenset(needed | {"cluster"} if params["cluster"] > 1 else needed)


SKINNY = KernelSpec(
    name="skinny",
    source="gemm/skinny.cu",
    entry="linear_skinny",
    doc="few rows of x: tensor cores with the operands swapped, k shared out over the grid",
    params=(
        *_dtypes("bf16", "fp16"), _LAYOUTS, *epilogue.PARAMS,
        Param("aligned", (True, False), "rows of x and weight are whole 16-byte pieces"),
        Param("tokens", TOKENS, "what rows of x are padded to"),
        Param("tile", _SKINNY_TILES, "rows of the weight, k of a stage, stages", tunable=True),
        Param(
            "cluster", (1, 2, 4, 8), "blocks of a cluster that share the k of a tile; 1: by memory",
            tunable=True,
        ),
    ),
    derive=_skinny_values,
    illegal=_skinny_illegal,
    features=_skinny_features,
    shared_bytes=_skinny_bytes,
    pdl=True,
    block=lambda params: (32 * _WARPS, 1, 1),
    grid=_skinny_grid,
    verification="fkjit.ops.gemm.cases_small:SKINNY",
    **CONTRACT,
)  # fmt: skip

register(epilogue.shipped(GEMV, _gemv_shown))
register(epilogue.shipped(SKINNY, _skinny_shown))
