"""Blocks of a cluster that may end before the others have done with their shared memory."""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.accesses import WRITE
from fkjit.interp.machine.machine import Machine
from fkjit.interp.race.finder import Race
from fkjit.interp.race.shadow import Conflict, knows_by_clock


class Endings:
    """A block's end is like a write to all its shared memory: what others did must come before."""

    def __init__(self, machine: Machine, race: Race) -> None:
        self.machine, self.race, self.layout = machine, race, machine.layout
        self.ended = np.zeros(self.layout.ctas, bool)
        machine.on_start.append(self._clear)
        machine.on_exit.append(self._check)

    def _clear(self) -> None:
        self.ended[:] = False

    def _check(self) -> None:
        living = np.bincount(self.layout.cta[self.machine.alive], minlength=self.layout.ctas) > 0
        for block in np.flatnonzero(~living & ~self.ended).tolist():
            self.ended[block] = True
            if block + self.layout.first_cta < self.layout.blocks:
                self._end(block)

    def _end(self, block: int) -> None:
        shadow, clocks = self.race.shared, self.race.clocks
        size = self.machine.memory.shared.size
        units = np.arange(block * size >> shadow.shift, (block + 1) * size >> shadow.shift)
        first = block * self.layout.padded
        knows = knows_by_clock(
            clocks, self.race.release(np.arange(first, first + self.layout.threads))
        )
        number = self.layout.first_cta + block

        def known(at: np.ndarray, who: np.ndarray, when: np.ndarray) -> np.ndarray:
            return (who // clocks.width == number) | knows(at, who, when)

        found = shadow.conflict(WRITE, units, np.full(units.size, -1), known)
        if found is not None:
            raise self._error(found, int(units[found.at]) << shadow.shift)

    def _error(self, found: Conflict, position: int) -> Exception:
        machine, layout, width = self.machine, self.layout, self.race.clocks.width
        ins = machine.function.instructions[self.race.report.events[found.stamp - 1]]
        cta, thread = found.actor // width - layout.first_cta, found.actor % width
        lane = cta * layout.padded + min(thread, layout.padded - 1)
        shared = machine.memory.shared
        rank = position // shared.size % int(np.prod(layout.cluster))
        detail = (
            f"{shared.describe(position % shared.size)} of the cluster's block {rank}, which "
            "nothing keeps from ending before (a cluster barrier must stand before its end)"
        )
        kind = "access to the shared memory of a block that may have ended"
        return machine.reporter.fault(kind, detail, ins, np.array([lane]))
