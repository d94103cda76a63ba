"""What all kernels of a product share: arguments, work, classes of shapes.

out[m, n] = act(scale * x[m, k] . weight + bias) + residual. A problem has m, n, k; dtype (of x,
weight, bias, pre) and out_dtype (of out and residual); x_layout "mk", or "km" for x transposed;
weight_layout "nk" (as nn.Linear's) or "kn"; x_stride, weight_stride, out_stride, residual_stride
(elements from one row of the array as it lies to the next); scale, a number; activation and gate;
precision of fp32: "ieee" (the default) or "tf32".
With gate the weight has 2 n outputs, gate first, and so has bias.

Arrays: x, weight, bias, residual -> out, and pre ([m, n], with gate [m, 2 n]): what the activation
is of, for a backward. bias, residual and pre may be None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Params, Problem, Work, size_class

POINTERS = ("x", "weight", "bias", "residual", "out", "pre")
_LARGEST_CLASS = 1 << 14  # beyond it, rows and columns make no difference to what is fastest


def outputs_of(problem: Problem) -> int:
    """Columns of the product: rows of a weight as nn.Linear has it."""
    return problem["n"] * (2 if problem["gate"] else 1)


def flops(problem: Problem) -> float:
    return 2.0 * problem["m"] * outputs_of(problem) * problem["k"]


def traffic(problem: Problem) -> float:
    """Bytes of x, weight and bias read once, out written once, and a residual read."""
    m, n, k, wide = problem["m"], problem["n"], problem["k"], outputs_of(problem)
    read = m * k + wide * k + (wide if problem.get("bias") else 0)
    rows = 2 if problem.get("residual") else 1
    return float(ITEMSIZE[problem["dtype"]] * read + ITEMSIZE[problem["out_dtype"]] * rows * m * n)


def shape_class(problem: Problem) -> dict[str, Any]:
    """Rows up to the next power of two; n and k as they are, since they are a model's."""
    return {"m": size_class(problem["m"], _LARGEST_CLASS), "n": problem["n"], "k": problem["k"]}


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name; a kernel takes those that it has."""
    return {
        **{name: arrays.get(name) for name in POINTERS},
        **{name: arrays.get(name) for name in ("workspace", "counters")},
        **{name: problem[name] for name in ("m", "n", "k", "scale")},
        **{f"{name}_stride": problem[f"{name}_stride"] for name in POINTERS[:2]},
        **{f"{name}_stride": problem[f"{name}_stride"] for name in ("out", "residual")},
    }


WORK = Work(flops=flops, bytes=traffic, interpreter_flops=2e8)

# The part of a KernelSpec that all of a product's kernels have.
CONTRACT: Mapping[str, Any] = {
    "op": "linear",
    "arguments": arguments,
    "shape_class": shape_class,
    "work": WORK,
}
