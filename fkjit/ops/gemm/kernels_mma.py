"""Portable products: tensor cores by mma.sync, 16-bit types, sm_75 and newer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.gemm import problem as shared
from fkjit.ops.gemm.problem import CONTRACT
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register

Block = tuple[int, int, int]  # rows, outputs, k
_GROUP_ROWS = 2048  # rows of x whose tiles are taken together


@dataclass(frozen=True)
class Tile:
    """How a block's tile is made."""

    warp: tuple[int, int]  # rows and outputs of a warp
    stages: int  # tiles of both operands in shared memory
    min_blocks: int = 1  # of an SM


TILES: dict[Block, Tile] = {
    (128, 256, 64): Tile((64, 64), 3),
    (256, 128, 64): Tile((64, 64), 3),
    (128, 256, 32): Tile((64, 64), 4),
    (256, 128, 32): Tile((64, 64), 4),
    (128, 128, 64): Tile((64, 64), 3, 2),
    (128, 128, 32): Tile((64, 64), 3, 2),
    (64, 128, 64): Tile((32, 64), 3, 2),
    (64, 64, 64): Tile((32, 32), 4, 3),
}
# Where the next tile waits in registers: few of them a thread.
STAGED_TILES: dict[Block, Tile] = {
    (128, 128, 32): Tile((64, 64), 2),
    (64, 64, 32): Tile((32, 32), 2, 2),
}
_BLOCKS = tuple(dict.fromkeys((*TILES, *STAGED_TILES)))


def _is_staged(params: Params) -> bool:
    """Whether tiles go through registers: without cp.async, or with rows it cannot copy."""
    return params["mma_k"] == 8 or not params["aligned"]


def _tile(params: Params) -> Tile:
    return (STAGED_TILES if _is_staged(params) else TILES)[params["block"]]


def _derive(params: Params) -> dict[str, Any]:
    tile, (block_m, block_n, block_k) = _tile(params), params["block"]
    return {
        "block_m": block_m, "block_n": block_n, "block_k": block_k,
        "warp_m": tile.warp[0], "warp_n": tile.warp[1],
        "stages": tile.stages, "min_blocks": tile.min_blocks, "group_rows": _GROUP_ROWS,
        "x_k_major": params["x_layout"] == "mk", "weight_k_major": params["weight_layout"] == "nk",
        **epilogue.values(params["activation"]),
    }  # fmt: skip


def _illegal(params: Params) -> str | None:
    staged, block = _is_staged(params), params["block"]
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"has no out_dtype={params['out_dtype']} for {params['dtype']}"
    if params["mma_k"] == 8 and params["dtype"] != "fp16":
        return "takes fp16 only where a product is of 8 k (sm_75)"
    if block not in (STAGED_TILES if staged else TILES):
        return "is no tile that goes through registers" if staged else "is too small for a ring"
    if params["gate"] and _tile(params).warp[1] < 64:
        return "has warps of 32 outputs, too few to be gate and up"
    return None


def _features(params: Params) -> frozenset[str]:
    if params["mma_k"] == 8:
        return frozenset({"f16_mma", "ldmatrix"})
    return frozenset({"bf16_mma", "ldmatrix", "cp_async"})


def _shared(params: Params) -> SharedLayout:
    block_m, block_n, block_k = params["block"]
    return [
        (f"{name} stage {stage}", 2 * rows * block_k)
        for stage in range(_tile(params).stages)
        for name, rows in (("x", block_m), ("weight", block_n))
    ]


def _threads(params: Params) -> Dim3:
    (block_m, block_n, _), (warp_m, warp_n) = params["block"], _tile(params).warp
    return (32 * (block_m // warp_m) * (block_n // warp_n), 1, 1)


def blocks_of(block: Block, gate: bool, m: int, n: int) -> int:
    """Tiles of an [m, n] output."""
    columns = block[1] // 2 if gate else block[1]
    return -(-m // block[0]) * -(-n // columns)


def _grid(params: Params, problem: Problem) -> Dim3:
    return (blocks_of(params["block"], params["gate"], problem["m"], problem["n"]), 1, 1)


PARAMS = (
    Param("dtype", ("bf16", "fp16"), "element type of x and weight"),
    Param("out_dtype", ("bf16", "fp16", "fp32"), "element type of out and residual"),
    Param("x_layout", ("mk", "km"), "how x lies: [m, k], or transposed"),
    Param("weight_layout", ("nk", "kn"), "how the weight lies: nn.Linear's [n, k], or [k, n]"),
    *epilogue.PARAMS,
    Param("aligned", (True, False), "rows of x, weight and out start on 16-byte boundaries"),
    Param("mma_k", (16, 8), "k of a product of the tensor cores: 8 is for sm_75"),
    Param("block", _BLOCKS, "rows of x, of weight, and k of a tile", tunable=True),
)

# Every legal variant; what is registered is fewer.
MMA_ALL = KernelSpec(
    **{
        **CONTRACT,
        "name": "mma",
        "source": "gemm/mma.cu",
        "entry": "linear_mma",
        "doc": "products on every GPU's tensor cores: mma.sync, cp.async ring; sm_75 and newer",
        "params": PARAMS,
        "derive": _derive,
        "illegal": _illegal,
        "features": _features,
        "superseded": lambda params: frozenset({"cp_async"} if params["mma_k"] == 8 else ()),
        "shared_layout": _shared,
        "block": _threads,
        "grid": _grid,
        "pdl": True,
        "verification": "fkjit.ops.gemm.cases_mma:MMA",
    }
)
