"""Asynchronous accesses under way: which units of a memory engines will still write or read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fkjit.interp.core.ptx import Instruction
from fkjit.interp.race.shadow import CHUNK, Shadow


@dataclass
class _Begun:
    """One instruction's accesses, of which `left` units are still under way."""

    units: np.ndarray
    left: int
    ins: Instruction
    write: bool


class Pending:
    """Counts by unit; `busy` by chunk says at a glance whether to look."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self.a_chunk = CHUNK // shadow.unit
        units = -(-shadow.units // self.a_chunk) * self.a_chunk
        self.writes = np.zeros(units, np.int16)
        self.reads = np.zeros(units, np.int16)
        self.busy = np.zeros(units // self.a_chunk, bool)
        self.begun: list[_Begun] = []

    @property
    def count(self) -> int:
        """Operations under way."""
        return len(self.begun)

    def clear(self) -> None:
        """Nothing is under way."""
        self.writes[:], self.reads[:], self.busy[:] = 0, 0, False
        self.begun.clear()

    def begin(self, units: np.ndarray, ins: Instruction, write: bool) -> None:
        """Distinct units that will be accessed."""
        (self.writes if write else self.reads)[units] += 1
        self.busy[units // self.a_chunk] = True
        self.begun.append(_Begun(units, units.size, ins, write))

    def end(self, units: np.ndarray, ins: Instruction, write: bool) -> None:
        """Some of them have been."""
        counts = self.writes if write else self.reads
        counts[units] -= 1
        chunks = units // self.a_chunk
        if units.size > 1:  # once each, where units of a chunk follow one another
            chunks = chunks[np.flatnonzero(np.diff(chunks, append=-1))]
        shape = (-1, self.a_chunk)
        still = self.writes.reshape(shape)[chunks].any(1) | self.reads.reshape(shape)[chunks].any(1)
        self.busy[chunks] = still
        for one in self.begun:
            mine = one.ins is ins and one.write == write and one.left >= units.size
            if mine and (one.units is units or (one.units == units[0]).any()):
                one.left -= units.size
                break
        self.begun = [one for one in self.begun if one.left]

    def near(self, positions: np.ndarray, width: int) -> bool:
        """Whether any of these accesses comes into a chunk where something is under way."""
        chunks = positions // CHUNK
        return any(bool(self.busy[chunks + span].any()) for span in range(max(width // CHUNK, 1)))

    def first(self, units: np.ndarray, write: bool) -> int | None:
        """The first of the units that a read (or write) must not touch yet."""
        busy = self.writes[units] > 0
        if write:
            busy |= self.reads[units] > 0
        found = np.flatnonzero(busy)
        return int(found[0]) if found.size else None

    def whose(self, unit: int) -> tuple[Instruction, bool]:
        """The operation that has this unit, and whether it writes."""
        return next((b.ins, b.write) for b in self.begun if (b.units == unit).any())
