"""The two files that a kernel of one's own begins with: y = factor * x."""

from __future__ import annotations

_CU = """\
/* y = factor * x, element by element, in fp32. Every architecture. */
#include "prelude.cuh"

using elem_t = ${dtype};
constexpr int THREADS = ${threads};
constexpr bool NEGATED = ${negated};

static_assert(THREADS % WARP_SIZE == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS) @name@(
    const elem_t* __restrict__ x,  // [n] contiguous
    elem_t* __restrict__ y,        // [n] contiguous
    const int n, const float factor) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  float value = factor * static_cast<float>(x[i]);
//% if negated
  value = -value;
//% endif
  y[i] = static_cast<elem_t>(value);
}
"""

_PY = """\
from pathlib import Path

import numpy as np

from fkjit import KernelSpec, Param, register

NUMPY = {"fp16": "f2", "fp32": "f4"}


def scaled(problem, arrays):
    @doc@
    sign = -1.0 if problem["negated"] else 1.0
    return {"y": sign * problem["factor"] * arrays["x"].astype(np.float64)}


@NAME@ = register(
    KernelSpec(
        op="@name@",
        name="plain",
        source="@name@.cu",
        entry="@name@",
        root=Path(__file__).parent,  # leave it out for kernels in fkjit's own kernels_cu/
        doc="y = factor * x",
        params=(
            Param("dtype", ("fp16", "fp32"), "element type of x and y"),
            Param("threads", (64, 256), "threads of a block", tunable=True),
            Param("negated", (False, True), "whether the sign changes"),
        ),
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (-(-problem["n"] // params["threads"]), 1, 1),
        arguments=lambda params, problem, arrays: {
            "x": arrays["x"],
            "y": arrays["y"],
            "n": problem["n"],
            "factor": problem["factor"],
        },
        problems=lambda params, scale: [{"n": 1000, "factor": 0.5, "negated": params["negated"]}],
        inputs=lambda params, problem, rng: {
            "x": rng.standard_normal(problem["n"]).astype(NUMPY[params["dtype"]])
        },
        outputs=lambda params, problem: {
            "y": np.full(problem["n"], np.nan, NUMPY[params["dtype"]])
        },
        reference=scaled,
        tolerance=lambda params: {"fp16": 1e-3, "fp32": 1e-7}[params["dtype"]],
    )
)
"""
_DOC = '"""In float64, by the name of the output."""'


def files(name: str) -> dict[str, str]:
    """NAME.cu and NAME.py with their texts; `name` is one that Python and CUDA take."""
    texts = {f"{name}.cu": _CU, f"{name}.py": _PY.replace("@doc@", _DOC)}
    return {
        file: text.replace("@name@", name).replace("@NAME@", name.upper())
        for file, text in texts.items()
    }
