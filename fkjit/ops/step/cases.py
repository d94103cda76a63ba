"""How the launches of a decode step are checked: problems, arrays, references in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE, activated
from fkjit.ops.kv.problem import page_shape
from fkjit.ops.rope.frequencies import rope_table
from fkjit.ops.step.kernels import ROWS
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_POISON = 7.0  # in pages, where nothing is appended
TABLE_ROWS = 90


def _common(params: Params, m: int, n: int, k: int, bias: bool) -> dict[str, Any]:
    names = ("dtype", "norm", "activation", "gate", "rope")
    said = {name: params[name] for name in names if name in params}
    return {**said, "m": m, "n": n, "k": k, "bias": bias, "x_stride": k + 8,
            "weight_stride": k + 16, "eps": 1e-5}  # fmt: skip


def _linear_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """As many rows as there is room for; columns and spans that not all warps have."""
    shapes = [(ROWS, 40, 72, True), (3, 2 * params["tile"][0] + 5, 1104, True), (1, 8, 8, False)]
    if scale == "full":
        shapes = [(1, 8192, 2048, True), (ROWS, 1000, 1000, True), (5, 4104, 2048, False)]
    most = params["room"] << 10
    return [
        {**_common(params, m, n, k, bias), "out_stride": n + 8}
        for m, n, k, bias in shapes
        for m in [min(m, most // (2 * k + 64))]
        if m
    ]


def _append_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Tokens without a slot among them; both layouts of pages; positions of 32 and 64 bits."""
    found, most = [], params["room"] << 10
    shapes = [(5, 4, 2, 32, 136, "nhd", 1), (2, 1, 1, 64, 264, "hnd", 2)]
    if scale == "full":
        shapes = [(1, 32, 8, 64, 2048, "nhd", 2), (ROWS, 8, 8, 128, 1024, "hnd", 1)]
    for m, heads_q, heads_kv, dim, k, layout, words in shapes:
        token, head = (heads_kv * dim, dim) if layout == "nhd" else (dim, 16 * dim)
        n = (heads_q + 2 * heads_kv) * dim
        found.append({
            **_common(params, min(m, most // (2 * k + 64)), n, k, m > 2), "heads_q": heads_q,
            "heads_kv": heads_kv, "head_dim": dim, "layout": layout, "position_words": words,
            "table_rows": TABLE_ROWS if params["rope"] else 0, "page_size": 16, "num_pages": 4,
            **{f"{side}_pages": (16 * heads_kv * dim, head, token) for side in "kv"},
        })  # fmt: skip
    return [problem for problem in found if problem["m"]]


def matrix(array: Any, rows: int, columns: int, stride: int) -> np.ndarray:
    """[rows, columns] of a buffer."""
    array = np.asarray(array)
    steps = (stride * array.itemsize, array.itemsize)
    return np.lib.stride_tricks.as_strided(array, (rows, columns), steps)


def wide(p: Problem) -> int:
    """Rows of the weight."""
    return p["n"] * (2 if p.get("gate") else 1)


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """x about 3, of a deviation of 2, so that a mean that is forgotten shows; gaps hold NaN."""
    kind, k, made = numpy_dtype(p["dtype"]), p["k"], {}
    spread = {"x": (p["m"], 2.0, 3.0), "weight": (wide(p), 1 / math.sqrt(k), 0.0)}
    for name, (rows, deviation, mean) in spread.items():
        stride = p[f"{name}_stride"]
        made[name] = np.full(rows * stride, np.nan, kind)
        values = deviation * rng.standard_normal((rows, k)) + mean
        matrix(made[name], rows, k, stride)[...] = values.astype(kind)
    made["norm_weight"] = (1 + 0.2 * rng.standard_normal(k)).astype(kind)
    if p["bias"]:
        made["bias"] = rng.standard_normal(wide(p)).astype(kind)
    if p["norm"] == "layer":
        made["norm_bias"] = (0.2 * rng.standard_normal(k)).astype(kind)
    return made


def _append_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    return {**_inputs(params, p, rng), **places(p, rng)}


def places(p: Problem, rng: np.random.Generator) -> Arrays:
    """Slots, of which every third is none; positions and angles, where q and k turn."""
    slots = rng.permutation(p["num_pages"] * p["page_size"])[: p["m"]].astype(np.int32)
    slots[2::3] = -1
    made: Arrays = {"slot_mapping": slots}
    if p["rope"]:
        kind = np.int64 if p["position_words"] == 2 else np.int32
        made["positions"] = rng.integers(0, TABLE_ROWS, p["m"], kind)
        made["table"] = rope_table(TABLE_ROWS, p["head_dim"])
    return made


def _linear_outputs(params: Params, p: Problem) -> Arrays:
    return {"out": np.full(p["m"] * p["out_stride"], np.nan, numpy_dtype(p["dtype"]))}


def append_outputs(params: Params, p: Problem) -> Arrays:
    """q, and pages of poison."""
    kind = numpy_dtype(p["dtype"])
    shape = page_shape(p["layout"], p["num_pages"], p["page_size"], p["heads_kv"], p["head_dim"])
    pages = {f"{side}_pages": np.full(shape, _POISON, kind) for side in "kv"}
    return {"out_q": np.full((p["m"], p["heads_q"], p["head_dim"]), np.nan, kind), **pages}


def _product(p: Problem, arrays: Mapping[str, Any]) -> np.ndarray:
    """Of the normalised rows and the weight, with the bias."""
    x = matrix(arrays["x"], p["m"], p["k"], p["x_stride"]).astype(np.float64)
    weight = matrix(arrays["weight"], wide(p), p["k"], p["weight_stride"]).astype(np.float64)
    factor = np.asarray(arrays["norm_weight"]).astype(np.float64)
    if p["norm"] == "layer":
        x = x - x.mean(-1, keepdims=True)
    rows = x / np.sqrt((x**2).mean(-1, keepdims=True) + p["eps"]) * factor
    if arrays.get("norm_bias") is not None:
        rows = rows + np.asarray(arrays["norm_bias"]).astype(np.float64)
    bias = arrays.get("bias")
    return rows @ weight.T + (0 if bias is None else np.asarray(bias).astype(np.float64))


def _linear_reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    z, n = _product(p, arrays), p["n"]
    y = activated(p["activation"], z[:, :n])
    made = np.full(p["m"] * p["out_stride"], np.nan)
    matrix(made, p["m"], n, p["out_stride"])[...] = y * z[:, n:] if p["gate"] else y
    return {"out": made}


def _append_reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    return appended(p, arrays, _product(p, arrays))


def appended(p: Problem, arrays: Mapping[str, Any], product: np.ndarray) -> Arrays:
    """What becomes of q, k and v side by side."""
    dim, kv = p["head_dim"], p["heads_kv"]
    heads = product.reshape(p["m"], -1, dim)
    turning = p["heads_q"] + kv
    if p["rope"]:
        table = np.asarray(arrays["table"]).astype(np.float64)[np.asarray(arrays["positions"])]
        cosine, sine = (side[:, None] for side in np.split(table, 2, -1))
        a, b = np.split(heads[:, :turning], 2, -1)
        heads[:, :turning] = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)
    made = {"out_q": heads[:, : p["heads_q"]]}
    slots = np.asarray(arrays["slot_mapping"])
    for side, first in (("k", p["heads_q"]), ("v", turning)):
        pages = np.full((p["num_pages"] * p["page_size"], kv, dim), _POISON)
        pages[slots[slots >= 0]] = heads[slots >= 0, first : first + kv]
        pages = pages.reshape(p["num_pages"], p["page_size"], kv, dim)
        made[f"{side}_pages"] = pages if p["layout"] == "nhd" else pages.transpose(0, 2, 1, 3)
    return made


def _tolerance(params: Params) -> float:
    return TOLERANCE[params["dtype"]]


LINEAR = Verification(
    problems=_linear_problems, inputs=_inputs, outputs=_linear_outputs,
    reference=_linear_reference, tolerance=_tolerance,
)  # fmt: skip
APPEND = Verification(
    problems=_append_problems, inputs=_append_inputs, outputs=append_outputs,
    reference=_append_reference, tolerance=_tolerance,
)  # fmt: skip
