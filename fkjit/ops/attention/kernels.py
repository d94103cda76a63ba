"""The kernels of `fkjit.attention`: one spec a `.cu` file."""

from __future__ import annotations

from typing import Any

from fkjit.ops.attention.features import PLAIN
from fkjit.ops.attention.problem import CONTRACT, NAIVE_ROWS, grid, split_block
from fkjit.ops.attention.shapes import MAX_HEAD_DIM, WIDEST
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register

HEAD_DIMS = (32, 64, 96, 128, 192, MAX_HEAD_DIM)  # what tiles are padded to
PAIRS = (*((d, d) for d in HEAD_DIMS), (192, 128))  # (head_dim, head_dim_v) that are compiled
# Of flash: blocks share the columns of wider heads, as many for each as registers have room for.
HEAD_DIMS_FLASH = (*HEAD_DIMS, WIDEST)
PAIRS_FLASH = (*PAIRS, (WIDEST, MAX_HEAD_DIM))
TILES_WIDEST = ((64, 32), (32, 16))  # the second where a block has 99 KB

_DTYPE = "element type of q, k, v and o"
_HEAD_DIM = "of q and k, padded to this in shared memory"
_HEAD_DIM_V = "of v and o, padded to this in shared memory"
_BLOCK = "query rows and keys of a tile; one number means both"
_ALIGNED = "rows of q, k, v and o start on 16-byte boundaries: asynchronous 16-byte copies"


# ------------------------------------------------------------------ flash: tensor cores, sm_80+


def _flash_warps(params: Params) -> int:
    """Warps of 32 rows where output, scores and fragments fit in 255 registers, else of 16."""
    (block_q, block_k), head_dim = split_block(params["block"]), params["head_dim"]
    wide = block_q == 128 and (head_dim <= 64 or (head_dim <= 128 and block_k <= 64))
    return block_q // (32 if wide else 16)


def _flash_derive(params: Params) -> dict[str, Any]:
    block_q, block_k = split_block(params["block"])
    warps = _flash_warps(params)
    small = block_q // warps == 16 or (block_k <= 64 and params["head_dim"] <= 64)
    return {
        "block_q": block_q,
        "block_k": block_k,
        "num_warps": warps,
        "stages": 2,
        "min_blocks": 1,
        "v_parts": v_parts(params),
        "q_in_registers": small and params["head_dim"] <= 128,
        **PLAIN,
    }


def v_parts(params: Params) -> int:
    """Blocks that share the columns of v and o."""
    return params["head_dim"] // params["head_dim_v"] if params["head_dim"] == WIDEST else 1


def _flash_grid(params: Params, problem: Problem) -> Dim3:
    return (grid(params, problem)[0] * v_parts(params), 1, 1)


def _flash_illegal(params: Params) -> str | None:
    block, dims = params["block"], (params["head_dim"], params["head_dim_v"])
    if dims not in PAIRS_FLASH:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if (block in TILES_WIDEST) < (dims[0] == WIDEST) or (block == (32, 16) and dims[0] < WIDEST):
        return f"is not a tile for head_dim={dims[0]}"
    if block == 128 and dims[0] > 128:
        return f"needs more registers than a thread has (head_dim={dims[0]})"
    if (block == (64, 32) and dims[0] <= 64) or (block == (128, 48) and dims[0] != 128):
        return f"is never the fastest tile (head_dim={dims[0]})"
    return _unaligned(params, 32 if dims[0] < WIDEST else TILES_WIDEST[-1])


def _flash_shared(params: Params) -> SharedLayout:
    """Q, and two stages of K and V."""
    block_q, block_k = split_block(params["block"])
    k, v = 2 * block_k * params["head_dim"], 2 * block_k * params["head_dim_v"]
    stages = [(f"{name} stage {i}", size) for i in range(2) for name, size in (("K", k), ("V", v))]
    return [("Q", 2 * block_q * params["head_dim"]), *stages]


def _threads(derive: Any) -> Any:
    return lambda params: (32 * derive(params)["num_warps"], 1, 1)


