"""Portable products: on tensor cores (mma.sync) of 16-bit types and tf32, of exact fp32 in FMAs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.gemm.problem import CONTRACT
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register

Block = tuple[int, int, int]  # rows, outputs, k
_GROUP_ROWS = 2048  # rows of x whose tiles are taken together


@dataclass(frozen=True)
class Tile:
    """How a block's tile is made."""

    warp: tuple[int, int]  # rows and outputs of a warp
    stages: int  # tiles of both operands in shared memory
    min_blocks: int = 1  # of an SM


# ------------------------------------------------------------------ mma: tensor cores

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
    (64, 128, 32): Tile((32, 64), 2),
    (64, 64, 32): Tile((32, 32), 2, 2),
}
# Of fp32, rounded to tf32: twice the bytes.
TF32_TILES: dict[Block, Tile] = {
    (128, 256, 32): Tile((64, 64), 3),
    (256, 128, 32): Tile((64, 64), 3),
    (128, 128, 32): Tile((64, 64), 3, 2),
    (64, 64, 32): Tile((32, 32), 3, 3),
}
TF32_STAGED_TILES: dict[Block, Tile] = {(64, 64, 32): Tile((32, 32), 2, 2)}
_TF32_PAD = 8  # floats between rows of a [k, outer] tile: no bank conflicts
_BLOCKS = tuple(dict.fromkeys((*TILES, *STAGED_TILES)))


def _is_staged(params: Params) -> bool:
    """Whether tiles go through registers: without cp.async, or with rows it cannot copy."""
    return params["mma_k"] == 8 or not params["aligned"]


def _tiles(params: Params) -> dict[Block, Tile]:
    if params["dtype"] == "fp32":
        return TF32_STAGED_TILES if _is_staged(params) else TF32_TILES
    return STAGED_TILES if _is_staged(params) else TILES


def _tile(params: Params) -> Tile:
    return _tiles(params)[params["block"]]


def _values(tile: Tile, params: Params) -> dict[str, Any]:
    """What both templates name."""
    block_m, block_n, block_k = params["block"]
    return {
        "block_m": block_m, "block_n": block_n, "block_k": block_k,
        "warp_m": tile.warp[0], "warp_n": tile.warp[1],
        "stages": tile.stages, "min_blocks": tile.min_blocks, "group_rows": _GROUP_ROWS,
        "x_k_major": params["x_layout"] == "mk", "weight_k_major": params["weight_layout"] == "nk",
        **epilogue.values(params["activation"]), "groups": "NONE",
    }  # fmt: skip


def _illegal(params: Params) -> str | None:
    staged, block = _is_staged(params), params["block"]
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"has no out_dtype={params['out_dtype']} for {params['dtype']}"
    if params["mma_k"] == 8 and params["dtype"] != "fp16":
        return "takes fp16 only where a product is of 8 k (sm_75)"
    if block not in _tiles(params):
        kind = "goes through registers" if staged else "fills a ring"
        return f"is no tile of {params['dtype']} that {kind}"
    if params["gate"] and _tile(params).warp[1] < 64:
        return "has warps of 32 outputs, too few to be gate and up"
    return None


def _features(params: Params) -> frozenset[str]:
    if params["mma_k"] == 8:
        return frozenset({"f16_mma", "ldmatrix"})
    if params["dtype"] == "fp32":
        return frozenset({"tf32_mma", "ldmatrix", "cp_async"})
    return frozenset({"bf16_mma", "ldmatrix", "cp_async"})


def _stages(params: Params, tile: Tile, itemsize: int, pads: Mapping[str, int]) -> SharedLayout:
    """`pads`: by an operand's layout, what is added to the rows or outputs of its tile."""
    block_m, block_n, block_k = params["block"]
    x = block_m + pads.get(params["x_layout"], 0)
    weight = block_n + pads.get(params["weight_layout"], 0)
    return [
        (f"{name} stage {stage}", itemsize * outer * block_k)
        for stage in range(tile.stages)
        for name, outer in (("x", x), ("weight", weight))
    ]


def _mma_stages(params: Params) -> SharedLayout:
    if params["dtype"] == "fp32":
        return _stages(params, _tile(params), 4, {"km": _TF32_PAD, "kn": _TF32_PAD})
    return _stages(params, _tile(params), 2, {})


