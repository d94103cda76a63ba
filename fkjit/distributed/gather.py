"""Attention with all keys at hand: one all-gather of keys and values, no merging.

Half of the KV heads travel while the other half is multiplied. The backward gathers them again;
each rank's fp32 sums of dk and dv go to their owners by an all-to-all, and are added in order of
ranks. It takes the memory of the whole sequence's keys and values.

Source: the "all-gather" context parallelism of Llama 3 (2024).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from fkjit.distributed.exchange import all_gather, all_to_all
from fkjit.distributed.groups import Group
from fkjit.distributed.order import chunk_count, chunks_of, in_order
from fkjit.distributed.pieces import Dense, sink_gradient
from fkjit.distributed.ring import flat, parts
from fkjit.distributed.tiles import Tile, band
from fkjit.ops.op.autograd import Differentiable, Tensors

_PARTS = 2  # of the heads


class Gather(NamedTuple):
    """A call. length: tokens of a chunk."""

    group: Group
    layout: str
    rows: Dense
    length: int

    def tiles(self) -> list[Tile]:
        """Of each of this rank's chunks with all keys."""
        (left, right), size, found = self.rows.rules.window, self.group.size, []
        total = chunk_count(self.layout, size) * self.length
        for place, chunk in enumerate(chunks_of(self.layout, self.group.rank, size)):
            ahead, row = chunk * self.length, place * self.length
            lowest = None if left is None else ahead - left
            tile = band(self.length, total, lowest, None if right is None else ahead + right)
            assert tile is not None  # a token sees itself
            found.append(tile._replace(q=(tile.q[0] + row, tile.q[1] + row), diagonal=True))
        return found


def gather(q: Any, k: Any, v: Any, sinks: Any, call: Gather) -> tuple[Any, Any]:
    """(o, lse) of this rank's queries."""
    return _GATHER((q, k, v, sinks), call)  # type: ignore[return-value]


def _heads(k: Any) -> list[slice]:
    """KV heads that travel together."""
    heads = k.shape[1]
    ends = [heads * n // _PARTS for n in range(_PARTS + 1)]
    return [slice(a, b) for a, b in pairwise(ends) if a < b]


def _whole(call: Gather, q: Any, k: Any, v: Any) -> Iterator[tuple[slice, slice, Any, Any]]:
    """For some KV heads at a time: the query heads, the KV heads, all keys and values of them."""
    group = q.shape[1] // k.shape[1]
    found = _heads(k)
    coming = [all_gather(call.group, flat(k[:, heads], v[:, heads])) for heads in found]
    for heads, message in zip(found, coming, strict=True):
        got = message.wait()
        sizes = k[:, heads].numel(), v[:, heads].numel()
        shapes = k[:, heads].shape, v[:, heads].shape
        rows = zip(got.split(sizes, 1), shapes, strict=True)
        keys, values = (
            in_order(x.view(call.group.size, *shape), call.layout, 2) for x, shape in rows
        )
        yield slice(heads.start * group, heads.stop * group), heads, keys, values


def _forward(inputs: Tensors, call: Gather) -> tuple[Tensors, Tensors]:
    q, k, v, sinks = inputs
    rows, found = call.rows, call.tiles()
    o, lse = (x[0] for x in rows.stack(1, q, v))
    for own, _, keys, values in _whole(call, q, k, v):
        for tile in found:
            sink = None if sinks is None else sinks[own]
            made = rows.attend(q[:, own], keys, values, tile, sink)
            rows.write(o[:, own], tile.q, made[0])
            rows.write(lse[:, own], tile.q, made[1])
    return (o, lse), (q, k, v, sinks, o, lse)


def _backward(saved: Tensors, of_results: Tensors, needed: Tensors, call: Gather) -> Tensors:
    (q, k, v, sinks, o, lse), (dout, dlse) = saved, of_results
    torch, rows, found = sys.modules["torch"], call.rows, call.tiles()
    dout = torch.zeros_like(o) if dout is None else dout.contiguous()
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    going = []
    for own, heads, keys, values in _whole(call, q, k, v):
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values)]
        for tile in found:
            results = (x if x is None else x[:, own] for x in (dout, q, o, lse, dlse))
            made = rows.differentiate(tuple(results), keys, values, tile)
            rows.write(dq[:, own], tile.q, made[0])
            for into, x in zip(sums, made[1:], strict=True):
                rows.add(into, tile.k, x)
        by_rank = [out_of_order(x, call.layout, call.group.size, 2).flatten(1) for x in sums]
        going.append((heads, all_to_all(call.group, torch.cat(by_rank, 1))))
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    for heads, message in going:
        total, *others = message.wait().unbind(0)
        for x in others:
            total = total.add_(x)
        for into, x in zip(
            (dk, dv), parts(total, k[:, heads].shape, v[:, heads].shape), strict=True
        ):
            into[:, heads] = x
    dsinks = sink_gradient(rows, sinks, dout, o, lse, dlse) if needed[3] else None
    return dq, dk, dv, dsinks


def out_of_order(x: Any, layout: str, size: int, dim: int) -> Any:
    """[ranks, …] of what all tokens along `dim` have: `in_order` backwards."""
    torch, pieces = sys.modules["torch"], x.chunk(chunk_count(layout, size), dim)
    ranks = (chunks_of(layout, rank, size) for rank in range(size))
    return torch.stack([torch.cat([pieces[c] for c in chunks], dim) for chunks in ranks])


_GATHER = Differentiable("GatherAttention", _forward, _backward)
