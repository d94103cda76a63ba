"""`fkjit.attention_backward`: the gradients of attention; and those of attention with score
features or packed sequences, which torch's autograd calls (fkjit/ops/attention/autograd.py)."""

from __future__ import annotations

import sys
from typing import Any

from fkjit.ops.attention.backward.checks import (
    CALL,
    INPUTS,
    OUTPUTS,
    PLAIN_INPUTS,
    PLAIN_OUTPUTS,
    ROWS,
    check,
    check_plain,
)
from fkjit.ops.attention.backward.problem import PACKED, Options
from fkjit.ops.attention.features import CASTS
from fkjit.ops.op import torch_ops
from fkjit.ops.op.casts import casting
from fkjit.ops.op.checks import check_flag
from fkjit.ops.op.node import Node, like
from fkjit.ops.op.op import Op
from fkjit.types import Impl, Layout

_NEW, _NEW_PLAIN = (None,) * len(OUTPUTS), (None,) * len(PLAIN_OUTPUTS)
_PLAIN_COUNT = len(PLAIN_INPUTS)


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
    impl: Impl = "auto",
    layout: Layout = "bhsd",
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

    Example:
        >>> q = k = v = np.ones((1, 1, 4, 16), np.float16)
        >>> o, lse = fkjit.attention(q, k, v, return_lse=True)
        >>> dq, dk, dv = fkjit.attention_backward(np.ones_like(o), q, k, v, o, lse)
        >>> float(dv.sum()), float(abs(dq).max())  # equal keys: no query can change the result
        (64.0, 0.0)
    """
    if type(deterministic) is not bool and deterministic is not None:
        deterministic = check_flag(CALL, "deterministic", deterministic)
    deterministic = deterministic or torch_is_deterministic()
    options = (causal, softmax_scale, deterministic, impl, layout)
    return _PLAIN((dout, q, k, v, o, lse, dlse), _NEW_PLAIN, options)


def torch_is_deterministic() -> bool:
    """Whether torch.use_deterministic_algorithms(True) was called."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.are_deterministic_algorithms_enabled()


_PLAIN = Op(
    CALL,
    inputs=PLAIN_INPUTS,
    outputs=PLAIN_OUTPUTS,
    check=check_plain,
    optional=("dlse",),
    batched=True,
    node=Node(
        lambda dout, q, k, v, *rest: [like(q), like(k), like(v)],
        "bool causal, float? softmax_scale, bool deterministic, str impl, str layout",
        3,
    ),
)
attention_backward.prepare = _PLAIN.preparing(attention_backward)  # type: ignore[attr-defined]

# ------------------------------------------------------------------ with score features


def gradients(inputs: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
    """Gradients of the inputs that `options.wanted` names, for torch tensors.

    inputs: in the order of `checks.INPUTS`, as a forward was given them and returned them; those
    left out at the end are None.
    """
    if not options.features:
        return _PLAIN(inputs[:_PLAIN_COUNT], _NEW_PLAIN, _flags(options))
    inputs = (*inputs, *(None,) * (len(INPUTS) - len(inputs)))
    found = _FEATURES(inputs, _written_to(inputs, options), options)
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def prepare_gradients(inputs: tuple[Any, ...], options: Options) -> None:
    """Compile and load what `gradients` needs, without running it."""
    if not options.features:
        return _PLAIN.prepare([*inputs[:_PLAIN_COUNT], *_NEW_PLAIN], _flags(options))
    inputs = (*inputs, *(None,) * (len(INPUTS) - len(inputs)))
    return _FEATURES.prepare([*inputs, *_written_to(inputs, options)], options)


def _flags(options: Options) -> tuple[Any, ...]:
    """Those of `check_plain`."""
    one = options
    return one.causal, one.softmax_scale, one.deterministic, one.impl, one.layout


def _written_to(inputs: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
    """Arrays for results, None for new ones: packed rows of no sequence, and those beyond the
    longest, have gradient 0."""
    if options.layout != PACKED or torch_ops.wrapped(*inputs):
        return _NEW
    torch = sys.modules["torch"]
    made = (
        torch.zeros_like(x, memory_format=torch.contiguous_format)
        if name in options.wanted
        else None
        for name, x in zip(ROWS, inputs[1:4], strict=True)
    )
    return (*made, *_NEW[len(ROWS) :])


def _fake(*given: Any) -> list[Any]:
    arrays = dict(zip(INPUTS, given, strict=False))
    return [like(arrays[name]) for name in given[-2]]


def _pack(*options: Any) -> tuple[Any, ...]:
    """As the schema has them: without the numbers of a score_mod, which is no node."""
    one = Options(*options)
    return one._replace(window=list(one.window), wanted=list(one.wanted))[:_IN_SCHEMA]  # type: ignore[arg-type]


def _unpack(*given: Any) -> Options:
    one = Options(*given)
    return one._replace(window=tuple(one.window), wanted=tuple(one.wanted))  # type: ignore[arg-type]


_SCHEMA = (
    "str form, str layout, bool causal, float? softmax_scale, int[] window, float softcap, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, str[] wanted, bool deterministic"
)
_IN_SCHEMA = _SCHEMA.count(",") + 1
_FEATURES = Op(
    "attention (backward)",
    inputs=INPUTS,
    outputs=OUTPUTS,
    check=casting(lambda: _FEATURES, check, CASTS),
    options=Options,
    optional=tuple(name for name in INPUTS if name not in ("dout", *ROWS, "o", "lse")),
    batched=True,
    node=Node(
        _fake, _SCHEMA, None, name="attention_form_backward", pack=_pack, unpack=_unpack,
        outputs=_written_to,
    ),
)  # fmt: skip
