"""`fkjit.attention_backward`: the gradients of attention."""

from __future__ import annotations

import sys
from typing import Any

from fkjit.ops.attention.backward.checks import CALL, check
from fkjit.ops.op import torch_ops
from fkjit.ops.op.node import Node, like
from fkjit.ops.op.op import Op

_INPUTS = ("dout", "q", "k", "v", "o", "lse", "dlse")
_OUTPUTS = ("dq", "dk", "dv", "lse_log2", "delta", "dq_sum", "turns")


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    deterministic: bool = True,
    impl: str = "auto",
    layout: str = "bhsd",
) -> Any:
    """dq, dk and dv of `fkjit.attention`, with probabilities made again from lse.

    torch's autograd calls it by itself: `fkjit.attention` of tensors that require grad has
    gradients. This is the same for other frameworks, or by hand.

    Args:
        dout: the gradient of o, [B, Hq, Sq, Dv]. q, k, v: what attention was given; o and lse: what
            it returned with return_lse=True. All of one dtype, fp16, bf16 or fp32, but lse: fp32
            [B, Hq, Sq], contiguous. Any strides, as long as the last dimension is contiguous. With
            layout="bshd" heads and rows trade places, not in lse.
        dlse: the gradient of lse, as lse; None: 0.
        causal, softmax_scale: as attention was given them.
        deterministic: the same bits at every call. False allows sums by atomics where that is
            faster; where torch.use_deterministic_algorithms(True) was called it is ignored.
        impl: "portable" for the kernels that run on every GPU, "flash_sm90" for Hopper's, "auto":
            Hopper's on Hopper where it takes the call.

    Returns:
        (dq, dk, dv), contiguous, with the shapes of q, k, v, in their dtype and framework. KV heads
        that several query heads read have the sum of their gradients, added up in fp32. Rows of q
        that see no key have gradient 0.

    Raises:
        ParameterError: shapes, strides, scale or flags that no kernel accepts.
        ArgumentTypeError: not arrays, integer or mixed dtypes. DeviceError: mixed devices.
        CaptureError: first call of a geometry under CUDA graph capture; see `fkjit.prepare`.

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning".
    """
    options = (causal, softmax_scale, deterministic or demanded(), impl, layout)
    call = _OP.traced if torch_ops.wrapped(dout, q, k, v) else _OP
    return call((dout, q, k, v, o, lse, dlse), (None,) * len(_OUTPUTS), options)


def demanded() -> bool:
    """Whether torch.use_deterministic_algorithms(True) was called."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.are_deterministic_algorithms_enabled()


_OP = Op(
    CALL,
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    check=check,
    optional=("dlse",),
    node=Node(
        lambda dout, q, k, v, *rest: [like(q), like(k), like(v)],
        "bool causal, float? softmax_scale, bool deterministic, str impl, str layout",
        3,
    ),
)
attention_backward.prepare = _OP.preparing(attention_backward)  # type: ignore[attr-defined]
