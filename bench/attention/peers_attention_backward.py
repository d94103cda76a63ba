"""Attention's gradients by PyTorch's backends and FlashAttention-4: what their autograd runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused
from .peers_torch import _NO_KERNEL as NO_KERNEL

_FA4 = "flash_attn.cute.interface"


def flat(made: Any) -> Any:
    """dq, dk and dv as one row of numbers."""
    return import_module("torch").cat([x.reshape(-1) for x in made[:3]])


def _leaves(arrays: Arrays) -> list[Any]:
    return [arrays[name].detach().clone().requires_grad_() for name in "qkv"]


def _gradients(o: Any, leaves: list[Any], dout: Any, turned: bool = False) -> Prepared:
    grad = import_module("torch").autograd.grad

    def call() -> Any:
        return grad(o, leaves, dout, retain_graph=True)

    def output(made: Any) -> Any:
        return flat([x.transpose(1, 2) for x in made] if turned else made)

    return Prepared(call, output, capturable=False)


def _sdpa(backend: str) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        if problem["causal"] and problem["seqlen_q"] != problem["seqlen_k"]:
            raise Refused("is_causal is aligned to the top left here, ours to the bottom right")
        torch, choice = import_module("torch"), import_module("torch.nn.attention")
        leaves = _leaves(arrays)
        try:
            with choice.sdpa_kernel(getattr(choice.SDPBackend, backend)):
                o = torch.nn.functional.scaled_dot_product_attention(
                    *leaves,
                    is_causal=problem["causal"],
                    enable_gqa=problem["heads_q"] != problem["heads_kv"],
                )
            prepared = _gradients(o, leaves, arrays["dout"])
            prepared.call()
        except RuntimeError as error:
            if not any(text in str(error) for text in NO_KERNEL):
                raise
            raise Refused("no kernel of this backend for this problem") from error
        return prepared

    return prepare


def _fa4(problem: Problem, arrays: Arrays) -> Prepared:
    if problem["dtype"] == "fp32":
        raise Refused("takes fp16 and bf16")
    attention = import_module(_FA4).flash_attn_func
    leaves = [arrays[name].transpose(1, 2).contiguous().detach().requires_grad_() for name in "qkv"]
    made = attention(*leaves, softmax_scale=problem["softmax_scale"], causal=problem["causal"])
    o = made[0] if isinstance(made, tuple) else made
    return _gradients(o, leaves, arrays["dout"].transpose(1, 2).contiguous(), turned=True)


PEERS = (
    *(
        Candidate(name=f"sdpa-{short}", package="torch", module="torch", prepare=_sdpa(backend))
        for short, backend in (
            ("flash", "FLASH_ATTENTION"),
            ("cudnn", "CUDNN_ATTENTION"),
            ("efficient", "EFFICIENT_ATTENTION"),
        )
    ),
    Candidate(name="fa4", package="flash-attn-4", module=_FA4, prepare=_fa4),
)