def _threads(tile: Tile, block: Block) -> Dim3:
    return (32 * (block[0] // tile.warp[0]) * (block[1] // tile.warp[1]), 1, 1)


def blocks_of(block: Block, gate: bool, m: int, n: int) -> int:
    """Tiles of an [m, n] output."""
    columns = block[1] // 2 if gate else block[1]
    return -(-m // block[0]) * -(-n // columns)


def _grid(params: Params, problem: Problem) -> Dim3:
    return (blocks_of(params["block"], params["gate"], problem["m"], problem["n"]), 1, 1)


_X_LAYOUT = Param("x_layout", ("mk", "km"), "how x lies: [m, k], or transposed")
_WEIGHT_LAYOUT = Param(
    "weight_layout", ("nk", "kn"), "how the weight lies: nn.Linear's [n, k], or [k, n]"
)
_EPILOGUE = (
    *epilogue.PARAMS,
    Param("residual", (False, True), "a residual is added to what the activation gives"),
    Param("pre", (False, True), "what the activation is of is kept for a backward"),
)
_ALIGNED = Param("aligned", (True, False), "rows of x and weight start on 16-byte boundaries")
_BLOCK = "rows of x, of weight, and k of a tile"
PARAMS = (
    Param("dtype", ("bf16", "fp16", "fp32"), "element type of x and weight; fp32: as tf32"),
    Param("out_dtype", ("bf16", "fp16", "fp32"), "element type of out and residual"),
    _X_LAYOUT,
    _WEIGHT_LAYOUT,
    *_EPILOGUE,
    _ALIGNED,
    Param("mma_k", (16, 8), "k of a product of 16-bit types: 8 is for sm_75"),
    Param("block", _BLOCKS, _BLOCK, tunable=True),
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
        "derive": lambda params: _values(_tile(params), params),
        "illegal": _illegal,
        "features": _features,
        "superseded": lambda params: frozenset({"cp_async"} if params["mma_k"] == 8 else ()),
        "shared_layout": _mma_stages,
        "block": lambda params: _threads(_tile(params), params["block"]),
        "grid": _grid,
        "pdl": True,
        "verification": "fkjit.ops.gemm.cases_mma:MMA",
    }
)

# ------------------------------------------------------------------ fma: exact fp32

FMA_TILES: dict[Block, Tile] = {
    (128, 128, 16): Tile((64, 64), 3, 2),
    (256, 128, 16): Tile((64, 64), 3),
    (128, 256, 16): Tile((64, 64), 3),
    (64, 64, 16): Tile((32, 32), 3, 3),
}


def _fma_tile(params: Params) -> Tile:
    return FMA_TILES[params["block"]]


FMA_ALL = KernelSpec(
    **{
        **CONTRACT,
        "name": "fma",
        "source": "gemm/fma.cu",
        "entry": "linear_fma",
        "doc": "exact fp32: products in FMAs, a ring in shared memory; every GPU",
        "params": (
            Param("dtype", ("fp32",), "element type of x, weight and out"),
            _X_LAYOUT,
            _WEIGHT_LAYOUT,
            *_EPILOGUE,
            _ALIGNED,
            Param("block", tuple(FMA_TILES), _BLOCK, tunable=True),
        ),
        "derive": lambda params: _values(_fma_tile(params), params),
        "shared_layout": lambda params: _stages(params, _fma_tile(params), 4, {}),
        "block": lambda params: _threads(_fma_tile(params), params["block"]),
        "grid": _grid,
        "pdl": True,
        "verification": "fkjit.ops.gemm.cases_mma:FMA",
    }
)

# ------------------------------------------------------------------ what is compiled ahead

_NO_EPILOGUE = {"activation": "none", "gate": False, "residual": False, "pre": False}
_PLAIN = {"x_layout": "mk", "weight_layout": "nk", **_NO_EPILOGUE, "aligned": True}
_BF16 = {"dtype": "bf16", "out_dtype": "bf16", "mma_k": 16, **_PLAIN}
_FP16 = {**_BF16, "dtype": "fp16", "out_dtype": "fp16"}
_TF32 = {**_BF16, "dtype": "fp32", "out_dtype": "fp32"}
_SWIGLU = {"activation": "silu", "gate": True}
_KEPT = {"activation": "gelu_tanh", "pre": True}
_TRANSPOSED = {"x_layout": "km", "weight_layout": "kn"}
_SMALL, _SMALL_STAGED = {"block": (64, 128, 64)}, {"block": (64, 64, 32)}


def _ahead(spec: KernelSpec, shown: Sequence[Mapping[str, Any]]) -> KernelSpec:
    """The kernel with these variants: each tile, each layout, all of an epilogue."""
    return register(replace(spec, ahead=shown))


MMA = _ahead(
    MMA_ALL,
    [
        *({**_BF16, "block": block} for block in TILES),
        {**_BF16, **_SMALL, **_SWIGLU, "residual": True},
        {**_BF16, **_SMALL, **_KEPT, "residual": True, "x_layout": "km"},
        {**_BF16, **_SMALL, **_SWIGLU, "pre": True, "weight_layout": "kn"},
        {**_BF16, **_SMALL, **_TRANSPOSED, "activation": "gelu", "out_dtype": "fp32"},
        {**_BF16, "block": (128, 256, 64), **_TRANSPOSED},
        {**_BF16, **_SMALL_STAGED, "aligned": False, **_KEPT},
        {**_BF16, "block": (128, 128, 32), "aligned": False, **_SWIGLU, **_TRANSPOSED},
        {**_FP16, **_SMALL, "activation": "relu"},
        *({**_FP16, "mma_k": 8, "block": block} for block in STAGED_TILES),
        {**_FP16, "mma_k": 8, **_SMALL_STAGED, "aligned": False, "residual": True},
        *({**_TF32, "block": block} for block in TF32_TILES),
        {**_TF32, **_SMALL_STAGED, **_TRANSPOSED, **_KEPT, "residual": True},
        {**_TF32, **_SMALL_STAGED, "x_layout": "km", "aligned": False},
        {**_TF32, "block": (128, 128, 32), **_SWIGLU, "weight_layout": "kn"},
    ],
)
_FP32, _FMA_SMALL = {"dtype": "fp32", **_PLAIN}, {"block": (64, 64, 16)}
FMA = _ahead(
    FMA_ALL,
    [
        *({**_FP32, "block": block} for block in FMA_TILES),
        {**_FP32, **_FMA_SMALL, **_KEPT, "residual": True, "x_layout": "km"},
        {**_FP32, **_FMA_SMALL, **_SWIGLU},
        {**_FP32, **_FMA_SMALL, **_SWIGLU, "weight_layout": "kn"},
        {**_FP32, **_FMA_SMALL, **_SWIGLU, **_TRANSPOSED, "residual": True, "aligned": False},
        {**_FP32, "block": (128, 128, 16), "activation": "gelu", "aligned": False},
    ],
)
