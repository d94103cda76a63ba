"""What the kernels of attention's forms share: arguments, work, reference, test problems.

A problem is that of attention_problem.py with window=(left, right) in place of causal (a side
without a bound is as wide as the scores), softcap, score_scalars {name: value}, axes (where batch,
head, row stand in the arrays), and for packed sequences total_q and total_k; seqlen_q and seqlen_k
are those of the longest then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.ops.attention import problem as plain
from fkjit.ops.attention.features import SLOTS, Form, parse
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Params, Problem

POINTERS = ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "bias", "mask", "sinks", *SLOTS)
PACKED_AXES = (None, 1, 0)
_NO_STRIDES = (0, 0, 0)


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    values = plain.scalars({**problem, "causal": False})
    return {
        **{name: arrays.get(name) for name in ("q", "k", "v", "o", "lse")},
        **{f"{name}_strides": _strides(problem, arrays[name]) for name in ("q", "k", "v", "o")},
        **values,
        **{f"max_{name}": values[name] for name in ("seqlen_q", "seqlen_k")},
        **form_arguments(problem, arrays),
    }


def form_arguments(problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a form."""
    left, right = problem["window"]
    alibi = arrays.get("alibi_slopes")
    form = (
        *_broadcast_strides(arrays.get("bias")),
        *_broadcast_strides(arrays.get("mask")),
        *(left, right),
        0 if alibi is None or len(alibi.shape) < 2 else _step(alibi, 0),
        problem.get("total_q", 0),
        problem["softcap"],
        problem["softmax_scale"],
    )
    return {
        **{name: arrays.get(name) for name in POINTERS},
        "form": form,
        **{f"score_{name}": value for name, value in problem["score_scalars"].items()},
    }


def _step(array: Any, axis: int) -> int:
    """Elements from one index to the next, 0 where there is but one."""
    return array.strides[axis] // array.itemsize if array.shape[axis] > 1 else 0


