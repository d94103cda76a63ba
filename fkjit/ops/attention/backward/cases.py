"""How the kernels of attention's backward are checked: problems, arrays, gradients in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fkjit.ops.attention import cases as forward
from fkjit.ops.attention.backward import problem as backward
from fkjit.ops.attention.backward.problem import ROW_STEP
from fkjit.ops.attention.features import parse
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

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
    made["dbias"] = np.zeros((*problem.get("bias_shape", (1, 1, 1)), problem["seqlen_k"]))
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
        _add_bias(made["dbias"], b, found["ds"])
        made["dsinks"] += found["sinks"]
        slopes = -(found["ds"] * abs(np.arange(sk) - np.arange(sq)[:, None] - (sk - sq))).sum(-1)
        made["dalibi_slopes"][b % len(made["dalibi_slopes"])] += slopes.sum(-1)
        store_rows(problem, arrays, made["dalibi_rows"], b, slopes, np.nan)
    return made


def _add_bias(dbias: np.ndarray, b: int, ds: np.ndarray) -> None:
    """The gradient of sequence b's final scores to that of a broadcast bias."""
    own, (sq, sk) = dbias[b % len(dbias)], ds.shape[1:]
    ds = ds if len(own) > 1 else ds.sum(0, keepdims=True)
    if own.shape[1] > 1:
        own[:, :sq, :sk] += ds
    else:
        own[:, :1, :sk] += ds.sum(1, keepdims=True)


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
    if problem.get("softcap"):
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
    return np.full(backward.rows_shape(problem), value)


