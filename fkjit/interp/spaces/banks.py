"""Shared memory's banks: how many wavefronts each instruction needs, and how many it had to need.

Shared memory has 32 banks of 4-byte words. One wavefront serves every word that no other word of
the same bank is in the way of; a word that several lanes read is served once:

    bytes of a lane   phases of a warp        ideal
    1, 2, 4           one, of 32 lanes        1
    8                 two, of 16 lanes        2
    16                four, of 8 lanes        4      ldmatrix, stmatrix: a matrix is a phase

A phase needs as many wavefronts as its fullest bank has distinct words; phases without an active
lane need none. Atomics count every lane, since lanes that meet at one word take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from fkjit.errors import SanitizerError
from fkjit.interp.core.accesses import ATOMIC
from fkjit.interp.core.lanes import distinct
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.core.report import where

BANKS, WORD, WARP = 32, 4, 32
MAX_KNOWN = 20_000  # patterns of addresses kept with their counts


@dataclass(frozen=True)
class BankLine:
    """What one kind of instruction of one line did to the banks, over a whole launch."""

    kernel: str  # the launch's title: "attention.flash fp16 head_dim=64 …"
    location: str  # "kernels_cu/attention/flash.cu:120"
    instruction: str  # "ld.shared.v4.f32"
    accesses: int  # by warps
    wavefronts: int
    ideal: int  # wavefronts without a conflict

    @property
    def ratio(self) -> float:
        """Wavefronts to ideal ones: 1.0 is free of conflicts."""
        return self.wavefronts / self.ideal


def wavefronts(
    positions: np.ndarray, width: int, lanes: np.ndarray, atomic: bool = False
) -> tuple[int, int, int]:
    """(accesses, wavefronts, ideal) of one access of `width` bytes by `lanes`, warps together.

    `positions`: bytes, of which 0 is in bank 0. `lanes`: 32 to a warp.
    """
    phases = max(1, width // WORD)
    phase = lanes // (WARP // phases)  # numbered through all warps
    words = positions // WORD
    if width > WORD:
        words = (words[:, None] + np.arange(width // WORD)).ravel()
        keys = np.repeat(phase, width // WORD)
    else:
        keys = phase
    if not atomic:
        both = distinct((keys << 40) | words)
        keys, words = both >> 40, both & ((1 << 40) - 1)
    counts = np.bincount(keys * BANKS + words % BANKS)
    counts = np.pad(counts, (0, -counts.size % BANKS)).reshape(-1, BANKS).max(1)
    return distinct(lanes // WARP).size, int(counts.sum()), int(np.count_nonzero(counts))


class Banks:
    """An observer that counts wavefronts by instruction."""

    def __init__(self) -> None:
        self.counts: dict[int, tuple[Instruction, list[int]]] = {}  # by program counter
        self._known: dict[object, tuple[int, int, int]] = {}  # loops repeat patterns, shifted

    def see(
        self, kind: str, shared: bool, positions: np.ndarray, width: int, lanes: np.ndarray,
        ins: Instruction,
    ) -> None:  # fmt: skip
        """Count one access."""
        if not shared or lanes.size == 0:
            return
        _, total = self.counts.setdefault(ins.pc, (ins, [0, 0, 0]))
        first, atomic = int(positions[0]), kind == ATOMIC
        pattern = blake2b((positions - first).tobytes(), digest_size=16)
        pattern.update(lanes.tobytes())
        key = (pattern.digest(), first % (BANKS * WORD), width, atomic)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > MAX_KNOWN:
                self._known.clear()
            found = self._known[key] = wavefronts(positions, width, lanes, atomic)
        total[:] = [a + b for a, b in zip(total, found, strict=True)]

    def lines(self, title: str) -> tuple[BankLine, ...]:
        """The figures by line and instruction, the worst ratio first."""
        merged: dict[tuple[str, str], list[int]] = {}
        for ins, counts in self.counts.values():
            total = merged.setdefault((where(ins), ".".join(ins.op)), [0, 0, 0])
            total[:] = [a + b for a, b in zip(total, counts, strict=True)]
        found = [BankLine(title, *key, *counts) for key, counts in merged.items()]
        return tuple(sorted(found, key=lambda line: (-line.ratio, line.location)))

    def gate(self, title: str, limit: float) -> None:
        """SanitizerError when an instruction needs more than `limit` times its ideal wavefronts."""
        every = [
            BankLine(title, where(ins), ".".join(ins.op), *counts)
            for ins, counts in self.counts.values()
        ]
        over = [line for line in every if line.ratio > limit]
        if not over:
            return
        worst = max(over, key=lambda line: line.ratio)
        more = f" (and {len(over) - 1} more instructions)" if len(over) > 1 else ""
        hint = "pad the rows by 4 to 16 bytes, or swizzle them, so that lanes meet other banks"
        raise SanitizerError(
            f"{title}: bank conflicts: {worst.wavefronts:,} wavefronts where {worst.ideal:,} would "
            f"do: {worst.ratio:.3g} times, limit {limit:g}{more}\n"
            f"    at {worst.location}\n    {worst.instruction}, {worst.accesses:,} accesses by "
            f"warps\n    hint: {hint}",
            kind="bank conflicts",
            kernel=title,
            location=worst.location,
            hint=hint,
        )
