"""Gradients of `fkjit.attention` with a form and of `fkjit.attention_varlen`, in PyTorch: of q, k,
v, a bias, ALiBi slopes and sinks, by the backward's kernels with the form rendered in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fkjit.errors import CompileError, ParameterError
from fkjit.ops.attention.backward import feature_call as backward
from fkjit.ops.attention.backward.call import demanded
from fkjit.ops.attention.features import ScoreFeatures
from fkjit.ops.op import torch_ops

# Of a call with a form, in the order of its op
_INPUTS = (*backward.ROWS, *backward.INPUTS[7:])
_DIFFERENTIABLE = (*backward.ROWS, *backward.OF_FORM)
_DTYPES = {
    "torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32",
    "torch.int32": "int32",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call whose result has a graph behind it; `run` and `traced` make (o, lse) of its inputs,
    the latter of tensors that only stand for others."""

    name: str  # as errors say it
    run: Callable[[tuple[Any, ...]], Any]
    traced: Callable[[tuple[Any, ...]], Any]
    layout: str
    causal: Any
    softmax_scale: Any
    window: Any
    softcap: Any
    score_mod: str
    score_mod_grad: str
    score_names: tuple[str, ...]
    score_scalars: tuple[tuple[str, str, Any], ...]
    deterministic: bool = True
    max_seqlen_q: Any = 0
    max_seqlen_k: Any = 0

    def options(self, given: dict[str, Any], wanted: tuple[str, ...]) -> tuple[Any, ...]:
        """Those of the backward."""
        sides = (-1 if side is None else int(side) for side in self.window or (None, None))
        return (
            self._form(given, wanted).text, self.layout, bool(self.causal), self.softmax_scale,
            tuple(sides), float(self.softcap or 0.0), self.max_seqlen_q, self.max_seqlen_k, wanted,
            self.deterministic or demanded(), self.score_scalars,
        )  # fmt: skip

    def _form(self, given: dict[str, Any], wanted: tuple[str, ...]) -> ScoreFeatures:
        arrays = [given[slot] for slot in backward.SLOTS[: len(self.score_names)]]
        kinds = (_DTYPES[str(array.dtype)] for array in arrays)
        return ScoreFeatures(
            softcap=bool(self.softcap),
            alibi=given["alibi_slopes"] is not None,
            bias="" if given["bias"] is None else _DTYPES[str(given["bias"].dtype)],
            mask=given["mask"] is not None,
            varlen=self.layout == backward.PACKED,
            score_mod=self.score_mod,
            score_args=(
                *zip(self.score_names, kinds, strict=True),
                *((name, kind) for name, kind, _ in self.score_scalars),
            ),
            score_mod_grad=self.score_mod_grad,
            dalibi="alibi_slopes" in wanted,
        )


def attend(op: Any, inputs: tuple[Any, ...], said: Any, exact: bool) -> Any:
    """(o, lse) of a call of an op, with a graph behind them."""
    with_lse = said._replace(return_lse=True)
    inputs = (*inputs, *(None,) * (len(_INPUTS) - len(inputs)))
    call = Call(
        op.name, lambda arrays: op(arrays, (), with_lse),
        lambda arrays: op.traced(arrays, (), with_lse),
        getattr(said, "layout", backward.PACKED), said.causal, said.softmax_scale, said.window,
        said.softcap, said.score_mod, said.score_mod_grad, said.score_names, said.score_scalars,
        exact, getattr(said, "max_seqlen_q", 0), getattr(said, "max_seqlen_k", 0),
    )  # fmt: skip
    return differentiable(call, inputs)


def differentiable(call: Call, inputs: tuple[Any, ...]) -> Any:
    """(o, lse) with a graph behind them."""
    given = dict(zip(_INPUTS, inputs, strict=True))
    for name, slot in zip(call.score_names, backward.SLOTS, strict=False):
        if getattr(given[slot], "requires_grad", False):
            raise ParameterError(
                f"{call.name}: score_args: {name} requires grad, but has no gradient; pass it "
                "detached"
            )
    if call.score_mod and not call.score_mod_grad:
        raise ParameterError(
            f"{call.name}: an input requires grad, but score_mod={call.score_mod!r} has no "
            "derivative; pass score_mod_grad, d(score_mod) / d(score) as an expression of the same "
            "names, or call it under torch.no_grad()"
        )
    return _function().apply(call, *inputs)


@lru_cache(maxsize=1)
def _function() -> Any:
    """torch's Function; its module is there, since a tensor was seen."""
    torch = sys.modules["torch"]

    class FormedAttention(torch.autograd.Function):
        @staticmethod
        def forward(call: Call, *inputs: Any) -> Any:
            traced = torch_ops.abstract(*inputs) or torch_ops.wrapped(*inputs)
            return call.traced(inputs) if traced else call.run(inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.call, *arrays = inputs
            ctx.save_for_backward(*arrays, *output)
            ctx.set_materialize_grads(False)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
            *inputs, o, lse = ctx.saved_tensors
            given = dict(zip(_INPUTS, inputs, strict=True))
            needed = dict(zip(_INPUTS, ctx.needs_input_grad[1:], strict=True))
            wanted = tuple(name for name in _DIFFERENTIABLE if needed[name])
            dout = torch.zeros_like(o) if dout is None else dout.contiguous()
            dlse = None if dlse is None else dlse.contiguous()
            made = _gradients(ctx.call, given, (dout, o, lse, dlse), wanted)
            found = dict(zip(wanted, made, strict=True))
            return None, *(found.get(name) for name in _INPUTS)

    return FormedAttention


def _gradients(
    call: Call, given: dict[str, Any], results: tuple[Any, ...], wanted: tuple[str, ...]
) -> Any:
    """Of what is wanted."""
    if 0 in given["q"].shape:
        return [sys.modules["torch"].zeros_like(given[name]) for name in wanted]
    dout, o, lse, dlse = results
    rows = (given[name] for name in backward.ROWS)
    inputs = (dout, *rows, o, lse, dlse, *(given[name] for name in backward.INPUTS[7:]))
    try:
        return backward.gradients(inputs, call.options(given, wanted))
    except CompileError as error:
        if not call.score_mod_grad:
            raise
        raise ParameterError(
            f"{call.name}: score_mod_grad={call.score_mod_grad!r} does not compile: {error}"
        ) from error
