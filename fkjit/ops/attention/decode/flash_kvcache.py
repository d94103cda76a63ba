"""What flash-attn's call with a KV cache asks for, in terms of ours: see `fkjit.compat`.

A contiguous cache [rows, Sk, H, D] is pages as well: each row is a page of Sk tokens, divided where
kernels take no page that long. All of it is on the device, and nothing waits for it.
"""

from __future__ import annotations

from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.kv.append import kv_append
from fkjit.ops.op import torch_ops
from fkjit.ops.rope.call import rope

_CALL = "flash_attn_with_kvcache"
_MOST = 256  # tokens of a page that paged_attention takes
_LEAST = 16  # and that kv_append takes


def rotate(
    q: Any, k: Any, lengths: Any, cosine: Any, sine: Any, interleaved: bool, causal: bool
) -> tuple[Any, Any]:
    """q [B, Sq, Hq, D] and k [B, Snew, H, D] turned: k's first token stands at the length before
    it, q's rows from there on if causal, else all of them there."""
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
    if causal and q.shape[1] == k.shape[1]:
        return rope(q, k, lengths, **options)
    at = lengths if causal else lengths[:, None].expand(-1, q.shape[1]).contiguous()
    return rope(q, None, at, **options), rope(k, None, lengths, **options)


def append(k: Any, v: Any, k_cache: Any, v_cache: Any, lengths: Any, rows: Any, table: Any) -> None:
    """New tokens [B, Snew, H, D] behind what the caches hold. Without room they are not written."""
    torch = torch_ops.torch_seen()
    batch, count = k.shape[:2]
    page = k_cache.shape[1]
    places = lengths.long()[:, None] + torch.arange(count, device=k.device)
    if table is None:
        pages = torch.arange(batch, device=k.device) if rows is None else rows.long()
        pages, room = pages[:, None].expand_as(places), places < page
    else:
        pages = table.long().gather(1, (places // page).clamp(max=table.shape[1] - 1))
        room = places < table.shape[1] * page
    slots = torch.where(room, pages * page + places % page, -1).flatten()
    cut = tuple(_cut(x, _LEAST, x.shape[0] * page) for x in (k_cache, v_cache))
    if all(x is not None for x in cut):
        kv_append(k.flatten(0, 1), v.flatten(0, 1), cut, slots)
        return
    k_cache.index_put_((pages, places), k)  # an error where there is no room
    v_cache.index_put_((pages, places), v)


def paged(k_cache: Any, v_cache: Any, table: Any) -> tuple[tuple[Any, Any], Any]:
    """The caches in pages that paged_attention takes, and the table of these pages, for a table
    [B, pages] of those that they have."""
    torch = torch_ops.torch_seen()
    page = k_cache.shape[1]
    size = min(page & -page, _MOST)
    if size == page:
        return (k_cache, v_cache), table
    cut = tuple(_cut(x, size, page) for x in (k_cache, v_cache))
    if any(x is None for x in cut):
        raise ParameterError(
            f"{_CALL}: k_cache or v_cache has {page} tokens in a row or page and gaps between "
            "them; pass contiguous caches"
        )
    parts = torch.arange(page // size, device=table.device, dtype=torch.int32)
    return (cut[0], cut[1]), (table[..., None] * (page // size) + parts).flatten(1).contiguous()


def _cut(cache: Any, size: int, run: int) -> Any:
    """[pages, size, H, D] of the same memory, where runs of so many tokens are cut; or None."""
    rows, page, heads, dim = cache.shape
    if run % size or (rows > 1 and cache.stride(0) != page * cache.stride(1)):
        return None
    steps = (size * cache.stride(1), *cache.stride()[1:])
    return cache.as_strided((rows * page // size, size, heads, dim), steps)
