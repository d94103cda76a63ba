"""Attention of one tile, forward and backward, and where its rows lie in a rank's arrays.

`Dense` arrays are [B, H, S, D] with lse [B, H, S]; a tile's ranges count tokens. `Packed` ones are
[total, H, D] with lse [H, total]; there a tile's ranges count chunks, of which every sequence has
one or two.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from fkjit.distributed.tiles import Range, Tile, Window
from fkjit.ops.attention.backward.call import gradients
from fkjit.ops.attention.backward.problem import PACKED, Options
from fkjit.ops.attention.features import ScoreFeatures
from fkjit.ops.attention.forward import attention, attention_into, attention_varlen
from fkjit.ops.attention.merge.call import merge_states
from fkjit.ops.attention.resumed.call import resume_attention, resumes


class Rules(NamedTuple):
    """What a call says of scores. window: of the whole sequence, causal folded in."""

    window: Window
    softmax_scale: float | None
    softcap: float | None

    @property
    def plain(self) -> bool:
        """Causal or not, and nothing else."""
        return self.window in ((None, None), (None, 0)) and self.softcap is None

    def of(self, tile: Tile) -> dict[str, Any]:
        """The options of fkjit.attention for a tile."""
        given: dict[str, Any] = {"softmax_scale": self.softmax_scale, "causal": tile.causal}
        if not (tile.full or tile.causal):
            given["window"] = (tile.left, tile.right)
        return given if self.softcap is None else {**given, "softcap": self.softcap}

    def backward(self, tile: Tile, packed: bool) -> Options:
        said = Options(
            causal=tile.causal, softmax_scale=self.softmax_scale, deterministic=True,
            softcap=self.softcap or 0.0, layout=PACKED if packed else "bhsd",
        )  # fmt: skip
        if tile.full or tile.causal:
            bounds = (-1, -1)
        else:
            bounds = tuple(-1 if side is None else side for side in (tile.left, tile.right))
        if bounds == (-1, -1) and not (self.softcap or packed):
            return said
        features = ScoreFeatures(softcap=bool(self.softcap), varlen=packed)
        return said._replace(features=features.text, window=bounds)  # type: ignore[arg-type]


class Dense:
    """Rows of [B, H, S, D]."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def part(self, x: Any, where: Range, dim: int = 2) -> Any:
        return x if where == (0, x.shape[dim]) else x.narrow(dim, where[0], where[1] - where[0])

    def attend(self, q: Any, k: Any, v: Any, tile: Tile, sinks: Any) -> tuple[Any, Any]:
        given = self.rules.of(tile)
        if sinks is not None:
            given["sinks"] = sinks
        rows = self.part(q, tile.q), self.part(k, tile.k), self.part(v, tile.k)
        return attention(*rows, return_lse=True, **given)

    def carries(self, q: Any, k: Any, v: Any) -> bool:
        """Whether a step may begin with the o and lse of the one before, in fp32: nothing is lost
        by rounding fp32, and windows, a soft cap and packed rows have no such kernel."""
        return type(self) is Dense and self.rules.plain and resumes(q, k, v)

    def begin(self, q: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
        """o and lse of rows that have seen no key but their sink."""
        torch, shape = sys.modules["torch"], (*q.shape[:-1], v.shape[-1])
        if sinks is None:
            o = torch.empty(shape, dtype=torch.float32, device=q.device)
            return o, o.new_full(shape[:-1], float("-inf"))
        lse = sinks.detach().float().view(1, -1, 1).expand(shape[:-1]).contiguous()
        return torch.zeros(shape, dtype=torch.float32, device=q.device), lse

    def go_on(
        self, q: Any, k: Any, v: Any, tile: Tile, state: tuple[Any, Any], o: Any, done: Range
    ) -> None:
        """A tile into the state of its rows; those that are done are rounded to o."""
        sums, lse, o, q = (self.part(x, tile.q) for x in (*state, o, q))
        keys = self.part(k, tile.k), self.part(v, tile.k)
        given = {"causal": tile.causal, "softmax_scale": self.rules.softmax_scale}
        resume_attention(q, *keys, sums, lse, o, done=done, **given)

    def attend_into(self, o: Any, lse: Any, q: Any, k: Any, v: Any, tile: Tile, sinks: Any) -> None:
        """A tile's result to its rows of o and lse."""
        given = self.rules.of(tile)
        if sinks is not None:
            given["sinks"] = sinks
        o, lse, q = (self.part(x, tile.q) for x in (o, lse, q))
        found = lse if lse.is_contiguous() else lse.new_empty(lse.shape)
        attention_into(o, found, q, self.part(k, tile.k), self.part(v, tile.k), **given)
        if found is not lse:
            lse.copy_(found)

    def differentiate(self, results: Any, k: Any, v: Any, tile: Tile) -> Any:
        """dq, dk, dv; results: dout, q, o, lse, dlse or None."""
        dout, q, o, lse, dlse = (self._of(x, tile.q) for x in results)
        given = (dout, q, self.part(k, tile.k), self.part(v, tile.k), o, lse, dlse)
        return gradients(given, self.rules.backward(tile, False))

    def _of(self, x: Any, where: Range) -> Any:
        if x is None:
            return None
        found = self.part(x, where)
        return found.contiguous() if x.dim() == 3 else found  # lse has no strides

    def write(self, into: Any, where: Range, x: Any) -> None:
        self.part(into, where).copy_(x)

    def add(self, into: Any, where: Range, x: Any) -> None:
        self.part(into, where).add_(x)

    def stack(self, count: int, q: Any, v: Any) -> tuple[Any, Any]:
        """Room for partial results: o and lse, which is -inf where nothing was seen."""
        o = q.new_empty(count, *q.shape[:-1], v.shape[-1])
        lse = q.new_full((count, *q.shape[:-1]), float("-inf"), dtype=_float32())
        return o, lse

    def merge(self, o: Any, lse: Any) -> tuple[Any, Any]:
        return merge_states(o, lse)

    def delta(self, dout: Any, o: Any) -> Any:
        """fp32 sums over columns of dout * o, as lse lies."""
        return (dout.float() * o.float()).sum(-1)

    def over_heads(self, x: Any) -> Any:
        """Sums of all rows of each head, of what lies as lse."""
        return x.sum((0, 2))

    def for_heads(self, x: Any) -> Any:
        return x.view(1, -1, 1)


class Packed(Dense):
    """Rows of [total, H, D], of sequences of which this rank has one or two chunks each."""

    def __init__(self, rules: Rules, cu_seqlens: Any, longest: int, chunks: int, rows: int) -> None:
        super().__init__(rules)
        self.chunks, self.longest = chunks, longest
        self.ends = {chunks: cu_seqlens}
        self.index: dict[Range, Any] = {}
        if chunks == 2:
            torch, half = sys.modules["torch"], cu_seqlens // 2
            self.ends[1], lengths = half, half.diff()
            each = torch.arange(len(lengths), device=half.device)
            whose = torch.repeat_interleave(each, lengths, output_size=rows // 2)
            place = torch.arange(rows // 2, device=half.device) - half[whose]
            first = (cu_seqlens[whose] + place).long()
            self.index = {(0, 1): first, (1, 2): first + lengths[whose]}

    def part(self, x: Any, where: Range, dim: int = 0) -> Any:
        found = self.index.get(where)
        return x if found is None else x.index_select(dim, found)

    def _packing(self, tile: Tile) -> tuple[Any, ...]:
        """cu_seqlens and the longest, of queries and keys."""
        sizes = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
        return (
            *(self.ends[n] for n in sizes), *(self.longest * n // self.chunks for n in sizes)
        )  # fmt: skip

    def attend(self, q: Any, k: Any, v: Any, tile: Tile, sinks: Any) -> tuple[Any, Any]:
        given = self.rules.of(tile)
        if sinks is not None:
            given["sinks"] = sinks
        rows = self.part(q, tile.q), self.part(k, tile.k), self.part(v, tile.k)
        return attention_varlen(*rows, *self._packing(tile), return_lse=True, **given)

    def attend_into(self, o: Any, lse: Any, q: Any, k: Any, v: Any, tile: Tile, sinks: Any) -> None:
        for into, x in zip((o, lse), self.attend(q, k, v, tile, sinks), strict=True):
            self.write(into, tile.q, x)

    def differentiate(self, results: Any, k: Any, v: Any, tile: Tile) -> Any:
        dout, q, o, lse, dlse = (self._of(x, tile.q) for x in results)
        ends_q, ends_k, most_q, most_k = self._packing(tile)
        rows = (dout, q, self.part(k, tile.k), self.part(v, tile.k), o, lse, dlse)
        said = self.rules.backward(tile, True)
        said = said._replace(max_seqlen_q=most_q, max_seqlen_k=most_k)
        return gradients((*rows, ends_q, ends_k), said)

    def _of(self, x: Any, where: Range) -> Any:
        if x is None:
            return None
        return self.part(x, where, 1 if x.dim() == 2 else 0)

    def write(self, into: Any, where: Range, x: Any) -> None:
        found = self.index.get(where)
        if found is None:
            into.copy_(x)
        else:
            into.index_copy_(1 if into.dim() == 2 else 0, found, x)

    def add(self, into: Any, where: Range, x: Any) -> None:
        found = self.index.get(where)
        if found is None:
            into.add_(x)
        else:
            into.index_copy_(0, found, into.index_select(0, found).add_(x))

    def stack(self, count: int, q: Any, v: Any) -> tuple[Any, Any]:
        rows, heads, _ = q.shape
        o = q.new_empty(count, rows, heads, v.shape[-1])
        return o, q.new_full((count, heads, rows), float("-inf"), dtype=_float32())

    def merge(self, o: Any, lse: Any) -> tuple[Any, Any]:
        o, lse = merge_states(o.unsqueeze(1), lse.unsqueeze(1), layout="bshd")
        return o[0], lse[0]

    def delta(self, dout: Any, o: Any) -> Any:
        return super().delta(dout, o).t()

    def over_heads(self, x: Any) -> Any:
        return x.sum(1)

    def for_heads(self, x: Any) -> Any:
        return x.view(-1, 1)


def sink_gradient(rows: Dense, sinks: Any, dout: Any, o: Any, lse: Any, dlse: Any) -> Any:
    """Of this rank's rows: sum of p (dlse - dout . o) with p = exp(sink - lse)."""
    probability = (rows.for_heads(sinks.float()) - lse).exp()
    along = -rows.delta(dout, o)
    if dlse is not None:
        along = along + dlse
    return rows.over_heads(probability * along).to(sinks.dtype)


def _float32() -> Any:
    return sys.modules["torch"].float32
