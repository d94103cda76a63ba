"""What all kernels of `fkjit.attention` share: arguments, work, reference, test problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Dim3, Params, Problem

MAX_HEAD_DIM = 256
NAIVE_ROWS = 4  # query rows of a block of the naive kernel, a warp each


def split_block(block: Any) -> tuple[int, int]:
    """64 -> (64, 64); (128, 64) stays."""
    return block if isinstance(block, tuple) else (block, block)


def grid(params: Params, problem: Problem) -> Dim3:
    """One block for each block_q query rows of each head."""
    rows = split_block(params["block"])[0] if "block" in params else NAIVE_ROWS
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


def padded_flops(params: Params, problem: Problem) -> float:
    """What a kernel multiplies: whole tiles of padded head dimensions."""
    sq, sk = problem["seqlen_q"], problem["seqlen_k"]
    exact = problem["batch"] * problem["heads_q"] * sq * sk
    exact *= 2.0 * (problem["head_dim"] + problem["head_dim_v"])
    block_q, block_k = split_block(params["block"]) if "block" in params else (NAIVE_ROWS, 1)
    rows, keys = grid(params, problem)[0] * block_q, -(-sk // block_k) * block_k
    least = MAX_HEAD_DIM if "head_dim" not in params else 0  # naive takes any, in registers for all
    dims = sum(max(params.get(name, 0), least) for name in ("head_dim", "head_dim_v"))
    return 2.0 * rows * keys * dims * (flops(problem) / exact if exact else 0.0)


def traffic(problem: Problem) -> float:
    """Bytes of q, k, v read once and o, lse written once."""
    d, dv, sq, sk = (problem[n] for n in ("head_dim", "head_dim_v", "seqlen_q", "seqlen_k"))
    rows_q = problem["batch"] * problem["heads_q"] * sq
    rows_k = problem["batch"] * problem["heads_kv"] * sk
    return float(ITEMSIZE[problem["dtype"]] * (rows_q + rows_k) * (d + dv) + 4 * rows_q)


def shape_class(problem: Problem) -> dict[str, Any]:
    """What decides which tile is best, coarsely: a few thousand rows are like many thousand."""

    def up_to(most: int, size: int) -> int:
        return min(1 << (max(size, 1) - 1).bit_length(), most)

    return {
        "seqlen_q": up_to(16_384, problem["seqlen_q"]),
        "seqlen_k": up_to(16_384, problem["seqlen_k"]),
        "heads": up_to(512, problem["batch"] * problem["heads_q"]),
        "causal": problem["causal"],
    }


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
    scale = float(np.float32(problem["softmax_scale"] * math.log2(math.e))) or 1e-30
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


SHARED: dict[str, Any] = dict(
    op="attention",
    grid=grid,
    flops=flops,
    interpreter_work=padded_flops,
    bytes=traffic,
    shape_class=shape_class,
    arguments=arguments,
    reference=reference,
    tolerance=tolerance,
    problems=problems,
    inputs=inputs,
    outputs=outputs,
)