def first_row(problem: Problem, arrays: Mapping[str, Any], b: int) -> int:
    """Of batch or sequence b in a padded array (templates/attention/backward/padded_rows.cuh)."""
    if "total_q" not in problem:
        return 0
    return (arrays["cu_seqlens_q"][b] // ROW_STEP + b) * ROW_STEP


def store_rows(
    problem: Problem, arrays: Mapping[str, Any], to: np.ndarray, b: int, rows: np.ndarray,
    past: float,
) -> None:  # fmt: skip
    """[heads, rows] of sequence b -> its place in a padded array, `past` to the end of the tile."""
    first, length = first_row(problem, arrays, b), rows.shape[1]
    own = to[0 if "total_q" in problem else b]
    own[:, first : first + -(-length // ROW_STEP) * ROW_STEP] = past
    own[:, first : first + length] = rows


def fragments(x: np.ndarray) -> np.ndarray:
    """[..., rows, columns] in the order of templates/attention/backward/sum_fragments.cuh."""
    *more, rows, columns = x.shape
    cut = x.reshape(*more, rows // 16, 2, 8, columns // 8, 4, 2)
    last = len(more)
    order = (0, 3, 2, 4, 1, 5)  # row block, column block, g, t, half, pair
    turned = cut.transpose(*range(last), *(last + i for i in order))
    return np.ascontiguousarray(turned).reshape(x.shape)


def dq_sum(problem: Problem, arrays: Mapping[str, Any], dq: np.ndarray) -> np.ndarray:
    """dq as its sums: whole tiles of rows and padded columns, not yet scaled."""
    sums = np.zeros(backward.sums_shape(problem))
    for b, queries, _ in sequences(problem, arrays):
        rows = dq[queries] / problem["softmax_scale"]
        rows = rows.swapaxes(0, 1) if "total_q" in problem else rows
        first = first_row(problem, arrays, b)
        own = sums[0 if "total_q" in problem else b]
        own[:, first : first + rows.shape[1], : rows.shape[2]] = rows
    return fragments(sums)


# ------------------------------------------------------------------ problems and arrays


def plain_problems(block_q: int, block_k: int, params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged, grouped, causal, rows without keys: sizes for the interpreter or for a GPU."""
    d, dv = params["head_dim"], params["head_dim_v"]
    if not params.get("aligned", True):
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


def feature_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Those of the forward; blocks that share a walk leave sums that have no reference."""
    features, found = parse(params["form"]), []
    block = {"block": (16, 16)} if scale == "small" else {}
    for one in forward.feature_problems({**params, **block}, scale)[: 1 if scale == "small" else 2]:
        found.append({
            **one, "causal": False, "score_mod_grad": features.score_mod_grad or "1",
            "bias_shape": (one["batch"] if features.dbias else 1, one["heads_q"], one["seqlen_q"]),
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


def outputs(params: Params, problem: Problem, names: tuple[str, ...]) -> Arrays:
    """These results, poisoned with NaN."""
    heads, bias = problem["heads_q"], parse(params.get("form", "window")).bias or "fp32"
    shapes: dict[str, tuple[int, ...]] = {
        "dbias": (*problem.get("bias_shape", (1, 1, 1)), problem["seqlen_k"]),
        "dbias_parts": _parts_shape(problem),
        "dsinks": (heads,),
        "dalibi_slopes": (problem.get("alibi_batches", 1), heads),
        "dalibi_rows": backward.rows_shape(problem),
        **{name: backward.shape(problem, name) for name in ("dq", "dk", "dv")},
    }
    if "total_q" in problem:
        for name in ("dq", "dk", "dv"):
            _, of, _, dim = shapes[name]
            shapes[name] = (problem["total_q" if name == "dq" else "total_k"], of, dim)
    dtypes: dict[str, str] = {**dict.fromkeys(("dq", "dk", "dv"), problem["dtype"]), "dbias": bias}
    return {n: np.full(shapes[n], np.nan, numpy_dtype(dtypes.get(n, "fp32"))) for n in names}


def tolerance(params: Params) -> float:
    """Greatest error against float64 on N(0, 1) inputs, beside the largest gradient."""
    return {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 4e-6}[params["dtype"]]


# ------------------------------------------------------------------ kernels that multiply


def _products(
    problems: Callable[[Params, str], list[dict[str, Any]]], *names: str, **more: str
) -> Verification:
    """`names` are results of every variant, `more` of those whose score features have the key."""

    def further(params: Params) -> tuple[str, ...]:
        features = parse(params.get("form", "window"))
        return tuple(name for field, name in more.items() if getattr(features, field))

    def found(params: Params, scale: str) -> list[dict[str, Any]]:
        if "form" not in params:
            return problems(params, scale)
        return [{**one, "more": further(params)} for one in feature_problems(params, scale)]

    def only(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
        every = reference(problem, arrays)
        return {name: every[name] for name in (*names, *problem.get("more", ()))}

    return Verification(
        problems=found,
        inputs=inputs,
        outputs=lambda params, one: outputs(params, one, (*names, *further(params))),
        reference=only,
        tolerance=tolerance,
    )


def _by_keys(params: Params, scale: str) -> list[dict[str, Any]]:
    own, other, *_ = params["tile"]
    return plain_problems(other, own, params, scale)


def _by_queries(params: Params, scale: str) -> list[dict[str, Any]]:
    own, other, *_ = params["tile"]
    return plain_problems(own, other, params, scale)


def _sum_reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    found = reference(problem, arrays)
    sums = dq_sum(problem, arrays, found["dq"])
    return {"dk": found["dk"], "dv": found["dv"], "dq_sum": sums}


DKDV = _products(_by_keys, "dk", "dv", dbias="dbias_parts")
DQ = _products(_by_queries, "dq", dbias="dbias", dalibi="dalibi_rows")
DBIAS = _products(_by_queries, "dbias")
DKDV_DQ = Verification(
    problems=lambda params, scale: [
        {**one, "sum_columns": params["head_dim"]} for one in _by_keys(params, scale)
    ],
    inputs=inputs,
    outputs=lambda params, one: {
        **outputs(params, one, ("dk", "dv")),
        "dq_sum": np.zeros(backward.sums_shape(one), np.float32),
    },
    reference=_sum_reference,
    tolerance=tolerance,
)


def _ordered_outputs(params: Params, problem: Problem) -> Arrays:
    """Sums are poisoned where there is a tile: the first block to come stores."""
    sums = np.full(backward.sums_shape(problem), np.nan, np.float32)
    block_q = params["tile"][1]
    sums[..., -(-problem["seqlen_q"] // block_q) * block_q :, :] = 0
    return {
        **outputs(params, problem, ("dk", "dv")), "dq_sum": sums,
        "turns": np.zeros(backward.order_shape(problem), np.uint32),
        "counters": np.zeros(1, np.uint32),
    }  # fmt: skip


def _ordered_reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    left = {"turns": np.zeros(backward.order_shape(problem)), "counters": np.zeros(1)}
    return _sum_reference(problem, arrays) | left


DKDV_ORDERED = Verification(
    problems=DKDV_DQ.problems,
    inputs=inputs,
    outputs=_ordered_outputs,
    reference=_ordered_reference,
    tolerance=tolerance,
)
