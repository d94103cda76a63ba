"""Random programs of accesses and synchronisation, against a plain, slow oracle."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp.core.accesses import ATOMIC, READ, WRITE
from fkjit.interp.core.lanes import Layout
from fkjit.interp.core.ptx import Function, Instruction
from fkjit.interp.core.report import Reporter
from fkjit.interp.race.finder import Race

BLOCKS, THREADS, BYTES = 2, 64, 64
LANES = BLOCKS * THREADS


def instruction(pc: int, *op: str) -> Instruction:
    return Instruction(op, (), None, f"k.cu:{pc}", ".".join(op), pc)


LOAD, STORE, ATOM = (
    instruction(0, "ld", "shared", "u8"),
    instruction(1, "st", "shared", "u8"),
    instruction(2, "atom", "shared", "add", "u32"),
)
ENGINE = instruction(3, "cp", "async", "bulk", "tensor")
OF = {READ: LOAD, WRITE: STORE, ATOMIC: ATOM}


def new_race() -> Race:
    layout = Layout((BLOCKS, 1, 1), (THREADS, 1, 1), BLOCKS)
    memory = SimpleNamespace(
        shared=SimpleNamespace(size=BYTES, describe=lambda at: f"byte {at}"),
        globals=SimpleNamespace(allocations=[ARRAY], raw=np.zeros(BYTES, np.uint8)),
    )
    function = Function("k", True, instructions=[LOAD, STORE, ATOM, ENGINE])
    machine = SimpleNamespace(
        layout=layout, memory=memory, function=function, on_start=[], on_exit=[], observers=[],
        engine_observers=[], alive=layout.live(), reporter=Reporter("k", layout),
    )  # fmt: skip
    race = Race(machine, function)  # type: ignore[arg-type]
    race.start_launch()
    for listener in machine.on_start:
        listener()
    return race


ARRAY = SimpleNamespace(writable=True, start=0, size=BYTES, describe=lambda at: f"byte {at}")


class Oracle:
    """Every access ever made, and full vector clocks of threads and engines."""

    def __init__(self, actors: int) -> None:
        self.knows = np.zeros((actors, actors), np.int64)
        self.time = np.ones(actors, np.int64)
        self.history: dict[int, list[tuple[int, int, str]]] = {}  # byte -> actor, time, kind

    def _conflict(self, actor: int, kind: str, byte: int, view: np.ndarray) -> bool:
        for who, when, other in self.history.get(byte, ()):
            harmless = {kind, other} in ({READ}, {ATOMIC})
            if who != actor and not harmless and view[who] < when:
                return True
        return False

    def access(self, kind: str, accesses: list[tuple[int, range]]) -> bool:
        """All at once; whether any of them races."""
        bad = False
        for actor, span in accesses:
            view = self.knows[actor]
            bad |= any(self._conflict(actor, kind, byte, view) for byte in span)
        if kind == WRITE:
            bytes_of: dict[int, int] = {}
            for actor, span in accesses:
                bad |= any(bytes_of.setdefault(byte, actor) != actor for byte in span)
        for actor, span in accesses:
            self.note(actor, kind, span)
        return bad

    def note(self, actor: int, kind: str, span: range) -> None:
        for byte in span:
            self.history.setdefault(byte, []).append((actor, int(self.time[actor]), kind))

    def release(self, actors: np.ndarray) -> np.ndarray:
        view = self.knows[actors].max(0)
        view[actors] = self.time[actors]
        self.time[actors] += 1
        return view

    def acquire(self, actors: np.ndarray, view: np.ndarray) -> None:
        self.knows[actors] = np.maximum(self.knows[actors], view)

    def meet(self, actors: np.ndarray) -> None:
        self.acquire(actors, self.release(actors))


def some_lanes(rng: np.random.Generator, block: int) -> np.ndarray:
    first = block * THREADS
    count = int(rng.choice([1, 2, 5, 32, 64]))
    return np.sort(rng.choice(np.arange(first, first + THREADS), count, replace=False))


def one_step(
    rng: np.random.Generator, race: Race, oracle: Oracle, clocks: list, shared: bool
) -> bool:
    """The same step for both; whether the oracle saw a race. Race raises by itself."""
    block = int(rng.integers(BLOCKS))
    choice = rng.random()
    if choice < 0.45:
        kind = str(rng.choice([READ, READ, WRITE, ATOMIC]))
        lanes = some_lanes(rng, block)
        width = int(rng.choice([1, 2, 4, 16]))
        at = rng.integers(0, BYTES // width, lanes.size) * width
        if rng.random() < 0.7:  # mostly everybody in its own place
            at = (
                (np.arange(lanes.size) * width + int(rng.integers(4)) * 16) % BYTES // width * width
            )
        at = at + block * BYTES if shared else at
        spans = [range(first, first + width) for first in at.tolist()]
        racy = oracle.access(kind, list(zip(lanes.tolist(), spans, strict=True)))
        expect(racy, race.access, kind, shared, at, width, lanes, OF[kind])
        return racy
    if choice < 0.6:
        lanes = np.arange(LANES) if rng.random() < 0.5 else np.arange(THREADS) + block * THREADS
        mask = np.zeros(LANES, bool)
        mask[lanes] = True
        race.meet(mask, race.clocks.layout.cta)
        for each in {int(lane) // THREADS for lane in lanes}:
            oracle.meet(np.arange(THREADS) + each * THREADS)
    elif choice < 0.75:
        warps = rng.choice(LANES // 32, int(rng.integers(1, 5)), replace=False)
        mask = np.zeros((LANES // 32, 32), bool)
        mask[warps] = True
        race.meet(mask.reshape(-1), np.arange(LANES) // 32)
        for warp in warps:
            oracle.meet(np.arange(32) + warp * 32)
    elif choice < 0.87:
        lanes = some_lanes(rng, block)
        clocks.append((race.release(lanes), oracle.release(lanes)))
    elif clocks:
        ours, theirs = clocks[int(rng.integers(len(clocks)))]
        lanes = some_lanes(rng, int(rng.integers(BLOCKS)))
        race.acquire(lanes, ours)
        oracle.acquire(lanes, theirs)
    return False


def expect(racy: bool, call, *arguments) -> None:  # type: ignore[no-untyped-def]
    if racy:
        with pytest.raises(SanitizerError, match="race: byte"):
            call(*arguments)
    else:
        call(*arguments)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("part", range(6))
def test_random_programs_race_where_the_oracle_says_so(part: int, shared: bool) -> None:
    raced, steps = 0, 0
    for seed in range(part * 40, part * 40 + 40):
        rng = np.random.default_rng(seed)
        race, oracle, clocks = new_race(), Oracle(LANES), []
        for _ in range(60):
            steps += 1
            if one_step(rng, race, oracle, clocks, shared):
                raced += 1
                break
    assert raced > 20 and steps > 100


@pytest.mark.parametrize("seed", range(30))
def test_engines_are_ordered_by_what_issued_and_what_waits(seed: int) -> None:
    """Reads and writes of engines between accesses of threads, finished in any order."""
    rng = np.random.default_rng(1000 + seed)
    race, oracle = new_race(), Oracle(LANES + 8)
    under_way: list = []
    for number in range(40):
        lanes = some_lanes(rng, 0)
        span = range(int(rng.integers(4)) * 16, 64)[:16]
        busy = [(w, engine) for _, engine, w, s in under_way if s == span]
        choice = rng.random()
        if choice < 0.3 and len(under_way) < 4:
            write = bool(rng.random() < 0.5)
            engine = LANES + number % 8
            view = oracle.knows[lanes].max(0)
            view[lanes] = oracle.time[lanes]
            kind = WRITE if write else READ
            racy = any(oracle._conflict(engine, kind, byte, view) for byte in span)
            racy |= any(write or w for w, _ in busy)
            arguments = (lanes, ("tma", number), np.array([span[0]]), 16, ENGINE, write)
            if racy:
                with pytest.raises(SanitizerError, match=r"race|missing wait|missing fence"):
                    race.start(*arguments)
                return
            race.proxy_fence(np.arange(LANES))
            under_way.append((race.start(*arguments), engine, write, span))
        elif choice < 0.6 and under_way:
            operation, engine, write, s = under_way.pop(int(rng.integers(len(under_way))))
            clock = race.finish(operation)
            oracle.note(engine, WRITE if write else READ, s)
            race.acquire(lanes, clock)
            view = np.zeros(LANES + 8, np.int64)
            view[engine] = oracle.time[engine]
            oracle.acquire(lanes, view)
            oracle.time[engine] += 1
        elif choice < 0.8:
            mask = np.arange(LANES) < THREADS
            race.meet(mask, race.clocks.layout.cta)
            race.proxy_fence(np.flatnonzero(mask))
            oracle.meet(np.arange(THREADS))
        else:
            kind = READ if rng.random() < 0.5 else WRITE
            lane = lanes[:1]
            racy = oracle.access(kind, [(int(lane[0]), span)])
            waits = any(w or kind == WRITE for w, _ in busy)
            if racy or waits:
                with pytest.raises(SanitizerError, match=r"race|missing wait"):
                    race.access(kind, True, np.array([span[0]]), 16, lane, OF[kind])
                return
            race.access(kind, True, np.array([span[0]]), 16, lane, OF[kind])
            race.proxy_fence(lane)
