"""Attention with a form as PyTorch's operators: fkjit::attention_form and fkjit::attention_varlen,
each with lse and without. A score_mod is no argument that PyTorch could trace: it is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.attention.checks import LAYOUTS
from fkjit.ops.op import torch_ops

_FORM = (
    "Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? mask=None, Tensor? sinks=None, "
    "int[]? window=None, float? softcap=None, bool causal=False, float? softmax_scale=None, "
    "int[]? block=None, bool? deterministic=True"
)
_DENSE = f"(Tensor q, Tensor k, Tensor v, {_FORM}, str impl='auto', str layout='bhsd') -> "
_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, {_FORM}) -> "
)
_FORM_NAMES = (
    *("alibi_slopes", "bias", "mask", "sinks", "window", "softcap", "causal", "softmax_scale"),
    *("block", "deterministic"),
)
_DENSE_NAMES = (*_FORM_NAMES, "impl", "layout")


def define(dense: Callable[..., Any], varlen: Callable[..., Any]) -> None:
    """Four operators; what they run are these calls of (rows, what is besides, shared, forms)."""

    def run_dense(lse: bool) -> Callable[..., Any]:
        def run(q: Any, k: Any, v: Any, *options: Any, **named: Any) -> Any:
            given = dict(zip(_DENSE_NAMES, options, strict=False)) | named
            where = (given.get("impl", "auto"), given.get("layout", "bhsd"))
            return dense((q, k, v), where, *_taken(given, lse), None, _exact(given))

        return run

    def run_varlen(lse: bool) -> Callable[..., Any]:
        def run(*arrays: Any, **named: Any) -> Any:
            given = dict(zip(_FORM_NAMES, arrays[7:], strict=False)) | named
            return varlen(arrays[:3], arrays[3:7], *_taken(given, lse), None, _exact(given))

        return run

    for lse, results in ((False, "Tensor"), (True, "(Tensor, Tensor)")):
        tail = "_lse" if lse else ""
        for name, schema, run, fake in (
            ("attention_form", _DENSE, run_dense(lse), _fake_dense(lse)),
            ("attention_varlen", _VARLEN, run_varlen(lse), _fake_varlen(lse)),
        ):
            torch_ops.define(
                torch_ops.Operator(
                    name + tail, schema + results, run, fake, gradients=run, autocast=3
                )
            )


def traced_dense(
    rows: tuple[Any, ...], where: tuple[Any, ...], shared: tuple[Any, ...],
    forms: tuple[Any, ...], deterministic: bool | None = True,
) -> Any:  # fmt: skip
    """What `attention` with a form is while torch.compile traces it."""
    name = "attention_form_lse" if shared[3] else "attention_form"
    given = _given("attention", shared, forms)
    return getattr(torch_ops.known, name)(*rows, *given, deterministic, *where)


def traced_varlen(
    rows: tuple[Any, ...], packed: tuple[Any, ...], shared: tuple[Any, ...],
    forms: tuple[Any, ...], deterministic: bool | None = True,
) -> Any:  # fmt: skip
    """What `attention_varlen` is while torch.compile traces it."""
    name = "attention_varlen_lse" if shared[3] else "attention_varlen"
    given = _given("attention_varlen", shared, forms)
    return getattr(torch_ops.known, name)(*rows, *packed, *given, deterministic)


def _given(call: str, shared: tuple[Any, ...], forms: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operators' arguments in the order of _FORM."""
    window, softcap, *arrays, score_mod, _ = forms
    causal, scale, block, _ = shared
    if score_mod is not None:
        raise ParameterError(
            f"{call}: score_mod={score_mod!r} is not supported under torch.compile; make the call "
            "in a function that torch.compiler.disable wraps"
        )
    sides = window if window is None else [-1 if side is None else side for side in window]
    tile = block if block is None else [block] if isinstance(block, int) else list(block)
    return (*arrays, sides, softcap, causal, scale, tile)


def _taken(given: dict[str, Any], lse: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `_given` was made from: tiles and windows as the calls take them."""
    block, window = given.get("block"), given.get("window")
    if block is not None:
        block = block[0] if len(block) == 1 else tuple(block)
    window = window if window is None else tuple(window)
    shared = (given.get("causal", False), given.get("softmax_scale"), block, lse)
    arrays = (given.get(name) for name in ("alibi_slopes", "bias", "mask", "sinks"))
    return shared, (window, given.get("softcap"), *arrays, None, None)


def _exact(given: dict[str, Any]) -> bool | None:
    return given.get("deterministic", True)


def _fake_dense(lse: bool) -> Callable[..., Any]:
    def fake(q: Any, k: Any, v: Any, *options: Any, **named: Any) -> Any:
        given = dict(zip(_DENSE_NAMES, options, strict=False)) | named
        made = q.new_empty((*q.shape[:3], v.shape[3]))
        axes = LAYOUTS[given.get("layout", "bhsd")]
        return (made, _floats(q, [q.shape[axis] for axis in axes[:3]])) if lse else made

    return fake


def _fake_varlen(lse: bool) -> Callable[..., Any]:
    def fake(q: Any, k: Any, v: Any, *options: Any, **named: Any) -> Any:
        made = q.new_empty((*q.shape[:2], v.shape[2]))
        return (made, _floats(q, [q.shape[1], q.shape[0]])) if lse else made

    return fake


def _floats(q: Any, shape: Sequence[int]) -> Any:
    return q.new_empty(shape, dtype=sys.modules["torch"].float32)