_FLASH_TILES = (16, 32, 64, 128, (64, 32), (128, 48), (128, 64), (32, 16))
FLASH = register(
    KernelSpec(
        name="flash",
        source="attention/flash.cu",
        entry="attention_flash",
        doc="online softmax on tensor cores (mma.sync), cp.async ring; sm_80 and newer",
        params=(
            Param("dtype", ("fp16", "bf16"), _DTYPE),
            Param("head_dim", HEAD_DIMS_FLASH, _HEAD_DIM),
            Param("head_dim_v", HEAD_DIMS, _HEAD_DIM_V),
            Param("block", _FLASH_TILES, _BLOCK, tunable=True),
            Param("aligned", (True, False), _ALIGNED),
        ),
        derive=_flash_derive,
        illegal=_flash_illegal,
        features=lambda params: frozenset({"cp_async", "ldmatrix", "bf16_mma"}),
        shared_layout=_flash_shared,
        block=_threads(_flash_derive),
        interpreter_flops=3.6e9,
        **{**CONTRACT, "grid": _flash_grid},
    )
)

# ------------------------------------------------------------------ flash: Turing's tensor cores


def _block_warps(params: Params) -> dict[str, Any]:
    """block_q, block_k and one warp for each 16 rows."""
    block_q, block_k = split_block(params["block"])
    return {"block_q": block_q, "block_k": block_k, "num_warps": block_q // 16, "min_blocks": 1}


def _sm75_derive(params: Params) -> dict[str, Any]:
    return {**_block_warps(params), "q_in_registers": params["head_dim"] <= 64}


def _sm75_illegal(params: Params) -> str | None:
    dims = (params["head_dim"], params["head_dim_v"])
    if dims not in PAIRS:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if dims[0] == 256 and split_block(params["block"])[1] == 64:
        return "needs more registers than a thread has (head_dim=256)"
    return _unaligned(params)


def _unaligned(params: Params, tile: Any = 32) -> str | None:
    """One tile is enough where elements are fetched one by one."""
    if params["aligned"] or params["block"] == tile:
        return None
    return "copies whole 16-byte chunks, and these rows do not start on 16-byte boundaries"


def _sm75_shared(params: Params) -> SharedLayout:
    """Q, and one tile each of K and V."""
    (block_q, block_k), d, dv = (
        split_block(params["block"]),
        params["head_dim"],
        params["head_dim_v"],
    )
    return [("Q", 2 * block_q * d), ("K", 2 * block_k * d), ("V", 2 * block_k * dv)]


FLASH_SM75 = register(
    KernelSpec(
        name="flash_sm75",
        source="attention/flash_sm75.cu",
        entry="attention_flash_sm75",
        doc="flash for GPUs without cp.async: m16n8k8 products, next tile in registers",
        params=(
            Param("dtype", ("fp16",), _DTYPE),
            Param("head_dim", HEAD_DIMS, _HEAD_DIM),
            Param("head_dim_v", HEAD_DIMS, _HEAD_DIM_V),
            Param("block", (16, 32, 64, (64, 32), (128, 64)), _BLOCK, tunable=True),
            Param("aligned", (True, False), _ALIGNED),
        ),
        derive=_sm75_derive,
        illegal=_sm75_illegal,
        features=lambda params: frozenset({"f16_mma", "ldmatrix"}),
        superseded=lambda params: frozenset({"cp_async"}),
        shared_layout=_sm75_shared,
        block=_threads(_sm75_derive),
        interpreter_flops=3e9,
        **CONTRACT,
    )
)

# ------------------------------------------------------------------ flash: exact fp32

SIMT_DIMS = (64, 128, 256)  # fewer: these kernels are for exactness and for reading


def _fp32_warps(params: Params) -> dict[str, Any]:
    block_q, block_k = split_block(params["block"])
    warps = {16: 2, 32: 2, 64: 4}[block_q]
    tile = {"block_q": block_q, "block_k": block_k, "num_warps": warps}
    return {**tile, "min_blocks": 1, **PLAIN}


def _simt_pair(params: Params) -> str | None:
    if params["head_dim"] != params["head_dim_v"]:
        return "is compiled for head_dim_v = head_dim only, both padded"
    return None


def _fp32_illegal(params: Params) -> str | None:
    if params["block"] == 64 and params["head_dim"] == 256:
        return "needs more registers than a thread has (head_dim=256)"
    if params["dtype"] == "bf16" and params["block"] == 64:
        return "needs more shared memory than the GPUs have that run bf16 here"
    return _simt_pair(params) or _unaligned(params, tile=16)


def _fp32_shared(params: Params) -> SharedLayout:
    """Q, K, V and the probabilities as floats; rows of Q, K and P padded by four."""
    (block_q, block_k), d, dv = (
        split_block(params["block"]),
        params["head_dim"],
        params["head_dim_v"],
    )
    floats = {
        "Q": block_q * (d + 4),
        "K": block_k * (d + 4),
        "V": block_k * dv,
        "P": block_q * (block_k + 4),
    }
    return [(name, 4 * count) for name, count in floats.items()]


FLASH_FP32 = register(
    KernelSpec(
        name="flash_fp32",
        source="attention/flash_fp32.cu",
        entry="attention_flash_fp32",
        doc="online softmax on fp32 FMAs: exact products; also bf16 without tensor cores",
        params=(
            Param("dtype", ("fp32", "bf16"), _DTYPE),
            Param("head_dim", SIMT_DIMS, _HEAD_DIM),
            Param("head_dim_v", SIMT_DIMS, _HEAD_DIM_V),
            Param("block", (16, 32, 64, (64, 32)), _BLOCK, tunable=True),
            Param("aligned", (True, False), _ALIGNED),
        ),
        derive=_fp32_warps,
        illegal=_fp32_illegal,
        superseded=lambda params: frozenset({"bf16_mma"} if params["dtype"] == "bf16" else ()),
        shared_layout=_fp32_shared,
        block=_threads(_fp32_warps),
        interpreter_flops=6e8,
        **CONTRACT,
    )
)

# ------------------------------------------------------------------ tiled and naive: to read


def _tiled_derive(params: Params) -> dict[str, Any]:
    block_q, block_k = split_block(params["block"])
    return {"block_q": block_q, "block_k": block_k}


def _tiled_shared(params: Params) -> SharedLayout:
    """Q, one tile that is K and then V, and the probabilities."""
    (block_q, block_k), d, dv = (
        split_block(params["block"]),
        params["head_dim"],
        params["head_dim_v"],
    )
    itemsize = ITEMSIZE[params["dtype"]]
    tile = block_k * max(d + 4 // itemsize, dv)
    return [
        ("Q", itemsize * block_q * d),
        ("K or V", itemsize * tile),
        ("P", 4 * block_q * block_k),
    ]


TILED = register(
    KernelSpec(
        name="tiled",
        source="attention/tiled.cu",
        entry="attention_tiled",
        doc="K and V tiles in shared memory, two passes: what tiling alone buys",
        params=(
            Param("dtype", ("fp16", "bf16", "fp32"), _DTYPE),
            Param("head_dim", SIMT_DIMS, _HEAD_DIM),
            Param("head_dim_v", SIMT_DIMS, _HEAD_DIM_V),
            Param("block", (16, 32, 64), _BLOCK, tunable=True),
        ),
        derive=_tiled_derive,
        illegal=_simt_pair,
        shared_layout=_tiled_shared,
        block=lambda params: (4 * split_block(params["block"])[0], 1, 1),
        interpreter_flops=2.5e8,
        **CONTRACT,
    )
)

NAIVE = register(
    KernelSpec(
        name="naive",
        source="attention/naive.cu",
        entry="attention_naive",
        doc="a warp a query row, two passes over the keys in device memory: the formula itself",
        params=(Param("dtype", ("fp16", "bf16", "fp32"), _DTYPE),),
        derive=lambda params: {"num_warps": NAIVE_ROWS},
        block=lambda params: (32 * NAIVE_ROWS, 1, 1),
        interpreter_flops=2.5e8,
        **CONTRACT,
    )
)