def _strides(problem: Problem, array: Any) -> tuple[int, ...]:
    """Of batch, head and row; packed arrays have no batch."""
    axes = problem["axes"][:3]
    return tuple(0 if axis is None else array.strides[axis] // array.itemsize for axis in axes)


def _broadcast_strides(array: Any) -> tuple[int, ...]:
    """Of batch, head and row of a [batch | 1, heads | 1, seqlen_q | 1, seqlen_k] array or None."""
    if array is None or not hasattr(array, "shape") or len(array.shape) != 4:
        return _NO_STRIDES
    return tuple(_step(array, axis) for axis in range(3))


def flops(problem: Problem) -> float:
    """Multiplications and additions of the two products, over (query, key) pairs in the band."""
    sq, sk = problem["seqlen_q"], problem["seqlen_k"]
    last = np.arange(sq, dtype=np.float64) + sk - sq
    left, right = problem["window"]
    seen = np.clip(last + right + 1, 0, sk) - np.clip(last - left, 0, sk)
    dims = problem["head_dim"] + problem["head_dim_v"]
    return 2.0 * problem["batch"] * problem["heads_q"] * seen.clip(0).sum() * dims


def padded_flops(params: Params, problem: Problem) -> float:
    """What a kernel multiplies, with its rules: some twice as much as without."""
    return 2 * plain.padded_flops(params, {**problem, "causal": False})


def traffic(problem: Problem) -> float:
    """Bytes of q, k, v read once, o and lse written once, and a bias or mask that is there."""
    return plain.traffic(problem) + problem.get("form_bytes", 0)


def shape_class(problem: Problem) -> dict[str, Any]:
    return {**plain.shape_class({**problem, "causal": problem["window"][1] == 0})}


# ------------------------------------------------------------------ in float64


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """o and lse, the textbook way, sequence by sequence."""
    exact: dict[str, Any] = {
        name: np.asarray(array).astype(np.float64)
        for name, array in arrays.items()
        if array is not None
    }
    if problem.get("total_q") is None:
        found = [attend(problem, exact, b, *(exact[n][b] for n in "qkv")) for b in _batch(problem)]
        o, lse = (np.stack(parts) for parts in zip(*found, strict=True))
        return {"o": o, "lse": lse}
    shape = (problem["total_q"], problem["heads_q"])
    o, lse = np.full((*shape, problem["head_dim_v"]), np.nan), np.full(shape[::-1], np.nan)
    q_ends, k_ends = (np.asarray(arrays[f"cu_seqlens_{n}"]) for n in "qk")
    for b in _batch(problem):
        q_rows, k_rows = slice(*q_ends[b : b + 2]), slice(*k_ends[b : b + 2])
        rows = (exact["q"][q_rows], exact["k"][k_rows], exact["v"][k_rows])
        made, sums = attend(problem, exact, b, *(x.swapaxes(0, 1) for x in rows))
        o[q_rows], lse[:, q_rows] = made.swapaxes(0, 1), sums
    return {"o": o, "lse": lse}


def _batch(problem: Problem) -> range:
    return range(problem["batch"])


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
    if problem["softcap"]:
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
    left, right = problem["window"]
    apart = k_idx - (q_idx + sk - sq)
    return np.where((apart >= -left) & (apart <= right), score, -np.inf)


# ------------------------------------------------------------------ problems for tests


def problems(params: Params, scale: str) -> Sequence[Problem]:
    """Ragged, grouped, windows on both sides: sizes for the interpreter or for a GPU."""
    form = parse(params["form"])
    found = []
    for index, usual in enumerate(plain.problems({**params, "aligned": True}, scale)):
        sq, sk = usual["seqlen_q"], usual["seqlen_k"]
        sk += -sk % (8 if form.seeded else 2 if form.bias_paired or form.mask_paired else 1)
        wide = max(sq, sk)
        problem = {
            **usual, "seqlen_k": sk, "axes": (0, 1, 2, 3), "softcap": 2.0 * form.softcap,
            "window": ((sk // 3, 2), (wide, 0), (wide, wide))[index % 3],
            "score_mod": form.score_mod, "score_scalars": {n: 0.01 for n, _ in form.scalars},
            "score_slots": tuple((n, SLOTS[i]) for i, (n, _) in enumerate(form.arrays)),
        }  # fmt: skip
        found.append(_packed(problem) if form.varlen else problem)
    return found


def _packed(problem: Problem) -> Problem:
    """The same with three sequences: the longest, an empty one, and one of a few rows."""
    few_q, few_k = min(5, problem["seqlen_q"]), min(9, problem["seqlen_k"])
    lengths = ((problem["seqlen_q"], 0, few_q), (few_k, problem["seqlen_k"], few_k))
    return {
        **problem, "axes": PACKED_AXES, "batch": 3, "lengths": lengths,
        "total_q": sum(lengths[0]), "total_k": sum(lengths[1]),
    }  # fmt: skip


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh q, k, v; and whatever the form reads, broadcast one way or the other."""
    form = parse(params["form"])
    found = _rows(problem, rng) | form_inputs(form, problem, rng)
    if form.varlen:
        for name, lengths in zip("qk", problem["lengths"], strict=True):
            found[f"cu_seqlens_{name}"] = np.cumsum((0, *lengths)).astype(np.int32)
    return found


def form_inputs(form: Form, problem: Problem, rng: np.random.Generator) -> Arrays:
    """What scores meet."""
    b, h, sq, sk = (problem[n] for n in ("batch", "heads_q", "seqlen_q", "seqlen_k"))

    def normal(*shape: int, dtype: str = "fp32") -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))

    more: dict[str, Any] = {
        "alibi_slopes": np.abs(normal(b, h)) if form.alibi else None,
        "bias": normal(1, h, sq, sk, dtype=form.bias) if form.bias else None,
        "mask": (rng.random((b, 1, sq, sk)) < 0.8).astype(np.uint8) if form.mask else None,
        "sinks": normal(h) if form.sinks else None,
    }  # fmt: skip
    for slot, (_, kind) in zip(SLOTS, form.arrays, strict=False):
        more[slot] = normal(max(sq, sk), dtype=kind)
    return {name: array for name, array in more.items() if array is not None}


def _rows(problem: Problem, rng: np.random.Generator) -> Arrays:
    """q, k, v as attention has them, or packed."""
    if "total_q" not in problem:
        return plain.inputs({}, problem, rng)
    dtype = numpy_dtype(problem["dtype"])
    shapes = {
        "q": (problem["total_q"], problem["heads_q"], problem["head_dim"]),
        "k": (problem["total_k"], problem["heads_kv"], problem["head_dim"]),
        "v": (problem["total_k"], problem["heads_kv"], problem["head_dim_v"]),
    }
    return {n: rng.standard_normal(s, dtype=np.float32).astype(dtype) for n, s in shapes.items()}


def outputs(params: Params, problem: Problem) -> Arrays:
    """o and lse, poisoned with NaN."""
    if "total_q" not in problem:
        return plain.outputs(params, problem)
    rows, heads = problem["total_q"], problem["heads_q"]
    o = np.full((rows, heads, problem["head_dim_v"]), np.nan, numpy_dtype(problem["dtype"]))
    return {"o": o, "lse": np.full((heads, rows), np.nan, np.float32)}


def form_bytes(form: Form, arrays: Mapping[str, Any]) -> int:
    """Bytes of a bias and a mask, as often as they are stored."""
    sizes = {"bias": ITEMSIZE.get(form.bias, 0), "mask": 1}
    found = ((arrays.get(name), size) for name, size in sizes.items())
    return sum(size * int(np.prod(array.shape)) for array, size in found if array is not None)
