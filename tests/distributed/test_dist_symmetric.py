"""Symmetric memory's paths, with buffers that a barrier exchanges and streams that do nothing: who
reads and writes what. That copies and kernels wait for each other is for `gpu_ranks.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.kit import draw, error, ranks

torch = pytest.importorskip("torch")


class Memory:
    """A rank's buffer; others' are copies as of the last barrier, and what is written to them
    arrives with the next one."""

    def __init__(self, group: Any, count: int, like: Any) -> None:
        self.group, self.own = group, like.new_full((count,), float("nan"))
        self.copies: Any = None
        self.written: dict[int, Any] = {}
        self.barriers = 0

    def get_buffer(self, rank: int, shape: Any, dtype: Any) -> Any:
        assert self.copies is not None, "read before a barrier"
        if self.group.rank != rank and self.own.numel() == self.group.size * shape[-1]:
            return self.written.setdefault(rank, self.own.new_zeros(shape))
        return self.copies[rank].view(shape)

    def barrier(self, channel: int) -> None:
        from fkjit.distributed.exchange import all_gather, all_to_all

        self.barriers += 1
        if self.written:
            rows = self.own.view(self.group.size, -1)
            sent = [
                self.written.get(r, rows.new_zeros(rows.shape))[self.group.rank]
                for r in range(self.group.size)
            ]
            came = all_to_all(self.group, torch.stack(sent)).wait()
            for rank in range(self.group.size):
                if rank != self.group.rank:
                    rows[rank] = came[rank]
            self.written.clear()
        self.copies = all_gather(self.group, self.own).wait()


def waited(stream: Any, flags: Any, index: int, value: int) -> None:
    assert flags[index] == value, "counts are those of a whole chunk"


@contextmanager
def faked(made: list[Memory]) -> Iterator[None]:
    from fkjit.distributed import attention, linear, symmetric

    def shared(group: Any, count: int, like: Any, use: str) -> tuple[Any, Any]:
        made.append(Memory(group, count, like))
        return made[-1].own, made[-1]

    nothing = SimpleNamespace(
        wait_event=lambda event: None, wait_stream=lambda stream: None, record_event=lambda: 1
    )
    places = [
        (symmetric, "shared", shared), (symmetric, "_stream", lambda torch, device: nothing),
        (attention, "available", lambda x: True), (linear, "available", lambda x: True),
        (symmetric, "write_flag", lambda stream, flags, at: flags[at : at + 1].fill_(1)),
        (symmetric, "wait_flag", waited), (torch.cuda, "current_stream", lambda: nothing),
        (torch.cuda, "stream", lambda stream: nullcontext()),
    ]  # fmt: skip
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def both(rank: int) -> dict[str, float]:
    """How far results by symmetric memory are from those by messages."""
    import fkjit.distributed as fd

    made: list[Memory] = []
    size = torch.distributed.get_world_size()
    q, k, v = (fd.shard(draw(n, (1, 2, 8 * size, 32), torch.float16)) for n in range(3))
    x, w = draw(rank + 5, (9, 32), torch.float16), draw(rank + 9, (32, 32), torch.float16)
    y = draw(rank + 7, (9 * size, 32), torch.float16)
    calls = {
        "ring": lambda way: fd.ring_attention(q, k, v, causal=True, form="ring", transport=way),
        "column": lambda way: fd.column_parallel_linear(x, w, transport=way),
        "row": lambda way: fd.row_parallel_linear(y, w, transport=way),
    }
    found = {}
    for name, call in calls.items():
        wanted = call("nccl")
        with faked(made):
            found[name] = error(call("symmetric"), wanted.double())
        assert made[-1].barriers == 2
    return found


def test_three_ranks_read_and_write_what_messages_bring():
    with ranks(3) as pool:
        assert pool.run(both) == [{"ring": 0.0, "column": 0.0, "row": 0.0}] * 3


def in_step(rank: int) -> dict[str, float]:
    """How far products whose tiles have flags are from float64; gradients too. On Hopper's
    interpreter."""
    import os

    import fkjit.distributed as fd
    from fkjit.distributed import linear
    from fkjit.settings import settings

    product, hows = linear.linear_flagged, []

    def noted(*given: Any, **named: Any) -> None:
        hows.append(named["how"])
        product(*given, **named)

    size = torch.distributed.get_world_size()
    os.environ["FKJIT_TARGET"] = "compute_90a"
    settings.cache_clear()
    made: list[Memory] = []
    x, w = draw(rank, (256, 64), torch.float16), draw(rank + 9, (64, 64), torch.float16) / 8
    y, bias = draw(rank + 5, (256 * size, 64), torch.float16), draw(20, (64,), torch.float16)
    xs = torch.cat([draw(r, (256, 64), torch.float16) for r in range(size)]).double()
    ys = [draw(r + 5, (256 * size, 64), torch.float16).double() for r in range(size)]
    ws = [(draw(r + 9, (64, 64), torch.float16) / 8).double() for r in range(size)]
    rows = slice(256 * rank, 256 * (rank + 1))
    found = {}
    linear.linear_flagged = noted
    try:
        with faked(made):
            column = fd.column_parallel_linear(x, w, bias, transport="tiles")
            row = fd.row_parallel_linear(y, w, bias, transport="tiles")
            again = fd.row_parallel_linear(y, w, bias, transport="tiles")
            x.requires_grad_(), w.requires_grad_()
            fd.column_parallel_linear(x, w, transport="tiles").backward(y)
            v = w.detach().clone().requires_grad_()
            fd.row_parallel_linear(y.requires_grad_(), v, transport="tiles").backward(x.detach())
    finally:
        linear.linear_flagged = product
        del os.environ["FKJIT_TARGET"]
        settings.cache_clear()
    assert [m.barriers for m in made[:2]] == [2, 2] and torch.equal(row, again)
    assert hows == ["waits", "tells", "tells", "waits", "tells", "tells", "waits"]
    found["column"] = error(column, xs @ w.detach().double().T + bias.double())
    wanted = sum(a[rows] @ b.T for a, b in zip(ys, ws, strict=True)) + bias.double()
    found["row"] = error(row, wanted)
    found["dx"] = error(x.grad, sum(a[rows] @ b for a, b in zip(ys, ws, strict=True)))
    found["dw"] = error(w.grad, ys[rank].T @ xs)
    found["row dx"] = error(y.grad, xs @ w.detach().double())
    found["row dw"] = error(v.grad, xs.T @ ys[rank])
    return found


def test_products_in_step_with_their_rows():
    with ranks(2) as pool:
        for errors in pool.run(in_step):
            assert all(e < 3e-3 for e in errors.values()), errors
