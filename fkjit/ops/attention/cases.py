"""What attention's forward kernels are verified with: problems, arrays, float64, tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from fkjit.ops.attention.features import SLOTS, ScoreFeatures, parse
from fkjit.ops.attention.kernels_sm90 import COUNTERS
from fkjit.ops.attention.problem import split_block
from fkjit.ops.attention.shapes import PACKED_AXES, WIDEST
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

# ------------------------------------------------------------------ in float64


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """o and lse, the textbook way, sequence by sequence: every score, a softmax, a product."""
    exact: dict[str, Any] = {
        name: _numbers(name, np.asarray(array))
        for name, array in arrays.items()
        if array is not None
    }
    if problem.get("total_q") is None:
        q, k, v = (exact[name] for name in "qkv")
        o, lse = np.empty((*q.shape[:3], v.shape[3])), np.empty(q.shape[:3])
        for b in range(len(q)):
            o[b], lse[b] = attend(problem, exact, b, q[b], k[b], v[b])
        return {"o": o, "lse": lse}
    shape = (problem["total_q"], problem["heads_q"])
    o, lse = np.full((*shape, problem["head_dim_v"]), np.nan), np.full(shape[::-1], np.nan)
    q_ends = np.asarray(arrays["cu_seqlens_q"])
    for b in range(problem["batch"]):
        q_rows = slice(*q_ends[b : b + 2])
        rows = (exact["q"][q_rows], *_keys_of(problem, arrays, exact, b))
        made, sums = attend(problem, exact, b, *(x.swapaxes(0, 1) for x in rows))
        o[q_rows], lse[:, q_rows] = made.swapaxes(0, 1), sums
    return {"o": o, "lse": lse}


def _numbers(name: str, array: np.ndarray) -> np.ndarray:
    """In float64; bytes of k and v are e4m3 codes."""
    is_code = name in ("k", "v") and array.dtype == np.uint8
    return (array.view(ml_dtypes.float8_e4m3fn) if is_code else array).astype(np.float64)


def _keys_of(
    problem: Problem, arrays: Mapping[str, Any], exact: Mapping[str, Any], b: int
) -> list[np.ndarray]:
    """k and v [Sk, Hkv, ...] of a packed sequence, or of one in pages."""
    if "page_size" not in problem:
        ends = np.asarray(arrays["cu_seqlens_k"])
        return [exact[name][slice(*ends[b : b + 2])] for name in "kv"]
    row = int(np.asarray(arrays["rows"])[b])
    pages = np.asarray(arrays["page_table"])[row]
    length = int(np.asarray(arrays["seq_lens"])[row])
    order = tuple(problem["page_axes"][i] for i in (0, 2, 1)) + (3,)  # pages, tokens, heads
    used = pages[: -(-length // problem["page_size"])]
    one = np.ones(problem["heads_kv"])
    held = [
        exact[name].transpose(order)[used] * exact.get(f"{name}_scale", one)[:, None]
        for name in "kv"
    ]
    return [x.reshape(-1, *x.shape[2:])[:length] for x in held]


def attend(
    problem: Problem, arrays: Mapping[str, Any], b: int, q: Any, k: Any, v: Any
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: q [Hq, Sq, D], k and v [Hkv, Sk, ...]."""
    group = problem["heads_q"] // problem["heads_kv"]
    k, v = (np.repeat(x, group, axis=0) for x in (k, v))
    scores = final_scores(problem, arrays, b, q @ k.swapaxes(-1, -2) * problem["softmax_scale"])
    sinks = arrays.get("sinks")
    virtual = np.full(len(q), -np.inf) if sinks is None else sinks
    top = np.maximum(scores.max(-1, initial=-np.inf), virtual[:, None])
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(-1) + np.exp(virtual[:, None] - top)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return weights / np.where(total == 0, 1, total)[..., None] @ v, lse


def final_scores(
    problem: Problem, arrays: Mapping[str, Any], b: int, score: np.ndarray
) -> np.ndarray:
    """Scaled scores [Hq, Sq, Sk] of batch b -> final ones, by the rules of attention/score.cuh."""
    heads, sq, sk = score.shape
    h, q_idx, k_idx = np.ogrid[:heads, :sq, :sk]
    if problem.get("softcap"):
        score = problem["softcap"] * np.tanh(score / problem["softcap"])
    if problem.get("score_mod"):
        names = {**problem["score_scalars"], **{n: arrays[s] for n, s in problem["score_slots"]}}
        given = {"score": score, "b": b, "h": h, "q_idx": q_idx, "k_idx": k_idx, **names}
        score = eval(problem["score_mod"], {"__builtins__": {}}, given)  # our own examples only
    if arrays.get("alibi_slopes") is not None:
        slopes = np.atleast_2d(arrays["alibi_slopes"])
        score = score - slopes[b % len(slopes)][:, None, None] * np.abs(q_idx + sk - sq - k_idx)
    for name in ("bias", "mask"):
        array = arrays.get(name)
        if array is not None:
            own = array[b % len(array)]
            own = own[:, : sq if own.shape[1] > 1 else 1, :sk]
            score = score + own if name == "bias" else np.where(own != 0, score, -np.inf)
    left, right = problem.get("window") or (np.inf, 0 if problem["causal"] else np.inf)
    apart = k_idx - (q_idx + sk - sq)
    return np.where((apart >= -left) & (apart <= right), score, -np.inf)


