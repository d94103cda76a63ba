"""What the gradients of a product start from: dz = dy * act'(z), and dbias, its column sums."""

from __future__ import annotations

from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.gemm import kernels_backward as kernels
from fkjit.ops.gemm.backward import ACTIVATION, ActivationOptions
from fkjit.ops.gemm.problem import outputs_of
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.op import Arrays, Op, Prepared
from .peers_linear_backward import PEERS, gradients

_ROWS = 256  # of dz checked at either end


def problem(
    m: int, n: int, activation: str, gate: bool = False, dtype: str = "bf16"
) -> dict[str, Any]:
    """dz and dbias; without an activation dz is dy, and dbias alone is made."""
    plain = activation == "none" and not gate
    return {
        "m": m, "n": n, "dtype": dtype, "out_dtype": dtype, "activation": activation, "gate": gate,
        "dy_stride": n, "pre": not plain, "dz": not plain, "dbias": True,
    }  # fmt: skip


def label(p: Problem) -> str:
    """ "bf16 M8192 N16384 gelu_tanh"."""
    gate = " gate" if p["gate"] else ""
    return f"{p['dtype']} M{p['m']} N{p['n']}{gate} {p['activation']}"


SETS: dict[str, list[dict[str, Any]]] = {
    "default": [
        problem(8192, 16_384, "gelu_tanh"), problem(4096, 3072, "gelu_tanh"),
        problem(4096, 14_336, "silu", gate=True), problem(16_384, 4096, "none"),
    ],
    "quick": [problem(4096, 3072, "gelu_tanh")],
}  # fmt: skip


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1); `like` has the dtype of the gradients."""
    torch = device.torch
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem["dtype"]]
    place = getattr(device, "place", "cuda")
    made = {"dy": torch.randn(problem["m"], problem["n"], dtype=kind, device=place)}
    if problem["pre"]:
        size = (problem["m"], outputs_of(problem))
        made["pre"] = torch.randn(*size, dtype=kind, device=place)
    return made


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Both ends of dz; of dbias everything."""
    limit = LIMITS[problem["dtype"]]
    if not problem["dz"]:
        return Expected([(..., arrays["dy"].double().sum(0))], limit)
    parts = []
    for end in (slice(None, _ROWS), slice(-_ROWS, None)):
        dy, z = (arrays[name][end].double() for name in ("dy", "pre"))
        parts.append((end, gradients(problem)(dy, z)[0]))
    return Expected(parts, limit)


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """What autograd calls."""
    dy, pre = arrays["dy"], arrays.get("pre")
    options = ActivationOptions(problem["activation"], problem["gate"], problem["dz"], True)
    return Prepared(lambda: ACTIVATION((dy, pre, dy), (None, None), options), _first)


def _first(returned: Any) -> Any:
    """dz, or dbias where it is alone."""
    if not isinstance(returned, (tuple, list)):
        return returned
    return next(made for made in returned if made is not None)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the gradients take."""
    named = {name: problem[name] for name in ("dtype", "out_dtype", "activation", "gate")}
    vector = problem["n"] % kernels.SIZE == 0
    return {**named, "vector": vector, **kernels.layout(problem["n"])}


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """A variant, with its partial sums."""
    dy, wide = arrays["dy"], outputs_of(problem)
    size, counters = kernels.scratch(params, problem)
    made = {"dz": dy.new_empty(problem["m"], wide)} if problem["dz"] else {}
    made["dbias"] = dy.new_empty(wide)
    scratch = {
        "workspace": dy.new_empty(size, dtype=device.torch.uint8),
        "counters": dy.new_zeros(counters, dtype=device.torch.int32),
    }

    def call() -> Any:
        fkjit.launch(spec, params, problem, {**arrays, **made, **scratch})
        return tuple(made.values())

    return Prepared(call, _first, variant=(spec, params))


OP = Op(
    name="linear_backward",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    launch=launch,
    peers=PEERS,
)
