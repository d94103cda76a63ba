"""What all kernels of `fkjit.attention_backward` share: work, reference, test problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.ops.attention import problem as forward
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Params, Problem

ROW_STEP = 128  # lse_log2 and delta have so many rows, or a multiple
GIVEN = ("dout", "q", "k", "v")  # arrays of [batch, head, row, column] that kernels read
SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


def rows_padded(problem: Problem) -> int:
    """Rows of lse_log2 and delta: whole tiles of queries, of packed sequences one tile more each
    (templates/attention/backward/padded_rows.cuh)."""
    packed = "total_q" in problem
    rows = problem["total_q" if packed else "seqlen_q"]
    return -(-rows // ROW_STEP) * ROW_STEP + ROW_STEP * problem["batch"] * packed


def rows_shape(problem: Problem) -> tuple[int, int, int]:
    """Of lse_log2 and delta."""
    batch = 1 if "total_q" in problem else problem["batch"]
    return batch, problem["heads_q"], rows_padded(problem)


def shape(problem: Problem, name: str) -> tuple[int, int, int, int]:
    """Of an array of [batch, head, row, column], whatever its gradient is called."""
    of = name.removeprefix("d") if name in ("dq", "dk", "dv") else name
    side = "q" if of in ("q", "dout", "o") else "k"
    heads = problem["heads_q" if side == "q" else "heads_kv"]
    dim = problem["head_dim" if of in ("q", "k") else "head_dim_v"]
    return problem["batch"], heads, problem[f"seqlen_{side}"], dim


def flops(problem: Problem) -> float:
    """Of the whole backward, as everybody counts it: five products where the forward has two."""
    return 2.5 * forward.flops(problem)


def products(problem: Problem, of_scores: int, of_values: int) -> float:
    """Of one kernel: products with head_dim, and those with head_dim_v, over visible pairs."""
    dims = problem["head_dim"] + problem["head_dim_v"]
    pairs = forward.flops(problem) / dims
    return pairs * (of_scores * problem["head_dim"] + of_values * problem["head_dim_v"])


def traffic(problem: Problem) -> float:
    """Bytes of dout, q, k, v, o and lse read and dq, dk, dv written, all of it once."""
    names = ("dout", "q", "k", "v", "o", "dq", "dk", "dv")
    elements = sum(math.prod(shape(problem, name)) for name in names)
    rows = problem["batch"] * problem["heads_q"] * problem["seqlen_q"]
    return float(ITEMSIZE[problem["dtype"]] * elements + 4 * rows)


def strides(problem: Problem, name: str, arrays: Mapping[str, Any]) -> tuple[int, ...]:
    """Elements between batches, heads and rows: of a call's array as the check found them, else of
    the array [batch, head, row, column] itself."""
    known = problem.get("strides", {}).get(name)
    if known is not None:
        return known
    array = arrays[name]
    return tuple(step // array.itemsize for step in array.strides[:3])


def scalars(problem: Problem) -> dict[str, Any]:
    """The scalar arguments of the kernels that multiply."""
    return {
        **forward.scalars(problem),
        "rows_padded": rows_padded(problem),
        "softmax_scale": float(np.float32(problem["softmax_scale"])),
    }


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """dq, dk, dv in float64 out of q, k, v, dout and delta (or o and dlse)."""
    group = problem["heads_q"] // problem["heads_kv"]
    double = {n: np.asarray(a).astype(np.float64) for n, a in arrays.items() if a is not None}
    q, dout = double["q"], double["dout"]
    k, v = (np.repeat(double[name], group, axis=1) for name in "kv")
    made = forward.reference(problem, {name: double[name] for name in "qkv"})
    lse = made["lse"][..., None]
    scores = q @ k.swapaxes(-1, -2) * problem["softmax_scale"]
    sq, sk = scores.shape[-2:]
    if problem["causal"]:
        hidden = np.arange(sk) > np.arange(sq)[:, None] + (sk - sq)
        scores = np.where(hidden, -np.inf, scores)
    p = np.exp(scores - np.where(np.isneginf(lse), np.inf, lse))
    delta = (dout * made["o"]).sum(-1) - double.get("dlse", 0.0)
    ds = p * (dout @ v.swapaxes(-1, -2) - delta[..., None]) * problem["softmax_scale"]

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    return {
        "dq": ds @ k, "dk": grouped(ds.swapaxes(-1, -2) @ q),
        "dv": grouped(p.swapaxes(-1, -2) @ dout),
    }  # fmt: skip


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh N(0, 1) q, k, v, dout, and lse_log2 and delta of their rows."""
    made = forward.inputs(params, problem, rng)
    dtype = numpy_dtype(problem["dtype"])
    normal = rng.standard_normal(shape(problem, "dout"), dtype=np.float32)
    made["dout"] = normal.astype(dtype)
    found = forward.reference(problem, made)
    delta = (made["dout"].astype(np.float64) * found["o"]).sum(-1)
    past = ((0, 0), (0, 0), (0, rows_padded(problem) - problem["seqlen_q"]))
    lse = np.where(np.isneginf(found["lse"]), np.inf, found["lse"] * math.log2(math.e))
    made["lse_log2"] = np.pad(lse, past, constant_values=np.inf).astype(np.float32)
    made["delta"] = np.pad(delta, past).astype(np.float32)
    return made


def outputs(names: Sequence[str]) -> Any:
    """What makes the arrays `names`, poisoned with NaN."""

    def made(params: Params, problem: Problem) -> Arrays:
        dtype = numpy_dtype(problem["dtype"])
        return {name: np.full(shape(problem, name), np.nan, dtype) for name in names}

    return made


def tolerance(params: Params) -> float:
    """Greatest error against float64 on N(0, 1) inputs, beside the largest gradient."""
    return {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 4e-6}[params["dtype"]]


def problems(block_q: int, block_k: int, params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged, grouped, causal, rows without keys: sizes for the interpreter or for a GPU."""
    d, dv = params["head_dim"], params["head_dim_v"]
    if not params["aligned"]:
        d, dv = d - 3, dv - 5
    base = {"dtype": params["dtype"], "head_dim": d, "head_dim_v": dv, "softmax_scale": d**-0.5}
    if scale == "small":
        shapes = [(1, 2, 1, block_q + 7, block_k + 5, True), (1, 1, 1, 21, 11, False)]
    else:
        shapes = [
            (2, 4, 2, 517, 1043, False),
            (1, 4, 1, 1043, 517, True),
            (2, 3, 3, 300, 1000, True),
        ]
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "causal")
    return [{**base, **dict(zip(names, one, strict=True))} for one in shapes]
