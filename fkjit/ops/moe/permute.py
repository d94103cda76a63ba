"""`fkjit.moe_permute`: the rows of tokens, in order of the experts that they go to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.moe import rows as rows
from fkjit.ops.moe.groups import MoeGroups
from fkjit.ops.op.checks import check_dtype, check_output
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.op.shapes import rows_of
from fkjit.runtime.interop import View

_CALL = "moe_permute"


def moe_permute(x: Any, groups: MoeGroups, *, out: Any = None) -> Any:
    """A row for each place of `groups`: x's of the token that has it, zeros where nobody is.

    Args:
        x: fp16, bf16 or fp32 [tokens, columns]: torch, CuPy, NumPy or any DLPack array; rows are
            contiguous and at one distance from each other.
        groups: what `moe_regroup` or `moe_route_and_regroup` made of the tokens' choices.
        out: where the result is written: contiguous, not overlapping x; default: a new array.

    Returns:
        [places, columns], in x's dtype and framework (`out` if given): as many rows as
        groups.sorted_token_ids has places. With torch it has a gradient: a row of dx is the sum
        over its places in fp32, always in the same order.

    Raises:
        ParameterError: shapes, strides, overlaps. ArgumentTypeError: not arrays, other dtypes, no
        MoeGroups. DeviceError: mixed devices. CaptureError: first call of a geometry under CUDA
        graph capture; see `fkjit.prepare`.

    Rows that start on 16-byte boundaries, of a multiple of 16 bytes, are fastest.
    """
    return _OP(*_call(x, groups, out))


def _prepare(x: Any, groups: MoeGroups, *, out: Any = None) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    inputs, outputs, options = _call(x, groups, out)
    _OP.prepare([*inputs, *outputs], options)


def _call(x: Any, groups: Any, out: Any) -> Any:
    if not isinstance(groups, MoeGroups):
        raise ArgumentTypeError(
            f"{_CALL}: groups is a {type(groups).__qualname__}; allowed: the MoeGroups of "
            "moe_regroup or moe_route_and_regroup"
        )
    places = int(groups.sorted_token_ids.shape[0])
    return (x, groups.inverse, groups.offsets, groups.counts), (out,), (places,)


def check_groups(call: str, views: Mapping[str, View | None]) -> int:
    """How many groups offsets and counts are of; 0 without them."""
    offsets, counts = views["offsets"], views["counts"]
    if offsets is None or counts is None:
        return 0
    for name, view in (("offsets", offsets), ("counts", counts)):
        check_dtype(call, name, view, ("int32",))
        if len(view.shape) != 1 or (view.shape[0] > 1 and view.strides[0] != 1):
            raise ParameterError(f"{call}: {name} is not one dimension, contiguous")
    if offsets.shape[0] != counts.shape[0] + 1:
        raise ParameterError(f"{call}: offsets has not one number more than counts")
    return counts.shape[0]


def _check(views: Mapping[str, View | None], places: int) -> Request:
    x, out = views["x"], views["out"]
    assert x is not None
    tokens, columns, stride = rows.check_rows(_CALL, "x", x)
    _, top_k = rows.check_inverse(_CALL, views["inverse"], tokens)
    check_output(_CALL, out, (places, columns), x.dtype)
    if out is not None and rows_of(_CALL, "out", out)[2] != columns and places > 1:
        raise ParameterError(f"{_CALL}: out has gaps between its rows; it must be contiguous")
    problem = rows.problem_of(
        x.dtype, tokens, top_k, columns, check_groups(_CALL, views), places, stride=stride
    )
    problem["vector"] = rows.is_vector(x.dtype, columns, stride, (x, out))
    launches = (Launch(rows.PERMUTE, rows.permute_variant(problem), problem),) if places else ()
    inputs = {name: views[name] for name in _INPUTS}
    return Request(inputs, {"out": Output((places, columns), x.dtype, out)}, launches)


def _with_gradients(inputs: tuple[Any, ...], outputs: tuple[Any, ...], options: Any) -> Any:
    if outputs[0] is not None:
        raise ParameterError(
            f"{_CALL}: out is given and x requires grad; call it under torch.no_grad(), or without "
            "out"
        )
    return _function().apply(*inputs, *options)


@lru_cache(maxsize=1)
def _function() -> Any:
    """torch's Function; its module is there, since a tensor was seen."""
    torch = sys.modules["torch"]

    class Permute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, inverse: Any, offsets: Any, counts: Any, places: int) -> Any:
            ctx.save_for_backward(inverse)
            return _OP((x, inverse, offsets, counts), (None,), (places,))

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, dout: Any) -> Any:
            from fkjit.ops.moe.combine import moe_combine

            (inverse,) = ctx.saved_tensors
            return moe_combine(dout.contiguous(), inverse), None, None, None, None

    return Permute


_INPUTS = ("x", "inverse", "offsets", "counts")
_OP = Op(
    _CALL, inputs=_INPUTS, outputs=("out",), check=_check, autograd=_with_gradients,
    node=Node(
        lambda x, inverse, offsets, counts, places: [x.new_empty(places, x.shape[1])],
        "SymInt places",
    ),
)  # fmt: skip
moe_permute.prepare = _prepare  # type: ignore[attr-defined]
