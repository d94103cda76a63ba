"""Messages between ranks that are under way while something else is computed.

Each function starts a message and returns it as a `Pending`; `wait()` gives what has arrived. On a
GPU waiting is the stream's, not the host's, unless the group has a time-out of ours. A rank that
does not answer is a `PeerError`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from fkjit.distributed.groups import Group
from fkjit.errors import PeerError
from fkjit.ops.op.autograd import Differentiable, Tensors

_POLL = 1e-4  # seconds between two looks at a message on a GPU


class Pending:
    """A message under way; keeps what is sent and received until it has arrived."""

    def __init__(self, group: Group, what: str, start: Callable[[], Any], *held: Any) -> None:
        """start: makes one or several of torch's works. held: the result first."""
        self.group, self.what = group, what
        self.held: tuple[Any, ...] = held
        self.works = self._guarded(start)

    def wait(self) -> Any:
        """What has arrived. PeerError where a rank has gone, or the time-out is over."""
        found = self.works if isinstance(self.works, list) else [self.works]
        for work in found:
            if work is not None:
                self._guarded(partial(self._wait, work))
        result, self.held, self.works = self.held[0], (), []
        return result

    def _wait(self, work: Any) -> None:
        limit = self.group.timeout
        if limit is None:
            work.wait()
            return
        if not self.held[0].is_cuda:
            work.wait(timedelta(seconds=limit))
            return
        end = time.monotonic() + limit
        while not work.is_completed():
            if time.monotonic() > end:
                raise TimeoutError(f"nothing came for {limit} s")
            time.sleep(_POLL)
        work.wait()

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(_lost(self.group, self.what, error)) from error


def _lost(group: Group, what: str, error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    limit = "the process group's time-out" if group.timeout is None else f"{group.timeout} s"
    return (
        f"{group.call}: rank {group.rank} of {group.size}: {what} did not end within {limit}: a "
        f"rank has stopped, or made another call ({lines[0] if lines else type(error).__name__}); "
        "end all ranks and start again"
    )


def shift(group: Group, x: Any, by: int = 1, tag: int = 0, into: Any = None) -> Pending:
    """x to rank + by, and into the result (`into`, or a new tensor) what rank - by sends, of the
    same shape and dtype."""
    dist, into = sys.modules["torch"].distributed, x.new_empty(x.shape) if into is None else into
    to, source = group.world_rank(group.rank + by), group.world_rank(group.rank - by)
    whom = group.process_group

    def start() -> Any:
        send = dist.P2POp(dist.isend, x, to, whom, tag)
        return dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, into, source, whom, tag)])

    return Pending(group, "a message along the ring", start, into, x)


def all_gather(group: Group, x: Any) -> Pending:
    """[ranks, *x.shape], contiguous, of x of every rank."""
    dist, x = sys.modules["torch"].distributed, x.contiguous()
    into, gather = x.new_empty(group.size, *x.shape), _named(dist, "all_gather")

    def start() -> Any:
        return gather(into.view(-1), x.view(-1), group=group.process_group, async_op=True)

    return Pending(group, "an all-gather", start, into, x)


def all_to_all(
    group: Group, x: Any, counts: Sequence[int] | None = None, into: Sequence[int] | None = None
) -> Pending:
    """Rows of x to every rank in turn, and theirs in order of the ranks.

    counts: how many to each; into: how many from each; None: as many to each.
    """
    dist, x = sys.modules["torch"].distributed, x.contiguous()
    rows = x.shape[0] if into is None else sum(into)
    made = x.new_empty(rows, *x.shape[1:])
    sizes = None if counts is None else list(counts), None if into is None else list(into)

    def start() -> Any:
        how = {"group": group.process_group, "async_op": True}
        return dist.all_to_all_single(made, x, sizes[1], sizes[0], **how)

    return Pending(group, "an all-to-all", start, made, x)


def _named(dist: Any, name: str) -> Callable[..., Any]:
    """PyTorch 2.13 calls all_gather_into_tensor all_gather_single."""
    found = getattr(dist, f"{name}_single", None)
    return found if found is not None else getattr(dist, f"{name}_into_tensor")


# ------------------------------------------------------------------ with gradients


class Routed:
    """An all-to-all with a gradient: rows of the gradient go back the way that rows came.

    `started` begins it and gives a tensor that stands for what comes, `arrived` makes that of it.
    Autograd runs them backwards, so that there, too, what stands between two calls runs while the
    message is under way.
    """

    def __init__(
        self, group: Group, counts: Sequence[int] | None = None,
        into: Sequence[int] | None = None, codec: Any = None,
    ) -> None:  # fmt: skip
        """counts: rows to each rank, into: from each; None: as many to each. codec: `encode` makes
        rows of bytes of what is sent, `decode` rows of the dtype again; gradients go as they are.
        """
        self.group, self.codec = group, codec
        self.counts, self.into = counts, into
        self.pending: Pending | None = None
        self.dtype: Any = None

    def started(self, x: Any) -> Any:
        return _STARTED((x,), self)[0]

    def arrived(self, standing: Any) -> Any:
        return _ARRIVED((standing,), self)[0]

    def __call__(self, x: Any) -> Any:
        return self.arrived(self.started(x))

    def send(self, x: Any, back: bool = False) -> Any:
        """A tensor of the shape of what comes, without its data."""
        counts, into = (self.into, self.counts) if back else (self.counts, self.into)
        self.dtype = x.dtype
        sent = x if back or self.codec is None else self.codec.encode(x)
        self.pending = all_to_all(self.group, sent, counts, into)
        rows = x.shape[0] if into is None else sum(into)
        return x.new_empty(()).expand(rows, *x.shape[1:])

    def receive(self, back: bool = False) -> Any:
        assert self.pending is not None
        came, self.pending = self.pending.wait(), None
        return came if back or self.codec is None else self.codec.decode(came, self.dtype)


def _start(inputs: Tensors, routed: Routed) -> tuple[Tensors, Tensors]:
    return (routed.send(inputs[0]),), ()


def _start_backward(saved: Tensors, gradients: Tensors, needed: Tensors, routed: Routed) -> Tensors:
    return (routed.receive(back=True),)


def _arrive(inputs: Tensors, routed: Routed) -> tuple[Tensors, Tensors]:
    return (routed.receive(),), ()


def _arrive_backward(
    saved: Tensors, gradients: Tensors, needed: Tensors, routed: Routed
) -> Tensors:
    dout = gradients[0]
    routed.send(dout.contiguous(), back=True)
    return (dout.new_empty(()).expand(dout.shape),)


_STARTED = Differentiable("StartAllToAll", _start, _start_backward)
_ARRIVED = Differentiable("EndAllToAll", _arrive, _arrive_backward)
