"""`attention_decode` and `paged_attention` as PyTorch's operators, each with lse and without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.op import torch_ops

_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"
_OPTIONS = "bool causal=True, float? softmax_scale=None, {} layout={}, int? split_size=None"
_FEATURES = (
    "Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? mask=None, Tensor? sinks=None, "
    "int[]? window=None, float? softcap=None"
)
_CONTIGUOUS = f"Tensor q, Tensor k, Tensor v, Tensor? seq_lens=None, {_SCALES}, " + (
    _OPTIONS.format("str", "'bhsd'")
)
_PAGED = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor seq_lens, "
    f"Tensor? rows=None, {_SCALES}, " + _OPTIONS.format("str?", "None")
)
# The operators' arguments behind the arrays that are not the same for both.
_NAMES = (
    *("k_scale", "v_scale", "causal", "softmax_scale", "layout", "split_size"),
    *("alibi_slopes", "bias", "mask", "sinks", "window", "softcap"),
)


def define(attention_decode: Callable[..., Any], paged_attention: Callable[..., Any]) -> None:
    """Four operators; what they run are these calls."""

    def contiguous(*given: Any, **options: Any) -> Any:
        return attention_decode(*given, **options)

    def paged(
        q: Any, k_pages: Any, v_pages: Any, page_table: Any, seq_lens: Any, rows: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        return paged_attention(q, (k_pages, v_pages), page_table, seq_lens, rows=rows, **options)

    for name, arrays, schema, call in (
        ("attention_decode", 4, _CONTIGUOUS, contiguous),
        ("paged_attention", 6, _PAGED, paged),
    ):
        for lse, results in ((False, "Tensor"), (True, "(Tensor, Tensor)")):
            torch_ops.define(
                torch_ops.Operator(
                    f"{name}_lse" if lse else name, f"({schema}, {_FEATURES}) -> {results}",
                    _running(call, arrays, lse), _fake(name, arrays, lse), autocast=1,
                )
            )  # fmt: skip


def _running(call: Callable[..., Any], arrays: int, lse: bool) -> Callable[..., Any]:
    """An operator, whose first arguments are so many arrays."""

    def run(*given: Any, **named: Any) -> Any:
        options = dict(zip(_NAMES, given[arrays:], strict=False)) | named
        return call(*given[:arrays], **options, return_lse=lse)

    return run


def traced(
    name: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...], options: tuple[Any, ...]
) -> Any:
    """What a call of the op is while a graph is traced."""
    if any(given is not None for given in outputs):
        raise refused(name, "out")
    q, k, v, page_table, seq_lens, rows, k_scale, v_scale, *features = inputs
    where = (seq_lens,) if name == "attention_decode" else (page_table, seq_lens, rows)
    layout, causal, softmax_scale, split_size, return_lse, window, softcap, *_ = options
    if window is not None:
        window = [-1 if side is None else side for side in window]
    operator = getattr(torch_ops.known, f"{name}_lse" if return_lse else name)
    return operator(
        q, k, v, *where, k_scale, v_scale, causal, softmax_scale, layout,
        split_size, *features[:4], window, softcap,
    )  # fmt: skip


def refused(name: str, what: str) -> ParameterError:
    """The error for what no graph can hold."""
    return ParameterError(f"{name}: {what} is given; not supported under torch.compile")


def _fake(name: str, arrays: int, lse: bool) -> Callable[..., Any]:
    def fake(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        if not lse:
            return o
        options = dict(zip(_NAMES, rest[arrays - 3 :], strict=False)) | named
        sizes = list(q.shape[:-1])
        if len(sizes) == 3 and (name == "paged_attention" or options.get("layout") == "bshd"):
            sizes[1], sizes[2] = sizes[2], sizes[1]
        return o, q.new_empty(sizes, dtype=sys.modules["torch"].float32)

    return fake
