"""Schedules on paper: who computes and who waits for what, from bytes, flops and rates of links.

A schedule is a list of tasks, each on a lane of a rank ("compute", "link", "network"); a task
begins when its lane is free and what it needs is done. Nothing here runs: `forms.choose` picks a
form by these times, docs/DISTRIBUTED.md shows them, a bench compares them with measured ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fkjit.distributed.order import chunks_of
from fkjit.distributed.tiles import tiles

_FP32 = 4
_BACKWARD_FLOPS = 2.5  # of the forward's: five products where it has two


@dataclass(frozen=True)
class Machine:
    """Rates, in flops, bytes and seconds. The defaults are those of a host of H200s as measured
    with NCCL between two of them; network ones are a 400 Gb/s card a GPU, on paper."""

    attention: float = 620e12  # flops a second that attention's forward sustains
    attention_backward: float = 480e12
    products: float = 700e12  # that a product sustains
    memory: float = 4.2e12  # bytes a second
    link: float = 314e9  # bytes a second into a GPU, from others of its host
    link_latency: float = 40e-6
    copy_latency: float = 10e-6  # of a copy engine's copy, and the flag behind it: on paper
    network: float = 45e9  # bytes a second into a GPU, from other hosts
    network_latency: float = 60e-6
    ranks_per_host: int = 8


class Task(NamedTuple):
    rank: int
    lane: str
    name: str
    begin: float
    end: float


@dataclass
class Timeline:
    """Tasks in the order in which they were added; times in seconds."""

    tasks: list[Task] = field(default_factory=list)
    free: dict[tuple[int, str], float] = field(default_factory=dict)

    def add(
        self, rank: int, lane: str, name: str, seconds: float, after: Iterable[Task | None] = ()
    ) -> Task:
        ready = max((task.end for task in after if task is not None), default=0.0)
        begin = max(ready, self.free.get((rank, lane), 0.0))
        task = Task(rank, lane, name, begin, begin + seconds)
        self.free[rank, lane] = task.end
        self.tasks.append(task)
        return task

    @property
    def seconds(self) -> float:
        return max((task.end for task in self.tasks), default=0.0)

    def busy(self, rank: int, lane: str = "compute") -> float:
        """Seconds that a lane works."""
        return sum(t.end - t.begin for t in self.tasks if (t.rank, t.lane) == (rank, lane))


class Attention(NamedTuple):
    """Attention of one sequence; tokens: of a rank."""

    tokens: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    itemsize: int = 2
    batch: int = 1
    causal: bool = True

    def flops(self, pairs: float) -> float:
        return 2.0 * self.batch * self.heads_q * (self.head_dim + self.head_dim_v) * pairs

    @property
    def kv_elements(self) -> int:
        dims = self.head_dim + self.head_dim_v
        return self.batch * self.heads_kv * self.tokens * dims

    @property
    def kv_bytes(self) -> int:
        return self.kv_elements * self.itemsize

    @property
    def q_bytes(self) -> int:
        return self.batch * self.heads_q * self.tokens * self.head_dim * self.itemsize

    @property
    def o_bytes(self) -> int:
        return self.batch * self.heads_q * self.tokens * self.head_dim_v * self.itemsize


def transfer(machine: Machine, count: float, remote: bool = False) -> float:
    """Seconds of a message."""
    if remote:
        return machine.network_latency + count / machine.network
    return machine.link_latency + count / machine.link


def from_all(machine: Machine, size: int, each: float) -> dict[str, float]:
    """Seconds a lane of a message of `each` bytes from every other rank, all at once."""
    near = min(size, machine.ranks_per_host) - 1
    far = size - 1 - near
    found = {"link": transfer(machine, near * each)} if near else {}
    return {**found, "network": transfer(machine, far * each, True)} if far else found


def _receive(
    line: Timeline, machine: Machine, rank: int, name: str, size: int, each: float,
    after: Iterable[Task | None] = (),
) -> list[Task]:  # fmt: skip
    after = list(after)
    lanes = from_all(machine, size, each)
    return [line.add(rank, lane, name, seconds, after) for lane, seconds in lanes.items()]


def _pairs(a: Attention, layout: str, rank: int, other: int, size: int) -> float:
    """Visible (query, key) pairs of two ranks' tokens."""
    own, theirs = (chunks_of(layout, r % size, size) for r in (rank, other))
    length, total = a.tokens // len(own), 0.0
    for tile in tiles(own, theirs, length, (None, 0 if a.causal else None)):
        rows, keys = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
        total += rows * (rows + 1) / 2 if tile.causal else rows * keys
    return total


