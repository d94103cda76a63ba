"""An array times a number that lies in memory, for gradients of `linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.elementwise import flat
from fkjit.ops.op.checks import check_output
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, ITEMSIZE, View
from fkjit.spec import KernelSpec, Params, Problem, Work, register
from fkjit.tuning import tuned

_CALL = "scale_gradient"
_BLOCKS = 8  # of a multiprocessor


def scale_gradient(x: Any, factor: Any) -> None:
    """x *= factor, in place; where that is 1 nothing is read.

    Args:
        x: [elements], contiguous, fp16, bf16 or fp32. factor: fp32 [1].
    """
    _OP((x, factor), (x,), ())


def _check(views: Mapping[str, View | None]) -> Request:
    """Arrays are our own."""
    x, out = views["x"], views["out"]
    assert x is not None
    check_output(_CALL, out, x.shape, x.dtype)
    blocks = _BLOCKS * (1 if x.device == CPU else multiprocessors(x.device))
    problem = {"elements": x.shape[0], "dtype": x.dtype, "most": blocks}
    params = tuned(SCALE, flat.usual(x.dtype, (x, out)), problem, arch_of(x))
    launches = (Launch(SCALE, params, problem),) if x.shape[0] else ()
    inputs = {name: views[name] for name in ("x", "factor")}
    return Request(inputs, {"out": Output(x.shape, x.dtype, out)}, launches)


def _blocks(params: Params, problem: Problem) -> int:
    return min(flat.blocks(params, problem), problem["most"])


SCALE = register(
    KernelSpec(
        op=_CALL,
        name="rows",
        source="elementwise/scale_gradient.cu",
        entry="scale_gradient",
        pdl=True,
        doc="an array times a number that lies in memory",
        params=flat.PARAMS,
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (_blocks(params, problem), 1, 1),
        arguments=lambda params, problem, arrays: {
            **{name: arrays[name] for name in ("x", "factor", "out")},
            "elements": problem["elements"],
        },
        shape_class=flat.shape_class,
        work=Work(
            flops=lambda p: float(p["elements"]),
            bytes=lambda p: 2.0 * ITEMSIZE[p["dtype"]] * p["elements"],
        ),
        verification="fkjit.ops.elementwise.cases_scale_gradient:SCALE",
    )
)

_OP = Op(_CALL, inputs=("x", "factor"), outputs=("out",), check=_check, in_place=(("out", "x"),))
