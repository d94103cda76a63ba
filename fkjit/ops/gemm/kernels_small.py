"""The kernels of products with few rows of x: what they are compiled for, and which tile takes a
problem."""

from __future__ import annotations

from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.gemm.problem import CONTRACT
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, register

GEMV_ROWS = 8  # of x, at most

Tile = tuple[int, int, int]  # outputs of a block, its warps, spans of a warp under way
# By layout of the weight and bytes of its elements, fastest first.
_GEMV_TILES: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("nk", 2): ((16, 8, 4), (8, 8, 4), (8, 16, 4)),
    ("kn", 2): ((64, 8, 2), (64, 16, 1)),
    ("nk", 4): ((16, 8, 2), (8, 8, 4)),
    ("kn", 4): ((128, 8, 2),),
}
_PRODUCTS = {
    ("nk", 2): "RowsMma", ("kn", 2): "ColumnsMma", ("nk", 4): "RowsFma", ("kn", 4): "ColumnsFma",
}  # fmt: skip


def _kind(params: Params) -> tuple[str, int]:
    return params["weight_layout"], 4 if params["dtype"] == "fp32" else 2


def _gemv_values(params: Params) -> dict[str, Any]:
    outputs, warps, unroll = params["tile"]
    return {
        **epilogue.values(params["activation"]),
        **{"product": _PRODUCTS[_kind(params)], "outputs": outputs},
        **{"warps": warps, "unroll": unroll, "resident": max(1, 16 // warps)},
    }


def _gemv_illegal(params: Params) -> str | None:
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"out_dtype={params['out_dtype']} is neither {params['dtype']} nor fp32"
    if params["tile"] not in _GEMV_TILES[_kind(params)]:
        return "is never the fastest tile"
    return None


def _gemv_features(params: Params) -> frozenset[str]:
    return frozenset(() if params["dtype"] == "fp32" else {"bf16_mma"})


def _gemv_grid(params: Params, problem: Problem) -> Dim3:
    return (-(-problem["n"] // params["tile"][0]), 1, 1)


GEMV = register(
    KernelSpec(
        **{
            **CONTRACT,
            "name": "gemv",
            "source": "gemm/gemv.cu",
            "entry": "linear_gemv",
            "doc": "up to eight rows of x: the weight streamed once, summed in registers",
            "params": (
                Param("dtype", ("bf16", "fp16", "fp32"), "element type of x and weight"),
                Param("out_dtype", ("bf16", "fp16", "fp32"), "element type of out"),
                Param("weight_layout", ("nk", "kn"), "[n, k] as nn.Linear's, or [k, n]"),
                *epilogue.PARAMS,
                Param("static_weight", (False, True), "nothing writes the weight: load it early"),
                Param(
                    "tile", tuple(dict.fromkeys(t for ts in _GEMV_TILES.values() for t in ts)),
                    "outputs of a block, its warps, spans of a warp under way", tunable=True,
                ),
            ),
            "derive": _gemv_values,
            "illegal": _gemv_illegal,
            "features": _gemv_features,
            "pdl": True,
            "block": lambda params: (32 * params["tile"][1], 1, 1),
            "grid": _gemv_grid,
            "verification": "fkjit.ops.gemm.cases_small:GEMV",
        }
    )
)  # fmt: skip

SKINNY_ROWS = 128  # of x, at most
_TOKENS = (16, 32, 64, 128)  # what rows of x are padded to

SkinnyTile = tuple[int, int, int]  # rows of the weight, k of a stage, stages
_SKINNY_TILES: tuple[SkinnyTile, ...] = (
    (128, 64, 4), (64, 64, 4), (128, 64, 6), (64, 64, 8), (64, 128, 4), (128, 128, 3),
)  # fmt: skip


def _skinny_bytes(params: Params) -> int:
    rows, block_k, stages = params["tile"]
    return 2 * stages * block_k * (rows + params["tokens"])


def _skinny_values(params: Params) -> dict[str, Any]:
    rows, block_k, stages = params["tile"]
    return {
        **epilogue.values(params["activation"]),
        "rows_of_k": params["weight_layout"] == "nk",
        **{"rows": rows, "block_k": block_k, "stages": stages},
        "resident": 1 if params["tokens"] * rows > 64 * 128 else 2,
    }


def _skinny_illegal(params: Params) -> str | None:
    rows, block_k, stages = params["tile"]
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"out_dtype={params['out_dtype']} is neither {params['dtype']} nor fp32"
    if params["gate"] and params["weight_layout"] == "kn" and rows < 128:
        return "has no panels of its own for gate and up"
    if params["gate"] and params["weight_layout"] == "nk" and block_k != 64:
        return "has gate and up in one panel of a tile"
    if 8 * params["tokens"] * (rows + 4) > _skinny_bytes(params):
        return "has no room for its sums"
    return None


def _skinny_grid(params: Params, problem: Problem) -> Dim3:
    outputs = params["tile"][0] // (2 if params["gate"] else 1)
    return (-(-problem["n"] // outputs), problem["split"], 1)


def skinny_memory(params: Params, problem: Problem) -> tuple[int, int]:
    """(bytes of workspace, counters) of a problem."""
    tiles, split, _ = _skinny_grid(params, problem)
    if split == 1:
        return 0, 0
    return 4 * tiles * split * problem["m"] * params["tile"][0], tiles


SKINNY = register(
    KernelSpec(
        **{
            **CONTRACT,
            "name": "skinny",
            "source": "gemm/skinny.cu",
            "entry": "linear_skinny",
            "doc": "few rows of x: operands swapped, k shared out over the grid",
            "params": (
                Param("dtype", ("bf16", "fp16"), "element type of x and weight"),
                Param("out_dtype", ("bf16", "fp16", "fp32"), "element type of out"),
                Param("weight_layout", ("nk", "kn"), "[n, k] as nn.Linear's, or [k, n]"),
                *epilogue.PARAMS,
                Param("aligned", (True, False), "rows start on 16-byte boundaries"),
                Param("static_weight", (False, True), "nothing writes the weight: load it early"),
                Param("tokens", _TOKENS, "rows of x, padded to this"),
                Param(
                    "tile", _SKINNY_TILES, "rows of the weight, k of a stage, stages",
                    tunable=True,
                ),
            ),
            "derive": _skinny_values,
            "illegal": _skinny_illegal,
            "features": lambda params: frozenset({"cp_async", "ldmatrix", "bf16_mma"}),
            "shared_bytes": _skinny_bytes,
            "pdl": True,
            "block": lambda params: (256, 1, 1),
            "grid": _skinny_grid,
            "verification": "fkjit.ops.gemm.cases_small:SKINNY",
        }
    )
)  # fmt: skip
