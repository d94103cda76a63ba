"""Prompts into the cache: a chunk of packed tokens of several sequences at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fkjit.models.network import Network
from fkjit.models.step import window_of
from fkjit.ops.attention.decode.call import paged_attention
from fkjit.ops.kv.cache import PagedKVCache
from fkjit.ops.op import torch_ops


class Piece(NamedTuple):
    """Tokens of a prompt, from position `start` on, for a sequence of the cache."""

    sequence: int
    start: int
    tokens: Sequence[int]


def prefill(network: Network, cache: PagedKVCache, pieces: Sequence[Piece]) -> tuple[Any, Any]:
    """Append all pieces; (the residual stream behind each one's last token [pieces, hidden], their
    rows in the cache's tables [pieces] int32)."""
    torch, device = torch_ops.torch_seen(), network.weights.embedding.device
    counts = [len(piece.tokens) for piece in pieces]
    sequences = [piece.sequence for piece in pieces]

    def uploaded(values: Any, dtype: Any) -> Any:
        return torch.from_numpy(np.asarray(values, dtype)).to(device, non_blocking=True)

    tokens = uploaded(np.concatenate([piece.tokens for piece in pieces]), np.int64)
    spans = [np.arange(piece.start, piece.start + len(piece.tokens)) for piece in pieces]
    positions = uploaded(np.concatenate(spans), np.int32)
    ends = uploaded(np.cumsum([0, *counts]), np.int32)
    slots, rows, most = cache.extend(sequences, counts), cache.rows(sequences), max(counts)

    def attend(q: Any, layer: int) -> Any:
        return paged_attention(
            q, cache, rows=rows, cu_seqlens_q=ends, max_seqlen_q=most, layer=layer,
            window=window_of(network, layer),
        )  # fmt: skip

    stream = network.hidden(tokens, positions, slots, cache, attend)
    return stream.index_select(0, (ends[1:] - 1).long()), rows
