"""A gated MLP as one node of autograd: y = (act(x Wgᵀ) * x Wuᵀ) Wdᵀ + residual in two products.

Gate and up are one product where their weights stand in one array (fkjit/models/joined.py), and so
is the gradient of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fkjit.models.joined import as_one
from fkjit.ops.gemm.backward import ACTIVATION
from fkjit.ops.gemm.call import gated_with_pre, linear
from fkjit.ops.op import torch_ops
from fkjit.ops.op.autograd import Differentiable, Tensors


def plain_products(parts: Sequence[Any], x: Any) -> bool:
    """Whether modules are nn.Linear themselves, without hooks, and multiply x as it is."""
    torch = torch_ops.torch_seen()
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    return all(
        type(one) is torch.nn.Linear and not hooked(one) and one.weight.dtype is x.dtype
        for one in parts
    )


def hooked(module: Any) -> bool:
    state = module.__dict__
    return bool(state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"])


def gated_mlp(module: Any, activation: str, x: Any, residual: Any = None) -> Any:
    """down(activation(gate(x)) * up(x)) + residual; None where `module` must do it itself."""
    gate, up, down = (getattr(module, f"{name}_proj") for name in ("gate", "up", "down"))
    if not plain_products((gate, up, down), x):
        return None
    both = as_one((gate.weight, up.weight))
    if both is None or down.bias is not None or gate.bias is not None:
        return None
    inputs = (x, gate.weight, up.weight, down.weight, residual)
    if torch_ops.wants_grad(inputs):
        return _GATED(inputs, (both, activation))[0]
    inner = linear(x, both, activation=activation, gate=True)
    return linear(inner, down.weight, residual=residual)


def _gated_forward(inputs: Tensors, options: Any) -> tuple[Tensors, Tensors]:
    (x, _, _, down, residual), (both, activation) = inputs, options
    inner, pre = gated_with_pre(x, both, activation)
    return (linear(inner, down, residual=residual),), (x, both, down, pre)


def _gated_backward(saved: Tensors, gradients: Tensors, needed: Tensors, options: Any) -> Tensors:
    """The kernel of the activation makes again what the last product was of: it is the half of what
    would have to be kept."""
    (x, both, down, pre), (_, activation) = saved, options
    dy = lined(gradients[0])
    rows, pre = dy.flatten(0, -2), pre.flatten(0, -2)
    dinner = linear(rows, down, weight_layout="kn")
    dz, inner = ACTIVATION((dinner, pre, both), (), (activation, True, True, False, True))
    ddown = linear(rows.t(), inner.t()) if needed[3] else None
    dx, dboth, _ = of_product(dz, x, both, needed[0], needed[1] or needed[2], False)
    dgate, dup = (None, None) if dboth is None else dboth.chunk(2)
    return dx, dgate, dup, ddown, gradients[0] if needed[4] else None


_GATED = Differentiable("GatedMlp", _gated_forward, _gated_backward)


# ------------------------------------------------------------------ gradients of a product


def lined(x: Any) -> Any:
    return x if x.stride(-1) == 1 else x.contiguous()


def of_product(dz: Any, x: Any, weight: Any, of_x: bool, of_weight: bool, of_bias: bool) -> Tensors:
    """Gradients of x weightᵀ + bias by that of its result."""
    dz, rows = dz.flatten(0, -2), x.flatten(0, -2)
    dx = linear(dz, weight, weight_layout="kn").view(x.shape) if of_x else None
    dweight = linear(dz.t(), rows.t()) if of_weight else None
    dbias = ACTIVATION((dz, None, weight), (), ("none", False, False, True)) if of_bias else None
    return dx, dweight, dbias[0] if isinstance(dbias, tuple) else dbias
