"""`fkjit.attention_decode` and `fkjit.paged_attention`: a few new tokens against all keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.decode import nodes
from fkjit.ops.attention.decode.checks import INPUTS, check_contiguous, check_paged
from fkjit.ops.kv.planes import planes
from fkjit.ops.op import torch_ops
from fkjit.ops.op.op import Op


def attention_decode(
    q: Any,
    k: Any,
    v: Any,
    seq_lens: Any = None,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    layout: str = "bhsd",
    split_size: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    score_args: Mapping[str, Any] | None = None,
) -> Any:
    """softmax(softmax_scale * q kᵀ + mask) v for a few new tokens of each sequence, in one launch.

    Args:
        q: [B, Hq, S, D], or [B, Hq, D] for one token; fp16 or bf16; S up to 16, D up to 256.
        k: [B, Hkv, Sk, D]; v: [B, Hkv, Sk, Dv]; Hq a multiple of Hkv. In q's dtype, or fp8 (e4m3,
            also as uint8) or int8 with scales. With layout="bshd" heads and tokens trade places.
            Rows begin on 16-byte boundaries; the last dimension is contiguous.
        seq_lens: [B] int32 on the device: keys of each sequence, new tokens included; default: Sk,
            beyond which nothing is read. Keys past a sequence's length are not touched.
        k_scale, v_scale: [Hkv] fp32, above 0: what codes of fp8 and int8 are multiplied by.
        causal: new token i sees keys up to i + length - S, so that the last one sees all.
        softmax_scale: default 1 / sqrt(D).
        split_size: keys of a part, 128, 256 …: then a sequence's result is the same to the
            bit whatever else is in the batch. None: parts as even as the batch allows, fastest; the
            same to the bit whenever lengths and GPU are the same.
        return_lse: also return the log-sum-exp of each row's scaled scores, fp32 [B, Hq, S]
            ([B, Hq] for one token).
        out: what to write o to; default: a new array.
        window: (left, right), as in `attention`: new token i sees keys from i + length - S - left
            to i + length - S + right. Keys before the first token's are not touched, nor shared
            out: a call costs what one with so many keys does. Pages of theirs may be gone.
        softcap, alibi_slopes, sinks, score_mod, score_args: as in `attention`, with the sequence's
            length for Sk. b is the sequence, h the query head, seqlen_k the length.
        bias, mask: as in `attention`, [B | 1, Hq | 1, S | 1, Sk]; a sequence's own stand at the
            beginning of the rows. D up to 128: else there are not the registers.

    Returns:
        o, as q with Dv columns, or (o, lse). A token that sees no key has o = 0 and lse = -inf, or
        the sink.

    Raises:
        ParameterError: shapes, strides or options that no kernel accepts, and GPUs before sm_80.
        ArgumentTypeError: dtypes. DeviceError: mixed devices. CaptureError: first call of a variant
        under CUDA graph capture; see `fkjit.prepare`.

    Lengths are read when the kernel runs: a captured graph follows sequences that grow. The work is
    shared out over the GPU by what they are then. To torch.compile the call is one operator, if
    there is no `out` and no `score_mod`. torch.autocast casts q alone: keys are kept as they are.
    Each form goes with each other and with everything else here; what a call does not use is not in
    its kernel.

    Sources: Dao et al., "Flash-Decoding for long-context inference"; Osama et al., "Stream-K".
    """
    if torch_ops.autocasting():
        (q,) = torch_ops.autocast(q)
    forms = (window, softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args)
    if torch_ops.compiling():
        options = {
            "k_scale": k_scale, "v_scale": v_scale, "causal": causal,
            "softmax_scale": softmax_scale, "layout": layout, "split_size": split_size,
            "return_lse": return_lse, "out": out,
        }  # fmt: skip
        return nodes.traced("attention_decode", (q, k, v, seq_lens), options, forms)
    given = _contiguous_call(
        q, k, v, seq_lens, k_scale=k_scale, v_scale=v_scale, causal=causal,
        softmax_scale=softmax_scale, layout=layout, split_size=split_size,
        return_lse=return_lse, out=out,
    )  # fmt: skip
    if not (window is softcap is alibi_slopes is bias is mask is sinks is score_mod is None):
        return _forms().run("attention_decode", given, forms)
    return _CONTIGUOUS(*given)


def paged_attention(
    q: Any,
    cache: Any,
    page_table: Any = None,
    seq_lens: Any = None,
    *,
    rows: Any = None,
    layer: int = 0,
    layout: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    score_args: Mapping[str, Any] | None = None,
) -> Any:
    """softmax(softmax_scale * q kᵀ + mask) v for new tokens against keys in pages, in one launch.

    Args:
        q: [B, Hq, D], one token of each sequence, or [B, S, Hq, D] for S up to 16; fp16 or bf16.
        cache: a `PagedKVCache`, or a pair of arrays (k_pages, v_pages) in `layout`, in q's dtype or
            fp8 (e4m3, also as uint8) or int8; pages of 1, 2, 4 … 256 tokens.
        page_table, seq_lens: [sequences, pages] and [sequences] int32 on the device, only where
            `cache` is a pair: the pages of each sequence, and how many keys it has, new tokens
            included. What lies beyond is not touched; page numbers that there are not are zeros.
        rows: [B] int32 on the device: the row of each sequence in the tables; below 0: none, its
            output is 0. Of a `PagedKVCache`: `cache.rows(...)`. Default: row i for sequence i.
        layer: which of the cache's layers.
        layout: "nhd" (default), pages are [page_size, heads, D]; or "hnd", [heads, page_size, D].
            Only where `cache` is a pair.
        k_scale, v_scale: as for `attention_decode`, only where `cache` is a pair.
        causal, softmax_scale, split_size, return_lse, out: as for `attention_decode`. The lse is
            [B, Hq, S], or [B, Hq] for one token.
        window, softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args: as for
            `attention_decode`. Sk of a bias and a mask is what fills the pages of a table's row.

    Returns and raises as `attention_decode`. Tables and lengths are read when the kernel runs: a
    captured graph of `kv_append` and this call follows sequences that grow. To torch.compile the
    call is one operator, if `cache` is a pair and there is no `out` and no `score_mod`.
    """
    if torch_ops.autocasting():
        (q,) = torch_ops.autocast(q)
    forms = (window, softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args)
    if torch_ops.compiling():
        if not isinstance(cache, tuple):
            raise ParameterError(
                "paged_attention: cache is no pair of arrays; under torch.compile pass "
                "(k_pages, v_pages), page_table and seq_lens"
            )
        options = {
            "k_scale": k_scale, "v_scale": v_scale, "causal": causal,
            "softmax_scale": softmax_scale, "layout": layout, "split_size": split_size,
            "return_lse": return_lse, "out": out,
        }  # fmt: skip
        arrays = (q, *cache, page_table, seq_lens, rows)
        return nodes.traced("paged_attention", arrays, options, forms)
    given = _paged_call(
        q, cache, page_table, seq_lens, rows=rows, layer=layer, layout=layout, k_scale=k_scale,
        v_scale=v_scale, causal=causal, softmax_scale=softmax_scale, split_size=split_size,
        return_lse=return_lse, out=out,
    )  # fmt: skip
    if not (window is softcap is alibi_slopes is bias is mask is sinks is score_mod is None):
        return _forms().run("paged_attention", given, forms)
    return _PAGED(*given)


def _forms() -> Any:
    """Imported by the first call that has one."""
    from fkjit.ops.attention.decode import feature_call

    return feature_call


def _contiguous_call(
    q: Any, k: Any, v: Any, seq_lens: Any = None, *, k_scale: Any = None, v_scale: Any = None,
    causal: bool = True, softmax_scale: float | None = None, layout: str = "bhsd",
    split_size: int | None = None, return_lse: bool = False, out: Any = None,
) -> tuple[tuple[Any, ...], ...]:  # fmt: skip
    """Arrays, outputs and options of a call."""
    arrays = (q, _codes(k), _codes(v), None, seq_lens, None, k_scale, v_scale)
    return arrays, (out, None), (layout, causal, softmax_scale, split_size, return_lse)


def _paged_call(
    q: Any, cache: Any, page_table: Any = None, seq_lens: Any = None, *, rows: Any = None,
    layer: int = 0, layout: str | None = None, k_scale: Any = None, v_scale: Any = None,
    causal: bool = True, softmax_scale: float | None = None, split_size: int | None = None,
    return_lse: bool = False, out: Any = None,
) -> tuple[tuple[Any, ...], ...]:  # fmt: skip
    """Arrays, outputs and options of a call."""
    held = planes(_PAGED.name, cache, layer, layout)
    own = (page_table, seq_lens, k_scale, v_scale)
    if hasattr(cache, "page_table"):
        if any(x is not None for x in own):
            raise ParameterError(
                f"{_PAGED.name}: page_table, seq_lens, k_scale and v_scale are the cache's own: "
                "leave them, and pass rows"
            )
        if rows is None:
            raise ArgumentTypeError(f"{_PAGED.name}: rows is None; pass cache.rows(sequences)")
        cache.flush()
        own = (cache.page_table, cache.lengths, *held.arrays[2:])
    k, v = (_codes(pages) for pages in held.arrays[:2])
    options = (held.layout, causal, softmax_scale, split_size, return_lse)
    return (q, k, v, *own[:2], rows, *own[2:]), (out, None), options


def _codes(array: Any) -> Any:
    """fp8 as bytes, which every framework has."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.view(torch.uint8) if array.dtype is torch.float8_e4m3fn else array
    return array.view("uint8") if str(getattr(array, "dtype", "")) == "float8_e4m3fn" else array


