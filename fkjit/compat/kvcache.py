"""flash-attn's function of a KV cache by its name."""

from __future__ import annotations

from typing import Any

from fkjit.compat.arguments import NO_WINDOW, check_tensors, explained, window_of
from fkjit.compat.cache_pages import pages_of
from fkjit.errors import ParameterError
from fkjit.ops.attention.decode.call import attention_decode, paged_attention
from fkjit.ops.attention.decode.problem import MAX_TOKENS
from fkjit.ops.attention.paged import uniform_ends
from fkjit.ops.kv.append import kv_append
from fkjit.ops.op import torch_ops
from fkjit.ops.op.checks import check_flag
from fkjit.ops.rope.call import rope

_CALL = "flash_attn_with_kvcache"
_TENSORS = (
    "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx",
    "cache_leftpad", "block_table", "alibi_slopes",
)  # fmt: skip
_PIECE = 8  # elements of 16 bytes
_MASKED_DIM = 128  # up to which decoding's kernel has registers for a mask


@explained(_CALL, _TENSORS)
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
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    check_lengths: bool = False,
) -> Any:
    """flash_attn.flash_attn_with_kvcache.

    Args:
        q: [B, Sq, Hq, D], fp16 or bf16.
        k_cache, v_cache: [B, Sk, Hkv, D]; or with a block_table [blocks, page, Hkv, D], pages of
            any number of tokens, 1, 2, 4 … 256 without more work. Written where there are k and v;
            after any error they are as they were.
        k, v: [B, Snew, Hkv, D], put behind what the caches hold, before attention; or None.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], where there are k and v: k is turned
            from each sequence's length on (less its cache_leftpad), q as well if causal or with a
            window, else all of it by that length. rotary_interleaved: pairs are neighbouring
            columns, not one from each half. (`fkjit.rope_kv_append` does it in one launch, and
            needs no table.)
        cache_seqlens: keys in the caches, [B] int32 on the device or one number; default: all Sk.
        cache_batch_idx: [B] int32, the row of each sequence in caches without a block_table.
        block_table: [B, pages] int32 on the device: the pages of each sequence.
        softmax_scale: default 1 / sqrt(D). causal: aligned to the bottom right.
        window_size (left, right; -1: without a bound), softcap (0 is without), alibi_slopes (fp32
            [Hq] or [B, Hq]): as flash_attn_func, by each sequence's length.
        cache_leftpad: [B] int32: keys before these are not seen; not with a block_table.
        num_splits: any; keys are shared out evenly.
        return_softmax_lse: also return the log-sum-exp, fp32 [B, Hq, Sq].
        check_lengths: look at lengths that are on a GPU, too, which waits for it.

    Lengths that the caches, or the pages of a table's row, have no room for, new tokens included,
    are a ParameterError where the host knows them (a number, a CPU tensor) or check_lengths. Else
    tokens without room are not written, and keys beyond the room are not read.

    Returns: o [B, Sq, Hq, D], or (o, lse). Raises as `fkjit.paged_attention`.
    """
    check_tensors(_CALL, q=q, k_cache=k_cache, v_cache=v_cache)
    for name, array in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if array.dim() != 4:
            raise ParameterError(f"{_CALL}: {name} has {array.dim()} dimensions; allowed: 4")
    if cache_seqlens is not None and type(cache_seqlens) is not int:
        check_tensors(_CALL, cache_seqlens=cache_seqlens)
    if (k is None) != (v is None):
        raise ParameterError(f"{_CALL}: k and v are given together or not at all")
    for name, given in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if given is not None and block_table is not None:
            raise ParameterError(f"{_CALL}: {name} is for caches without a block_table")
    lengths = _lengths(q, k_cache, cache_seqlens, block_table)
    _check_room(lengths, k, k_cache, block_table, cache_seqlens, check_lengths)
    local = any(0 <= side < _room(k_cache, block_table) for side in window_size)
    if rotary_cos is not None or rotary_sin is not None:
        at = lengths if cache_leftpad is None else lengths - cache_leftpad
        q, k = _rotated(q, k, at, rotary_cos, rotary_sin, rotary_interleaved, causal or local)
    seen = lengths if k is None else lengths + k.shape[1]
    check_flag(_CALL, "return_softmax_lse", return_softmax_lse)
    window = window_of(_CALL, window_size)
    options = {
        "causal": causal, "softmax_scale": softmax_scale, "return_lse": return_softmax_lse,
        "window": window, "softcap": softcap or None, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    if cache_leftpad is not None:
        places = torch_ops.torch_seen().arange(k_cache.shape[1], device=q.device)
        options["mask"] = (places >= cache_leftpad[:, None])[:, None, None]
    where = (cache_batch_idx, block_table, cache_leftpad is not None)
    call, arrays, more = _attention(q, k_cache, v_cache, seen, *where)
    if k is None:
        return _as_given(call(*arrays, **more, **options), more, q)
    call.prepare(*arrays, **more, **options)  # whatever is wrong is found before a cache is written
    _append(k, v, k_cache, v_cache, lengths, cache_batch_idx, block_table)
    return _as_given(call(*arrays, **more, **options), more, q)


def _attention(
    q: Any, k_cache: Any, v_cache: Any, seen: Any, rows: Any, table: Any, masked: bool
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that attends to the caches, its arrays and further arguments. Decoding's kernel
    reads caches of whole 16-byte pieces; whatever it does not take goes to the forward's."""
    few = q.shape[1] <= MAX_TOKENS and 0 not in q.shape
    whole = all(x.shape[-1] % _PIECE == 0 for x in (q, k_cache, v_cache))
    whole = whole and (not masked or max(q.shape[-1], v_cache.shape[-1]) <= _MASKED_DIM)
    if few and whole and rows is None and table is None:
        return attention_decode, (q, k_cache, v_cache, seen), {"layout": "bshd"}
    pages = pages_of(_CALL, k_cache, v_cache)
    if table is None:
        torch = torch_ops.torch_seen()
        own = torch.arange(len(seen), dtype=torch.int32, device=q.device)
        table = (own if rows is None else rows)[:, None]
    table = pages.table(table)
    if few and whole:
        return paged_attention, (q, pages.arrays, table, seen), {}
    packed = q.flatten(0, 1)
    ends = uniform_ends(q, *q.shape[:2])
    return paged_attention, (packed, pages.arrays, table, seen), {
        "cu_seqlens_q": ends, "max_seqlen_q": q.shape[1],
    }  # fmt: skip


def _as_given(made: Any, more: dict[str, Any], q: Any) -> Any:
    """Results of packed queries as those of [B, Sq, Hq, D]."""
    if "cu_seqlens_q" not in more:
        return made
    o, *lse = made if isinstance(made, tuple) else (made,)
    o = o.unflatten(0, q.shape[:2])
    return (o, lse[0].unflatten(1, q.shape[:2]).transpose(0, 1)) if lse else o


def _append(
    k: Any, v: Any, k_cache: Any, v_cache: Any, lengths: Any, rows: Any, table: Any
) -> None:
    """New tokens [B, Snew, H, D] behind what the caches hold. Without room they are not written."""
    torch = torch_ops.torch_seen()
    tokens, pages = k_cache.shape[1], pages_of(_CALL, k_cache, v_cache)
    places = lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    if table is None:
        blocks = torch.arange(len(k), device=k.device) if rows is None else rows.long()
        blocks = blocks[:, None].expand_as(places)
    else:
        blocks = table.long().gather(1, (places // tokens).clamp(0, table.shape[1] - 1))
    room = (places >= 0) & (places < _room(k_cache, table)) & (blocks >= 0)
    slots = blocks * (pages.step * pages.size) + places % tokens
    slots = torch.where(room, slots, -1).flatten()
    kv_append(k.flatten(0, 1), v.flatten(0, 1), pages.arrays, slots)


def _rotated(
    q: Any, k: Any, at: Any, cosine: Any, sine: Any, interleaved: bool, successive: bool
) -> tuple[Any, Any]:
    """q [B, Sq, Hq, D] and k [B, Snew, H, D] turned: k's first token stands at `at`; q's rows from
    there on if successive, else all of them there."""
    torch = torch_ops.torch_seen()
    for name, array in (("rotary_cos", cosine), ("rotary_sin", sine)):
        if array is None or array.dim() != 2 or array.shape != cosine.shape:
            shown = None if array is None else tuple(array.shape)
            raise ParameterError(
                f"{_CALL}: {name} has shape {shown}; allowed: both [positions, rotary_dim / 2]"
            )
    if k is None:
        raise ParameterError(f"{_CALL}: rotary_cos and rotary_sin go with k and v")
    options = {
        "table": torch.cat((cosine, sine), -1).float(), "interleaved": interleaved,
        "layout": "bshd",
    }  # fmt: skip
    if successive and q.shape[1] == k.shape[1]:
        return rope(q, k, at, **options)
    own = at if successive else at[:, None].expand(-1, q.shape[1]).contiguous()
    return rope(q, None, own, **options), rope(k, None, at, **options)


def _room(k_cache: Any, table: Any) -> int:
    """Tokens of a sequence that there is room for."""
    return k_cache.shape[1] * (1 if table is None else table.shape[1])


def _check_room(lengths: Any, k: Any, k_cache: Any, table: Any, given: Any, look: bool) -> None:
    """ParameterError where lengths that the host knows do not fit."""
    if isinstance(given, int):
        least = most = given
    elif given is not None and len(lengths) and (look or lengths.device.type == "cpu"):
        least, most = int(lengths.min()), int(lengths.max())
    else:
        least, most = 0, k_cache.shape[1] if given is None else 0
    new, room = 0 if k is None else k.shape[1], _room(k_cache, table)
    if least < 0 or most + new > room:
        raise ParameterError(
            f"{_CALL}: cache_seqlens has lengths from {least} to {most}, and {new} new tokens; "
            f"allowed: 0 to {room - new}, what the caches have room for"
        )


def _lengths(q: Any, k_cache: Any, cache_seqlens: Any, block_table: Any) -> Any:
    """[B] int32 where q is."""
    torch = torch_ops.torch_seen()
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        if block_table is not None:
            raise ParameterError(f"{_CALL}: a block_table needs cache_seqlens")
        cache_seqlens = k_cache.shape[1]
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