def whole(a: Attention, machine: Machine, size: int, backward: bool = False) -> float:
    """Seconds of the whole sequence on one GPU."""
    tokens = a.tokens * size
    pairs = tokens * (tokens + 1) / 2 if a.causal else float(tokens) ** 2
    return _multiply(a, machine, pairs, backward)


def _multiply(a: Attention, machine: Machine, pairs: float, backward: bool) -> float:
    if backward:
        return _BACKWARD_FLOPS * a.flops(pairs) / machine.attention_backward
    return a.flops(pairs) / machine.attention


# ------------------------------------------------------------------ forms of attention


def ring(
    a: Attention, machine: Machine, size: int, layout: str = "zigzag", backward: bool = False,
    overlap: bool = True,
) -> Timeline:  # fmt: skip
    """`fkjit.distributed.ring`, step by step; overlap=False: keys travel while nobody computes."""
    line = Timeline()
    none: list[Task | None] = [None] * size
    arrived, done, sums = none, none, none

    def next_keys(after: list[tuple[Task | None, ...]]) -> list[Task | None]:
        return _hop(line, machine, size, f"KV {step + 1}", a.kv_bytes, after)

    for step in range(size):
        coming, more = none, step + 1 < size
        if more and overlap:
            coming = next_keys([(arrived[r - 1],) for r in range(size)])
        done = [
            line.add(
                rank, "compute", f"step {step}",
                _multiply(a, machine, _pairs(a, layout, rank, rank - step, size), backward),
                (arrived[rank],),
            )
            for rank in range(size)
        ]  # fmt: skip
        if more and not overlap:
            coming = next_keys([(done[r - 1], done[r]) for r in range(size)])
        if backward and size > 1:
            after = [(done[r - 1], sums[r - 1]) for r in range(size)]
            each = _FP32 if more else a.itemsize  # home, rounded
            sums = _hop(line, machine, size, f"sums {step}", each * a.kv_elements, after)
        arrived = coming
    if not backward and size > 1:
        for rank in range(size):
            line.add(rank, "compute", "merge", a.o_bytes * (3 * size + 1) / machine.memory)
    return line


def _hop(
    line: Timeline, machine: Machine, size: int, name: str, count: float,
    after: list[tuple[Task | None, ...]],
) -> list[Task | None]:  # fmt: skip
    """A message from each rank to the next one."""
    found: list[Task | None] = []
    for rank in range(size):
        remote = size > machine.ranks_per_host and rank % machine.ranks_per_host == 0
        lane, seconds = "network" if remote else "link", transfer(machine, count, remote)
        found.append(line.add(rank, lane, name, seconds, after[rank]))
    return found


def gather(
    a: Attention, machine: Machine, size: int, layout: str = "zigzag", backward: bool = False
) -> Timeline:
    """`fkjit.distributed.gather`: half of the heads travel while the other half is multiplied."""
    line = Timeline()
    for rank in range(size):
        pairs = sum(_pairs(a, layout, rank, other, size) for other in range(size))
        for half in range(2):
            came = _receive(line, machine, rank, f"KV {half}", size, a.kv_bytes / 2)
            seconds = _multiply(a, machine, pairs / 2, backward)
            made = line.add(rank, "compute", f"half {half}", seconds, came)
            if backward:
                _receive(
                    line, machine, rank, f"sums {half}", size, _FP32 * a.kv_elements / 2, (made,)
                )
    return line


