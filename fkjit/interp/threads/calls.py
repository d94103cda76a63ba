"""Calls of functions that are not inlined: recursive ones, and those reached by their address.

A call copies the arguments into a new frame on the thread's stack, saves the registers of the body
that calls, and goes to the function; `%return` comes back behind the call, where `%resume` takes
the results, the registers and the frame back.
"""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.callgraph import addresses_of
from fkjit.interp.core.inline import FRAME, STACK, STACK_BYTES
from fkjit.interp.core.lanes import Group, distinct
from fkjit.interp.core.ptx import Frame, Imm, Instruction, Mem, Operand, Vec
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.guards import guard_mask
from fkjit.interp.machine.opcodes import Step, control
from fkjit.interp.memory.locate import Locator


class Frames:
    """The stacks of all threads."""

    def __init__(self, d: Decoder) -> None:
        self.machine, self.local = d.machine, d.machine.memory.local
        self.frames = list(d.function.frames.values())
        self.by_address = addresses_of(d.function, d.machine.memory.symbols)
        self.pointer = d.registers.typed(FRAME.name, "u64")
        self.first = d.machine.address(STACK)
        self.depth = np.zeros(d.machine.layout.lanes, np.int64)
        self.returns: list[np.ndarray] = []  # program counters, by depth
        d.machine.on_start.append(self._start_batch)

    def _start_batch(self) -> None:
        self.pointer[:] = self.first
        self.depth[:] = 0

    def enter(self, lanes: np.ndarray, used: int, needed: int, back: int, ins: Instruction) -> None:
        """A new frame behind one of `used` bytes; the return goes to `back`."""
        top = self.pointer[lanes] + np.uint64(used)
        if int(top.max()) + needed > self.first + STACK_BYTES:
            deep = int(self.depth[lanes].max()) + 1
            detail = f"{STACK_BYTES:,} bytes of stack do not hold {deep:,} calls"
            raise self.machine.reporter.fault("stack overflow", detail, ins, lanes)
        self.pointer[lanes] = top
        for level in distinct(self.depth[lanes]).tolist():
            if level == len(self.returns):
                self.returns.append(np.zeros(self.depth.size, np.int64))
            self.returns[level][lanes[self.depth[lanes] == level]] = back
        self.depth[lanes] += 1

    def leave(self, lanes: np.ndarray) -> np.ndarray:
        """The program counters at which lanes go on."""
        self.depth[lanes] -= 1
        back = np.zeros(lanes.size, np.int64)
        for level in distinct(self.depth[lanes]).tolist():
            here = self.depth[lanes] == level
            back[here] = self.returns[level][lanes[here]]
        return back

    def copy(self, lanes: np.ndarray, to: np.ndarray, of: np.ndarray, size: int) -> None:
        """Copy bytes between local offsets of the same thread."""
        byte = np.arange(size)
        start = self.local.start[lanes][:, None] + byte
        self.local.raw[start + to[:, None]] = self.local.raw[start + of[:, None]]
        self.local.written((start + to[:, None]).reshape(-1), 1)


class _Saved:
    """The registers of one body, saved by depth while it waits for the return of a call."""

    def __init__(self, d: Decoder, frame: Frame | None) -> None:
        names = frame.registers if frame else []
        self.registers = [d.registers.raw(name) for name in names]
        self.watchers = [d.watchers.setdefault(n, []) for n in d.watched.intersection(names)]
        self.levels: list[list[np.ndarray]] = []

    def save(self, lanes: np.ndarray, depth: np.ndarray) -> None:
        for level in distinct(depth[lanes]).tolist():
            while len(self.levels) <= level:
                self.levels.append([np.zeros_like(register) for register in self.registers])
            here = lanes[depth[lanes] == level]
            for kept, register in zip(self.levels[level], self.registers, strict=True):
                kept[here] = register[here]

    def restore(self, lanes: np.ndarray, depth: np.ndarray) -> None:
        for level in distinct(depth[lanes]).tolist():
            here = lanes[depth[lanes] == level]
            for kept, register in zip(self.levels[level], self.registers, strict=True):
                register[here] = kept[here]
        for watchers in self.watchers:
            for watcher in watchers:
                watcher()


