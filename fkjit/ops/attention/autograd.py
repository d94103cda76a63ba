"""`fkjit.attention` of torch tensors that require grad: its backward is `attention_backward`."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from fkjit.ops.attention.backward.call import attention_backward
from fkjit.ops.op import torch_ops
from fkjit.ops.op.checks import check_flag


def wanted(*arrays: Any) -> bool:
    """Whether torch wants a gradient of the result, and asks for it here: torch.func.vmap asks the
    operator, for the whole batch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    tensors = [x for x in arrays if x is not None and isinstance(x, torch.Tensor)]
    if True not in [x.requires_grad for x in tensors]:
        return False
    return not any(map(torch._C._functorch.is_batchedtensor, tensors))


def attend(op: Any, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """A call of the op of attention or attention_varlen, with a graph behind its results."""
    said = op.options(*options)
    exact = check_deterministic(op.name, said.deterministic)
    if op.name == "attention" and not _has_features(inputs, said):
        given = (said.causal, said.softmax_scale, said.block, said.impl, said.layout)
        o, lse = _function().apply(*inputs[:3], *given, exact, op)
    else:
        from fkjit.ops.attention import feature_autograd

        o, lse = feature_autograd.attend(op, inputs, said, exact)
    return (o, lse) if said.return_lse else o


def _has_features(inputs: tuple[Any, ...], said: Any) -> bool:
    given = (*inputs[3:], said.window, said.softcap)
    return bool(said.score_mod) or any(x is not None for x in given)


def check_deterministic(call: str, value: Any) -> bool:
    """None is left to torch.use_deterministic_algorithms, which `attention_backward` asks; so is
    False."""
    return value is not None and check_flag(call, "deterministic", value)


@lru_cache(maxsize=1)
def _function() -> Any:
    """torch's Function; its module is there, since a tensor was seen."""
    torch = sys.modules["torch"]

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(q: Any, k: Any, v: Any, causal: Any, softmax_scale: Any, block: Any, impl: Any,
                    layout: Any, deterministic: bool, op: Any) -> Any:  # fmt: skip
            options = (causal, softmax_scale, block, impl, True, layout, deterministic)
            if torch_ops.abstract(q, k, v) or torch_ops.wrapped(q, k, v):  # traced by AOTAutograd
                return op.traced((q, k, v), (), options)
            # Detached, a geometry has a plan: whether it requires grad belongs to the tensor.
            return op((q.detach(), k.detach(), v.detach()), (), options)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            q, k, v, causal, softmax_scale, _, _, layout, deterministic, *_ = inputs
            ctx.save_for_backward(q, k, v, *output)
            ctx.set_materialize_grads(False)
            ctx.options = {
                "causal": causal, "softmax_scale": softmax_scale, "layout": layout,
                "deterministic": deterministic,
            }  # fmt: skip

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
            q, k, v, o, lse = ctx.saved_tensors
            dout = torch.zeros_like(o) if dout is None else _rows_contiguous(dout)
            dlse = None if dlse is None else dlse.contiguous()
            made = attention_backward(dout, q, k, v, o, lse, dlse=dlse, **ctx.options)
            found = (
                dx if needed else None
                for dx, needed in zip(made, ctx.needs_input_grad[:3], strict=True)
            )
            return (*found, *(None,) * 7)

    return Attention


def _rows_contiguous(x: Any) -> Any:
    """x, or a copy where columns are no neighbours: the gradient of a sum is one element."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
