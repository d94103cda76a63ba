"""How decoding is checked and timed: problems with random pages, and the reference in float64.

With score features a problem has what attention's has: `window`, `softcap`, `score_mod` …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.ops.attention import cases as forward
from fkjit.ops.attention.decode.grid import workspace
from fkjit.ops.attention.decode.problem import ROW_AXES
from fkjit.ops.attention.features import POINTERS, SLOTS, parse
from fkjit.ops.attention.shapes import PAGE_AXES
from fkjit.ops.kv import cases as kv
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

# Of the small problems and of the full ones; None: as wide as the scores.
_WINDOWS = {"small": ((24, 0), (140, 3)), "full": ((300, 0), (None, 0), (1000, 2), (4095, 0))}


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
        **{"page_size": page_size, "layout": layout, "page_axes": PAGE_AXES[layout]},
        "axes": ROW_AXES["bhsd"],
        **{"table_rows": batch, "table_width": width},
        "num_pages": batch * width + 2 if page_size else batch,
    }


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged lengths with an empty sequence; pages in both layouts, and none; splits of fixed size.
    With score features seen through windows."""
    found = _small(params) if scale == "small" else _full(params)
    if "form" not in params:
        return found
    return [
        _windowed(problem, window, params["form"])
        for problem, window in zip(found, _WINDOWS[scale], strict=True)
    ]


def _sizes(params: Params) -> tuple[int, int, int]:
    """New tokens, more of them, and a head dimension that is padded."""
    tokens, more = (1, 3) if params["rows"] == 16 else (6, 16)
    return tokens, more, params["head_dim"] - (16 if params["storage"] != "same" else 8)


def _small(params: Params) -> list[dict[str, Any]]:
    tokens, more, dim = _sizes(params)
    return [
        problem_of(params, [70, 0, 33], tokens=tokens, page_size=16, layout="nhd", blocks=4),
        problem_of(params, [150], heads_q=4, heads_kv=1, tokens=more, dim=dim, split=128),
    ]


def _full(params: Params) -> list[dict[str, Any]]:
    tokens, more, dim = _sizes(params)
    lengths = [1024, 1, 5000, 0, 1023, 16, 33]
    return [
        problem_of(params, lengths, tokens=more, page_size=16, layout="nhd", blocks=100),
        problem_of(params, lengths, tokens=tokens, page_size=256, blocks=37, dim=dim),
        problem_of(params, lengths, tokens=tokens, page_size=2, blocks=11, split=512),
        problem_of(params, [70_000], heads_q=32, heads_kv=8, tokens=tokens, blocks=264),
    ]


def _windowed(problem: Problem, window: tuple[int | None, int], text: str) -> dict[str, Any]:
    form, longest, (left, right) = parse(text), problem["longest"], window
    return {
        **problem, "causal": False, "seqlen_k": longest, "softcap": 2.0 * form.softcap,
        "window": (longest if left is None else left, right), "score_mod": form.score_mod,
        "score_scalars": {name: 0.01 for name, _ in form.scalars},
        "score_slots": tuple((n, SLOTS[i]) for i, (n, _) in enumerate(form.arrays)),
    }  # fmt: skip


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh q; pages in any order, NaN (int8: 127) where no token is; lengths, tables, scales; and
    what scores meet."""
    table, found = _table(problem, rng), {"q": _queries(problem, rng)}
    scales = kv.random_scales({**problem, "heads": problem["heads_kv"]}, rng)
    for side in ("k", "v"):
        ones = np.ones(problem["heads_kv"], np.float32)
        found[side] = _stored(problem, table, scales.get(f"{side}_scale", ones), rng)
    if problem["page_size"]:
        found["page_table"] = table.astype(np.int32)
    found |= {"seq_lens": np.array(problem["lengths"], np.int32), **scales}
    if "form" in params:
        found |= forward.feature_inputs(parse(params["form"]), problem, rng)
    return found


def _queries(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim"))
    return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(problem["dtype"]))


def _table(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Pages of each sequence; without pages a row each."""
    batch, width = problem["batch"], problem["table_width"] or 1
    table = rng.permutation(problem["num_pages"])[: batch * width].reshape(batch, width)
    return table if problem["page_size"] else np.arange(batch)[:, None]


def _stored(
    problem: Problem, table: np.ndarray, scale: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Keys or values as they lie in memory."""
    size, dtype = problem["page_size"] or problem["longest"], numpy_dtype(problem["dtype"])
    heads, dim = problem["heads_kv"], problem["head_dim"]
    stored = _poison(problem, (problem["num_pages"], size, heads, dim))
    for b, length in enumerate(problem["lengths"]):
        x = rng.standard_normal((length, heads, dim), dtype=np.float32).astype(dtype)
        at = np.arange(length)
        stored[table[b, at // size], at % size] = kv.encode(x, problem["storage"], scale)
    return stored if problem["layout"] == "nhd" else stored.transpose(0, 2, 1, 3).copy()


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
    names = ("q", *POINTERS)
    exact = {n: np.asarray(arrays[n]).astype(np.float64) for n in names if n in arrays}
    if "window" not in problem:
        problem = {**problem, **_unbounded(problem["causal"])}
    for b, length in enumerate(np.asarray(arrays["seq_lens"])):
        k, v = (keys_of(problem, arrays, side, b, int(length)) for side in ("k", "v"))
        o[b], lse[b] = forward.attend(problem, exact, b, exact["q"][b], k, v)
    return {"o": o, "lse": lse}


def _unbounded(causal: bool) -> dict[str, Any]:
    """A problem's features where there are none."""
    return {"window": (np.inf, 0 if causal else np.inf), "softcap": 0.0}


def keys_of(problem: Problem, arrays: Mapping[str, Any], side: str, b: int, length: int) -> Any:
    """[heads_kv, length, dim] of one sequence, in float64."""
    stored = np.asarray(arrays[side])
    stored = stored if problem["layout"] == "nhd" else stored.transpose(0, 2, 1, 3)
    at, size = np.arange(length), problem["page_size"]
    pages = np.asarray(arrays["page_table"])[b, at // size] if size else np.full(length, b)
    scale = np.asarray(arrays.get(f"{side}_scale", np.ones(problem["heads_kv"])))
    x = kv.decode(stored[pages, at % size if size else at], problem["storage"], scale, "fp32")
    return x.astype(np.float64).transpose(1, 0, 2)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) of one sequence: q [Hq, S, D], k and v [Hkv, keys, D]."""
    problem = {
        "heads_q": q.shape[0], "heads_kv": k.shape[0], "softmax_scale": softmax_scale,
        **_unbounded(causal),
    }  # fmt: skip
    return forward.attend(problem, {}, 0, q, k, v)


def tolerance(params: Params) -> float:
    """Greatest error of o against float64 on N(0, 1) inputs."""
    return {"fp16": 2e-3, "bf16": 1.6e-2}[params["dtype"]]


SPLIT = Verification(
    problems=problems, inputs=inputs, outputs=outputs, reference=reference, tolerance=tolerance,
)  # fmt: skip