def _buffers(operand: Operand) -> list[tuple[Mem, int]]:
    """Pairs of (variable, bytes)."""
    assert isinstance(operand, Vec)
    found = []
    for at in range(0, len(operand.items), 2):
        memory, size = operand.items[at : at + 2]
        assert isinstance(memory, Mem) and isinstance(size, Imm)
        found.append((memory, size.value))
    return found


def _offsets(d: Decoder, ins: Instruction, memory: Mem) -> np.ndarray:
    """The local offsets of a variable: one a lane, or one for all."""
    return Locator(d, ins, Mem(memory.base, 0), 1, False).base


@control("%call")
def call(d: Decoder, ins: Instruction) -> Step:
    """%call target, own frame, arguments."""
    frames, machine, following = d.part(Frames), d.machine, ins.pc + 1
    own = d.immediate(ins.args[1])
    caller = frames.frames[own] if own >= 0 else None
    used = caller.bytes if caller else 0
    target = d.src(ins.args[0], "u64")
    saved = _saved(d, own)
    given = [(_offsets(d, ins, m), m.offset, size) for m, size in _buffers(ins.args[2])]

    def enter(lanes: np.ndarray, address: int) -> None:
        frame = frames.by_address.get(address)
        if frame is None or [size for _, size in frame.parameters] != [s for _, _, s in given]:
            detail = f"a call of {address:#x}, which is no function with such parameters"
            raise machine.reporter.fault("bad call", detail, ins, lanes)
        sources = [
            (np.broadcast_to(base, frames.depth.shape)[lanes].astype(np.int64) + offset, size)
            for base, offset, size in given
        ]
        saved.save(lanes, frames.depth)
        frames.enter(lanes, used, frame.bytes, following, ins)
        here = frames.pointer[lanes].astype(np.int64)
        for (source, size), (at, _) in zip(sources, frame.parameters, strict=True):
            frames.copy(lanes, here + at, source, size)
        mask = np.zeros(frames.depth.size, bool)
        mask[lanes] = True
        machine.push(machine.target(frame.entry), mask)

    def run(group: Group) -> None:
        lanes, chosen = group.lanes, group.pick(target)
        for address in distinct(chosen).tolist():
            enter(lanes[chosen == address], address)

    return run


@control("%resume")
def resume(d: Decoder, ins: Instruction) -> Step:
    """%resume own frame, results: what follows a call."""
    frames = d.part(Frames)
    own = d.immediate(ins.args[0])
    used = frames.frames[own].bytes if own >= 0 else 0
    saved = _saved(d, own)
    taken = [(_offsets(d, ins, m), m.offset, size) for m, size in _buffers(ins.args[1])]

    def run(group: Group) -> int:
        lanes = group.lanes
        results = frames.pointer[lanes].astype(np.int64)
        frames.pointer[lanes] -= np.uint64(used)
        saved.restore(lanes, frames.depth)
        at = 0
        for base, offset, size in taken:
            to = np.broadcast_to(base, frames.depth.shape)[lanes].astype(np.int64) + offset
            frames.copy(lanes, to, results + at, size)
            at += size
        return ins.pc + 1

    return run


def _saved(d: Decoder, own: int) -> _Saved:
    """One for each body, shared by its calls."""
    table = d.part(_Table)
    if own not in table.saved:
        frames = d.part(Frames).frames
        table.saved[own] = _Saved(d, frames[own] if own >= 0 else None)
    return table.saved[own]


class _Table:
    def __init__(self, d: Decoder) -> None:
        self.saved: dict[int, _Saved] = {}


@control("%return")
def return_(d: Decoder, ins: Instruction) -> Step:
    """The end of a function that was called."""
    frames, machine = d.part(Frames), d.machine

    def run(group: Group) -> None:
        ending = guard_mask(d, ins, group)
        rest = group.mask & ~ending
        if rest.any():
            machine.push(ins.pc + 1, rest)
        lanes = np.flatnonzero(ending)
        back = frames.leave(lanes)
        for pc in distinct(back).tolist():
            mask = np.zeros_like(ending)
            mask[lanes[back == pc]] = True
            machine.push(pc, mask)

    return run