def ulysses(
    a: Attention, machine: Machine, size: int, layout: str = "contiguous", backward: bool = False
) -> Timeline:
    """`fkjit.distributed.ulysses`: q, k, v one way, o the other; in the backward both again."""
    line = Timeline()
    there, back = (a.q_bytes + a.kv_bytes) / size, a.o_bytes / size
    if backward:
        there, back = back, there
    for rank in range(size):
        came = _receive(line, machine, rank, "tokens for heads", size, there)
        seconds = whole(a, machine, size, backward) / size
        made = line.add(rank, "compute", "attention", seconds, came)
        _receive(line, machine, rank, "heads for tokens", size, back, (made,))
    return line


# ------------------------------------------------------------------ experts and products


class Experts(NamedTuple):
    """A layer of experts; tokens: of a rank."""

    tokens: int = 4096
    experts: int = 128
    top_k: int = 8
    hidden: int = 7168
    inner: int = 2048
    itemsize: int = 2

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * self.top_k * self.hidden * self.inner


def experts(a: Experts, machine: Machine, size: int, chunks: int = 2) -> Timeline:
    """`fkjit.distributed.moe_layer`: chunks of tokens there, through the products, and back."""
    line = Timeline()
    each = a.tokens * a.top_k * a.hidden * a.itemsize / size / chunks
    for rank in range(size):
        there = [_receive(line, machine, rank, f"dispatch {n}", size, each) for n in range(chunks)]
        for n in range(chunks):
            seconds = a.flops / machine.products / chunks
            made = line.add(rank, "compute", f"experts {n}", seconds, there[n])
            _receive(line, machine, rank, f"combine {n}", size, each, (made,))
    return line


class Product(NamedTuple):
    """x [m, k] by a weight [n, k] that ranks have a part of."""

    m: int = 8192
    n: int = 28672
    k: int = 8192
    itemsize: int = 2

    def seconds(self, machine: Machine, size: int) -> float:
        return 2.0 * self.m * self.n * self.k / size / machine.products


def column_linear(
    a: Product, machine: Machine, size: int, overlap: bool = True, pieces: int = 2
) -> Timeline:
    """Rows of x come from rank after rank, in pieces; each is multiplied when it is there."""
    line, pieces = Timeline(), pieces if overlap else 1
    rows, each = a.m * a.k * a.itemsize / size / pieces, a.seconds(machine, size) / size
    for rank in range(size):
        came = [
            line.add(rank, "link", f"x {n}", transfer(machine, rows))
            for n in range((size - 1) * pieces)
        ]
        line.add(rank, "compute", "own", each, () if overlap else came[-1:])
        for n, task in enumerate(came):
            line.add(rank, "compute", f"product {n}", each / pieces, (task,))
    return line


def row_linear(
    a: Product, machine: Machine, size: int, overlap: bool = True, pieces: int = 2
) -> Timeline:
    """Partial sums go to their owners as soon as they are there, own ones last; then all are
    added."""
    line, pieces = Timeline(), pieces if overlap else 1
    rows, each = a.m * a.n * a.itemsize / size, a.seconds(machine, size) / size
    for rank in range(size):
        made = [
            line.add(rank, "compute", f"product {n}", each / pieces)
            for n in range((size - 1) * pieces)
        ]
        own = line.add(rank, "compute", "own", each)
        sent = [
            line.add(
                rank, "link", f"sums {n}", transfer(machine, rows / pieces),
                (task if overlap else own,),
            )
            for n, task in enumerate(made)
        ]  # fmt: skip
        line.add(rank, "compute", "add", rows * (size + 1) / machine.memory, (own, *sent))
    return line


def in_step(a: Product, machine: Machine, size: int, column: bool, chunks: int = 4) -> Timeline:
    """Products whose tiles wait for flags: copies of so many chunks of a rank's rows."""
    make = column_linear if column else row_linear
    return make(a, replace(machine, link_latency=machine.copy_latency), size, pieces=chunks)
