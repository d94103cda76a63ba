"""`fkjit.attention` and `fkjit.attention_varlen`: scaled dot-product attention, forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, overload

from fkjit.arguments import bind
from fkjit.errors import CompileError
from fkjit.ops.attention import nodes
from fkjit.ops.attention.checks import check, check_varlen, look_at_ends
from fkjit.ops.attention.features import CASTS, FEATURE_ARRAYS, PACKED_ENDS, POINTERS
from fkjit.ops.attention.options import AttentionOptions, VarlenOptions, unpack_score_mod
from fkjit.ops.op import torch_ops
from fkjit.ops.op.casts import casting
from fkjit.ops.op.expression import does_not_compile
from fkjit.ops.op.op import Op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fkjit.ops.attention.typed import DenseKeywords, VarlenKeywords
    from fkjit.types import AnyArray, Array, Impl, Layout


@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray,
    *, return_lse: Literal[False] = False, **options: Unpack[DenseKeywords],
) -> AnyArray: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray,
    *, return_lse: Literal[True], **options: Unpack[DenseKeywords],
) -> tuple[AnyArray, AnyArray]: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray,
    *, return_lse: bool, **options: Unpack[DenseKeywords],
) -> AnyArray | tuple[AnyArray, AnyArray]: ...  # fmt: skip
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block: int | tuple[int, int] | None = None,
    impl: Impl = "auto",
    return_lse: bool = False,
    layout: Layout = "bhsd",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    score_args: Mapping[str, Any] | None = None,
    score_mod_grad: str | None = None,
    deterministic: bool | None = True,
) -> Any:
    """softmax(softmax_scale * q kᵀ + mask) v, in one kernel, fp32 accumulation.

    Args:
        q: [B, Hq, Sq, D]; k: [B, Hkv, Sk, D]; v: [B, Hkv, Sk, Dv]. fp16, bf16 or fp32, all alike;
            torch, CuPy, NumPy or any DLPack arrays on one device. Any strides, as long as the last
            dimension is contiguous. D and Dv from 1 to 256, in 16 bits without gradients to 512
            (from sm_80 on). Hq a multiple of Hkv (GQA, MQA: query head h reads KV head
            h // (Hq // Hkv)). With layout="bshd" heads and rows trade places.
        causal: query i sees keys j <= i + Sk - Sq: the mask is aligned to the bottom right, as in
            FlashAttention, so that the last query sees every key.
        softmax_scale: default 1 / sqrt(D).
        block: tile, (query rows, keys) or one number for both; default: the spec's choice for this
            architecture and shape. Every legal tile gives the same result within rounding. Rows
            that do not start on 16-byte boundaries (odd D, sliced views) are fetched element by
            element, with one tile only and slower.
        impl: "flash" (online softmax on tensor cores; fp32 exact on FMA units), "tiled" (shared
            memory, two passes), "naive" (a warp a row, for reading), "auto": flash; on a GPU, for
            up to 16 queries of many keys, mostly the kernel of `attention_decode`.
        return_lse: also return the log-sum-exp of each row's final scores, fp32 [B, Hq, Sq].
        window: (left, right): query i sees keys from i + Sk - Sq - left to i + Sk - Sq + right, as
            in FlashAttention; None or -1 for a side without a bound.
        softcap: scores become softcap * tanh(score / softcap).
        alibi_slopes: fp32 [Hq] or [B, Hq] (16 bits are cast): slope * |i + Sk - Sq - j| is taken
            from a score.
        bias: added to scores; fp16, bf16 or fp32 [B | 1, Hq | 1, Sq | 1, Sk].
        mask: bool of the same shapes; a key is seen where it is True.
        sinks: fp32 [Hq] (16 bits are cast): a logit that each row of a head has besides, without a
            value.
        score_mod: an expression of CUDA, compiled into the kernel, that a score becomes: of score,
            b, h, q_idx, k_idx, seqlen_q, seqlen_k and what score_args names, as in
            score_mod="score + slope * (k_idx - q_idx)", score_args={"slope": 0.1}.
        score_args: numbers (int, float; a new value is no new kernel), and arrays of one dimension,
            fp32, fp16, bf16 or int32, that the expression subscripts.
        score_mod_grad: d(score_mod) / d(score), an expression of the same names; without it a call
            with a score_mod has no gradients.
        deterministic: gradients have the same bits at every call. False or None allows sums in any
            order where that is faster, unless torch.use_deterministic_algorithms(True) was called.
            The result itself always has the same bits.

    A score meets softmax_scale, softcap, score_mod, alibi_slopes, bias, then masks. Each of these
    goes with each other. What a call does not use is not in its kernel. docs/ATTENTION.md has more.

    Returns:
        o [B, Hq, Sq, Dv] (layout as q) in q's dtype and framework, or (o, lse). A row that sees no
        key (Sk = 0, or causal with Sq > Sk) gives o = 0 and lse = -inf, or the sink where there is
        one. NaN in a visible key makes NaN rows. Scores that fp32 holds give finite results.

    Raises:
        ParameterError: shapes, tile, scale or flags that no kernel accepts.
        ArgumentTypeError: not arrays, integer or mixed dtypes. DeviceError: mixed devices.
        CaptureError: first call of a variant under CUDA graph capture; see `prepare`.

    CUDA arrays run on their GPU, on the caller's current stream. CPU arrays run the same kernel in
    the interpreter, up to FKJIT_INTERPRETER_LIMIT seconds of estimated work. With torch
    it has gradients of q, k and v (`fkjit.attention_backward`), of bias, alibi_slopes and sinks. To
    torch.compile (fullgraph=True too), torch.export and torch.func.vmap the call is one operator,
    torch.ops.fkjit.attention (or attention_lse). torch.autocast casts q, k and v, as it does for
    PyTorch's own attention.

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning".

    Example:
        >>> q = np.ones((1, 4, 8, 32), np.float16)
        >>> k = v = np.ones((1, 2, 8, 32), np.float16)
        >>> fkjit.attention(q, k, v, causal=True).shape
        (1, 4, 8, 32)
    """
    options = (causal, softmax_scale, block, impl, return_lse, layout, deterministic)
    if window is softcap is alibi_slopes is bias is mask is sinks is score_mod is None:
        return _ATTENTION((q, k, v), (), options)
    inputs = (q, k, v, None, None, alibi_slopes, bias, mask, sinks)
    options = (*options, tuple(window) if isinstance(window, list) else window, softcap)
    return _run(_ATTENTION, inputs, options, score_mod, score_args, score_mod_grad)


@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: Array, cu_seqlens_k: Array,
    max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[False] = False, **options: Unpack[VarlenKeywords],
) -> AnyArray: ...  # fmt: skip
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: Array, cu_seqlens_k: Array,
    max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[True], **options: Unpack[VarlenKeywords],
) -> tuple[AnyArray, AnyArray]: ...  # fmt: skip
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: Array, cu_seqlens_k: Array,
    max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: bool, **options: Unpack[VarlenKeywords],
) -> AnyArray | tuple[AnyArray, AnyArray]: ...  # fmt: skip
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block: int | tuple[int, int] | None = None,
    return_lse: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    score_args: Mapping[str, Any] | None = None,
    score_mod_grad: str | None = None,
    deterministic: bool | None = True,
) -> Any:
    """Attention over sequences of several lengths, packed one behind the other.

    Args:
        q: [total_q, Hq, D]; k: [total_k, Hkv, D]; v: [total_k, Hkv, Dv]; as `attention` takes them.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 (int64 is cast) on the same device: 0 and the
            running sums of the lengths. Sequence i is rows cu_seqlens[i] up to cu_seqlens[i + 1];
            empty ones are fine.
        max_seqlen_q, max_seqlen_k: at least the longest lengths. Rows and keys beyond are left out:
            nothing waits for the device to find out, so a CUDA graph may replay with other lengths.
        causal, window: aligned to the bottom right of each sequence.
        bias, mask: [B | 1, Hq | 1, max_seqlen_q | 1, max_seqlen_k]: a sequence's own [Sq, Sk] stand
            at the beginning of its rows and columns.
        score_mod: b is the sequence, q_idx and k_idx count its own rows.
        The others: as in `attention`.

    Returns:
        o [total_q, Hq, Dv], or (o, lse) with lse fp32 [Hq, total_q]. Rows of no sequence are not
        written. A row that sees no key gives o = 0 and lse = -inf (with a sink: the sink).

    Raises:
        ParameterError, ArgumentTypeError, DeviceError, CaptureError: as `attention`.

    Every feature goes with every other, on every GPU. With torch it has the gradients that
    `attention` has, 0 in rows of no sequence. To torch.compile the call is one operator,
    torch.ops.fkjit.attention_varlen (or …_lse).

    Example:
        >>> q = k = v = np.ones((8, 2, 32), np.float16)
        >>> ends = np.array([0, 3, 8], np.int32)  # sequences of 3 and 5 tokens
        >>> fkjit.attention_varlen(q, k, v, ends, ends, 5, 5).shape
        (8, 2, 32)
    """
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, sinks)
    options = (
        max_seqlen_q, max_seqlen_k, causal, softmax_scale, block, return_lse, deterministic,
        tuple(window) if isinstance(window, list) else window, softcap,
    )  # fmt: skip
    return _run(_VARLEN, inputs, options, score_mod, score_args, score_mod_grad)


def _run(
    op: Op, inputs: tuple[Any, ...], options: tuple[Any, ...], score_mod: Any, score_args: Any,
    score_mod_grad: Any, act: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """A call of an op, or what `act` does with its arguments; what NVRTC has against a score_mod as
    a ParameterError."""
    act = act or op
    if score_mod is None and score_args is None and score_mod_grad is None:
        return act(inputs, (), options)
    if torch_ops.compiling():  # which refuses a score_mod before anything is looked at
        return act(inputs, (), (*options, score_mod))
    slots, rest = unpack_score_mod(op.name, score_mod, score_args, score_mod_grad)
    try:
        return act((*inputs, *slots), (), (*options, *rest))
    except CompileError as error:
        raise does_not_compile(op.name, "score_mod", score_mod, error) from error


# ------------------------------------------------------------------ the two ops

_PARTS = ("o_parts", "lse_parts")  # of few queries: nobody's but the kernels'
_AUTOGRAD = "fkjit.ops.attention.autograd"  # imported where a gradient is wanted: half of all code


def _op(name: str, check: Callable[..., Any], options: Any, traced: Callable[..., Any]) -> Op:
    def autograd(inputs: tuple[Any, ...], outputs: Any, options: tuple[Any, ...]) -> Any:
        return import_module(_AUTOGRAD).attend(op, inputs, options)

    op = Op(
        name, inputs=("q", "k", "v", *POINTERS), outputs=("o", "lse", *_PARTS), options=options,
        check=casting(lambda: op, check, CASTS),
        optional=[n for n in POINTERS if name == "attention" or n not in PACKED_ENDS],
        autograd=autograd, traced=traced, autocast=3, batched=True,
        lengths=2 if options is VarlenOptions else 0,
        guard=look_at_ends if options is VarlenOptions else None,
    )  # fmt: skip
    return op


_ATTENTION = _op("attention", check, AttentionOptions, nodes.traced)
_VARLEN = _op("attention_varlen", check_varlen, VarlenOptions, nodes.traced_varlen)
nodes.define(_ATTENTION, _VARLEN)


def attention_into(
    o: Any, lse: Any, q: Any, k: Any, v: Any, *, causal: bool = False,
    softmax_scale: float | None = None, window: Any = None, softcap: float | None = None,
    sinks: Any = None,
) -> None:  # fmt: skip
    """`attention` without gradients, whose results are written to o [B, Hq, Sq, Dv], of rows at any
    distance, and to a contiguous lse."""
    options = (causal, softmax_scale, None, "auto", True, "bhsd", True, window, softcap)
    inputs = (q, k, v, *(sinks if name == "sinks" else None for name in POINTERS))
    made = _ATTENTION(inputs, (o, lse, None, None), options)
    for into, x in zip((o, lse), made, strict=True):
        if into is not x:  # another op has answered
            into[...] = x


# ------------------------------------------------------------------ prepare

_LAST = "softcap"  # of the options that a call without a score_mod gives
_MOD = ("score_mod", "score_args", "score_mod_grad")
_ARRAYS = 3 + len(PACKED_ENDS) + len(FEATURE_ARRAYS)  # that it gives


def _preparing(op: Op, call: Callable[..., Any], options: Any) -> Callable[..., None]:
    signature, names = inspect.signature(call), options._fields[: options._fields.index(_LAST) + 1]

    def prepare(*args: Any, **named: Any) -> None:
        """Compile and load what the call with the same arguments needs, without running it; where
        an input requires grad, what its gradients need as well.

        Call it before capturing a CUDA graph, or to pay the first-call cost early. Checks and
        raises as the call does; nothing to do for CPU arrays.
        """
        given = bind(op.name, signature, args, named)
        if isinstance(given["window"], list):
            given["window"] = tuple(given["window"])
        # Inputs and options exactly as the call has them, whose plan it is.
        inputs = tuple(given.get(name) for name in op.inputs[:_ARRAYS])
        said, mod = tuple(given[name] for name in names), [given[name] for name in _MOD]
        act = partial(_prepare, op)
        if any(x is not None for x in (*inputs[3:], given["window"], given["softcap"], mod[0])):
            _run(op, inputs, said, *mod, act=act)
        else:
            act(inputs[:3], (), said[:-2])

    return prepare


def _prepare(
    op: Op, inputs: tuple[Any, ...], outputs: tuple[Any, ...], options: tuple[Any, ...]
) -> None:
    if torch_ops.wants_grad(inputs):
        import_module(_AUTOGRAD).prepare(op, inputs, options)
    else:
        op.prepare(inputs, options)


attention.prepare = _preparing(_ATTENTION, attention, AttentionOptions)  # type: ignore[attr-defined]
attention_varlen.prepare = _preparing(_VARLEN, attention_varlen, VarlenOptions)  # type: ignore[attr-defined]
