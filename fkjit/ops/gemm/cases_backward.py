"""How the gradient of an activation is checked: problems, arrays, the reference in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE, activated
from fkjit.ops.gemm.kernels_backward import scratch
from fkjit.ops.gemm.problem import outputs_of
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


def _problem(params: Params, m: int, n: int, gap: int) -> dict[str, Any]:
    plain = (params["activation"], params["gate"]) == ("none", False)
    names = ("dtype", "out_dtype", "activation", "gate")
    return {
        **{name: params[name] for name in names}, "m": m, "n": n, "dy_stride": n + gap,
        "pre": not plain, "dz": True, "dbias": True, "y": params["gate"], "multiprocessors": 6,
    }  # fmt: skip


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Two strips, several blocks of one; and a few columns, without dbias or without dz."""
    columns = 8 * params["threads"] + 64
    m = 37 if scale == "small" else 1000
    odd = 0 if params["vector"] else 5
    narrow = _problem(params, 3, 8 + odd, 8)
    return [
        _problem(params, m, columns - odd, 8 + odd),
        {**narrow, "dbias": False},
        {**narrow, "dz": False, "y": False},
    ]


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    dtype, out_dtype = numpy_dtype(p["dtype"]), numpy_dtype(p["out_dtype"])
    made = {"dy": rng.standard_normal(p["m"] * p["dy_stride"]).astype(out_dtype)}
    if p["pre"]:
        made["pre"] = rng.standard_normal((p["m"], outputs_of(p))).astype(dtype)
    size, counters = scratch(params, p)
    if size:
        made["workspace"] = np.full(size // 4, np.nan, np.float32)
        made["counters"] = np.zeros(counters, np.uint32)
    return made


def _outputs(params: Params, p: Problem) -> Arrays:
    shapes = {"dz": (p["m"], outputs_of(p)), "dbias": (outputs_of(p),), "y": (p["m"], p["n"])}
    kind = numpy_dtype(p["dtype"])
    return {name: np.full(shape, np.nan, kind) for name, shape in shapes.items() if p.get(name)}


def _slope(activation: str, z: np.ndarray) -> np.ndarray:
    """Of the activation, by differences: about 1e-9 of what it is."""
    step = 1e-5
    if activation == "relu":
        return (z > 0).astype(np.float64)
    return (activated(activation, z + step) - activated(activation, z - step)) / (2 * step)


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """In float64."""
    dy = np.asarray(arrays["dy"]).reshape(p["m"], p["dy_stride"])[:, : p["n"]].astype(np.float64)
    dz, y = dy, None
    if p["pre"]:
        z, n = np.asarray(arrays["pre"]).astype(np.float64), p["n"]
        dz = dy * _slope(p["activation"], z[:, :n])
        if p["gate"]:
            value = activated(p["activation"], z[:, :n])
            y = value * z[:, n:]
            dz = np.concatenate([dz * z[:, n:], dy * value], axis=1)
    made = {"dz": dz, "dbias": dz.sum(0)} | ({} if y is None else {"y": y})
    return {name: found for name, found in made.items() if p.get(name)}


ACTIVATION = Verification(
    problems=_problems, inputs=_inputs, outputs=_outputs, reference=reference,
    tolerance=lambda params: TOLERANCE[params["dtype"]],
)  # fmt: skip
