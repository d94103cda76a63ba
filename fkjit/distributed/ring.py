"""Ring attention: keys and values travel from rank to rank while the present ones are multiplied.

    step 0        step 1        step 2        …     rank r has, in step s, those of rank r - s;
    q_r k_r       q_r k_(r-1)   q_r k_(r-2)         those of step s + 1 arrive meanwhile

Each step begins with the o, in fp32, and log-sum-exps of the one before and goes on; rows that see
no more keys are rounded. Or (carry=False, and where no kernel goes on) it leaves a partial result
in q's dtype; all are weighed and added in fp32, once, in order of the steps. Either way bits depend
on nothing but inputs and the number of ranks. In
the backward the sums of dk and dv, fp32, follow their keys one step behind, and go home at the end.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023).
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from fkjit.distributed.exchange import Pending, shift
from fkjit.distributed.groups import Group
from fkjit.distributed.order import chunks_of
from fkjit.distributed.pieces import Dense, sink_gradient
from fkjit.distributed.symmetric import pulling
from fkjit.distributed.tiles import Tile, endings, slots, tiles
from fkjit.ops.op.autograd import Differentiable, Tensors

_KV, _SUMS = 1, 2  # tags of messages
# Queries of a head, and columns, up to which carrying was faster on an H200 than merging.
_CARRIED_ROWS, _CARRIED_DIM = 4096, 64


class Ring(NamedTuple):
    """A call. length: of a chunk, as tiles count it. transport: of keys and values. carry: o in
    fp32 from step to step, where that can be."""

    group: Group
    layout: str
    rows: Dense
    length: int
    transport: str = "nccl"
    carry: bool = True

    def steps(self) -> list[tuple[Tile, ...]]:
        """This rank's tiles, step by step, as far as any rank has some."""
        size, rank = self.group.size, self.group.rank
        most = max(s for s in range(size) for r in range(size) if s == 0 or self._tiles(r, s))
        return [self._tiles(rank, step) for step in range(most + 1)]

    def _tiles(self, rank: int, step: int) -> tuple[Tile, ...]:
        size, window = self.group.size, self.rows.rules.window
        own, theirs = (chunks_of(self.layout, r % size, size) for r in (rank, rank - step))
        return tiles(own, theirs, self.length, window)


def carries(q: Any, given: bool | None) -> bool:
    """What a call says, or else what was faster."""
    if given is not None:
        return bool(given)
    return q.shape[-2] <= _CARRIED_ROWS or q.shape[-1] <= _CARRIED_DIM


def ring(q: Any, k: Any, v: Any, sinks: Any, call: Ring) -> tuple[Any, Any]:
    """(o, lse) of this rank's queries."""
    return _RING((q, k, v, sinks), call)  # type: ignore[return-value]


class _Travelling:
    """Keys and values on their way round, in one message."""

    def __init__(self, group: Group, k: Any, v: Any) -> None:
        self.group, self.shapes = group, (k.shape, v.shape)
        self.present = k, v
        self.flat: Any = None
        self.coming: Pending | None = None

    def ask(self, step: int) -> None:
        """For those that come next."""
        if self.flat is None:
            self.flat = flat(*self.present)
        self.coming = shift(self.group, self.flat, tag=_KV)

    def take(self) -> None:
        if self.coming is not None:
            self.flat = self.coming.wait()
            self.present, self.coming = parts(self.flat, *self.shapes), None

    def end(self) -> None:
        """Nobody reads this rank's keys any more."""


def _travelling(call: Ring, k: Any, v: Any) -> Any:
    if call.transport == "symmetric":
        return pulling(call.group, k, v)
    return _Travelling(call.group, k, v)


def flat(*arrays: Any) -> Any:
    return sys.modules["torch"].cat([x.reshape(-1) for x in arrays])


