"""Attention under the names and argument orders of others, so that swapping an import is enough.

    from fkjit.compat import scaled_dot_product_attention, flash_attn_func, flash_attn_with_kvcache

For torch tensors. What fkjit has no kernel for yet (dropout, padding on the left of a
cache) is refused with a ParameterError that names the argument, never left out silently.
"""

from __future__ import annotations

from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.decode import flash_kvcache
from fkjit.ops.attention.decode.call import attention_decode, paged_attention
from fkjit.ops.attention.forward import attention, attention_varlen
from fkjit.ops.op import torch_ops

_SDPA, _FLASH = "scaled_dot_product_attention", "flash_attn_func"
_VARLEN, _CACHED = "flash_attn_varlen_func", "flash_attn_with_kvcache"
_WINDOW = (-1, -1)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: [B, Hq, Sq, D] or [Hq, Sq, D]; key and value the same with Sk rows, Dv columns of
            value. fp16, bf16 or fp32.
        attn_mask: bool (a key is seen where it is True) or floating (added to scores), of any shape
            that broadcasts to [B, Hq, Sq, Sk]; not beside is_causal. A row that sees no key is 0.
        dropout_p: 0.
        is_causal: query i sees keys up to i: aligned to the top left, as in PyTorch.
        scale: default 1 / sqrt(D).
        enable_gqa: whether key and value may have fewer heads.

    Returns: o, as query with Dv columns. Raises as `fkjit.attention`.
    """
    _check_tensors(_SDPA, query=query, key=key, value=value)
    _refuse(_SDPA, dropout_p=(dropout_p, 0.0))
    if attn_mask is not None and is_causal:
        raise ParameterError(f"{_SDPA}: attn_mask and is_causal=True; allowed: one of them")
    if query.dim() not in (3, 4):
        raise ParameterError(f"{_SDPA}: query has {query.dim()} dimensions; allowed: 3 or 4")
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise ParameterError(
            f"{_SDPA}: query has {query.shape[-3]} heads, key {key.shape[-3]}; allowed with "
            "enable_gqa=True"
        )
    q, k, v = (x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value))
    if attn_mask is not None:
        made = attention(q, k, v, softmax_scale=scale, **_mask(attn_mask, k.shape[2]))
    elif is_causal:
        made = _causal(q, k, v, scale)
    else:
        made = attention(q, k, v, softmax_scale=scale, deterministic=None)
    return made if query.dim() == 4 else made.squeeze(0)


def _mask(attn_mask: Any, keys: int) -> dict[str, Any]:
    """As `attention` takes it: four dimensions, the last in full and contiguous."""
    _check_tensors(_SDPA, attn_mask=attn_mask)
    whole = attn_mask[(None,) * (4 - attn_mask.dim())] if attn_mask.dim() < 4 else attn_mask
    if whole.shape[-1] != keys or whole.stride(-1) != 1:
        whole = whole.expand(*whole.shape[:-1], keys).contiguous()
    return {"mask" if whole.dtype is torch_ops.torch_seen().bool else "bias": whole}


def _causal(q: Any, k: Any, v: Any, scale: float | None) -> Any:
    """Aligned to the top left: keys past the queries are seen by none, queries past the keys see
    them all."""
    rows = min(q.shape[2], k.shape[2])
    k, v = k[:, :, :rows], v[:, :, :rows]
    made = attention(q[:, :, :rows], k, v, causal=True, softmax_scale=scale, deterministic=None)
    if rows == q.shape[2]:
        return made
    rest = attention(q[:, :, rows:], k, v, softmax_scale=scale, deterministic=None)
    return torch_ops.torch_seen().cat((made, rest), 2)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func.

    Args:
        q: [B, Sq, Hq, D]; k, v: [B, Sk, Hkv, D]; fp16 or bf16 (and fp32).
        dropout_p: 0. softmax_scale: default 1 / sqrt(D).
        causal, window_size (left, right; -1: without a bound): aligned to the bottom right.
        softcap: 0 is without. alibi_slopes: fp32 [Hq] or [B, Hq].
        deterministic: of gradients. The result is always the same to the bit, and so are gradients
            where torch.use_deterministic_algorithms(True) was called.
        return_attn_probs: also return the log-sum-exp and None, for the probabilities that the
            original gives for tests.

    Returns: o [B, Sq, Hq, D], or (o, lse fp32 [B, Hq, Sq], None). Raises as `fkjit.attention`.
    """
    _check_tensors(_FLASH, q=q, k=k, v=v)
    _refuse(_FLASH, dropout_p=(dropout_p, 0.0))
    made = attention(
        q, k, v, causal=causal, softmax_scale=softmax_scale, layout="bshd",
        return_lse=return_attn_probs, window=_window(window_size), softcap=softcap or None,
        alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return (*made, None) if return_attn_probs else made


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func.

    Args:
        q: [total_q, Hq, D]; k, v: [total_k, Hkv, D]; fp16 or bf16 (and fp32).
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 on the device: where sequences begin and end.
        max_seqlen_q, max_seqlen_k: at least the longest lengths.
        block_table: None (`flash_attn_with_kvcache` reads pages). The others: as flash_attn_func.

    Returns: o [total_q, Hq, D], or (o, lse fp32 [Hq, total_q], None). Raises as
        `fkjit.attention_varlen`.
    """
    _check_tensors(_VARLEN, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _refuse(_VARLEN, dropout_p=(dropout_p, 0.0), block_table=(block_table, None))
    made = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
        softmax_scale=softmax_scale, return_lse=return_attn_probs, window=_window(window_size),
        softcap=softcap or None, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return (*made, None) if return_attn_probs else made


def _window(window_size: Any) -> Any:
    """None where neither side has a bound: such a call has no score feature."""
    return None if tuple(window_size) == _WINDOW else tuple(window_size)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn.flash_attn_with_kvcache, for up to 16 new tokens of each sequence.

    Args:
        q: [B, Sq, Hq, D], fp16 or bf16, Sq from 1 to 16.
        k_cache, v_cache: [B, Sk, Hkv, D]; or with a block_table [blocks, page, Hkv, D], pages of
            any number of tokens, 1, 2, 4 … 256 without more work. Written where there are k and v.
        k, v: [B, Snew, Hkv, D], put behind what the caches hold, before attention; or None.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], where there are k and v: k is turned
            from each sequence's length on, q as well if causal, else all of it by that length.
            rotary_interleaved: pairs are neighbouring columns, not one from each half.
            (`fkjit.rope_kv_append` does it in one launch, and needs no table.)
        cache_seqlens: keys in the caches, [B] int32 on the device or one number; default: all Sk.
        cache_batch_idx: [B] int32, the row of each sequence in caches without a block_table.
        block_table: [B, pages] int32 on the device: the pages of each sequence.
        softmax_scale: default 1 / sqrt(D). causal: aligned to the bottom right.
        window_size (left, right; -1: without a bound), softcap (0 is without), alibi_slopes (fp32
            [Hq] or [B, Hq]): as flash_attn_func, by each sequence's length.
        cache_leftpad: None.
        num_splits: any; keys are shared out evenly.
        return_softmax_lse: also return the log-sum-exp, fp32 [B, Hq, Sq].

    Returns: o [B, Sq, Hq, D], or (o, lse). Raises as `fkjit.paged_attention`.
    """
    _check_tensors(_CACHED, q=q, k_cache=k_cache, v_cache=v_cache)
    _refuse(_CACHED, cache_leftpad=(cache_leftpad, None))
    lengths = _lengths(q, k_cache, cache_seqlens, block_table)
    if (k is None) != (v is None):
        raise ParameterError(f"{_CACHED}: k and v are given together or not at all")
    if cache_batch_idx is not None and block_table is not None:
        raise ParameterError(f"{_CACHED}: cache_batch_idx is for caches without a block_table")
    if rotary_cos is not None or rotary_sin is not None:
        turned = (rotary_cos, rotary_sin, rotary_interleaved, causal)
        q, k = flash_kvcache.rotate(q, k, lengths, *turned)
    if k is not None:
        flash_kvcache.append(k, v, k_cache, v_cache, lengths, cache_batch_idx, block_table)
        lengths = lengths + k.shape[1]
    options = {
        "causal": causal, "softmax_scale": softmax_scale, "return_lse": return_softmax_lse,
        "window": _window(window_size), "softcap": softcap or None, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    if block_table is None and cache_batch_idx is None:
        return attention_decode(q, k_cache, v_cache, lengths, layout="bshd", **options)
    table = block_table if cache_batch_idx is None else cache_batch_idx[:, None]
    cache, table = flash_kvcache.paged(k_cache, v_cache, table)
    return paged_attention(q, cache, table, lengths, **options)


def _lengths(q: Any, k_cache: Any, cache_seqlens: Any, block_table: Any) -> Any:
    """[B] int32 where q is."""
    torch = torch_ops.torch_seen()
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        if block_table is not None:
            raise ParameterError(f"{_CACHED}: a block_table needs cache_seqlens")
        cache_seqlens = k_cache.shape[1]
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)


def _check_tensors(call: str, **arrays: Any) -> None:
    torch = torch_ops.torch_seen()
    for name, array in arrays.items():
        if torch is None or not isinstance(array, torch.Tensor):
            raise ArgumentTypeError(
                f"{call}: {name} is a {type(array).__name__}; allowed: torch tensors "
                "(fkjit.attention takes other arrays)"
            )


def _refuse(call: str, **values: tuple[Any, Any]) -> None:
    """ParameterError for the first argument that is not the one value allowed."""
    for name, (value, allowed) in values.items():
        same = value is allowed if allowed is None else value == allowed
        if not same:
            shown = "a tensor" if hasattr(value, "shape") else repr(value)
            raise ParameterError(f"{call}: {name}={shown}: not supported; allowed: {allowed!r}")
