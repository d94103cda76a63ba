"""How streamed products of a decode step are checked: problems, arrays, references in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE, activated
from fkjit.ops.step import cases
from fkjit.ops.step.stream_kernel import BLOCK_K, stages
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_PARTS = 4  # of x's moments


def _rows(params: Params) -> int:
    """Of x, at most."""
    return params["tokens"] - (16 if params["norm"] == "layer" else 0)


def _common(params: Params, m: int, n: int, k: int) -> dict[str, Any]:
    names = ("dtype", "norm", "leaves", "activation", "gate", "rope", "head")
    said = {name: params[name] for name in names if name in params}
    return {**said, "tile": params["tile"], "m": m, "n": n, "k": k, "bias": m % 2 == 1,
            "x_stride": k + 8, "weight_stride": k + 16, "eps": 1e-5, "parts": _PARTS}  # fmt: skip


def _linear_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """All rows there is room for and fewer; a last step of k and a last tile that are not whole,
    and where k is not shared by many more steps than stages."""
    rows, cluster, _ = params["tile"]
    whole, most = rows // (2 if params["gate"] else 1), _rows(params)
    last = 0 if params["leaves"] == "layer" else 8
    least = BLOCK_K * cluster
    steps = max(stages(params)) + 2 if cluster < 4 else 3
    shapes = [(most, whole + last, least + 32), (max(most - 9, 1), whole, steps * least)]
    if scale == "full":
        shapes = [(most, 2048, 2048), (most - 1, 8192, 2048), (most, 2048, 8192)]
    return [
        {**_common(params, m, n, k), "residual": n % 16 == 0, "out_stride": n,
         "residual_stride": n + 8}
        for m, n, k in shapes
    ]  # fmt: skip


def _append_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Tokens without a slot among them; both layouts of pages; positions of 32 and 64 bits."""
    dim, cluster, _ = params["tile"]
    found, least, most = [], BLOCK_K * cluster, _rows(params)
    shapes = [(most, 2, 1, 2 * least, "nhd", 1), (3, 1, 1, least + 32, "hnd", 2)]
    if scale == "full":
        shapes = [(most, 32, 8, 2048, "nhd", 2)]
    for m, heads_q, heads_kv, k, layout, words in shapes:
        token, head = (heads_kv * dim, dim) if layout == "nhd" else (dim, 16 * dim)
        found.append({
            **_common(params, m, (heads_q + 2 * heads_kv) * dim, k), "heads_q": heads_q,
            "heads_kv": heads_kv, "head_dim": dim, "layout": layout, "position_words": words,
            "table_rows": cases.TABLE_ROWS if params["rope"] else 0, "page_size": 16,
            "num_pages": 8,
            **{f"{side}_pages": (16 * heads_kv * dim, head, token) for side in "kv"},
        })  # fmt: skip
    return found


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """x about 3, of a deviation of 2, where a norm takes that away, times the norm's weight."""
    kind, m, k, made = numpy_dtype(p["dtype"]), p["m"], p["k"], {}
    normed = p["norm"] != "none"
    rows = 2 * rng.standard_normal((m, k)) + 3 if normed else rng.standard_normal((m, k))
    if normed:
        made["moments"] = _moments(rows, _PARTS, p["norm"] == "layer")
        made["x_weight"] = (1 + 0.2 * rng.standard_normal(k)).astype(kind)
        rows = rows * made["x_weight"].astype(np.float64)
        if p["norm"] == "layer":
            made["x_bias"] = (0.2 * rng.standard_normal(k)).astype(kind)
        else:
            del made["x_weight"]
    weight = rng.standard_normal((cases.wide(p), k)) / math.sqrt(k)
    for name, values in (("x", rows), ("weight", weight)):
        stride = p[f"{name}_stride"]
        made[name] = np.full(len(values) * stride, np.nan, kind)
        cases.matrix(made[name], len(values), k, stride)[...] = values.astype(kind)
    if p["bias"]:
        made["bias"] = rng.standard_normal(cases.wide(p)).astype(kind)
    return made


def _moments(rows: np.ndarray, parts: int, centered: bool) -> np.ndarray:
    """Of equal parts of rows, as a product leaves them: [parts, m], or [parts, m, 2]."""
    cut = rows.reshape(len(rows), parts, -1).transpose(1, 0, 2)
    if not centered:
        return np.ascontiguousarray((cut**2).sum(-1), np.float32)
    apart = ((cut - cut.mean(-1, keepdims=True)) ** 2).sum(-1)
    return np.ascontiguousarray(np.stack([cut.sum(-1), apart], -1), np.float32)


