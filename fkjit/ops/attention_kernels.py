"""The kernels of `fkjit.attention`: one spec a `.cu` file, and what they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Dim3, KernelSpec, Param, Params, Problem, register

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # what tiles are padded to
MAX_HEAD_DIM = HEAD_DIMS[-1]
PAIRS = (*((d, d) for d in HEAD_DIMS), (192, 128))  # (head_dim, head_dim_v) that are compiled

_DTYPE = "element type of q, k, v and o"
_HEAD_DIM = "of q and k, padded to this in shared memory"
_HEAD_DIM_V = "of v and o, padded to this in shared memory"
_BLOCK = "query rows and keys of a tile; one number means both"
_ALIGNED = "rows of q, k, v and o start on 16-byte boundaries: asynchronous 16-byte copies"


def split_block(block: Any) -> tuple[int, int]:
    """64 -> (64, 64); (128, 64) stays."""
    return block if isinstance(block, tuple) else (block, block)


# ------------------------------------------------------------------ what all implementations share


def grid(params: Params, problem: Problem) -> Dim3:
    """One block for each block_q query rows of each head."""
    rows = split_block(params["block"])[0] if "block" in params else _NAIVE_ROWS
    blocks_q = -(-problem["seqlen_q"] // rows)
    return (blocks_q * problem["heads_q"] * problem["batch"], 1, 1)


def flops(problem: Problem) -> float:
    """Multiplications and additions of the two products, over visible (query, key) pairs."""
    sq, sk = problem["seqlen_q"], problem["seqlen_k"]
    pairs = sq * sk
    if problem["causal"]:
        first = sk - sq + 1  # keys that query 0 sees; the last query sees all
        pairs = sq * (first + sk) / 2 if first > 0 else sk * (sk + 1) / 2
    dims = problem["head_dim"] + problem["head_dim_v"]
    return 2.0 * problem["batch"] * problem["heads_q"] * pairs * dims


def traffic(problem: Problem) -> float:
    """Bytes of q, k, v read once and o, lse written once."""
    d, dv, sq, sk = (problem[n] for n in ("head_dim", "head_dim_v", "seqlen_q", "seqlen_k"))
    rows_q = problem["batch"] * problem["heads_q"] * sq
    rows_k = problem["batch"] * problem["heads_kv"] * sk
    return float(ITEMSIZE[problem["dtype"]] * (rows_q + rows_k) * (d + dv) + 4 * rows_q)


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name. Strides are taken from the arrays (NumPy or CuPy)."""

    def strides(name: str) -> tuple[int, ...]:
        array = arrays[name]
        return tuple(stride // array.itemsize for stride in array.strides[:3])

    return {
        **{name: arrays[name] for name in ("q", "k", "v", "o", "lse")},
        **{f"{name}_strides": strides(name) for name in ("q", "k", "v", "o")},
        **scalars(problem),
    }


def scalars(problem: Problem) -> dict[str, Any]:
    """The scalar arguments of every attention kernel."""
    # A scale of 0 would turn a masked -inf into NaN; 1e-30 leaves exp2(score * scale) = 1.
    scale = problem["softmax_scale"] * math.log2(math.e) or 1e-30
    return {
        "heads_q": problem["heads_q"],
        "group_size": problem["heads_q"] // problem["heads_kv"],
        **{n: problem[n] for n in ("seqlen_q", "seqlen_k", "head_dim", "head_dim_v")},
        "softmax_scale_log2": scale,
        "causal": int(problem["causal"]),
    }


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """o and lse in float64, the textbook way: every score, a softmax, a product."""
    group = problem["heads_q"] // problem["heads_kv"]
    q, k, v = (np.asarray(arrays[name]).astype(np.float64) for name in ("q", "k", "v"))
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * problem["softmax_scale"]
    sq, sk = scores.shape[-2:]
    if problem["causal"]:
        hidden = np.arange(sk) > np.arange(sq)[:, None] + (sk - sq)
        scores = np.where(hidden, -np.inf, scores)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isfinite(top), top, 0.0)
    return {"o": (weights / np.where(total == 0, 1, total)) @ v, "lse": lse[..., 0]}