def tolerance(params: Params) -> float:
    """Greatest error of o against float64 on N(0, 1) inputs: two roundings of its largest value."""
    return {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 4e-6}[params["dtype"]]


# ------------------------------------------------------------------ problems and arrays


def problems(params: Params, scale: str) -> Sequence[Problem]:
    """Ragged, grouped, causal both ways, strided: sizes for the interpreter or for a GPU."""
    block_q, block_k = split_block(params.get("block", (16, 32)))
    d, dv = params.get("head_dim", 64), params.get("head_dim_v", 64)
    dv = WIDEST if d == WIDEST else dv  # in parts
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


def feature_problems(params: Params, scale: str) -> Sequence[Problem]:
    """The same with score features, and windows on both sides."""
    features = parse(params["form"])
    found = []
    for index, usual in enumerate(problems({**params, "aligned": True}, scale)):
        sq, sk = usual["seqlen_q"], usual["seqlen_k"]
        sk += -sk % (
            8 if features.seeded else 2 if features.bias_paired or features.mask_paired else 1
        )
        wide = max(sq, sk)
        problem = {
            **usual, "seqlen_k": sk, "axes": (0, 1, 2, 3), "softcap": 2.0 * features.softcap,
            "window": ((sk // 3, 2), (wide, 0), (wide, wide))[index % 3],
            "score_mod": features.score_mod,
            "score_scalars": {name: 0.01 for name, _ in features.scalars},
            "score_slots": tuple((n, SLOTS[i]) for i, (n, _) in enumerate(features.arrays)),
        }  # fmt: skip
        packed = _packed(problem) if features.varlen else problem
        found.append(_paged(packed, index) if features.paged else packed)
    return found


def _packed(problem: Problem) -> Problem:
    """The same with three sequences: the longest, an empty one, and one of a few rows."""
    few_q, few_k = min(5, problem["seqlen_q"]), min(9, problem["seqlen_k"])
    lengths = ((problem["seqlen_q"], 0, few_q), (few_k, problem["seqlen_k"], few_k))
    return {
        **problem, "axes": PACKED_AXES, "batch": 3, "lengths": lengths,
        "total_q": sum(lengths[0]), "total_k": sum(lengths[1]),
    }  # fmt: skip


def _paged(problem: Problem, index: int) -> Problem:
    """The same with its keys in pages, which lie one way or the other."""
    size = (16, 64)[index % 2]
    width = -(-problem["seqlen_k"] // size) + 1
    return {
        **problem, "page_size": size, "num_pages": 4 * width, "table_width": width,
        "page_axes": ((0, 2, 1), (0, 1, 2))[index % 2],
    }  # fmt: skip


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh q, k, v, packed or not; and what the features read, broadcast one way or the other."""
    features = parse(params["form"]) if "form" in params else ScoreFeatures()
    found = (_packed_rows if "total_q" in problem else _dense_rows)(problem, rng)
    if features.paged:
        found |= _pages(problem, rng, features.codes)
    found |= feature_inputs(features, problem, rng)
    if features.varlen:
        for name, lengths in zip("q" if features.paged else "qk", problem["lengths"], strict=False):
            found[f"cu_seqlens_{name}"] = np.cumsum((0, *lengths)).astype(np.int32)
    return found


def feature_inputs(features: ScoreFeatures, problem: Problem, rng: np.random.Generator) -> Arrays:
    """What scores meet."""
    b, h, sq, sk = (problem[n] for n in ("batch", "heads_q", "seqlen_q", "seqlen_k"))

    def normal(*shape: int, dtype: str = "fp32") -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))

    more: dict[str, Any] = {
        "alibi_slopes": np.abs(normal(b, h)) if features.alibi else None,
        "bias": normal(1, h, sq, sk, dtype=features.bias) if features.bias else None,
        "mask": (rng.random((b, 1, sq, sk)) < 0.8).astype(np.uint8) if features.mask else None,
        "sinks": normal(h) if features.sinks else None,
    }  # fmt: skip
    for slot, (_, kind) in zip(SLOTS, features.arrays, strict=False):
        more[slot] = normal(max(sq, sk), dtype=kind)
    return {name: array for name, array in more.items() if array is not None}


def _dense_rows(problem: Problem, rng: np.random.Generator) -> Arrays:
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


def _packed_rows(problem: Problem, rng: np.random.Generator) -> Arrays:
    dtype = numpy_dtype(problem["dtype"])
    shapes = {
        "q": (problem["total_q"], problem["heads_q"], problem["head_dim"]),
        "k": (problem["total_k"], problem["heads_kv"], problem["head_dim"]),
        "v": (problem["total_k"], problem["heads_kv"], problem["head_dim_v"]),
    }
    return {n: rng.standard_normal(s, dtype=np.float32).astype(dtype) for n, s in shapes.items()}


def _pages(problem: Problem, rng: np.random.Generator, codes: str) -> Arrays:
    """k, v, tables and lengths: pages in any order, what no sequence has is NaN (or 127), and table
    rows stand in another order than sequences."""
    size, width, batch = problem["page_size"], problem["table_width"], problem["batch"]
    lengths = np.asarray(problem["lengths"][1], np.int32)
    rows = np.arange(batch, dtype=np.int32)[::-1].copy()
    table = np.full((batch, width), -1, np.int32)
    free = iter(rng.permutation(problem["num_pages"]))
    held = np.zeros((problem["num_pages"], size), bool)
    for row, length in zip(rows, lengths, strict=True):
        for at in range(-(-int(length) // size)):
            table[row, at] = next(free)
            held[table[row, at], : length - at * size] = True
    found: dict[str, Any] = {"page_table": table, "rows": rows}
    found["seq_lens"] = lengths[np.argsort(rows)]
    for name, dim in (("k", "head_dim"), ("v", "head_dim_v")):
        shape = (problem["num_pages"], size, problem["heads_kv"], problem[dim])
        made = rng.standard_normal(shape, dtype=np.float32)
        made[~held] = np.nan
        dtype = numpy_dtype(problem["dtype"])
        if codes:
            scale = rng.uniform(0.01, 0.03, problem["heads_kv"]).astype(np.float32)
            found[f"{name}_scale"], made = scale, made / scale[:, None]
            dtype = np.dtype(ml_dtypes.float8_e4m3fn)
        if codes == "int8":
            made, dtype = np.rint(np.nan_to_num(made.clip(-127, 127), nan=127)), np.dtype(np.int8)
        order = tuple(np.argsort((*(problem["page_axes"][i] for i in (0, 2, 1)), 3)))
        made = np.ascontiguousarray(made.transpose(order)) if problem["page_axes"][1] == 1 else made
        made = made.astype(dtype)
        found[name] = made.view(np.uint8) if codes == "fp8" else made
    return found


def outputs(params: Params, problem: Problem) -> Arrays:
    """o and lse, poisoned with NaN."""
    b, h, sq, dv = (problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v"))
    o, lse = (b, h, sq, dv), (b, h, sq)
    if "total_q" in problem:
        o, lse = (problem["total_q"], h, dv), (h, problem["total_q"])
    dtype = numpy_dtype(problem["dtype"])
    return {"o": np.full(o, np.nan, dtype), "lse": np.full(lse, np.nan, np.float32)}


# ------------------------------------------------------------------ on sm_90


def problems_sm90(params: Params, scale: str) -> Sequence[Problem]:
    """The small ones on a GPU of two SMs, so that blocks go on, and the last, one tile of queries,
    with keys for its consumers to take turns."""
    usual = problems(params, scale)
    if scale != "small":
        return usual
    *most, last = ({**problem, "multiprocessors": 2} for problem in usual)
    return [*most, {**last, "seqlen_k": 2 * last["seqlen_k"] + 3}]


def feature_problems_sm90(params: Params, scale: str) -> Sequence[Problem]:
    """Rows of a bias or a mask in whole 16 bytes; the small ones on a GPU of two SMs, so that
    blocks go on."""
    features, found = parse(params["form"]), []
    for problem in feature_problems(params, scale):
        keys = problem["seqlen_k"]
        wide = -(-keys // 16) * 16 if features.bias or features.mask else keys
        more = {"multiprocessors": 2} if scale == "small" else {}
        found.append({**problem, "seqlen_k": wide, **more})
    return found


def outputs_sm90(params: Params, problem: Problem) -> Arrays:
    """o, lse and the counter that blocks draw their work from."""
    return {**outputs(params, problem), "counters": np.zeros(COUNTERS, np.uint32)}


PLAIN = Verification(
    problems=problems, inputs=inputs, outputs=outputs, reference=reference, tolerance=tolerance
)
FEATURES = replace(PLAIN, problems=feature_problems)
PLAIN_SM90 = replace(PLAIN, problems=problems_sm90, outputs=outputs_sm90)
FEATURES_SM90 = replace(PLAIN_SM90, problems=feature_problems_sm90)
