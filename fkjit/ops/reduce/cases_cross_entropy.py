"""How the cross-entropy of rows is checked: problems, arrays, the reference in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Several rounds of a block with columns to spare; a row that most threads have nothing of; and
    losses alone."""
    turn = 4 * params["threads"] * params["unroll"]
    long = turn + 4 * params["threads"] + 61 if scale == "small" else 128_251
    rows = 3 if scale == "small" else 1000
    shapes = ((rows, long, True), (2, 16, True), (2, 43, False))
    return [
        {"rows": rows, "columns": columns, "wide": -(-columns // 8) * 8, "dtype": params["dtype"],
         "gradient": gradient}
        for rows, columns, gradient in shapes
    ]  # fmt: skip


def _held(params: Params, scale: str) -> list[dict[str, Any]]:
    """Rows that fill a tile but for some columns, and one that its first block has alone."""
    threads, vectors, cluster = params["tile"]
    most = 4 * threads * vectors * cluster
    rows = 2 if scale == "small" else 1000
    shapes = ((rows, most - 13, True), (2, 43, True), (1, 16, False))
    return [
        {"rows": rows, "columns": columns, "wide": -(-columns // 8) * 8, "dtype": params["dtype"],
         "gradient": gradient}
        for rows, columns, gradient in shapes
    ]  # fmt: skip


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """Logits that differ by some tens, so that a maximum is needed; behind them are numbers that
    nothing may depend on."""
    logits = (8 * rng.standard_normal((p["rows"], p["wide"]))).astype(np.float32)
    logits[:, p["columns"] :] = 1e4
    target, factor = rng.integers(0, p["columns"], p["rows"]), rng.uniform(0.5, 2, p["rows"])
    return {"logits": logits, "target": target, "factor": factor.astype(np.float32)}


def _outputs(params: Params, p: Problem) -> Arrays:
    made: dict[str, Any] = {"loss": np.full(p["rows"], np.nan, np.float32)}
    if p["gradient"]:
        shape = (p["rows"], p["wide"])
        made["gradient"] = np.full(shape, np.nan, numpy_dtype(p["dtype"]))
    return made


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """In float64."""
    x = np.asarray(arrays["logits"])[:, : p["columns"]].astype(np.float64)
    rows, target = np.arange(p["rows"]), np.asarray(arrays["target"])
    top = x.max(1, keepdims=True)
    normal = top + np.log(np.exp(x - top).sum(1, keepdims=True))
    found = {"loss": normal[:, 0] - x[rows, target]}
    if p["gradient"]:
        made = np.zeros((p["rows"], p["wide"]))
        made[:, : p["columns"]] = np.exp(x - normal)
        made[rows, target] -= 1
        found["gradient"] = made * np.asarray(arrays["factor"]).astype(np.float64)[:, None]
    return found


_SHARED: dict[str, Any] = {
    "inputs": _inputs, "outputs": _outputs, "reference": reference,
    "tolerance": lambda params: {"fp16": 1e-3, "bf16": 4e-3, "fp32": 1e-5}[params["dtype"]],
}  # fmt: skip

ROWS = Verification(problems=_problems, **_SHARED)
HELD = Verification(problems=_held, **_SHARED)
