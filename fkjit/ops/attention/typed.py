"""Keyword arguments that attention's calls share, for the signatures that type checkers see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from fkjit.types import Array, Impl, Layout, PageLayout


class ScoreOptions(TypedDict, total=False):
    """What scores go through: every call has these."""

    causal: bool
    softmax_scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Array | None
    bias: Array | None
    mask: Array | None
    sinks: Array | None
    score_mod: str | None
    score_args: Mapping[str, Any] | None


class VarlenKeywords(ScoreOptions, total=False):
    """Of `attention_varlen`."""

    block: int | tuple[int, int] | None
    score_mod_grad: str | None
    deterministic: bool | None


class DenseKeywords(VarlenKeywords, total=False):
    """Of `attention`."""

    impl: Impl
    layout: Layout


class _NewTokens(ScoreOptions, total=False):
    k_scale: Array | None
    v_scale: Array | None
    split_size: int | None
    out: Array | None


class DecodeKeywords(_NewTokens, total=False):
    """Of `attention_decode`."""

    layout: Layout


class PagedKeywords(_NewTokens, total=False):
    """Of `paged_attention`."""

    rows: Array | None
    cu_seqlens_q: Array | None
    max_seqlen_q: int | None
    mixed: bool
    layer: int
    layout: PageLayout | None
