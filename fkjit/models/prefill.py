"""Prompts into the cache: a chunk of packed tokens of several sequences at a time.

A pass of few tokens takes the host longer than the GPU. So it is padded to one of a few sizes, and
its launches are one CUDA graph from the second time on that a size is met. What pads it is a piece
of no sequence, whose tokens have no slots in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fkjit.models.network import Network
from fkjit.models.step import COUNTERS, window_of
from fkjit.ops.attention.decode.call import paged_attention
from fkjit.ops.kv.cache import PagedKVCache
from fkjit.ops.op import torch_ops
from fkjit.runtime import workspace

_TOKENS = (64, 128, 256, 384, 512, 768, 1024)  # of a padded pass; more keep the GPU busy
_PIECES = (1, 4, 16, 64)  # of a padded pass
_APART = 64  # int32: arrays of a pass begin at multiples of 256 bytes
# Whose scale is the largest of all tokens', padding among them.
_TOGETHER = ("fp8_tensor", "")


class Piece(NamedTuple):
    """Tokens of a prompt, from position `start` on, for a sequence of the cache."""

    sequence: int
    start: int
    tokens: Sequence[int]


class Size(NamedTuple):
    """Of a pass: tokens; pieces, what pads it among them."""

    tokens: int
    pieces: int


def padded(tokens: int, pieces: int, codes: str | None = None) -> Size | None:
    """The size of the pass that computes so many; None: it is as large as they are. codes: of the
    layers' products."""
    if codes in _TOGETHER:
        return None
    most = next((size for size in _TOKENS if size >= tokens), None)
    room = next((size for size in _PIECES if size >= pieces), None)
    return None if most is None or room is None else Size(most, room + 1)


class _Arrays(NamedTuple):
    """tokens, positions, slots [tokens], ends [pieces + 1], last, rows [pieces]: int32. last: each
    piece's last token."""

    tokens: Any
    positions: Any
    slots: Any
    ends: Any
    last: Any
    rows: Any


def _arrays(numbers: Any, size: Size) -> _Arrays:
    """Views of one array, of NumPy or torch, as long as `_length` says; all begin at addresses of
    which wide accesses may be."""
    tokens, pieces = size
    counts, at, made = (tokens, tokens, tokens, pieces + 1, pieces, pieces), 0, []
    for count in counts:
        made.append(numbers[at : at + count])
        at += -(-count // _APART) * _APART
    return _Arrays(*made)


def _length(size: Size) -> int:
    tokens, pieces = (-(-count // _APART) * _APART for count in (size.tokens, size.pieces + 1))
    return 3 * (tokens + pieces)


def _numbers(pieces: Sequence[Piece], size: Size, slots: np.ndarray, rows: Any) -> np.ndarray:
    """int32 [`_length`]. What pads it has no slots, and no rows."""
    counts = [len(piece.tokens) for piece in pieces]
    made, total = np.zeros(_length(size), np.int32), sum(counts)
    at = _arrays(made, size)
    at.tokens[:total] = np.concatenate([np.asarray(piece.tokens) for piece in pieces])
    spans = [np.arange(piece.start, piece.start + len(piece.tokens)) for piece in pieces]
    at.positions[:total] = np.concatenate(spans)
    for own, given in ((at.slots, slots), (at.rows, rows)):
        own[: len(given)], own[len(given) :] = given, -1
    at.ends[1 : len(counts) + 1] = np.cumsum(counts)
    at.ends[len(counts) + 1 :] = size.tokens
    at.last[:] = at.ends[1:] - 1
    return made


class _Pass:
    """A padded pass, whose arrays keep their places."""

    def __init__(self, size: Size, device: Any) -> None:
        torch = torch_ops.torch_seen()
        self.size, self.met = size, False
        self.graph: Any = None
        self.out: Any = None  # of the graph
        self.numbers = torch.zeros(_length(size), dtype=torch.int32, device=device)
        self.arrays = _arrays(self.numbers, size)


class Prompts:
    """Passes of prompts through a network, into a cache. graphs: small ones are padded, and
    captured."""

    def __init__(self, network: Network, cache: PagedKVCache, graphs: bool) -> None:
        self.network, self.cache = network, cache
        self._device = network.weights.embedding.device
        self._graphs = graphs and network.weights.embedding.is_cuda
        self._passes: dict[Size, _Pass] = {}
        self._pool: Any = None

    def fill(self, pieces: Sequence[Piece]) -> tuple[Any, Any]:
        """Append all pieces; (the residual stream behind each one's last token [pieces, hidden],
        their rows in the cache's tables [pieces] int32). The next call may overwrite both."""
        counts = [len(piece.tokens) for piece in pieces]
        sequences = [piece.sequence for piece in pieces]
        slots = self.cache.place(sequences, counts)
        rows = [self.cache.pool.row(sequence) for sequence in sequences]
        self.cache.flush()
        padding = padded(sum(counts), len(counts), self.network.codes) if self._graphs else None
        size = padding or Size(sum(counts), len(counts))
        made = torch_ops.torch_seen().from_numpy(_numbers(pieces, size, slots, rows))
        if padding is None:
            at = _arrays(made.to(self._device, non_blocking=True), size)
            return self._forward(at, max(counts)), at.rows
        one = self._passes.get(size)
        if one is None:
            one = self._passes[size] = _Pass(size, self._device)
        one.numbers.copy_(made, non_blocking=True)
        return self._padded(one)[: len(pieces)], one.arrays.rows[: len(pieces)]

    def _padded(self, one: _Pass) -> Any:
        """[pieces of the size, hidden]. The first pass compiles and loads every kernel."""
        if one.graph is not None:
            one.graph.replay()
            return one.out
        stream = self._forward(one.arrays, one.size.tokens)
        if one.met:
            self._capture(one)
        one.met = True
        return stream

    def _capture(self, one: _Pass) -> None:
        torch = torch_ops.torch_seen()
        workspace.reserve(self._device.index, COUNTERS)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            one.out = self._forward(one.arrays, one.size.tokens)
        one.graph = graph

    def _forward(self, at: _Arrays, most: int) -> Any:
        """most: at least the tokens of a piece."""
        network, cache = self.network, self.cache

        def attend(q: Any, layer: int) -> Any:
            return paged_attention(
                q, cache, rows=at.rows, cu_seqlens_q=at.ends, max_seqlen_q=most, layer=layer,
                window=window_of(network, layer),
            )  # fmt: skip

        stream = network.hidden(at.tokens, at.positions, at.slots, cache, attend)
        return stream.index_select(0, at.last)
