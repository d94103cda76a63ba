"""How times are taken: warm-up, turns, an event pair an iteration; cold L2, warm L2, in a graph.

What is timed is the GPU's time of a call. A short delay on the GPU before each begin event lets the
host run ahead, so that its own time, which is measured apart, does not leak into the events.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .clocks import over
from .device import Device
from .op import Prepared
from .statistics import summary

MODES = ("cold", "warm", "graph")
LEAST = 20  # iterations, however short the time is
_EVENTS = 15e-6  # host seconds of an iteration beside the call itself
_GRAPH_SECONDS = 2e-3  # of work in a graph: its launch is then less than a hundredth
_MOST_COPIES = 50
_REPLAY_DELAY = 20e-6
_LONG = 20e-3  # a call of so many seconds hardly feels what ran before it
_HOST_CALLS = 100  # several kernels each: fewer than a stream's queue holds
_READ_EVERY = 3  # turns: reading clocks takes milliseconds on some machines


@dataclass(frozen=True)
class Effort:
    """How much is measured: `seconds` bounds one mode of one candidate on one case."""

    warmup: int = 100
    iterations: int = 1000
    turns: int = 10
    seconds: float = 1.0
    modes: Sequence[str] = MODES


QUICK = Effort(warmup=10, iterations=100, turns=5, seconds=0.2)


@dataclass
class Runner:
    """A candidate that may be timed, and its times so far."""

    name: str
    prepared: Prepared
    gpu_seconds: float = 0.0  # of a call, first estimate
    host_seconds: float = 0.0
    times: dict[str, list[list[float]]] = field(default_factory=dict)  # mode -> turns of ms
    copies: int = 0  # calls in the graph
    output: Any = None  # of the graph
    error: str | None = None
    no_graph: str | None = None
    states: list[dict[str, Any]] = field(default_factory=list)  # clocks while it ran

    def results(self) -> dict[str, Any]:
        """{mode: summary in ms}; a graph says how many calls it has, or why there is none."""
        made = {
            mode: summary([ms for turn in turns for ms in turn], turns)
            for mode, turns in self.times.items()
        }
        if "graph" in made:
            made["graph"]["copies"] = self.copies
        elif self.no_graph:
            made["graph"] = {"missing": self.no_graph}
        return made

    def during(self) -> dict[str, Any]:
        """Clocks, power, temperature and throttling while it ran."""
        return over(self.states)


def pace(device: Device, runner: Runner) -> None:
    """First estimates of a call's time on the GPU and on the host; the call is warm afterwards."""
    call, spans, hosts = runner.prepared.call, [], []
    for _ in range(3):
        device.synchronize()
        begin, end = device.mark(), device.mark()
        start = device.now()
        begin.record()
        call()
        end.record()
        hosts.append(device.now() - start)
        device.synchronize()
        spans.append(device.between(begin, end) * 1e-3)
    runner.gpu_seconds, runner.host_seconds = max(min(spans), 1e-7), min(hosts)


def warm_up(device: Device, runner: Runner, effort: Effort) -> int:
    """Up to `effort.warmup` calls, at least three, in a fifth of its seconds; their number."""
    each = max(runner.gpu_seconds, runner.host_seconds)
    count = max(3, min(effort.warmup, math.ceil(0.2 * effort.seconds / each)))
    for _ in range(count):
        runner.prepared.call()
    device.synchronize()
    return count


def host_microseconds(device: Device, runner: Runner, seconds: float, rounds: int = 5) -> float:
    """Median host time of a call. The GPU is idle at first and never waited for."""
    each = max(runner.gpu_seconds, runner.host_seconds)
    calls = min(_HOST_CALLS, math.ceil(seconds / rounds / each))
    found = []
    with _no_collection():
        for _ in range(rounds):
            device.synchronize()
            begin = device.now()
            for _ in range(calls):
                runner.prepared.call()
            found.append((device.now() - begin) / calls * 1e6)
    device.synchronize()
    return summary(found)["p50"]


def iterations(asked: int, each: float, seconds: float) -> int:
    """How many iterations of `each` seconds to take: at most `asked`, at least LEAST."""
    return max(min(LEAST, asked), min(asked, int(seconds / each)))


