"""Problems of decoding for tests and benchmarks: random pages, and the reference in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.ops.attention.decode.grid import workspace
from fkjit.ops.kv import cases as kv
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem

NEW = (0, 1, 2)  # axes of batch, head, token in q [B, H, S, D]
PAGE_AXES = {"nhd": (0, 2, 1), "hnd": (0, 1, 2)}  # of page, head, token


def problem_of(
    params: Params, lengths: Sequence[int], *, heads_q: int = 8, heads_kv: int = 2,
    tokens: int = 1, page_size: int = 0, layout: str = "hnd", blocks: int = 3, split: int = 0,
    dim: int | None = None, longest: int | None = None, causal: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """One problem; without pages k and v are [B, H, S, D]."""
    dim = dim or int(params["head_dim"])
    longest = max(*lengths, 1) if longest is None else longest
    batch, width = len(lengths), -(-longest // page_size) if page_size else 0
    return {
        **{name: params[name] for name in ("dtype", "storage")},
        **{"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "seqlen_q": tokens},
        **{"head_dim": dim, "head_dim_v": dim, "causal": causal, "softmax_scale": dim**-0.5},
        **{"longest": longest, "lengths": list(lengths), "split": split, "blocks": blocks},
        **{"page_size": page_size, "axes": NEW, "page_axes": PAGE_AXES[layout], "layout": layout},
        **{"table_rows": batch, "table_width": width},
        "num_pages": batch * width + 2 if page_size else batch,
    }


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged lengths with an empty sequence; pages in both layouts, and none; fixed parts."""
    tokens, more = (1, 3) if params["rows"] == 16 else (6, 16)
    short = params["head_dim"] - (16 if params["storage"] != "same" else 8)
    if scale == "small":
        return [
            problem_of(params, [70, 0, 33], tokens=tokens, page_size=16, layout="nhd", blocks=4),
            problem_of(params, [150], heads_q=4, heads_kv=1, tokens=more, dim=short, split=128),
        ]
    lengths = [1024, 1, 5000, 0, 1023, 16, 33]
    return [
        problem_of(params, lengths, tokens=more, page_size=16, layout="nhd", blocks=100),
        problem_of(params, lengths, tokens=tokens, page_size=256, blocks=37, dim=short),
        problem_of(params, lengths, tokens=tokens, page_size=2, blocks=11, split=512),
        problem_of(params, [70_000], heads_q=32, heads_kv=8, tokens=tokens, blocks=264),
    ]


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh q; pages in any order, NaN (int8: 127) where no token is; lengths, tables, scales."""
    batch, hq, hkv, dim = (problem[n] for n in ("batch", "heads_q", "heads_kv", "head_dim"))
    size = problem["page_size"] or problem["longest"]
    width = problem["table_width"] or 1
    table = rng.permutation(problem["num_pages"])[: batch * width].reshape(batch, width)
    if not problem["page_size"]:
        table = np.arange(batch)[:, None]
    q = rng.standard_normal((batch, hq, problem["seqlen_q"], dim), dtype=np.float32)
    found: Arrays = {"q": q.astype(numpy_dtype(problem["dtype"]))}
    scales = kv.random_scales({**problem, "heads": hkv}, rng)
    for side in ("k", "v"):
        kept = _poison(problem, (problem["num_pages"], size, hkv, dim))
        scale = scales.get(f"{side}_scale", np.ones(hkv, np.float32))
        for b, length in enumerate(problem["lengths"]):
            x = rng.standard_normal((length, hkv, dim), dtype=np.float32)
            x = x.astype(numpy_dtype(problem["dtype"]))
            at = np.arange(length)
            kept[table[b, at // size], at % size] = kv.encode(x, problem["storage"], scale)
        found[side] = kept if problem["layout"] == "nhd" else kept.transpose(0, 2, 1, 3).copy()
    if problem["page_size"]:
        found["page_table"] = table.astype(np.int32)
    return {**found, "seq_lens": np.array(problem["lengths"], np.int32), **scales}


def _poison(problem: Problem, shape: tuple[int, ...]) -> np.ndarray:
    if problem["storage"] == "same":
        return np.full(shape, np.nan, numpy_dtype(problem["dtype"]))
    return np.full(shape, 127, kv.CODES[problem["storage"]])  # in e4m3 it is NaN


def outputs(params: Params, problem: Problem) -> Arrays:
    """o and lse, poisoned with NaN; the workspace as well; counters of 0."""
    shape = tuple(problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v"))
    size, counters = workspace(params, problem)
    return {
        "o": np.full(shape, np.nan, numpy_dtype(problem["dtype"])),
        "lse": np.full(shape[:3], np.nan, np.float32),
        "workspace": np.full(size // 4, np.nan, np.float32),
        "counters": np.zeros(counters, np.uint32),
    }


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """o and lse in float64, sequence by sequence; the counters as they were."""
    shape = tuple(problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v"))
    o, lse = np.zeros(shape), np.full(shape[:3], -np.inf)
    for b, length in enumerate(np.asarray(arrays["seq_lens"])):
        k, v = (keys_of(problem, arrays, side, b, int(length)) for side in ("k", "v"))
        q = np.asarray(arrays["q"])[b].astype(np.float64)
        o[b], lse[b] = attend(q, k, v, problem["softmax_scale"], problem["causal"])
    return {"o": o, "lse": lse}


def keys_of(problem: Problem, arrays: Mapping[str, Any], side: str, b: int, length: int) -> Any:
    """[heads_kv, length, dim] of one sequence, in float64."""
    kept = np.asarray(arrays[side])
    kept = kept if problem["layout"] == "nhd" else kept.transpose(0, 2, 1, 3)
    at, size = np.arange(length), problem["page_size"]
    pages = np.asarray(arrays["page_table"])[b, at // size] if size else np.full(length, b)
    scale = np.asarray(arrays.get(f"{side}_scale", np.ones(problem["heads_kv"])))
    x = kv.decode(kept[pages, at % size if size else at], problem["storage"], scale, "fp32")
    return x.astype(np.float64).transpose(1, 0, 2)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) of one sequence: q [Hq, S, D], k and v [Hkv, keys, D]."""
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    scores = q @ k.swapaxes(-1, -2) * softmax_scale
    tokens, keys = scores.shape[-2:]
    if causal:
        hidden = np.arange(keys) > np.arange(tokens)[:, None] + (keys - tokens)
        scores = np.where(hidden, -np.inf, scores)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return (weights / np.where(total == 0, 1, total)) @ v, lse[..., 0]


def tolerance(params: Params) -> float:
    """Greatest error of o against float64 on N(0, 1) inputs."""
    return {"fp16": 2e-3, "bf16": 1.6e-2}[params["dtype"]]