def parts(x: Any, *shapes: Any) -> tuple[Any, ...]:
    """Arrays that `flat` put one behind the other."""
    found = x.split([shape.numel() for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(found, shapes, strict=True))


def _forward(inputs: Tensors, call: Ring) -> tuple[Tensors, Tensors]:
    q, k, v, sinks = inputs
    rows, steps = call.rows, call.steps()
    every = tuple(tile for step in steps for tile in step)
    made: Carried | Merged
    if call.carry and len(every) > 1 and rows.carries(q, k, v) and endings(every, q.shape[2]):
        made = Carried(rows, q, v, sinks, every)
    else:
        made = Merged(rows, q, v, sinks, every)
    travelling = _travelling(call, k, v)
    for step, found in enumerate(steps):
        if step + 1 < len(steps):
            travelling.ask(step + 1)
        keys, values = travelling.present
        for tile in found:
            made.add(keys, values, tile)
        travelling.take()
    travelling.end()
    results = made.results()
    return results, (q, k, v, sinks, *results)


class Carried:
    """Rows that go on from tile to tile."""

    def __init__(self, rows: Dense, q: Any, v: Any, sinks: Any, every: tuple[Tile, ...]) -> None:
        self.rows, self.q = rows, q
        self.state = rows.begin(q, v, sinks)
        self.o = q.new_empty(*q.shape[:-1], v.shape[-1])
        self.done = iter(endings(every, q.shape[2]) or ())

    def add(self, k: Any, v: Any, tile: Tile) -> None:
        self.rows.go_on(self.q, k, v, tile, self.state, self.o, next(self.done))

    def results(self) -> tuple[Any, Any]:
        return self.o, self.state[1]


class Merged:
    """Partial results of tiles, put together at the end."""

    def __init__(self, rows: Dense, q: Any, v: Any, sinks: Any, every: tuple[Tile, ...]) -> None:
        self.rows, self.q, self.sinks, self.one = rows, q, sinks, None
        self.places = iter(slots(every))
        self.stack = None
        if len(every) > 1:
            self.stack = rows.stack(1 + max(slots(every)), q, v)

    def add(self, k: Any, v: Any, tile: Tile) -> None:
        given = self.q, k, v, tile, self.sinks if tile.diagonal else None
        if self.stack is None:
            self.one = self.rows.attend(*given)
            return
        place = next(self.places)
        o, lse = (x[place] for x in self.stack)
        self.rows.attend_into(o, lse, *given)

    def results(self) -> Any:
        return self.one if self.stack is None else self.rows.merge(*self.stack)


def _backward(saved: Tensors, of_results: Tensors, needed: Tensors, call: Ring) -> Tensors:
    (q, k, v, sinks, o, lse), (dout, dlse) = saved, of_results
    torch, rows, steps = sys.modules["torch"], call.rows, call.steps()
    dout = torch.zeros_like(o) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    travelling, sums, own = _travelling(call, k, v), None, None
    for step, found in enumerate(steps):
        if step + 1 < len(steps):
            travelling.ask(step + 1)
        own = torch.zeros(k.numel() + v.numel(), dtype=torch.float32, device=q.device)
        dk, dv = parts(own, k.shape, v.shape)
        keys, values = travelling.present
        for tile in found:
            made = rows.differentiate((dout, q, o, lse, dlse), keys, values, tile)
            places = ((dq, tile.q), (dk, tile.k), (dv, tile.k))
            for (into, where), x in zip(places, made, strict=True):
                rows.add(into, where, x)
        if sums is not None:
            own = sums.wait().add_(own)
        if step + 1 < len(steps):
            sums = shift(call.group, own, 1, _SUMS)
        travelling.take()
    travelling.end()
    assert own is not None  # a step there is
    home = own.to(k.dtype)  # nothing is added any more
    if len(steps) > 1:
        home = shift(call.group, home, 1 - len(steps), _SUMS).wait()
    dk, dv = parts(home, k.shape, v.shape)
    dsinks = sink_gradient(rows, sinks, dout, o, lse, dlse) if needed[3] else None
    return dq.to(q.dtype), dk, dv, dsinks


_RING = Differentiable("RingAttention", _forward, _backward)
