"""`fkjit.attention`: scaled dot-product attention, forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fkjit.cpu.run import interpret
from fkjit.ops.attention import autograd, nodes
from fkjit.ops.attention.checks import LAYOUTS, Request, check
from fkjit.ops.attention.kernels_sm90 import COUNTERS, FLASH_SM90
from fkjit.ops.attention.plan import again, find, remember
from fkjit.ops.attention.short_q import FewPlan
from fkjit.ops.op import torch_ops
from fkjit.runtime import interop, workspace
from fkjit.runtime.device import launch_on_device, loaded
from fkjit.runtime.interop import CPU
from fkjit.sanitizer import refuse_gpu


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block: int | tuple[int, int] | None = None,
    impl: str = "auto",
    return_lse: bool = False,
    layout: str = "bhsd",
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
            dimension is contiguous. D and Dv from 1 to 256. Hq a multiple of Hkv (GQA, MQA: query
            head h reads KV head h // (Hq // Hkv)). With layout="bshd" heads and rows trade places.
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
        alibi_slopes: fp32 [Hq] or [B, Hq]: slope * |i + Sk - Sq - j| is taken from a score.
        bias: added to scores; fp16, bf16 or fp32 [B | 1, Hq | 1, Sq | 1, Sk].
        mask: bool of the same shapes; a key is seen where it is True.
        sinks: fp32 [Hq]: a logit that each row of a head has besides, without a value.
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
        one. NaN in a visible key makes NaN rows; scores are right up to about 1e8 in magnitude.

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
    """
    options = (causal, softmax_scale, block, impl, return_lse, layout)
    dense = window is softcap is alibi_slopes is bias is mask is sinks is score_mod is None
    if dense and not torch_ops.compiling():
        made = again(q, k, v, options)
        if made is not None:
            return made
    if torch_ops.autocasting():
        q, k, v = torch_ops.autocast(q, k, v)
    if not dense:
        forms = (window, softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args)
        return _forms().dense(q, k, v, options, forms, score_mod_grad, deterministic)
    if torch_ops.compiling():
        return nodes.traced(q, k, v, *options, deterministic)
    plan = find(q, k, v, options)
    if plan is not None:
        refuse_gpu("attention")
        return plan.run(q, k, v)
    if torch_ops.wants_grad((q, k, v)):
        return autograd.attend(_Differentiated, (q, k, v), (*options, deterministic))
    if torch_ops.wrapped(q, k, v):
        return nodes.traced(q, k, v, *options, deterministic)
    request = check(q, k, v, *options)
    if request.q.kind == "torch":
        torch_ops.arrived()
    if request.few:
        few = FewPlan(*options)
        remember(request, None, options, few)
        return few.run(q, k, v)
    o = interop.empty(request.q, request.output_shape, request.problem["dtype"])
    lse = interop.empty(request.q, request.lse_shape, "fp32") if return_lse else None
    if request.device == CPU and not request.empty:
        _on_cpu(request, o, lse)
    elif not request.empty:
        _on_gpu(request, o, lse, options)
    o = interop.give_back(request.q, o)
    return (o, interop.give_back(request.q, lse)) if return_lse else o


class _Said(NamedTuple):
    causal: Any
    softmax_scale: Any
    block: Any
    impl: Any
    return_lse: Any
    layout: Any
    deterministic: Any
    window: Any = None
    softcap: Any = None
    score_mod: str = ""
    score_mod_grad: str = ""


class _Differentiated:
    """Plain attention as autograd calls it."""

    name, options = "attention", _Said

    def __new__(cls, inputs: Any, outputs: Any, options: Any) -> Any:
        if torch_ops.abstract(*inputs) or torch_ops.wrapped(*inputs):
            return nodes.traced(*inputs, *options)
        names = ("causal", "softmax_scale", "block", "impl", "return_lse", "layout")
        # Detached, a geometry has a plan.
        return attention(*(x.detach() for x in inputs), **dict(zip(names, options, strict=False)))

    @staticmethod
    def prepare(inputs: Any, options: Any) -> None:
        names = ("causal", "softmax_scale", "block", "impl", "return_lse", "layout")
        prepare(*(x.detach() for x in inputs), **dict(zip(names, options, strict=False)))


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block: int | tuple[int, int] | None = None,
    impl: str = "auto",
    return_lse: bool = False,
    layout: str = "bhsd",
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
) -> None:
    """Compile and load what `attention` with the same arguments needs, without running it.

    Call it before capturing a CUDA graph, or to pay the first-call cost early. Checks and raises as
    `attention` does; nothing to do for CPU arrays.
    """
    options = (causal, softmax_scale, block, impl, return_lse, layout)
    if torch_ops.wants_grad((q, k, v)):
        return autograd.prepare(_Differentiated, (q, k, v), (*options, deterministic))
    if not (window is softcap is alibi_slopes is bias is mask is sinks is score_mod is None):
        forms = (window, softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args)
        return _forms().prepare_dense(q, k, v, options, forms)
    request = check(q, k, v, *options)
    if request.few:
        few = FewPlan(*options)
        few.prepare(q, k, v)
        remember(request, None, options, few)
    elif request.device != CPU and not request.empty:
        stream = interop.current_stream(request.q)
        kernel = loaded(request.spec, request.params, request.device, stream)
        if request.spec is FLASH_SM90:
            workspace.reserve(request.device)
        remember(request, kernel, options)


def _forms() -> Any:
    """Imported by the first call that has one."""
    from fkjit.ops.attention import feature_forward

    return feature_forward


attention.prepare = prepare  # type: ignore[attr-defined]
nodes.define(attention)


def _on_cpu(request: Request, o: Any, lse: Any) -> None:
    order = LAYOUTS[request.layout]
    arrays = {n: interop.as_numpy(getattr(request, n)).transpose(order) for n in ("q", "k", "v")}
    arrays["o"] = interop.as_numpy(interop.view(o, "attention", "o")).transpose(order)
    arrays["lse"] = None if lse is None else interop.as_numpy(interop.view(lse, "attention", "lse"))
    arrays["counters"] = np.zeros(COUNTERS, np.uint32)
    interpret(request.spec, request.params, request.problem, arrays)


def _on_gpu(request: Request, o: Any, lse: Any, options: tuple[Any, ...]) -> None:
    arrays = request.pointers(
        interop.Pointer(interop.view(o, "attention", "o")),
        interop.Pointer(None if lse is None else interop.view(lse, "attention", "lse")),
    )
    stream = interop.current_stream(request.q)
    counters = 0
    if request.spec is FLASH_SM90:
        counters = workspace.find(request.q.array, request.device, stream, 0, COUNTERS)[1]
    named = request.spec.arguments(
        request.params, request.problem, {**arrays, "counters": counters}
    )
    named = interop.resolved(named)
    kernel = launch_on_device(
        request.spec, request.params, request.problem, named, request.device, stream
    )
    if request.q.kind == "dlpack":  # whoever owns the inputs may reuse their memory once we return
        interop.synchronise(request.q)
    remember(request, kernel, options)
