"""How the backward of LayerNorm and RMSNorm is checked: problems, arrays, references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fkjit.ops.norm import cases as forward
from fkjit.ops.norm.kernels import capacity, size, threads
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_ALL = ("dx", "dweight_parts", "dbias_parts")


_DX_TOLERANCE = {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 4e-6}


def _problem(params: Params, rows: int, columns: int, gap: int, parts: int) -> dict[str, Any]:
    made = forward.problem(params, rows, columns, gap, "weight", residual=gap > 0)
    return {**made, "parts": parts}


def _problems(params: Params, full: int, group: int) -> list[dict[str, Any]]:
    """Rows that fill a tile, and some that do not, with gaps between them and dsum."""
    step = size(params["dtype"])
    less = max(step, full - 3 * step) if params["vector"] else full - 13
    return [
        _problem(params, 2, full, 0, 2 * group),
        _problem(params, 5, less, step, group),
        {**_problem(params, 1, max(step, full // 3 // step * step), 0, group), "affine": "none"},
    ]


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    made = forward.inputs(params, {**p, "residual": False}, rng)
    seen = forward.seen(p, made["x"])
    _, mean, rstd = forward.normalised(seen, params["centered"], p["eps"])
    for name in ("dy", *(("dsum",) if p["residual"] else ())):
        made[name] = forward.normal(rng, made["x"].size, p["dtype"])
    return {**made, "mean": mean.astype(np.float32), "rstd": rstd.astype(np.float32)}


def _reference(centered: bool, p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """dx, and the parts of dweight and dbias: row i belongs to part i % parts."""
    double = {n: np.asarray(a).astype(np.float64) for n, a in arrays.items() if a is not None}
    x, dy = (forward.seen(p, double[name]) for name in ("x", "dy"))
    mean = double["mean"][:, None] if centered else 0.0
    rstd = double["rstd"][:, None]
    h, g = (x - mean) * rstd, dy * double.get("weight", 1.0)
    dx = g - h * (g * h).mean(-1, keepdims=True)
    dx = (dx - g.mean(-1, keepdims=True) if centered else dx) * rstd
    if "dsum" in double:
        dx = dx + forward.seen(p, double["dsum"])
    made: Arrays = {"dx": np.full(forward.extent(p), np.nan)}
    forward.seen(p, made["dx"])[...] = dx
    for name, terms in (("dweight_parts", dy * h), ("dbias_parts", dy)):
        made[name] = np.zeros((p["parts"], p["columns"]))
        np.add.at(made[name], np.arange(p["rows"]) % p["parts"], terms)
    return made


def _outputs(centered: bool, wanted: tuple[str, ...], p: Problem) -> Arrays:
    shapes: dict[str, tuple[int, ...]] = {"dx": (forward.extent(p),)}
    for name in ("dweight_parts", *(("dbias_parts",) if centered else ())):
        shapes[name] = (p["parts"], p["columns"])
    kinds = {"dx": numpy_dtype(p["dtype"])}
    return {
        name: np.full(shape, np.nan, kinds.get(name, np.float32))
        for name, shape in shapes.items()
        if name in wanted
    }


Problems = Callable[[Params], list[dict[str, Any]]]


def _verification(centered: bool, wanted: tuple[str, ...], problems: Problems) -> Verification:
    """`wanted`: the outputs of one kernel."""

    def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
        found = _reference(centered, p, arrays)
        return {name: found[name] for name in _outputs(centered, wanted, p)}

    return Verification(
        problems=lambda params, scale: problems(params),
        inputs=lambda params, p, rng: _inputs({**params, "centered": centered}, p, rng),
        outputs=lambda params, p: _outputs(centered, wanted, p),
        reference=reference,
        tolerance=lambda params: _DX_TOLERANCE[params["dtype"]],
    )


def _of_rows(params: Params) -> list[dict[str, Any]]:
    tile = params["tile"]
    return _problems(params, capacity(params["dtype"], tile), threads(tile) // tile[0])


def _of_staged(params: Params) -> list[dict[str, Any]]:
    full = capacity(params["dtype"], params["tile"])
    return _problems({**params, "vector": True}, full, 1)[1:]


def _full_block(params: Params, vectors: int) -> int:
    return capacity(params["dtype"], (params["threads"], vectors, 1)) + 72


def _of_wide(params: Params) -> list[dict[str, Any]]:
    return _problems(params, _full_block(params, 2), 1)


def _of_weight_parts(params: Params) -> list[dict[str, Any]]:
    return _problems({**params, "weight_dtype": params["dtype"]}, _full_block(params, 1), 2)


LAYER_NORM_ROWS, RMS_NORM_ROWS = (_verification(c, _ALL, _of_rows) for c in (True, False))
LAYER_NORM_STAGED, RMS_NORM_STAGED = (_verification(c, _ALL, _of_staged) for c in (True, False))
LAYER_NORM_WIDE, RMS_NORM_WIDE = (_verification(c, _ALL[:1], _of_wide) for c in (True, False))
LAYER_NORM_WEIGHT_PARTS, RMS_NORM_WEIGHT_PARTS = (
    _verification(c, _ALL[1:], _of_weight_parts) for c in (True, False)
)


def _sum_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    return [
        {"weight_dtype": params["weight_dtype"], "parts": parts, "columns": columns}
        for parts, columns in ((1, 7), (70, 72))
    ]


def _sum_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    shape = (p["parts"], p["columns"])
    names = ("dweight_parts", "dbias_parts")
    return {name: rng.standard_normal(shape, np.float32) for name in names}


def _sum_outputs(params: Params, p: Problem) -> Arrays:
    kind = numpy_dtype(p["weight_dtype"])
    return {name: np.full(p["columns"], np.nan, kind) for name in ("dweight", "dbias")}


def _sums(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    return {
        name: np.asarray(arrays[f"{name}_parts"]).astype(np.float64).sum(0)
        for name in ("dweight", "dbias")
    }


SUM_PARTS = Verification(
    problems=_sum_problems,
    inputs=_sum_inputs,
    outputs=_sum_outputs,
    reference=_sums,
    tolerance=lambda params: {"fp16": 1e-3, "bf16": 8e-3, "fp32": 2e-6}[params["weight_dtype"]],
)
