"""Decoding in all its forms: what `attention_decode` and `paged_attention` do with a window, a
soft cap and the like."""

from __future__ import annotations

from typing import Any

from fkjit.ops.attention.decode.checks import INPUTS
from fkjit.ops.attention.decode.feature_checks import check_contiguous, check_paged
from fkjit.ops.attention.decode.feature_problem import POINTERS
from fkjit.ops.attention.feature_forward import explained, taken_apart
from fkjit.ops.op.op import Op

_OUTPUTS = ("o", "lse")
_SHARED = ("rows", "k_scale", "v_scale", *POINTERS)
_OPS = {
    "attention_decode": Op(
        "attention_decode", inputs=(*INPUTS, *POINTERS), outputs=_OUTPUTS, check=check_contiguous,
        optional=("page_table", "seq_lens", *_SHARED),
    ),
    "paged_attention": Op(
        "paged_attention", inputs=(*INPUTS, *POINTERS), outputs=_OUTPUTS, check=check_paged,
        optional=_SHARED,
    ),
}  # fmt: skip


def run(call: str, given: tuple[tuple[Any, ...], ...], forms: tuple[Any, ...]) -> Any:
    """A call with a form. given: arrays, outputs and options of one without; forms: window,
    softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args."""
    arrays, outputs, options = _with(call, given, forms)
    return explained(_OPS[call], options, lambda: _OPS[call](arrays, outputs, options))


def prepare(call: str, given: tuple[tuple[Any, ...], ...], forms: tuple[Any, ...]) -> None:
    """Compile and load what `run` needs."""
    arrays, outputs, options = _with(call, given, forms)
    op = _OPS[call]
    explained(op, options, lambda: op.prepare([*arrays, *outputs], options))


def _with(
    call: str, given: tuple[tuple[Any, ...], ...], forms: tuple[Any, ...]
) -> tuple[tuple[Any, ...], ...]:
    arrays, outputs, options = given
    more, form_options = taken_apart(call, forms)
    return (*arrays, *more), outputs, (*options, *form_options)
