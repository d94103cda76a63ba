"""`fkjit.moe_permute`: the rows of tokens, in order of the experts that they go to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fkjit.arguments import whole
from fkjit.errors import ArgumentTypeError
from fkjit.ops.moe import rows as rows
from fkjit.ops.moe.checks import check_dense
from fkjit.ops.moe.combine import moe_combine
from fkjit.ops.moe.groups import MoeGroups, check_groups
from fkjit.ops.op.autograd import Differentiable, Tensors, autograd_of
from fkjit.ops.op.checks import check_output
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.runtime.interop import View

_CALL = "moe_permute"


def moe_permute(
    x: Any, groups: MoeGroups, *, out: Any = None, num_out_tokens: int | None = None
) -> Any:
    """A row for each place of `groups`: x's of the token that has it, zeros where nobody is.

    Args:
        x: fp16, bf16 or fp32 [tokens, columns]: torch, CuPy, NumPy or any DLPack array; rows are
            contiguous and at one distance from each other.
        groups: what `moe_regroup` or `moe_route_and_regroup` made of the tokens' choices.
        out: where the result is written: contiguous, not overlapping x; default: a new array.
        num_out_tokens: how many of the places come out at the most, as in TransformerEngine and
            Megatron; the rows of later ones are left out, and get no gradient.

    Returns:
        [places, columns], in x's dtype and framework (`out` if given): as many rows as
        groups.sorted_token_ids has places, or num_out_tokens. With torch it has a gradient: a row
        of dx is the sum over its places in fp32, always in the same order.

    Raises:
        ParameterError: shapes, strides, overlaps. ArgumentTypeError: not arrays, other dtypes, no
        MoeGroups. DeviceError: mixed devices. CaptureError: first call of a geometry under CUDA
        graph capture; see `fkjit.prepare`.

    Rows that start on 16-byte boundaries, of a multiple of 16 bytes, are fastest.

    Example:
        >>> x, ids = np.array([[1], [2]], np.float32), np.array([[1, 0], [1, 0]], np.int32)
        >>> fkjit.moe_permute(x, fkjit.moe_regroup(ids, num_experts=2))[:, 0]
        array([1., 2., 1., 2.], dtype=float32)
    """
    return _OP(*_call(x, groups, out, num_out_tokens))


def _prepare(
    x: Any, groups: MoeGroups, *, out: Any = None, num_out_tokens: int | None = None
) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    inputs, outputs, options = _call(x, groups, out, num_out_tokens)
    _OP.prepare([*inputs, *outputs], options)


def _call(x: Any, groups: Any, out: Any, num_out_tokens: Any) -> Any:
    if not isinstance(groups, MoeGroups):
        raise ArgumentTypeError(
            f"{_CALL}: groups is a {type(groups).__qualname__}; allowed: the MoeGroups of "
            "moe_regroup or moe_route_and_regroup"
        )
    places = int(groups.sorted_token_ids.shape[0])
    kept = places
    if num_out_tokens is not None:
        kept = min(whole(_CALL, "num_out_tokens", num_out_tokens), places)
    return (x, groups.inverse, groups.offsets, groups.counts), (out,), (places, kept)


def _check(views: Mapping[str, View | None], every: int, kept: int | None = None) -> Request:
    """Of `every` place, or so many that are kept."""
    places = every if kept is None else kept
    x, out = views["x"], views["out"]
    assert x is not None
    tokens, columns, stride = rows.check_rows(_CALL, "x", x)
    _, top_k = rows.check_inverse(_CALL, views["inverse"], tokens)
    check_output(_CALL, out, (places, columns), x.dtype)
    check_dense(_CALL, "out", out)
    problem = rows.problem_of(
        x.dtype, tokens, top_k, columns, check_groups(_CALL, views), places, stride=stride
    )
    problem["vector"] = rows.is_vector(x.dtype, columns, stride, (x, out))
    launches = (Launch(rows.PERMUTE, rows.permute_variant(problem), problem),) if places else ()
    inputs = {name: views[name] for name in _INPUTS}
    return Request(inputs, {"out": Output((places, columns), x.dtype, out)}, launches)


def _forward(inputs: Tensors, options: tuple[int | None, ...]) -> tuple[Tensors, Tensors]:
    return (_OP(inputs, (), options),), inputs[1:2]


def _backward(saved: Tensors, gradients: Tensors, needed: Tensors, options: Any) -> Tensors:
    """Of a row: the sum over its places, of which those that were left out count as zeros."""
    places, kept = (*options, None)[:2]
    rows_of, torch = gradients[0].contiguous(), sys.modules["torch"]
    if kept is not None and kept < places:
        rows_of = torch.nn.functional.pad(rows_of, (0, 0, 0, places - kept))
    return moe_combine(rows_of, *saved), None, None, None


_INPUTS = ("x", "inverse", "offsets", "counts")
_OP = Op(
    _CALL, inputs=_INPUTS, outputs=("out",), check=_check,
    autograd=autograd_of(_CALL, Differentiable("Permute", _forward, _backward)),
    node=Node(
        lambda x, inverse, offsets, counts, places, kept=None: [
            x.new_empty(places if kept is None else kept, x.shape[1])
        ],
        "SymInt places, SymInt? kept=None",
    ),
)  # fmt: skip
moe_permute.prepare = _prepare  # type: ignore[attr-defined]