def _linear_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    made, kind, m, n = _inputs(params, p, rng), numpy_dtype(p["dtype"]), p["m"], p["n"]
    if p["residual"]:
        made["residual"] = rng.standard_normal(m * p["residual_stride"]).astype(kind)
    if p["leaves"] != "none":
        made["norm_weight"] = (1 + 0.2 * rng.standard_normal(n)).astype(kind)
    return made


def _append_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    return {**_inputs(params, p, rng), **cases.places(p, rng)}


def _linear_outputs(params: Params, p: Problem) -> Arrays:
    kind, m, n = numpy_dtype(p["dtype"]), p["m"], p["n"]
    made: Arrays = {"out": np.full((m, n), np.nan, kind)}
    if p["leaves"] != "none":
        pair = (2,) if p["leaves"] == "layer" else ()
        tiles = -(-n // p["tile"][0])
        made["scaled_out"] = np.full((m, n), np.nan, kind)
        made["moments_out"] = np.full((tiles, m, *pair), np.nan, np.float32)
    return made


def _product(p: Problem, arrays: Mapping[str, Any]) -> np.ndarray:
    """Of the normalised rows and the weight, with the bias."""
    x = cases.matrix(arrays["x"], p["m"], p["k"], p["x_stride"]).astype(np.float64)
    weight = cases.matrix(arrays["weight"], cases.wide(p), p["k"], p["weight_stride"])
    if p["norm"] != "none":
        moments = np.asarray(arrays["moments"]).astype(np.float64)
        x = _normed(x, moments, arrays, p)
    bias = arrays.get("bias")
    z = x @ weight.astype(np.float64).T
    return z + (0 if bias is None else np.asarray(bias).astype(np.float64))


def _normed(
    x: np.ndarray, moments: np.ndarray, arrays: Mapping[str, Any], p: Problem
) -> np.ndarray:
    """The norm's outcome, of rows that are times its weight."""
    k = p["k"]
    if p["norm"] == "rms":
        return x / np.sqrt(moments.sum(0) / k + p["eps"])[:, None]
    weight, bias = (np.asarray(arrays[f"x_{n}"]).astype(np.float64) for n in ("weight", "bias"))
    mean, part = moments[..., 0].sum(0) / k, k / len(moments)
    apart = moments[..., 1] + part * (moments[..., 0] / part - mean) ** 2
    rstd = 1 / np.sqrt(apart.sum(0) / k + p["eps"])
    return (x - mean[:, None] * weight) * rstd[:, None] + bias


def _linear_reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    z, m, n = _product(p, arrays), p["m"], p["n"]
    y = activated(p["activation"], z[:, :n]) * (z[:, n:] if p["gate"] else 1)
    if p["residual"]:
        y = y + cases.matrix(arrays["residual"], m, n, p["residual_stride"]).astype(np.float64)
    made = {"out": y}
    if p["leaves"] != "none":
        rows, centered = p["tile"][0], p["leaves"] == "layer"
        padded = np.pad(y, ((0, 0), (0, -n % rows)))
        made["scaled_out"] = y * np.asarray(arrays["norm_weight"]).astype(np.float64)
        made["moments_out"] = _moments(padded, padded.shape[1] // rows, centered)
    return made


def _append_reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    return cases.appended(p, arrays, _product(p, arrays))


def _head_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Columns that are no multiple of anything."""
    rows, cluster, _ = params["tile"]
    shapes = [(_rows(params) - 3, rows + 21, BLOCK_K * cluster)]
    if scale == "full":
        shapes = [(_rows(params), 50257, 768)]
    return [{**_common(params, m, n, k), "residual_stride": 0, "out_stride": n + -n % 4}
            for m, n, k in shapes]  # fmt: skip


def _head_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    return {name: x for name, x in _inputs(params, p, rng).items() if name != "bias"}


def _head_outputs(params: Params, p: Problem) -> Arrays:
    tiles = -(-p["n"] // p["tile"][0])
    return {"out": np.full((p["m"], p["out_stride"]), np.nan, np.float32),
            "largest": np.zeros((tiles, p["m"], 2), np.int32)}  # fmt: skip


def _head_reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    made = np.full((p["m"], p["out_stride"]), np.nan)
    made[:, : p["n"]] = _product(p, arrays)
    return {"out": made}


def _pick_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    return [{"m": m, "tiles": tiles, "advance": advance}
            for m, tiles, advance in ((5, 700, True), (3, 9, False))]  # fmt: skip


def _pick_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """Values with some that are equal, in one row a NaN."""
    m, tiles = p["m"], p["tiles"]
    values = rng.integers(0, 50, (tiles, m)).astype(np.float32)
    values[tiles // 2, 1] = np.nan
    columns = rng.permutation(tiles)[:, None] * 64 + rng.integers(0, 64, (tiles, m))
    return {"largest": np.stack([values.view(np.int32), columns.astype(np.int32)], -1),
            "tokens": np.arange(m), "positions": np.arange(m, dtype=np.int32),
            "active": np.arange(m, dtype=np.int32) % 2}  # fmt: skip


def _pick_reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    largest = np.asarray(arrays["largest"])
    values, columns = largest[..., 0].copy().view(np.float32), largest[..., 1]
    values = np.where(np.isnan(values), np.inf, values)
    first = np.where(values == values.max(0), columns, np.iinfo(np.int32).max).min(0)
    return {"best": first.astype(np.int64)}


def _begin_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Rows that a thread has one piece of, and two."""
    said = {name: params[name] for name in ("dtype", "norm", "learned")}
    return [{**said, "m": 5, "k": k, "vocabulary": 50, "max_positions": 40, "max_sequences": 8,
             "max_pages": 3, "page_size": 16} for k in (72, 2064)]  # fmt: skip


def _begin_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """One row is no sequence, one is full, one has no page where its token would be."""
    kind, m, k = numpy_dtype(p["dtype"]), p["m"], p["k"]
    made = {
        "tokens": rng.integers(0, p["vocabulary"], m), "rows": np.array([4, -1, 0, 7, 2], np.int32),
        "positions": rng.integers(0, p["max_positions"], m).astype(np.int32),
        "embedding": (rng.standard_normal((p["vocabulary"], k)) + 1).astype(kind),
        "norm_weight": (1 + 0.2 * rng.standard_normal(k)).astype(kind),
        "page_table": rng.permutation(24).reshape(8, 3).astype(np.int32),
        "capacities": np.full(8, 48, np.int32), "lengths": np.arange(8, dtype=np.int32) * 5,
    }  # fmt: skip
    made["capacities"][0], made["page_table"][7, 2] = 0, -1
    if p["learned"]:
        made["position_embedding"] = rng.standard_normal((p["max_positions"], k)).astype(kind)
    return made


def _begin_outputs(params: Params, p: Problem) -> Arrays:
    kind, shape = numpy_dtype(p["dtype"]), (p["m"], p["k"])
    pair = (2,) if p["norm"] == "layer" else ()
    return {"slot_mapping": np.full(p["m"], -7, np.int32), "stream": np.full(shape, np.nan, kind),
            "scaled": np.full(shape, np.nan, kind),
            "moments": np.full((1, p["m"], *pair), np.nan, np.float32)}  # fmt: skip


def _begin_reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    stream = np.asarray(arrays["embedding"]).astype(np.float64)[np.asarray(arrays["tokens"])]
    if p["learned"]:
        learned = np.asarray(arrays["position_embedding"]).astype(np.float64)
        stream = stream + learned[np.asarray(arrays["positions"])]
    weight = np.asarray(arrays["norm_weight"]).astype(np.float64)
    table, slots = np.asarray(arrays["page_table"]), []
    for row in (4, -1, 0, 7, 2):
        page = table[row, 5 * row // 16] if row > 0 else -1
        slots.append(-1 if page < 0 else page * 16 + 5 * row % 16)
    return {"slot_mapping": np.array(slots), "stream": stream, "scaled": stream * weight,
            "moments": _moments(stream, 1, p["norm"] == "layer")}  # fmt: skip


def _tolerance(params: Params) -> float:
    """Sums of squares of a tile are as large as it is wide."""
    return TOLERANCE[params["dtype"]] * (1 if params.get("leaves", "none") != "none" else 0.25)


LINEAR = Verification(
    problems=_linear_problems, inputs=_linear_inputs, outputs=_linear_outputs,
    reference=_linear_reference, tolerance=_tolerance,
)  # fmt: skip
APPEND = Verification(
    problems=_append_problems, inputs=_append_inputs, outputs=cases.append_outputs,
    reference=_append_reference, tolerance=_tolerance,
)  # fmt: skip
HEAD = Verification(
    problems=_head_problems, inputs=_head_inputs, outputs=_head_outputs,
    reference=_head_reference, tolerance=_tolerance,
)  # fmt: skip
PICK = Verification(
    problems=_pick_problems, inputs=_pick_inputs,
    outputs=lambda params, p: {"best": np.full(p["m"], -1, np.int64)}, reference=_pick_reference,
)  # fmt: skip
BEGIN = Verification(
    problems=_begin_problems, inputs=_begin_inputs, outputs=_begin_outputs,
    reference=_begin_reference, tolerance=lambda params: TOLERANCE[params["dtype"]] * 4,
)  # fmt: skip
