"""How gradients of a gated activation in a product's way out are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm import cases
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_STEP = 1e-6


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Tiles that are cut, more of them than blocks; fewer rows than half a tile's."""
    block_m, block_n = params["block"]
    wide, deep = (2, 200) if scale == "small" else (9, 1000)
    given = {"pre": True, "bias": False}
    return [
        {**cases.problem(params, block_m + 24, wide * block_n - 8, deep, **given),
         "multiprocessors": 2},
        {**cases.problem(params, 6, block_n // 4 // 8 * 8, 64, **given), "multiprocessors": 2},
    ]  # fmt: skip


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    pre = rng.standard_normal((p["m"], 2 * p["n"])).astype(numpy_dtype(p["dtype"]))
    return {**cases.inputs(params, p, rng), "pre": pre}


def _outputs(params: Params, p: Problem) -> Arrays:
    made = cases.outputs(params, p)
    return {"out": made["out"], "dz": np.full((p["m"], 2 * p["n"]), np.nan, made["out"].dtype)}


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """In float64, slopes by differences."""
    plain = {**p, "activation": "none", "pre": False}
    dy = cases.seen(plain, "out", cases.reference(plain, arrays)["out"])
    pre = np.asarray(arrays["pre"]).astype(np.float64)
    gate, up = pre[:, : p["n"]], pre[:, p["n"] :]
    value, more, less = (cases.activated(p["activation"], gate + d) for d in (0, _STEP, -_STEP))
    slope = (more - less) / (2 * _STEP)
    out = np.full(max(p["m"], 1) * p["out_stride"], np.nan)
    cases.seen(p, "out", out)[...] = value * up
    return {"out": out, "dz": np.concatenate([dy * up * slope, dy * value], 1)}


SLOPES = Verification(
    problems=_problems, inputs=_inputs, outputs=_outputs, reference=reference,
    tolerance=lambda params: cases.TOLERANCE[params["dtype"]],
)  # fmt: skip
