"""A step of AdamW for one parameter, for `fkjit.models.patch_optimizer`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit.ops.elementwise import flat
from fkjit.ops.op.checks import check_output
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import KernelSpec, Params, Problem, Work, register
from fkjit.tuning import tuned

_CALL = "adamw"


class Rates(NamedTuple):
    """Of both moments, what is added to the root of the second, and the decay of weights."""

    beta1: float
    beta2: float
    eps: float
    decay: float


def adamw(
    param: Any, grad: Any, first: Any, second: Any, rate: Any, number: Any, rates: Rates
) -> None:
    """Change a parameter and its moments in place.

    Args:
        param, grad, first, second: [elements], contiguous, of one dtype: fp16, bf16 or fp32.
        rate: fp32 [1], the learning rate. number: fp32 [1], of the step, from 1.
        rates: the others.
    """
    _OP((param, grad, first, second, rate, number), (param, first, second), tuple(rates))


def _check(views: Mapping[str, View | None], *rates: float) -> Request:
    """Arrays are our own."""
    param = views["param"]
    assert param is not None
    shape, dtype = param.shape, param.dtype
    for name in _OUTPUTS:
        check_output(_CALL, views[name], shape, dtype, name)
    problem = {"elements": shape[0], "dtype": dtype, **dict(zip(_RATES, rates, strict=True))}
    fixed = flat.usual(dtype, (views[name] for name in _ARRAYS + _OUTPUTS))
    params = tuned(STEP, fixed, problem, arch_of(param))
    outputs = {name: Output(shape, dtype, views[name]) for name in _OUTPUTS}
    launches = (Launch(STEP, params, problem),) if shape[0] else ()
    return Request({name: views[name] for name in _INPUTS}, outputs, launches)


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: problem[name] for name in _RATES}
    logarithms = {f"log_{name}": math.log(said[name]) if said[name] else -math.inf
                  for name in ("beta1", "beta2")}  # fmt: skip
    named = {name: arrays[name] for name in _INPUTS + _OUTPUTS}
    return {**named, **said, **logarithms, "elements": problem["elements"]}


_ARRAYS = ("param", "grad", "first", "second")
_INPUTS = (*_ARRAYS, "rate", "number")
_OUTPUTS = ("new_param", "new_first", "new_second")
_RATES = Rates._fields

STEP = register(
    KernelSpec(
        op=_CALL,
        name="rows",
        source="elementwise/adamw.cu",
        entry="adamw",
        pdl=True,
        doc="a step of AdamW for one parameter",
        params=flat.PARAMS,
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (flat.blocks(params, problem), 1, 1),
        arguments=_arguments,
        shape_class=flat.shape_class,
        work=Work(
            flops=lambda p: 15.0 * p["elements"],
            bytes=lambda p: 7.0 * ITEMSIZE[p["dtype"]] * p["elements"],
        ),
        verification="fkjit.ops.elementwise.cases_adamw:STEP",
    )
)

_OP = Op(
    _CALL, inputs=_INPUTS, outputs=_OUTPUTS, check=_check,
    in_place=tuple(zip(_OUTPUTS, ("param", "first", "second"), strict=True)),
)  # fmt: skip
