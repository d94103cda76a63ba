"""`attention_decode` and `paged_attention` as PyTorch's operators, each with lse and without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.op import torch_ops

_OPTIONS = (
    "Tensor? k_scale=None, Tensor? v_scale=None, bool causal=True, float? softmax_scale=None, "
)
_FORM = (
    ", Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? mask=None, Tensor? sinks=None, "
    "int[]? window=None, float? softcap=None"
)
_CONTIGUOUS = (
    "(Tensor q, Tensor k, Tensor v, Tensor? seq_lens=None, " + _OPTIONS + "str layout='bhsd', "
    f"int? split_size=None{_FORM}) -> "
)
_PAGED = (
    "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor seq_lens, "
    "Tensor? rows=None, " + _OPTIONS + f"str? layout=None, int? split_size=None{_FORM}) -> "
)
FORMS = ("window", "softcap", "alibi_slopes", "bias", "mask", "sinks", "score_mod", "score_args")
_OF_FORM = ("alibi_slopes", "bias", "mask", "sinks", "window", "softcap")  # in a schema
_NAMES = ("k_scale", "v_scale", "causal", "softmax_scale", "layout", "split_size", *_OF_FORM)


def define(attention_decode: Callable[..., Any], paged_attention: Callable[..., Any]) -> None:
    """Four operators; what they run are these calls."""

    def contiguous(lse: bool) -> Callable[..., Any]:
        def run(q: Any, k: Any, v: Any, seq_lens: Any = None, *options: Any, **named: Any) -> Any:
            given = dict(zip(_NAMES, options, strict=False)) | named
            return attention_decode(q, k, v, seq_lens, **given, return_lse=lse)

        return run

    def paged(lse: bool) -> Callable[..., Any]:
        def run(
            q: Any, k_pages: Any, v_pages: Any, page_table: Any, seq_lens: Any, rows: Any = None,
            *options: Any, **named: Any,
        ) -> Any:  # fmt: skip
            given = dict(zip(_NAMES, options, strict=False)) | named
            cache = (k_pages, v_pages)
            return paged_attention(
                q, cache, page_table, seq_lens, rows=rows, **given, return_lse=lse
            )

        return run

    for name, schema, run, at in (
        ("attention_decode", _CONTIGUOUS, contiguous, 8),
        ("paged_attention", _PAGED, paged, 10),
    ):
        for lse, results in ((False, "Tensor"), (True, "(Tensor, Tensor)")):
            full = f"{name}_lse" if lse else name
            torch_ops.define(
                torch_ops.Operator(
                    full, schema + results, run(lse), _fake(name, lse, at), autocast=1
                )
            )


def traced(
    name: str, arrays: tuple[Any, ...], options: dict[str, Any], forms: tuple[Any, ...]
) -> Any:
    """What a call is while torch.compile traces it."""
    options |= dict(zip(FORMS, forms, strict=True))
    for refused in ("out", "score_mod"):
        if options.pop(refused) is not None:
            raise ParameterError(f"{name}: {refused} is given; not supported under torch.compile")
    if options["window"] is not None:
        options["window"] = [-1 if side is None else side for side in options["window"]]
    full = f"{name}_lse" if options.pop("return_lse") else name
    return getattr(torch_ops.known, full)(*arrays, *(options[key] for key in _NAMES))


def _fake(name: str, lse: bool, layout_at: int) -> Callable[..., Any]:
    def fake(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        if not lse:
            return o
        given = (q, k, v, *rest)
        layout = given[layout_at] if len(given) > layout_at else named.get("layout", "bhsd")
        sizes = list(q.shape[:-1])
        if len(sizes) == 3 and (name == "paged_attention" or layout == "bshd"):
            sizes[1], sizes[2] = sizes[2], sizes[1]
        return o, q.new_empty(sizes, dtype=sys.modules["torch"].float32)

    return fake
