"""A step of AdamW for one parameter, for `fkjit.models.patch_optimizer`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit.ops.op.checks import FLOATS, check_output
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register, size_class
from fkjit.tuning import tuned

_CALL = "adamw"
_BYTES = 16  # of an access
_LARGEST_CLASS = 1 << 28


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
    arrays = [view for name in _ARRAYS + _OUTPUTS if (view := views[name]) is not None]
    vector = not any(view.pointer % _BYTES for view in arrays)
    fixed = {"dtype": dtype, "vector": vector, "threads": 256}
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


def _blocks(params: Params, problem: Problem) -> int:
    width = _BYTES // ITEMSIZE[params["dtype"]] if params["vector"] else 1
    return -(-problem["elements"] // (params["threads"] * width))


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
        params=(
            Param("dtype", FLOATS, "element type of all arrays"),
            Param("vector", (True, False), "16-byte accesses"),
            Param("threads", (128, 256), "threads of a block", tunable=True),
        ),
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (_blocks(params, problem), 1, 1),
        arguments=_arguments,
        shape_class=lambda p: {"elements": size_class(p["elements"], _LARGEST_CLASS)},
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
