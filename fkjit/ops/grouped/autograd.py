"""Gradients of `fkjit.grouped_linear` in PyTorch: of x, weight and bias.

z[rows of e] = x[rows of e] . weight[e]^T + bias[e], y = act(z)
dz = dy * act'(z)                      linear's kernel, of all places at once
dx[rows of e] = dz[rows of e] . weight[e]          the forward's kernel, of the weight as it lies
dweight[e] = dz[rows of e]^T . x[rows of e]        the same of k that is sorted by expert
dbias[e]: column sums of dz[rows of e]             a product with ones
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fkjit.ops.gemm.backward import ACTIVATION
from fkjit.ops.grouped.call import DEPTH, DepthOptions, GroupedOptions
from fkjit.ops.op.autograd import Differentiable, Tensors

Run = Callable[..., Any]  # an op: (inputs, outputs, options) -> its results
_ONES = 8  # columns of a product whose first is wanted: 16 bytes


def differentiable(product: Run, with_pre: Run) -> Differentiable:
    """`grouped_linear` with gradients; `product`: its op."""
    return Differentiable(
        "GroupedLinear",
        lambda inputs, options: _forward(product, with_pre, inputs, GroupedOptions(*options)),
        lambda saved, gradients, needed, options: _backward(
            product, saved, gradients[0], needed, GroupedOptions(*options)
        ),
    )


def _forward(
    product: Run, with_pre: Run, inputs: Tensors, said: GroupedOptions
) -> tuple[Tensors, Tensors]:
    x, weight, bias, *lists = inputs
    bent = bool(said.gate) or said.activation is not None
    if bent and said.save_pre_activation:
        y, pre = with_pre(inputs, (), tuple(said))
        return (y,), (x, weight, None, *lists, pre)
    y = product(inputs, (), tuple(said))
    return (y,), (x, weight, bias if bent else None, *lists, None)


def _backward(
    product: Run, saved: Tensors, dy: Any, needed: Tensors, said: GroupedOptions
) -> tuple[Any, ...]:
    x, weight, bias, residual, offsets, pre = saved
    of_x, of_weight, of_bias = needed[:3]
    if not x.shape[0]:
        found = (None if a is None else a.new_zeros(a.shape) for a in (x, weight))
        dbias = weight.new_zeros(weight.shape[0], _wide(weight, said)) if of_bias else None
        return *(f if w else None for f, w in zip(found, needed, strict=False)), dbias, *_NO_LISTS
    lists = (residual, offsets)
    dz = _of_activation(product, (x, weight, bias, *lists), pre, dy.contiguous(), said)
    other = "kn" if said.weight_layout == "nk" else "nk"
    dx = product(
        (dz, weight, None, *lists), (), GroupedOptions(said.block_size, weight_layout=other)
    )
    how = DepthOptions(said.block_size)
    dweight = dbias = None
    if of_weight:
        sides = (dz, x.contiguous())
        sides = sides if said.weight_layout == "nk" else sides[::-1]
        dweight = DEPTH((*sides, None, None, offsets), (), how)
    if of_bias:
        ones = x.new_ones(x.shape[0], _ONES)
        dbias = DEPTH((dz, ones, None, None, offsets), (), how)[..., 0].contiguous()
    return dx if of_x else None, dweight, dbias, *_NO_LISTS


_NO_LISTS = (None, None)


def _wide(weight: Any, said: GroupedOptions) -> int:
    return weight.shape[1 if said.weight_layout == "nk" else 2]


def _of_activation(product: Run, inputs: Tensors, pre: Any, dy: Any, said: GroupedOptions) -> Any:
    """dz of all places."""
    if not said.gate and said.activation is None:
        return dy
    if pre is None:
        pre = product(inputs, (), GroupedOptions(said.block_size, weight_layout=said.weight_layout))
    options = (said.activation or "none", bool(said.gate), True, False)
    return ACTIVATION((dy, pre, inputs[1]), (), options)
