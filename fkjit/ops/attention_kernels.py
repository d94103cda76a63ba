"""The kernels of `fkjit.attention`: one spec a `.cu` file, and what they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.arch import Arch
from fkjit.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Dim3, KernelSpec, Param, Params, Problem, register

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # what tiles are padded to
MAX_HEAD_DIM = HEAD_DIMS[-1]
_PAIRS = (*((d, d) for d in HEAD_DIMS), (192, 128))  # (head_dim, head_dim_v) that are compiled

_DTYPE = "element type of q, k, v and o"
_HEAD_DIM = "of q and k, padded to this in shared memory"
_HEAD_DIM_V = "of v and o, padded to this in shared memory"
_BLOCK = "query rows and keys of a tile; one number means both"
_ALIGNED = "rows of q, k, v and o start on 16-byte boundaries: asynchronous 16-byte copies"


def split_block(block: Any) -> tuple[int, int]:
    """64 -> (64, 64); (128, 64) stays."""
    return block if isinstance(block, tuple) else (block, block)


def padded_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The cheapest compiled pair that holds these head dimensions."""
    fitting = [pair for pair in _PAIRS if pair[0] >= head_dim and pair[1] >= head_dim_v]
    return min(fitting, key=sum)


# ------------------------------------------------------------------ what all implementations share


def grid(params: Params, problem: Problem) -> Dim3:
    """One block for each block_q query rows of each head."""
    blocks_q = -(-problem["seqlen_q"] // split_block(params["block"])[0])
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


_SHARED = dict(
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
    wide = block_q == 128 and (head_dim <= 64 or head_dim <= 128 and block_k <= 64)
    return block_q // (32 if wide else 16)


def _flash_derive(params: Params) -> dict[str, Any]:
    block_q, block_k = split_block(params["block"])
    warps = _flash_warps(params)
    small = block_q // warps == 16 or block_k <= 64 and params["head_dim"] <= 64
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
    if dims not in _PAIRS:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if block == 128 and dims[0] > 128 or block == (128, 48) and dims[0] not in (96, 128):
        return f"needs more registers than a thread has (head_dim={dims[0]})"
    if not params["aligned"] and block != 32:
        return "copies whole 16-byte chunks, and these rows do not start on 16-byte boundaries"
    return None


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
        interpreter_flops=1.5e9,
        **_SHARED,
    )
)

# Preferred tiles by padded head_dim, fastest first (bench/NOTES.md); the first of which two blocks
# fit on an SM is taken.
_FLASH_PREFERENCE = {
    32: (128, (128, 64), 64, (64, 32), 32, 16),
    64: (128, (128, 64), 64, (64, 32), 32, 16),
    96: ((128, 64), (128, 48), 64, (64, 32), 32, 16),
    128: ((128, 48), (128, 64), (64, 32), 64, 32, 16),
    192: ((64, 32), 64, 32, 16),
    256: ((64, 32), 32, 16),
}


def choose_block(spec: KernelSpec, fixed: Params, problem: Problem, arch: Arch) -> Any:
    """The tile for this problem on this architecture: no taller than the queries need."""
    legal = spec.legal_values("block", {**fixed, "block": None}, arch)
    order = [b for b in preference(spec, fixed) if b in legal] or legal
    rows = max(16, 1 << (max(problem["seqlen_q"], 1) - 1).bit_length())
    order = [b for b in order if split_block(b)[0] <= rows] or order

    def fits_twice(block: Any) -> bool:
        shared = spec.shared_bytes({**fixed, "block": block}) + 1024
        return 2 * shared <= arch.shared_per_sm

    return next(filter(fits_twice, order), order[0])


def preference(spec: KernelSpec, fixed: Params) -> Sequence[Any]:
    return _FLASH_PREFERENCE[fixed["head_dim"]]


def implementation(impl: str, dtype: str, arch: Arch) -> KernelSpec:
    return FLASH


def parameters(
    spec: KernelSpec, problem: Problem, block: Any, aligned: bool, arch: Arch
) -> dict[str, Any]:
    head_dim, head_dim_v = padded_dims(problem["head_dim"], problem["head_dim_v"])
    params = {
        "dtype": problem["dtype"],
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "block": block,
        "aligned": aligned,
    }
    if block is None:
        params["block"] = choose_block(spec, params, problem, arch)
    spec.check(params, arch)
    return params
