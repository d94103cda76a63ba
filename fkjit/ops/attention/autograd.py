"""Gradients of `fkjit.attention` and `fkjit.attention_varlen` in PyTorch: of q, k, v, a bias, ALiBi
slopes and sinks, by the kernels of `backward/` with the call's score features rendered in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fkjit.errors import CompileError, ParameterError
from fkjit.ops.attention.backward.call import gradients, prepare_gradients, torch_is_deterministic
from fkjit.ops.attention.backward.checks import DIFFERENTIABLE, ROWS
from fkjit.ops.attention.backward.problem import PACKED, Options
from fkjit.ops.attention.features import POINTERS, SLOTS, ScoreFeatures
from fkjit.ops.attention.shapes import MAX_HEAD_DIM
from fkjit.ops.op.autograd import Differentiable
from fkjit.ops.op.checks import check_flag
from fkjit.ops.op.expression import does_not_compile

INPUTS = (*ROWS, *POINTERS)  # of the ops of attention, which may leave out the last ones
_PLACES = {name: at for at, name in enumerate(INPUTS)}
_FIRST_SLOT = _PLACES[SLOTS[0]]
_MAX_CALLS = 1024
_DTYPES = {
    "torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32",
    "torch.int32": "int32",
}  # fmt: skip


def attend(op: Any, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """A call of the op of attention or attention_varlen, with a graph behind its results.

    op: its `name`, `options` (a NamedTuple) and `prepare`; called without gradients it makes o, or
    o and lse. inputs: of torch tensors; those of INPUTS that the call has. options: of the call.
    """
    try:
        call = _known_call(op, options)
    except TypeError:  # options that cannot be hashed: the op explains them
        call = Call(op, options)
    call.check(inputs)
    o, lse = _ATTENTION(inputs, call)
    return (o, lse) if call.returns_lse else o


def prepare(op: Any, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """Compile and load what `attend` and its backward need, without running either."""
    torch, call = sys.modules["torch"], Call(op, options)
    call.check(inputs)
    op.prepare(inputs, call.forward)
    q, v = inputs[0].detach(), inputs[2]
    if 0 in q.shape:
        return
    o = q.new_empty((*q.shape[:-1], v.shape[-1]), requires_grad=True)
    lse = q.new_empty(call.lse_shape(q), dtype=torch.float32, requires_grad=True)
    needed = tuple(x is not None and x.requires_grad for x in inputs)
    with torch.no_grad():
        made = call.gradient(inputs, (o.detach(), o, lse, None), needed)
        _explained(call, *made, prepare_gradients)


class Call:
    """What the backward of a call depends on beside its arrays."""

    def __init__(self, op: Any, options: tuple[Any, ...]) -> None:
        said = op.options(*options)
        self.op, self.said = op, said
        self.forward = tuple(said._replace(return_lse=True))[: len(options)]
        self.returns_lse = check_flag(op.name, "return_lse", said.return_lse)
        # None is left to torch.use_deterministic_algorithms, which also overrules False.
        exact = said.deterministic
        self.deterministic = exact is not None and check_flag(op.name, "deterministic", exact)
        self.layout = getattr(said, "layout", PACKED)
        rules = said.window is not None or said.softcap is not None or bool(said.score_mod)
        self.plain = not rules and self.layout != PACKED  # unless arrays say otherwise
        self._options: dict[Any, Options] = {}

    def check(self, inputs: tuple[Any, ...]) -> None:
        """ParameterError for heads too wide for a gradient, or a score_mod whose gradient nobody
        knows."""
        for name, array in (("head_dim", inputs[0]), ("head_dim_v", inputs[2])):
            if array.shape[-1] > MAX_HEAD_DIM:
                raise ParameterError(
                    f"{self.op.name}: an input requires grad, but {name}={array.shape[-1]} has no "
                    f"backward; allowed: up to {MAX_HEAD_DIM}, or a call under torch.no_grad()"
                )
        if not self.said.score_mod:
            return
        slots = inputs[_FIRST_SLOT:]
        for name, array in zip(self.said.score_names, slots, strict=False):
            if getattr(array, "requires_grad", False):
                raise ParameterError(
                    f"{self.op.name}: score_args: {name} requires grad, but has no gradient; pass "
                    "it detached"
                )
        if not self.said.score_mod_grad:
            raise ParameterError(
                f"{self.op.name}: an input requires grad, but score_mod={self.said.score_mod!r} "
                "has no derivative; pass score_mod_grad, d(score_mod) / d(score) as an expression "
                "of the same names, or call it under torch.no_grad()"
            )

    def gradient(
        self, inputs: tuple[Any, ...], results: tuple[Any, ...], needed: tuple[bool, ...]
    ) -> tuple[tuple[Any, ...], Options]:
        """Inputs and options of the backward; `results`: dout, o, lse, dlse."""
        dout, o, lse, dlse = results
        q, k, v, *features = inputs
        given = (dout, q, k, v, o, lse, dlse, *features)
        return given, self._of_gradient(features, needed)

    def _of_gradient(self, features: list[Any], needed: tuple[bool, ...]) -> Options:
        deterministic = self.deterministic or torch_is_deterministic()
        key = (deterministic, needed, *[None if x is None else x.dtype for x in features])
        found = self._options.get(key)
        if found is None:
            found = self._options[key] = self._made(features, needed, deterministic)
        return found

    def _made(self, features: list[Any], needed: tuple[bool, ...], deterministic: bool) -> Options:
        said = self.said
        shared = {
            "layout": self.layout, "causal": bool(said.causal), "deterministic": deterministic,
            "softmax_scale": said.softmax_scale,
        }  # fmt: skip
        if self.plain and all(x is None for x in features):
            return Options(**shared)
        left, right = (-1 if x is None else int(x) for x in said.window or (None, None))
        wanted = dict(zip(INPUTS, needed, strict=False))
        names = tuple(name for name in DIFFERENTIABLE if wanted.get(name))
        return Options(
            **shared,
            features=self._features(dict(zip(POINTERS, features, strict=False)), names).text,
            window=(left, right),
            softcap=float(said.softcap or 0.0),
            max_seqlen_q=getattr(said, "max_seqlen_q", 0),
            max_seqlen_k=getattr(said, "max_seqlen_k", 0),
            wanted=names,
            score_scalars=said.score_scalars,
        )

    def _features(self, given: dict[str, Any], wanted: tuple[str, ...]) -> ScoreFeatures:
        said, bias = self.said, given.get("bias")
        kinds = (
            _DTYPES[str(given[slot].dtype)]
            for _, slot in zip(said.score_names, SLOTS, strict=False)
        )
        return ScoreFeatures(
            softcap=bool(said.softcap),
            alibi=given.get("alibi_slopes") is not None,
            bias="" if bias is None else _DTYPES[str(bias.dtype)],
            mask=given.get("mask") is not None,
            varlen=self.layout == PACKED,
            score_mod=said.score_mod,
            score_args=(
                *zip(said.score_names, kinds, strict=True),
                *((name, kind) for name, kind, _ in said.score_scalars),
            ),
            score_mod_grad=said.score_mod_grad,
            dalibi="alibi_slopes" in wanted,
        )

    def lse_shape(self, q: Any) -> tuple[int, ...]:
        """Of the log-sum-exps of q's rows: heads before rows."""
        if self.layout == PACKED:
            return q.shape[1], q.shape[0]
        batch, one, two, _ = q.shape
        return (batch, two, one) if self.layout == "bshd" else (batch, one, two)


