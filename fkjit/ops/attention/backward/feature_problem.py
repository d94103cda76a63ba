"""What the backward's kernels with a form share: arguments, float64 reference, test problems.

A problem is that of attention_form_problem.py, with `bias_shape` (batch, heads and rows of the
bias), `bias_parts` and `alibi_batches` (1 where all batches share their slopes) where there are
gradients of them. A call's has the `strides` of dense arrays besides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fkjit.ops.attention import feature_problem as forward
from fkjit.ops.attention import problem as usual
from fkjit.ops.attention.backward import problem as plain
from fkjit.ops.attention.features import parse
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem

ROWS = ("dout", "q", "k", "v", "o", "dq", "dk", "dv")  # arrays with strides
_OTHERS = (
    *("lse", "dlse", "lse_log2", "delta", "dq_sum", "turns", "dbias", "dbias_parts", "dsinks"),
    *("dalibi_rows", "dalibi_slopes"),
)


def longest_padded(problem: Problem) -> int:
    """Rows of the longest sequence's tiles."""
    return -(-problem["seqlen_q"] // plain.ROW_STEP) * plain.ROW_STEP


def bias_size(problem: Problem) -> int:
    """Elements of the gradient of a bias."""
    return math.prod(problem["bias_shape"]) * problem["seqlen_k"]


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of all of these kernels by name: each takes those that it has."""
    given = {name: arrays.get(name) for name in (*ROWS, *_OTHERS)}
    strided = {n: strides(problem, n, x) for n in ROWS if (x := given[n]) is not None}
    shape = problem.get("bias_shape", (1, 1, 1))
    return {
        **given,
        **{f"{name}_strides": steps for name, steps in strided.items()},
        **plain.scalars({**problem, "causal": False}),
        **{"max_seqlen_q": problem["seqlen_q"], "max_seqlen_k": problem["seqlen_k"]},
        **{"batch": problem["batch"], "total_q": problem.get("total_q", 0)},
        **dict(zip(("bias_batch", "bias_heads", "bias_rows"), shape, strict=True)),
        "first_batch": problem.get("first_batch", 0),
        "inverse_scale": 1 / problem["softmax_scale"] if problem["softmax_scale"] else 0.0,
        **{"parts": problem.get("bias_parts", 1), "size": math.prod(shape) * problem["seqlen_k"]},
        "alibi_batch_stride": problem["heads_q"] if problem.get("alibi_batches", 1) > 1 else 0,
        "sum_columns": problem.get("sum_columns", 0),
        **forward.form_arguments(problem, arrays),
    }


def strides(problem: Problem, name: str, array: Any) -> tuple[int, ...]:
    """Elements between batches, heads and rows."""
    known = problem.get("strides", {}).get(name)
    if known is not None:
        return known
    axes = problem["axes"][:3]
    return tuple(0 if axis is None else array.strides[axis] // array.itemsize for axis in axes)


# ------------------------------------------------------------------ in float64


def sequences(problem: Problem, arrays: Mapping[str, Any]) -> Iterator[tuple[int, Any, Any]]:
    """(number, where its queries are, where its keys are) of each batch or sequence."""
    for b in range(problem["batch"]):
        if "total_q" not in problem:
            yield b, b, b
        else:
            ends = (arrays[f"cu_seqlens_{n}"] for n in "qk")
            queries, keys = (slice(end[b], end[b + 1]) for end in ends)
            yield b, queries, keys


def _one(problem: Problem, array: Any, where: Any) -> np.ndarray:
    """[heads, rows, columns] of a sequence."""
    own = np.asarray(array[where]).astype(np.float64)
    return own.swapaxes(0, 1) if "total_q" in problem else own


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """Every gradient, and dalibi_rows where they are stored."""
    exact = {n: np.asarray(a).astype(np.float64) for n, a in arrays.items() if a is not None}
    made: Arrays = {f"d{n}": np.zeros(arrays[n].shape) for n in "qkv"}
    made["dbias"] = np.zeros((*problem["bias_shape"], problem["seqlen_k"]))
    made["dsinks"] = np.zeros(problem["heads_q"])
    made["dalibi_slopes"] = np.zeros((problem.get("alibi_batches", 1), problem["heads_q"]))
    made["dalibi_rows"] = padded(problem, np.nan)
    made["dbias_parts"] = np.zeros(_parts_shape(problem))
    for b, queries, keys in sequences(problem, arrays):
        where = {"q": queries, "dout": queries, "k": keys, "v": keys}
        rows = {n: _one(problem, arrays[n], at) for n, at in where.items()}
        found = _differentiate(problem, exact, b, rows)
        for name, at in (("dq", queries), ("dk", keys), ("dv", keys)):
            one = found[name]
            made[name][at] = one.swapaxes(0, 1) if "total_q" in problem else one
        sq, sk = found["ds"].shape[1:]
        made["dbias_parts"][b, :, :sk] = found["ds"].sum(1)
        bias = made["dbias"][b % len(made["dbias"])]
        ds = found["ds"] if len(bias) > 1 else found["ds"].sum(0, keepdims=True)
        bias[:, : sq if bias.shape[1] > 1 else 1, :sk] += (
            ds if bias.shape[1] > 1 else ds.sum(1, keepdims=True)
        )
        made["dsinks"] += found["sinks"]
        slopes = -(found["ds"] * abs(np.arange(sk) - np.arange(sq)[:, None] - (sk - sq))).sum(-1)
        made["dalibi_slopes"][b % len(made["dalibi_slopes"])] += slopes.sum(-1)
        store_rows(problem, arrays, made["dalibi_rows"], b, slopes, np.nan)
    return made


def _parts_shape(problem: Problem) -> tuple[int, int, int]:
    """Sums that the kernel of keys leaves, where no warps share its keys."""
    return problem["batch"], problem["heads_q"], problem["seqlen_k"]


def _differentiate(
    problem: Problem, exact: Mapping[str, Any], b: int, rows: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """One sequence's; `ds` is the gradient of its final scores."""
    group = problem["heads_q"] // problem["heads_kv"]
    q, dout = rows["q"], rows["dout"]
    o, lse = forward.attend(problem, exact, b, q, rows["k"], rows["v"])
    k, v = (np.repeat(rows[n], group, axis=0) for n in "kv")
    score = q @ k.swapaxes(-1, -2) * problem["softmax_scale"]
    final = forward.final_scores(problem, exact, b, score)
    lse = np.where(np.isneginf(lse), np.inf, lse)
    p = np.exp(final - lse[..., None])
    delta = (dout * o).sum(-1)
    ds = p * (dout @ v.swapaxes(-1, -2) - delta[..., None])
    inner = ds * _slopes(problem, exact, b, score) * problem["softmax_scale"]
    sinks = exact.get("sinks", np.full(len(q), -np.inf))[:, None]

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x) // group, group, *x.shape[1:]).sum(1)

    return {
        "ds": ds, "dq": inner @ k, "dk": grouped(inner.swapaxes(-1, -2) @ q),
        "dv": grouped(p.swapaxes(-1, -2) @ dout), "sinks": -(np.exp(sinks - lse) * delta).sum(-1),
    }  # fmt: skip


