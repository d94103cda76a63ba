"""What a run looks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Checks:
    """Which faults the interpreter finds; the rest of a kernel's behaviour is the same.

    mem: accesses out of bounds, misaligned, of uninitialised memory; barriers and collectives that
    not all threads reach. race: accesses that nothing orders. banks: wavefronts of shared memory
    are counted (`Stats.banks`); with `bank_limit`, more than so many times the ideal number for one
    instruction is a fault. race implies mem.

    short_sums: wgmma of e4m3 adds with as few bits as Hopper's tensor cores have, which takes some
    ten times as long; else in fp32.
    """

    mem: bool = True
    race: bool = False
    banks: bool = False
    bank_limit: float | None = None
    short_sums: bool = False

    def __post_init__(self) -> None:
        if self.race and not self.mem:
            object.__setattr__(self, "mem", True)