def time_in_turns(
    device: Device, runners: Sequence[Runner], effort: Effort, seconds: float
) -> Iterator[str]:
    """Fill `times` of each runner, mode by mode; yields each mode when it is done.

    The runners take turns, in another order each time: clocks, temperature and neighbours fall on
    all alike. A runner that raises gets an `error` and is left out from then on.
    """
    for mode in effort.modes:
        batches = {r.name: _plan(device, r, mode, effort, seconds) for r in runners if not r.error}
        with _no_collection():
            for turn in range(effort.turns):
                for index in _order(len(runners), turn):
                    runner = runners[index]
                    batch = batches.get(runner.name)
                    if batch is not None and runner.error is None:
                        _turn(device, runner, mode, batch, turn, effort.turns)
        yield mode


def _order(count: int, turn: int) -> list[int]:
    """A turn's. At the GPU's power limit the clock of one candidate depends on what ran before it:
    behind one that needs little power it is higher for a while."""
    return random.Random(turn).sample(range(count), count)


Batch = tuple[int, Callable[[int], "Pending"]]
Pending = list[tuple[Any, Any]]  # event pairs of calls that were launched


def _plan(
    device: Device, runner: Runner, mode: str, effort: Effort, seconds: float
) -> Batch | None:
    """Number of iterations, and what takes a number of them; None where there is no graph."""
    delay = 1.25 * runner.host_seconds + 5e-6
    if mode == "graph":
        return _plan_graph(device, runner, effort, seconds)
    if mode == "cold":
        delay = max(0.0, delay - device.flush_seconds)
    flush = device.flush_seconds if mode == "cold" else 0.0
    each = max(runner.gpu_seconds + flush + delay, runner.host_seconds + _EVENTS)
    return (
        iterations(effort.iterations, each, seconds),
        lambda count: _batch(
            device, runner.prepared.call, count, mode == "cold", delay, each < _LONG
        ),
    )


def _plan_graph(device: Device, runner: Runner, effort: Effort, seconds: float) -> Batch | None:
    call = runner.prepared.call
    if not runner.prepared.capturable:
        runner.no_graph = "cannot be captured: it replays a graph of its own"
        return None
    most = min(_MOST_COPIES, max(1, effort.iterations // LEAST))
    copies = max(1, min(most, math.ceil(_GRAPH_SECONDS / runner.gpu_seconds)))
    try:
        replay, runner.output = device.capture(call, copies)
        for _ in range(3):
            replay()
        device.synchronize()
    except Exception as error:  # whatever a library does that no graph can hold
        runner.no_graph = first_line(error)
        return None
    runner.copies = copies
    replays = iterations(effort.iterations // copies, runner.gpu_seconds * copies, seconds)

    return max(replays, LEAST), lambda count: _batch(
        device, replay, count, False, _REPLAY_DELAY, copies * runner.gpu_seconds < _LONG
    )


def _turn(device: Device, runner: Runner, mode: str, batch: Batch, turn: int, turns: int) -> None:
    total, take = batch
    count = total // turns + (turn < total % turns)
    if not count:
        return
    copies = runner.copies if mode == "graph" else 1
    try:
        with device.span(f"{runner.name} {mode}"):
            marks = take(count)
            if turn % _READ_EVERY == 0:
                runner.states.append(device.state())  # while the GPU is at work
            device.synchronize()
        found = [device.between(begin, end) / copies for begin, end in marks]
    except Exception as error:
        runner.error = first_line(error)
        return
    runner.times.setdefault(mode, []).append(found)


def _batch(
    device: Device, call: Callable[[], Any], count: int, cold: bool, delay: float, lead_in: bool
) -> Pending:
    """Launch `count` calls between events, after one without if there is to be a `lead_in`: what
    the last candidate left in caches and clocks is not for the first of them."""
    marks = [(device.mark(), device.mark()) for _ in range(count)]
    if lead_in:
        call()
    for begin, end in marks:
        if cold:
            device.flush()
        device.delay(delay)
        begin.record()
        call()
        end.record()
    return marks


def first_line(error: BaseException) -> str:
    """What went wrong, in one line of at most 300 characters."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"[:300]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector stays off: it would stop the host in the middle of a batch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def shown(results: Mapping[str, Any], order: Sequence[str] = ("warm", "cold", "graph")) -> float:
    """The median to show of a cell's modes, ms: the first of `order` that was measured."""
    return next((results[m]["p50"] for m in order if "p50" in results.get(m, {})), math.nan)