@lru_cache(maxsize=_MAX_CALLS)
def _known_call(op: Any, options: tuple[Any, ...]) -> Call:
    return Call(op, options)


def _forward(inputs: tuple[Any, ...], call: Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    results = call.op(inputs, (), call.forward)
    return results, (*results, *inputs)


def _backward(
    saved: tuple[Any, ...], of_results: tuple[Any, ...], needed: tuple[bool, ...], call: Call
) -> Any:
    (o, lse, *inputs), (dout, dlse) = saved, of_results
    torch = sys.modules["torch"]
    dout = torch.zeros_like(o) if dout is None else _rows_contiguous(dout)
    dlse = None if dlse is None else dlse.contiguous()
    given, options = call.gradient(tuple(inputs), (dout, o, lse, dlse), needed)
    if options.features and 0 in o.shape:
        return [
            torch.zeros_like(x) if want else None for x, want in zip(inputs, needed, strict=True)
        ]
    made = _explained(call, given, options, gradients)
    if needed == (True,) * len(made):  # as it mostly is
        return made
    found = dict(zip(options.wanted, made, strict=True))
    return [found.get(name) if want else None for name, want in zip(INPUTS, needed, strict=False)]


def _explained(
    call: Call, inputs: tuple[Any, ...], options: Options, run: Callable[..., Any]
) -> Any:
    """What `run` returns; what NVRTC has against a score_mod_grad as a ParameterError."""
    try:
        return run(inputs, options)
    except CompileError as error:
        derivative = call.said.score_mod_grad
        if not derivative:
            raise
        raise does_not_compile(call.op.name, "score_mod_grad", derivative, error) from error


def _rows_contiguous(x: Any) -> Any:
    """x, or a copy where columns are no neighbours: the gradient of a sum is one element."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


_ATTENTION = Differentiable("Attention", _forward, _backward)
