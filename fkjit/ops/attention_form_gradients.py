"""Gradients of `fkjit.attention` with a form, in PyTorch: the backward's kernels with the form
rendered in. Biases, slopes and sinks have none yet; a score_mod has no derivative."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fkjit.errors import ParameterError
from fkjit.interop import View
from fkjit.ops import attention_backward_choice as choice
from fkjit.ops import attention_backward_fp32 as fp32
from fkjit.ops import attention_backward_kernels as kernels
from fkjit.ops.attention_backward_checks import check as check_plain
from fkjit.ops.attention_form import Form, parse
from fkjit.ops.simple import Launch, Op, Request, arch_of
from fkjit.spec import KernelSpec, Param, Params, Problem

ARRAYS = ("alibi_slopes", "bias", "mask")
_INPUTS = ("dout", "q", "k", "v", "o", "lse", "dlse", *ARRAYS)
_OUTPUTS = ("dq", "dk", "dv", "lse_log2", "delta")
_DTYPES = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}
# A warp has 16 rows: rules and band take the registers of another 16.
_TILES: dict[str, dict[int, tuple[Any, ...]]] = {
    "keys": {
        64: ((64, 64, 4, 1, 2),),
        **dict.fromkeys((128, 192), ((64, 32, 4, 2, 2), (32, 32, 2, 2, 2))),
        256: ((32, 32, 2, 2, 2), (32, 32, 2, 2, 1)),
    },
    "queries": {
        64: ((64, 64, 4, 2),),
        **dict.fromkeys((128, 192), ((64, 32, 4, 2),)),
        256: ((32, 32, 2, 2),),
    },
    "keys_fp32": fp32.TILES,
    "queries_fp32": fp32.TILES,
}


@lru_cache(maxsize=1024)
def kernel(base: KernelSpec, text: str) -> KernelSpec:
    """A kernel of the backward with a form."""

    def derive(params: Params) -> dict[str, Any]:
        values = parse(text).values() | {"in_registers": False}
        return {**base.derive(params), **values}

    def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        usual = base.arguments(params, problem, arrays)
        return {**usual, **{name: arrays.get(name) for name in ARRAYS}, "form": problem["form"]}

    def illegal(params: Params) -> str | None:
        known = params["tile"] in _TILES[base.name][params["head_dim"]]
        return None if known else f"is not a tile for head_dim={params['head_dim']}"

    tiles = tuple(dict.fromkeys(t for some in _TILES[base.name].values() for t in some))
    params = [
        replace(param, values=tiles) if param.name == "tile" else param for param in base.params
    ]
    return replace(
        base,
        op="attention_backward_form",
        derive=derive,
        arguments=arguments,
        illegal=illegal,
        params=(*params, Param("form", (text,), "what it does beside causal attention")),
    )


def _check(
    views: Mapping[str, View | None], text: str, window: Any, softcap: float, softmax_scale: Any,
    layout: str,
) -> Request:  # fmt: skip
    """Launches of a backward whose forward has looked at the form."""
    plain = {name: views[name] for name in _INPUTS[:7]}
    request = check_plain(plain, False, softmax_scale, True, "portable", layout)
    seen = {name: view for name in ARRAYS if (view := views[name]) is not None}
    launches = [
        launch if launch.spec is kernels.ROWS else _with_form(launch, text, window, softcap, seen,
                                                              arch_of(request.like))
        for launch in request.launches
    ]  # fmt: skip
    return Request(dict(views), request.outputs, tuple(launches))


def _with_form(
    launch: Launch, text: str, window: tuple[int, int], softcap: float,
    seen: Mapping[str, View], arch: Any,
) -> Launch:  # fmt: skip
    spec, old = kernel(launch.spec, text), launch.params
    problem = {**launch.problem, "form": _form(launch.problem, window, softcap, seen)}
    dims = old["head_dim"], old["head_dim_v"]
    tiles = _TILES[spec.name][dims[0]]
    params = choice.parameters(spec, tiles, dims, problem, old["aligned"], arch, form=text)
    return Launch(spec, params, problem)


def _form(
    problem: Problem, window: tuple[int, int], softcap: float, seen: Mapping[str, View]
) -> tuple[Any, ...]:
    """The kernels' AttentionForm."""

    def steps(name: str) -> tuple[int, ...]:
        view = seen.get(name)
        if view is None:
            return (0, 0, 0)
        pairs = zip(view.strides[:3], view.shape[:3], strict=True)
        return tuple(step if n > 1 else 0 for step, n in pairs)

    alibi = seen.get("alibi_slopes")
    by_batch = alibi is not None and len(alibi.shape) == 2 and alibi.shape[0] > 1
    batch_stride = alibi.strides[0] if alibi is not None and by_batch else 0
    scale = problem["softmax_scale"]
    return (*steps("bias"), *steps("mask"), *window, batch_stride, 0, softcap, scale)


_OP = Op(
    "attention (backward)",
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    check=_check,
    optional=("dlse", *ARRAYS),
)


def differentiable(call: Op, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """`call` with a graph behind its results; inputs and options in the order of attention's op
    with a form: impl, layout, causal, softmax_scale, block, return_lse, window, softcap, ..."""
    given = dict(zip(("alibi_slopes", "bias", "mask", "sinks"), inputs[5:9], strict=True))
    for name, array in given.items():
        if getattr(array, "requires_grad", False):
            raise ParameterError(
                f"attention: {name} requires grad, but has no gradient yet; pass it detached"
            )
    if options[8]:
        raise ParameterError(
            "attention: an input requires grad, but score_mod has no derivative; call it under "
            "torch.no_grad() or pass detached tensors"
        )
    o, lse = _function().apply(call, inputs[3:], options, *inputs[:3])
    return (o, lse) if options[5] else o


@lru_cache(maxsize=1)
def _function() -> Any:
    """torch's Function; its module is there, since a tensor was seen."""
    torch = sys.modules["torch"]

    class FormedAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Any, rest: Any, options: Any, q: Any, k: Any, v: Any) -> Any:
            o, lse = call((q, k, v, *rest), (None, None), (*options[:5], True, *options[6:]))
            ctx.save_for_backward(q, k, v, o, lse, *rest[2:5])
            ctx.set_materialize_grads(False)
            ctx.options = options
            return o, lse

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
            q, k, v, o, lse, *arrays = ctx.saved_tensors
            dout = torch.zeros_like(o) if dout is None else dout.contiguous()
            dlse = None if dlse is None else dlse.contiguous()
            made = _gradients((dout, q, k, v, o, lse, dlse, *arrays), ctx.options)
            needed = ctx.needs_input_grad[3:]
            found = [dx if n else None for dx, n in zip(made, needed, strict=True)]
            return None, None, None, *found

    return FormedAttention


def _gradients(given: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """dq, dk and dv."""
    _, layout, causal, softmax_scale, _, _, window, softcap, *_ = options
    _, q, k, *_, alibi, bias, mask = given
    form = Form(
        softcap=bool(softcap),
        alibi=alibi is not None,
        mask=mask is not None,
        bias="" if bias is None else _DTYPES[str(bias.dtype)],
    )
    rows = 1 if layout == "bshd" else 2
    wide = max(q.shape[rows], k.shape[rows])
    left, right = (wide if x in (None, -1) else min(int(x), wide) for x in window or (None, None))
    band = (left, 0 if causal else right)
    settings = (form.text, band, float(softcap or 0.0), softmax_scale, layout)
    return _OP(given, (None,) * len(_OUTPUTS), settings)
