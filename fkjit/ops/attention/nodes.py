"""Attention as PyTorch's operators: fkjit::attention, fkjit::attention_form (with score features)
and fkjit::attention_varlen, each with lse and without, since the number of results belongs to a
schema. A score_mod is no argument that PyTorch could trace: it is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.attention.features import FEATURE_ARRAYS, PACKED_ENDS
from fkjit.ops.attention.options import AttentionOptions, VarlenOptions
from fkjit.ops.attention.shapes import LAYOUTS
from fkjit.ops.op import torch_ops
from fkjit.ops.op.op import Op

# Arguments of each operator behind its arrays; the options among them have the names that
# AttentionOptions and VarlenOptions give them.
_PLAIN = (
    "bool causal=False, float? softmax_scale=None, int[]? block=None, str impl='auto', "
    "str layout='bhsd', bool? deterministic=True"
)
_FEATURES = (
    "Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? mask=None, Tensor? sinks=None, "
    "int[]? window=None, float? softcap=None, bool causal=False, float? softmax_scale=None, "
    "int[]? block=None, bool? deterministic=True"
)
_SCHEMAS = {
    "attention": f"(Tensor q, Tensor k, Tensor v, {_PLAIN}) -> ",
    "attention_form": f"(Tensor q, Tensor k, Tensor v, {_FEATURES}, str impl='auto', "
    "str layout='bhsd') -> ",
    "attention_varlen": "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {_FEATURES}) -> ",
}


def _arguments(name: str) -> tuple[str, ...]:
    """The names in a schema."""
    inside = _SCHEMAS[name].removeprefix("(").partition(") ->")[0]
    return tuple(item.split()[-1].partition("=")[0] for item in inside.split(", "))


_NAMES = {name: _arguments(name) for name in _SCHEMAS}


def define(attention: Op, varlen: Op) -> None:
    """Make the operators of these ops known to PyTorch."""
    for name, schema in _SCHEMAS.items():
        op = varlen if name == "attention_varlen" else attention
        for lse, results in ((False, "Tensor"), (True, "(Tensor, Tensor)")):
            own = name + "_lse" * lse
            torch_ops.define(
                torch_ops.Operator(
                    own, schema + results, _running(name, op, lse), _faking(name, lse),
                    vmap=_vmap(own) if name == "attention" else None,
                    gradients=_differentiating(name, op, lse), autocast=op.autocast,
                )
            )  # fmt: skip


def traced(inputs: tuple[Any, ...], outputs: Any, options: tuple[Any, ...]) -> Any:
    """What `attention` is while torch.compile traces it, or under torch.func.vmap. `inputs` and
    `options`: the op's."""
    said = AttentionOptions(*options)
    more = [x for x in (*inputs[3:], said.window, said.softcap) if x is not None]
    name = "attention_form" if more or said.score_mod else "attention"
    return _call(name, "attention", inputs, said)


def traced_varlen(inputs: tuple[Any, ...], outputs: Any, options: tuple[Any, ...]) -> Any:
    """What `attention_varlen` is."""
    return _call("attention_varlen", "attention_varlen", inputs, VarlenOptions(*options))


def _call(name: str, call: str, inputs: tuple[Any, ...], said: Any) -> Any:
    if said.score_mod:
        raise ParameterError(
            f"{call}: score_mod={said.score_mod!r} is not supported under torch.compile; make the "
            "call in a function that torch.compiler.disable wraps"
        )
    q, k, v, *rest = inputs
    window, block = said.window, said.block
    sides = window if window is None else [-1 if side is None else side for side in window]
    tile = block if block is None else [block] if isinstance(block, int) else list(block)
    known = getattr(torch_ops.known, name + "_lse" if said.return_lse else name)
    if name == "attention":
        return known(
            q, k, v, said.causal, said.softmax_scale, tile, said.impl, said.layout,
            said.deterministic,
        )  # fmt: skip
    features = (*rest[2:6], sides, said.softcap, said.causal, said.softmax_scale, tile)
    if name == "attention_varlen":
        lengths = (*rest[:2], said.max_seqlen_q, said.max_seqlen_k)
        return known(q, k, v, *lengths, *features, said.deterministic)
    return known(q, k, v, *features, said.deterministic, said.impl, said.layout)


def _running(name: str, op: Op, lse: bool) -> Callable[..., Any]:
    """What the operator runs, of tensors with data."""
    return lambda *given, **named: op(*_call_of(name, lse, given, named), running=True)


def _differentiating(name: str, op: Op, lse: bool) -> Callable[..., Any]:
    """The operator where an input requires grad."""

    def gradients(*given: Any, **named: Any) -> Any:
        assert op.autograd is not None
        return op.autograd(*_call_of(name, lse, given, named))

    return gradients


def _call_of(
    name: str, lse: bool, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """Inputs, outputs and options of the op: `_call` the other way round."""
    said = dict(zip(_NAMES[name], given, strict=False)) | named
    rows = tuple(said.pop(x) for x in ("q", "k", "v"))
    arrays = tuple(said.pop(x, None) for x in (*PACKED_ENDS, *FEATURE_ARRAYS))
    block, window = said.pop("block", None), said.pop("window", None)
    said["block"] = block if block is None else block[0] if len(block) == 1 else tuple(block)
    said["window"] = window if window is None else tuple(window)
    options = VarlenOptions if name == "attention_varlen" else AttentionOptions
    return rows if name == "attention" else rows + arrays, (), options(**said, return_lse=lse)


def _vmap(name: str) -> Callable[..., Any]:
    """The mapped dimension becomes part of the batch: one launch."""

    def mapped(info: Any, dims: tuple[Any, ...], q: Any, k: Any, v: Any, *options: Any) -> Any:
        count = info.batch_size
        inputs = [
            x.movedim(dim, 0) if dim is not None else x.expand(count, *x.shape)
            for x, dim in zip((q, k, v), dims, strict=False)
        ]
        made = getattr(torch_ops.known, name)(*(x.flatten(0, 1) for x in inputs), *options)
        batch = inputs[0].shape[1]
        if name == "attention":
            return made.unflatten(0, (count, batch)), 0
        return tuple(x.unflatten(0, (count, batch)) for x in made), (0, 0)

    return mapped


def _faking(name: str, lse: bool) -> Callable[..., Any]:
    """Results without data: o as q with v's columns, lse with heads before rows."""

    def fake(q: Any, k: Any, v: Any, *given: Any, **named: Any) -> Any:
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        if not lse:
            return o
        said = dict(zip(_NAMES[name][3:], given, strict=False)) | named
        axes: Sequence[int] = LAYOUTS[said.get("layout", "bhsd")][:3]
        rows = [q.shape[axis] for axis in (axes if len(q.shape) == 4 else (1, 0))]
        return o, q.new_empty(rows, dtype=sys.modules["torch"].float32)

    return fake
