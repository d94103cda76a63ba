"""flash-attn's caches as pages of ours: a contiguous cache [rows, Sk, H, D] is pages as well, each
row one of Sk tokens, divided where kernels take no page that long. All of it is on the device, and
nothing waits for it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fkjit.errors import ParameterError
from fkjit.ops.op import torch_ops

MOST = 256  # tokens of a page that kernels take


class Pages(NamedTuple):
    """k and v [pages, size, H, D], views of the caches; how many of them a row or page of a cache
    takes (`step` counts what lies between, too) and has."""

    arrays: tuple[Any, Any]
    size: int
    step: int
    parts: int

    def table(self, blocks: Any) -> Any:
        """[B, pages] of these pages, for [B, blocks] of the caches'."""
        if self.step == self.parts == 1:
            return blocks
        parts = torch_ops.torch_seen().arange(self.parts, device=blocks.device, dtype=blocks.dtype)
        whole = blocks[..., None] * self.step + parts
        return whole.masked_fill(blocks[..., None] < 0, -1).flatten(1).contiguous()


def pages_of(call: str, k_cache: Any, v_cache: Any) -> Pages:
    """ParameterError where tokens of different rows are no whole number of tokens apart."""
    rows, tokens = k_cache.shape[:2]
    apart = [_apart(cache) for cache in (k_cache, v_cache)]
    if 0 in apart:
        raise ParameterError(
            f"{call}: k_cache or v_cache has strides {k_cache.stride()}, {v_cache.stride()}; "
            "allowed: rows a whole number of tokens apart: pass contiguous caches"
        )
    together = math.gcd(tokens, *apart) if rows > 1 else tokens
    size = min(together & -together, MOST)
    if apart[0] != apart[1] and rows > 1:
        raise ParameterError(
            f"{call}: rows of k_cache are {apart[0]} tokens apart, those of v_cache {apart[1]}; "
            "allowed: the same"
        )
    step = apart[0] // size if rows > 1 else tokens // size
    arrays = tuple(_cut(cache, size, step) for cache in (k_cache, v_cache))
    return Pages((arrays[0], arrays[1]), size, step, tokens // size)


def _apart(cache: Any) -> int:
    """Tokens from the beginning of a row to that of the next one; 0 if that is no whole number."""
    row, token = cache.stride()[:2]
    if cache.shape[0] <= 1:
        return int(cache.shape[1])
    return row // token if token > 0 and row % token == 0 and row > 0 else 0


def _cut(cache: Any, size: int, step: int) -> Any:
    rows, tokens, heads, dim = cache.shape
    token = cache.stride(1)
    count = (rows - 1) * step + tokens // size
    return cache.as_strided((count, size, heads, dim), (size * token, *cache.stride()[1:]))
