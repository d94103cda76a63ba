"""Gradients of `fkjit.linear` in PyTorch: of x, weight, bias and residual.

z = scale * x . weight^T + bias, y = act(z) + residual
dz = dy * act'(z), dbias = column sums of dz          one kernel: backward.py
dx = scale * dz . weight, dweight = scale * dz^T . x  the forward's kernels, of transposed views
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fkjit.errors import ParameterError
from fkjit.ops.gemm.backward import ACTIVATION
from fkjit.ops.gemm.checks import CALL, check_activation
from fkjit.ops.gemm.options import LinearOptions
from fkjit.ops.op.autograd import Differentiable, Tensors, as_tuple
from fkjit.ops.op.op import Op

Run = Callable[..., Any]  # an op: (inputs, outputs, options) -> its results


class Ops(NamedTuple):
    """What forward and backward are made of. with_pre: a product that returns z as well."""

    product: Run
    with_pre: Run
    activation: Run


def differentiable(product: Op, with_pre: Op) -> Differentiable:
    """`linear` with gradients; `product`: its op."""
    ops = Ops(product, with_pre, ACTIVATION)
    return Differentiable(
        "Linear",
        lambda inputs, options: _forward(ops, inputs, LinearOptions(*options)),
        lambda saved, gradients, needed, options: _backward(
            ops, saved, gradients[0], needed, LinearOptions(*options)
        ),
    )


def prepare(product: Op, with_pre: Op, inputs: Tensors, options: Any) -> None:
    """Compile and load what forward and backward need, without running either."""
    ops, said = Ops(*map(_preparing, (product, with_pre, ACTIVATION))), LinearOptions(*options)
    with sys.modules["torch"].no_grad():
        (y,), saved = _forward(ops, inputs, said)
        needed = tuple(x is not None and x.requires_grad for x in inputs)
        _backward(ops, saved, y, needed, said)


def _preparing(op: Op) -> Run:
    """The op's prepare, which returns results that hold nothing."""

    def run(inputs: Tensors, outputs: Tensors, options: Any) -> Any:
        assert op.node is not None
        op.prepare(inputs, tuple(options))
        whole = (*inputs, *(None,) * (len(op.inputs) - len(inputs)))
        made = op.node.fake(*whole, *options)
        return made[0] if len(made) == 1 else tuple(made)

    return run


def _forward(ops: Ops, inputs: Tensors, said: LinearOptions) -> tuple[Tensors, Tensors]:
    x, weight, bias, _ = inputs
    _check_derivative(said)
    bent = _is_bent(said)
    if bent and said.save_pre_activation:
        y, pre = ops.with_pre(inputs, (), tuple(said))
        return (y,), (x, weight, None, pre)
    return as_tuple(ops.product(inputs, (), tuple(said))), (x, weight, bias if bent else None, None)


def _is_bent(said: LinearOptions) -> bool:
    """Whether dz depends on z."""
    return bool(said.gate) or check_activation(said) != "none"


def _check_derivative(said: LinearOptions) -> None:
    if said.epilogue_mod is not None and said.epilogue_mod_grad is None:
        raise ParameterError(
            f"{CALL}: an input requires grad, but epilogue_mod={said.epilogue_mod!r} has no "
            "derivative; pass epilogue_mod_grad, an expression of x, or call it under "
            "torch.no_grad()"
        )


def _backward(
    ops: Ops, saved: Tensors, dy: Any, needed: Tensors, said: LinearOptions
) -> tuple[Any, ...]:
    x, weight, bias, pre = saved
    of_x, of_weight, of_bias, of_residual = needed
    dresidual = dy if of_residual else None
    if x.numel() == 0:  # no rows, and sums of nothing
        wide = weight.shape[0 if said.weight_layout == "nk" else 1]
        dbias = x.new_zeros(wide) if of_bias else None
        dx, dweight = (
            a.new_zeros(a.shape) if w else None for a, w in ((x, of_x), (weight, of_weight))
        )
        return dx, dweight, dbias, dresidual
    if not (of_x or of_weight or of_bias):
        return None, None, None, dresidual
    rows = x.reshape(-1, x.shape[-1])
    dz, dbias = _of_activation(
        ops, (rows, weight, bias, pre), dy, (of_x or of_weight, of_bias), said
    )
    outer = weight if said.weight_layout == "kn" else weight.t()  # [k, outputs]
    options = tuple(LinearOptions(scale=said.scale, precision=said.precision))
    dx = ops.product((dz, outer), (), options).reshape(x.shape) if of_x else None
    dweight = None
    if of_weight:
        sides = (dz.t(), rows.t()) if said.weight_layout == "nk" else (rows.t(), dz.t())
        dweight = ops.product(sides, (), options)
    return dx, dweight, dbias, dresidual


def _of_activation(
    ops: Ops, saved: Tensors, dy: Any, wanted: tuple[bool, bool], said: LinearOptions
) -> tuple[Any, Any]:
    """dz and dbias, as far as they are wanted."""
    rows, weight, bias, pre = saved
    dy = dy.reshape(-1, dy.shape[-1])
    dy = dy if dy.stride(1) == 1 or dy.shape[1] == 1 else dy.contiguous()
    if pre is not None:
        pre = pre.reshape(-1, pre.shape[-1])
    elif _is_bent(said):
        again = LinearOptions(
            scale=said.scale, weight_layout=said.weight_layout, precision=said.precision
        )
        pre = ops.product((rows, weight, bias), (), tuple(again))
    make_dz, make_dbias = wanted
    as_it_is = pre is None and dy.dtype == rows.dtype
    if as_it_is and not make_dbias:
        return dy, None
    options = (check_activation(said), bool(said.gate), make_dz and not as_it_is, make_dbias)
    made = list(as_tuple(ops.activation((dy, pre, weight), (), options)))
    dz = dy if as_it_is else made.pop(0) if make_dz else None
    return dz, made[0] if make_dbias else None
