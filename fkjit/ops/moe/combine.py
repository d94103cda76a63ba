"""`fkjit.moe_combine`: what the experts made of each token, weighted and put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.moe import rows as rows
from fkjit.ops.moe.checks import check_dense
from fkjit.ops.moe.groups import MoeGroups, check_groups
from fkjit.ops.op.autograd import Differentiable, Tensors, as_tuple, autograd_of
from fkjit.ops.op.checks import check_dtype, check_output, check_shape
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.runtime.interop import View

_CALL = "moe_combine"


def moe_combine(y: Any, inverse: Any, weights: Any = None, *, out: Any = None) -> Any:
    """The sum over a token's choices of weights[t, k] * y[inverse[t, k]].

    Args:
        y: fp16, bf16 or fp32 [places, columns]: torch, CuPy, NumPy or any DLPack array; rows are
            contiguous and at one distance from each other.
        inverse: int32 [tokens, top_k], the place of each choice, -1: dropped; or the MoeGroups that
            has it, with which the backward knows the rows that nobody has, and need not clear all.
        weights: fp32 [tokens, top_k]; default: 1.
        out: where the result is written: contiguous, not overlapping y; default: a new array.

    Returns:
        [tokens, columns], in y's dtype and framework (`out` if given): added in fp32, in the order
        of k, and rounded once. With torch it has gradients of y and weights, the same bits at every
        call; rows of dy that nobody has are 0.

    Raises:
        ParameterError: shapes, strides, overlaps. ArgumentTypeError: not arrays, other dtypes.
        DeviceError: mixed devices. CaptureError: first call of a geometry under CUDA graph capture;
        see `fkjit.prepare`. Places beyond y's rows are not looked for on a GPU.

    Example:
        >>> y = np.array([[1], [2], [3], [4]], np.float32)  # a row for each place
        >>> inverse = np.array([[2, 0], [3, 1]], np.int32)  # the places of two tokens
        >>> fkjit.moe_combine(y, inverse, np.full((2, 2), 0.5, np.float32))
        array([[2.],
               [3.]], dtype=float32)
    """
    return _OP(*_call(y, inverse, weights, out))


def _prepare(y: Any, inverse: Any, weights: Any = None, *, out: Any = None) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    inputs, outputs, options = _call(y, inverse, weights, out)
    _OP.prepare([*inputs, *outputs], options)


def _call(y: Any, inverse: Any, weights: Any, out: Any) -> Any:
    lists = (inverse, None, None)
    if isinstance(inverse, MoeGroups):
        lists = (inverse.inverse, inverse.offsets, inverse.counts)
    return (y, lists[0], weights, *lists[1:]), (out,), ()


def _check(views: Mapping[str, View | None]) -> Request:
    y, out = views["y"], views["out"]
    assert y is not None
    problem = _describe(_CALL, views)
    shape = (problem["tokens"], problem["columns"])
    check_output(_CALL, out, shape, y.dtype)
    check_dense(_CALL, "out", out)
    problem["vector"] = _is_vector(problem, (y, out))
    launches = (Launch(rows.COMBINE, rows.combine_variant(problem), problem),) if shape[0] else ()
    inputs = {name: views[name] for name in _INPUTS}
    return Request(inputs, {"out": Output(shape, y.dtype, out)}, launches)


def _describe(call: str, views: Mapping[str, View | None]) -> dict[str, Any]:
    y, weights = views["y"], views["weights"]
    assert y is not None
    places, columns, stride = rows.check_rows(call, "y", y)
    tokens, top_k = rows.check_inverse(call, views["inverse"])
    if weights is not None:
        check_dtype(call, "weights", weights, ("fp32",))
        check_shape(call, "weights", weights, (tokens, top_k), "inverse's")
        check_dense(call, "weights", weights)
    groups = check_groups(call, views)
    return rows.problem_of(y.dtype, tokens, top_k, columns, groups, places, stride=stride)


def _is_vector(problem: Mapping[str, Any], views: tuple[View | None, ...]) -> bool:
    return rows.is_vector(problem["dtype"], problem["columns"], problem["stride"], views)


def _check_gradient(views: Mapping[str, View | None], of_y: bool, of_weights: bool) -> Request:
    """Of dy and dweights; arrays are our own."""
    y, dy = views["y"], views["dy"]
    assert y is not None
    problem = _describe(_CALL, views)
    made = {
        "dy": Output((problem["places"], problem["columns"]), y.dtype, dy) if of_y else None,
        "dweights": Output((problem["tokens"], problem["top_k"]), "fp32") if of_weights else None,
    }
    vector = _is_vector(problem, (y, dy, views["dout"]))
    params = {"dtype": y.dtype, "vector": vector, "threads": rows.THREADS["combine_backward"]}
    launches = (Launch(rows.COMBINE_BACKWARD, params, problem),) if problem["tokens"] else ()
    return Request({n: v for n, v in views.items() if n not in made}, made, launches)


def _forward(inputs: Tensors, options: Any) -> tuple[Tensors, Tensors]:
    return (_OP(inputs, (), options),), inputs


def _backward(saved: Tensors, gradients: Tensors, needed: Tensors, options: Any) -> Tensors:
    y, *rest = saved
    wanted = (needed[0], needed[2])
    inputs = (y, gradients[0].contiguous(), *rest)
    found = iter(as_tuple(_GRADIENT(inputs, _cleared(inputs, wanted), wanted)))
    dy, dweights = (next(found) if one else None for one in wanted)
    return dy, None, dweights, None, None


def _cleared(inputs: tuple[Any, ...], options: tuple[bool, bool]) -> tuple[Any, None]:
    """What is written to: dy of zeros, where the kernel cannot tell which rows nobody has."""
    y, _, inverse, _, offsets, _ = inputs
    cleared = options[0] and (offsets is None or not inverse.numel())
    return (y.new_zeros(y.shape) if cleared else None), None


_INPUTS = ("y", "inverse", "weights", "offsets", "counts")
_OP = Op(
    _CALL, inputs=_INPUTS, outputs=("out",), check=_check, optional=_INPUTS[2:],
    autograd=autograd_of(_CALL, Differentiable("Combine", _forward, _backward)),
    node=Node(lambda y, inverse, *rest: [y.new_empty(inverse.shape[0], y.shape[1])]),
)  # fmt: skip


def _fake_gradient(
    y: Any, dout: Any, inverse: Any, weights: Any, offsets: Any, counts: Any,
    of_y: bool, of_weights: bool,
) -> list[Any]:  # fmt: skip
    dy = [y.new_empty(y.shape)] if of_y else []
    return [*dy, weights.new_empty(inverse.shape)] if of_weights else dy


_GRADIENT = Op(
    f"{_CALL} (backward)",
    inputs=("y", "dout", "inverse", "weights", "offsets", "counts"),
    outputs=("dy", "dweights"),
    check=_check_gradient,
    optional=("weights", "offsets", "counts"),
    node=Node(
        _fake_gradient, "bool of_y, bool of_weights", None, f"{_CALL}_backward", outputs=_cleared
    ),
)
moe_combine.prepare = _prepare  # type: ignore[attr-defined]