def _preparing(op: Op, call: Callable[..., Any]) -> Callable[..., None]:
    def prepare(*args: Any, **options: Any) -> None:
        """Compile and load what the call with the same arguments needs, without running it."""
        forms = tuple(options.pop(name, None) for name in nodes.FORMS)
        arrays, outputs, rest = given = call(*args, **options)
        if any(form is not None for form in forms[:-1]):
            _forms().prepare(op.name, given, forms)
        else:
            op.prepare([*arrays, *outputs], rest)

    return prepare


_OUTPUTS = ("o", "lse")
_CONTIGUOUS = Op(
    "attention_decode", inputs=INPUTS, outputs=_OUTPUTS, check=check_contiguous,
    optional=("page_table", "seq_lens", "rows", "k_scale", "v_scale"),
)  # fmt: skip
_PAGED = Op(
    "paged_attention", inputs=INPUTS, outputs=_OUTPUTS, check=check_paged,
    optional=("rows", "k_scale", "v_scale"),
)  # fmt: skip
attention_decode.prepare = _preparing(_CONTIGUOUS, _contiguous_call)  # type: ignore[attr-defined]
paged_attention.prepare = _preparing(_PAGED, _paged_call)  # type: ignore[attr-defined]
nodes.define(attention_decode, paged_attention)
