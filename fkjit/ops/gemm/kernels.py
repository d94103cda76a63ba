"""The product for reading, and for what the other kernels do not take: a spec a `.cu` file."""

from __future__ import annotations

from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.gemm.problem import CONTRACT
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, register

_DTYPES = ("bf16", "fp16", "fp32")
_THREADS = 256


def _derive(params: Params) -> dict[str, Any]:
    layouts = {"x_km": params["x_layout"] == "km", "weight_kn": params["weight_layout"] == "kn"}
    return {**layouts, **epilogue.values(params["activation"])}


def _illegal(params: Params) -> str | None:
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"is not {params['dtype']} or fp32"
    return None


def _grid(params: Params, problem: Problem) -> Dim3:
    block = params["block"]
    return (-(-problem["m"] // block) * -(-problem["n"] // block), 1, 1)


# All that a call may take.
TILED = KernelSpec(
    name="tiled",
    source="gemm/tiled.cu",
    entry="linear_tiled",
    doc="tiles in shared memory, fp32 FMAs: every dtype, layout and alignment",
    params=(
        Param("dtype", _DTYPES, "element type of x, weight, bias and pre"),
        Param("out_dtype", _DTYPES, "element type of residual and out: dtype or fp32"),
        Param("x_layout", ("mk", "km"), "km: x is transposed in memory"),
        Param("weight_layout", ("nk", "kn"), "nk: as nn.Linear's"),
        *epilogue.PARAMS,
        Param("block", (64, 32), "rows and columns of a tile", tunable=True),
    ),
    derive=_derive,
    illegal=_illegal,
    block=lambda params: (_THREADS, 1, 1),
    grid=_grid,
    verification="fkjit.ops.gemm.cases_tiled:TILED",
    **CONTRACT,
)


def _shown(params: Params) -> str | None:
    """Activations are the same code for each layout: one is enough ahead of time."""
    layouts, types = (params["x_layout"], params["weight_layout"]), params["dtype"]
    plain = (params["activation"], params["gate"]) == epilogue.SHIPPED[0]
    if not plain and (layouts != ("mk", "nk") or params["out_dtype"] != types):
        return "is compiled when called"
    return TILED.illegal(params)


register(epilogue.shipped(TILED, _shown))