def _slopes(
    problem: Problem, arrays: Mapping[str, Any], b: int, score: np.ndarray
) -> np.ndarray | float:
    """d(final) / d(scaled)."""
    slope: np.ndarray | float = 1.0
    if problem["softcap"]:
        score = problem["softcap"] * np.tanh(score / problem["softcap"])
        slope = 1 - (score / problem["softcap"]) ** 2
    if problem.get("score_mod"):
        heads, sq, sk = score.shape
        h, q_idx, k_idx = np.ogrid[:heads, :sq, :sk]
        names = {**problem["score_scalars"], **{n: arrays[s] for n, s in problem["score_slots"]}}
        given = {"score": score, "b": b, "h": h, "q_idx": q_idx, "k_idx": k_idx, **names}
        text = problem["score_mod_grad"]  # our own examples only
        slope = slope * eval(text, {"__builtins__": {}}, given)
    return slope


# ------------------------------------------------------------------ what each row brings along


def padded(problem: Problem, value: float) -> np.ndarray:
    """An array that has rows_padded rows for each head."""
    packed = "total_q" in problem
    shape = (1 if packed else problem["batch"], problem["heads_q"], plain.rows_padded(problem))
    return np.full(shape, value)


def first_row(problem: Problem, arrays: Mapping[str, Any], b: int) -> int:
    """Of batch or sequence b in a padded array (templates/attention/backward/padded_rows.cuh)."""
    if "total_q" not in problem:
        return 0
    return (arrays["cu_seqlens_q"][b] // plain.ROW_STEP + b) * plain.ROW_STEP


def store_rows(
    problem: Problem, arrays: Mapping[str, Any], to: np.ndarray, b: int, rows: np.ndarray,
    past: float,
) -> None:  # fmt: skip
    """[heads, rows] of sequence b -> its place in a padded array, `past` to the end of the tile."""
    step, length = plain.ROW_STEP, rows.shape[1]
    first = first_row(problem, arrays, b)
    own = to[0 if "total_q" in problem else b]
    own[:, first : first + -(-length // step) * step] = past
    own[:, first : first + length] = rows


# ------------------------------------------------------------------ problems for tests


def problems(params: Params, scale: str) -> list[Problem]:
    """Those of the forward; blocks that share a walk leave sums that have no reference."""
    form, found = parse(params["form"]), []
    block = {"block": (16, 16)} if scale == "small" else {}
    for one in forward.problems({**params, **block}, scale)[: 1 if scale == "small" else 2]:
        found.append({
            **one, "causal": False, "score_mod_grad": form.score_mod_grad or "1",
            "bias_shape": (one["batch"] if form.dbias else 1, one["heads_q"], one["seqlen_q"]),
            "bias_parts": 1,
            "alibi_batches": one["batch"],
        })  # fmt: skip
    return found


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """What the forward reads; dout, and what its rows bring along: NaN where nobody may look."""
    made = forward.inputs(params, problem, rng)
    shape = (*made["q"].shape[:-1], problem["head_dim_v"])
    made["dout"] = rng.standard_normal(shape, np.float32).astype(numpy_dtype(problem["dtype"]))
    exact = {n: a.astype(np.float64) for n, a in made.items()}
    lse_log2, delta = padded(problem, np.nan), padded(problem, np.nan)
    for b, queries, keys in sequences(problem, made):
        q, k, v = (
            _one(problem, made[n], at) for n, at in (("q", queries), ("k", keys), ("v", keys))
        )
        o, lse = forward.attend(problem, exact, b, q, k, v)
        lse = np.where(np.isneginf(lse), np.inf, lse * math.log2(math.e))
        store_rows(problem, made, lse_log2, b, lse, np.inf)
        less = (o * _one(problem, made["dout"], queries)).sum(-1)
        store_rows(problem, made, delta, b, less, 0.0)
    rows = {"lse_log2": lse_log2, "delta": delta}
    return made | {name: array.astype(np.float32) for name, array in rows.items()}


def outputs(params: Params, problem: Problem) -> Arrays:
    """Every result of these kernels, poisoned with NaN."""
    dtype = numpy_dtype(problem["dtype"])
    packed = "total_q" in problem

    def rows(name: str) -> np.ndarray:
        shape: tuple[int, ...] = plain.shape(problem, name)
        if packed:
            shape = (problem["total_q" if name == "dq" else "total_k"], shape[1], shape[3])
        return np.full(shape, np.nan, dtype)

    heads = problem["heads_q"]
    bias = numpy_dtype(parse(params["form"]).bias or "fp32")
    return {
        **{name: rows(name) for name in ("dq", "dk", "dv")},
        "dbias": np.full((*problem["bias_shape"], problem["seqlen_k"]), np.nan, bias),
        "dbias_parts": np.full(_parts_shape(problem), np.nan, np.float32),
        "dsinks": np.full(heads, np.nan, np.float32),
        "dalibi_slopes": np.full((problem["alibi_batches"], heads), np.nan, np.float32),
        "dalibi_rows": padded(problem, np.nan).astype(np.float32),
    }


def tolerance(params: Params) -> float:
    return plain.tolerance(params)


def shape_class(problem: Problem) -> dict[str, Any]:
    return {**usual.shape_class({**problem, "causal": problem["window"][1] == 0})}