def tolerance(params: Params) -> float:
    """Greatest error of o against float64 on N(0, 1) inputs: two roundings of its largest value."""
    return {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 4e-6}[params["dtype"]]


def problems(params: Params, scale: str) -> Sequence[Problem]:
    """Ragged, grouped, causal both ways, strided: sizes for the interpreter or for a GPU."""
    block_q, block_k = split_block(params.get("block", (16, 32)))
    d, dv = params.get("head_dim", 64), params.get("head_dim_v", 64)
    if not params.get("aligned", True):
        d, dv = d - 3, dv - 5
    base = {"dtype": params["dtype"], "head_dim": d, "head_dim_v": dv, "softmax_scale": d**-0.5}
    if scale == "small":
        shapes = [(1, 2, 1, block_q + 3, 2 * block_k + 5, True), (1, 1, 1, 5, block_k, False)]
    else:
        shapes = [
            (2, 4, 2, 517, 1043, False),
            (1, 4, 1, 1043, 517, True),
            (2, 3, 3, 300, 1000, True),
            (1, 2, 2, 2048, 2048, True),
        ]
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "causal")
    return [{**base, **dict(zip(names, shape, strict=True))} for shape in shapes]


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh N(0, 1) q, k, v; v a view of a [batch, seqlen, heads, dim] array."""
    dtype = numpy_dtype(problem["dtype"])

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    b, hq, hkv, sq, sk, d, dv = (
        problem[n]
        for n in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    )
    v = normal(b, sk, hkv, dv).transpose(0, 2, 1, 3)
    return {"q": normal(b, hq, sq, d), "k": normal(b, hkv, sk, d), "v": v}


def outputs(params: Params, problem: Problem) -> Arrays:
    """o and lse, poisoned with NaN."""
    b, h, sq, dv = (problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v"))
    o = np.full((b, h, sq, dv), np.nan, numpy_dtype(problem["dtype"]))
    return {"o": o, "lse": np.full((b, h, sq), np.nan, np.float32)}


_SHARED: dict[str, Any] = dict(
    op="attention",
    grid=grid,
    flops=flops,
    bytes=traffic,
    arguments=arguments,
    reference=reference,
    tolerance=tolerance,
    problems=problems,
    inputs=inputs,
    outputs=outputs,
)

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
        "q_in_registers": small and params["head_dim"] <= 128,
    }


def _flash_illegal(params: Params) -> str | None:
    block, dims = params["block"], (params["head_dim"], params["head_dim_v"])
    if dims not in PAIRS:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if block == 128 and dims[0] > 128:
        return f"needs more registers than a thread has (head_dim={dims[0]})"
    if (block == (64, 32) and dims[0] <= 64) or (block == (128, 48) and dims[0] != 128):
        return f"is never the fastest tile (head_dim={dims[0]})"
    return _unaligned(params)


def _flash_shared(params: Params) -> int:
    """Q, and two stages of K and V."""
    block_q, block_k = split_block(params["block"])
    dims = params["head_dim"] + params["head_dim_v"]
    return 2 * (block_q * params["head_dim"] + 2 * block_k * dims)


def _threads(derive: Any) -> Any:
    return lambda params: (32 * derive(params)["num_warps"], 1, 1)


FLASH = register(
    KernelSpec(
        name="flash",
        source="attention/flash.cu",
        entry="attention_flash",
        doc="online softmax on tensor cores (mma.sync), cp.async ring; sm_80 and newer",
        params=(
            Param("dtype", ("fp16", "bf16"), _DTYPE),
            Param("head_dim", HEAD_DIMS, _HEAD_DIM),
            Param("head_dim_v", HEAD_DIMS, _HEAD_DIM_V),
            Param("block", (16, 32, 64, 128, (64, 32), (128, 48), (128, 64)), _BLOCK, tunable=True),
            Param("aligned", (True, False), _ALIGNED),
        ),
        derive=_flash_derive,
        illegal=_flash_illegal,
        features=lambda params: frozenset({"cp_async", "ldmatrix", "bf16_mma"}),
        shared_bytes=_flash_shared,
        block=_threads(_flash_derive),
        interpreter_flops=2e9,
        **_SHARED,
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


def _unaligned(params: Params) -> str | None:
    if params["aligned"] or params["block"] == 32:
        return None
    return "copies whole 16-byte chunks, and these rows do not start on 16-byte boundaries"


def _sm75_shared(params: Params) -> int:
    """Q, and one tile each of K and V."""
    (block_q, block_k), d, dv = (
        split_block(params["block"]),
        params["head_dim"],
        params["head_dim_v"],
    )
    return 2 * (block_q * d + block_k * (d + dv))


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
        shared_bytes=_sm75_shared,
        block=_threads(_sm75_derive),
        interpreter_flops=2e9,
        **_SHARED,
    )
)

# ------------------------------------------------------------------ flash: exact fp32

SIMT_DIMS = (64, 128, 256)  # fewer: these kernels are for exactness and for reading


def _fp32_warps(params: Params) -> dict[str, Any]:
    block_q, block_k = split_block(params["block"])
    warps = {16: 2, 32: 2, 64: 4}[block_q]
    return {"block_q": block_q, "block_k": block_k, "num_warps": warps, "min_blocks": 1}


def _simt_pair(params: Params) -> str | None:
    if params["head_dim"] != params["head_dim_v"]:
        return "is compiled for head_dim_v = head_dim only, both padded"
    return None


def _fp32_illegal(params: Params) -> str | None:
    if params["block"] == 64 and params["head_dim"] == 256:
        return "needs more registers than a thread has (head_dim=256)"
    if params["dtype"] == "bf16" and params["block"] == 64:
        return "needs more shared memory than the GPUs have that run bf16 here"
    return _simt_pair(params) or _unaligned(params)


def _fp32_shared(params: Params) -> int:
    """Q, K, V and the probabilities as floats; rows of Q, K and P padded by four."""
    (block_q, block_k), d, dv = (
        split_block(params["block"]),
        params["head_dim"],
        params["head_dim_v"],
    )
    return 4 * ((block_q + block_k) * (d + 4) + block_k * dv + block_q * (block_k + 4))


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
        shared_bytes=_fp32_shared,
        block=_threads(_fp32_warps),
        interpreter_flops=1e8,
        **_SHARED,
    )
)

# ------------------------------------------------------------------ tiled and naive: to read


def _tiled_derive(params: Params) -> dict[str, Any]:
    block_q, block_k = split_block(params["block"])
    return {"block_q": block_q, "block_k": block_k}


def _tiled_shared(params: Params) -> int:
    """Q, one tile that is K and then V, and the probabilities."""
    (block_q, block_k), d, dv = (
        split_block(params["block"]),
        params["head_dim"],
        params["head_dim_v"],
    )
    itemsize = ITEMSIZE[params["dtype"]]
    elements = block_q * d + block_k * max(d + 4 // itemsize, dv)
    return elements * itemsize + 4 * block_q * block_k


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
        shared_bytes=_tiled_shared,
        block=lambda params: (4 * split_block(params["block"])[0], 1, 1),
        interpreter_flops=5e7,
        **_SHARED,
    )
)

_NAIVE_ROWS = 4  # warps of a block, a query row each

NAIVE = register(
    KernelSpec(
        name="naive",
        source="attention/naive.cu",
        entry="attention_naive",
        doc="a warp a query row, two passes over the keys in device memory: the formula itself",
        params=(Param("dtype", ("fp16", "bf16", "fp32"), _DTYPE),),
        derive=lambda params: {"num_warps": _NAIVE_ROWS},
        block=lambda params: (32 * _NAIVE_ROWS, 1, 1),
        interpreter_flops=2e7,
        **_SHARED,
    )
)
