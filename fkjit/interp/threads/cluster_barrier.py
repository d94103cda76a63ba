"""barrier.cluster.arrive and .wait: the threads of a cluster's blocks meet in two steps."""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.lanes import Group, distinct
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.guards import guard_mask
from fkjit.interp.machine.opcodes import Step, control, only
from fkjit.interp.memory.cluster import Cluster
from fkjit.interp.race.clocks import Clock
from fkjit.interp.race.finder import Race, race_of


class ClusterBarriers:
    """The hardware barrier of every cluster: who has arrived, who may pass, who waits where."""

    def __init__(self, d: Decoder) -> None:
        self.machine, self.race, layout = d.machine, race_of(d), d.machine.layout
        self.cluster = layout.cta // d.part(Cluster).size  # of every lane
        self.clusters = int(self.cluster[-1]) + 1
        self.arrived = np.zeros(layout.lanes, bool)  # in the phase under way
        self.passed = np.zeros(layout.lanes, bool)  # their phase is complete; no wait yet
        self.waiting: dict[int, tuple[Instruction, np.ndarray]] = {}
        self.clocks: dict[int, Clock | None] = {}  # by cluster, of the phase under way
        self.complete: dict[int, Clock | None] = {}
        d.machine.on_start.append(self._clear)
        d.machine.on_exit.append(self.release)
        d.machine.waiting.append(self._who)

    def _clear(self) -> None:
        self.arrived[:], self.passed[:] = False, False
        for table in (self.waiting, self.clocks, self.complete):
            table.clear()

    def _who(self) -> list[tuple[Instruction, np.ndarray]]:
        entries = [(ins, np.flatnonzero(mask)) for ins, mask in self.waiting.values()]
        return [entry for entry in entries if entry[1].size]

    def arrive(self, lanes: np.ndarray, ins: Instruction, releases: bool) -> None:
        """Lanes (a mask) arrive; what they know is known to all who wait, if `releases`."""
        again = lanes & (self.arrived | self.passed)
        if again.any():
            detail = "the thread has arrived before and has not waited since"
            raise self.machine.reporter.fault(
                "cluster barrier out of turn", detail, ins, np.flatnonzero(again)
            )
        self.arrived |= lanes
        race = self.race
        if race is not None:  # a relaxed arrival after a fence releases too
            self._tell(race, lanes if releases else lanes & (race.flags.fenced >= 0))
        self.release()

    def _tell(self, race: Race, lanes: np.ndarray) -> None:
        cta = self.machine.layout.cta
        for block in distinct(cta[lanes]).tolist():
            mine = np.flatnonzero(lanes & (cta == block))
            cluster = int(self.cluster[mine[0]])
            self.clocks[cluster] = race.join(self.clocks.get(cluster), race.release(mine))

    def wait(self, lanes: np.ndarray, ins: Instruction) -> np.ndarray:
        """Lanes (a mask) wait; returns those that may go on at once."""
        early = lanes & ~(self.arrived | self.passed)
        if early.any():
            detail = "the thread waits without having arrived"
            raise self.machine.reporter.fault(
                "cluster barrier out of turn", detail, ins, np.flatnonzero(early)
            )
        ready = lanes & self.passed
        self._pass(ready)
        _, before = self.waiting.get(ins.pc, (ins, np.zeros_like(lanes)))
        self.waiting[ins.pc] = ins, before | (lanes & ~ready)
        return ready

    def release(self) -> None:
        """Complete the phase of clusters whose threads have all arrived (or ended)."""
        here = self.arrived & self.machine.alive
        if not here.any():
            return
        arrived = np.bincount(self.cluster[here], minlength=self.clusters)
        living = np.bincount(self.cluster[self.machine.alive], minlength=self.clusters)
        done = (arrived == living) & (arrived > 0)
        if not done.any():
            return
        for cluster in np.flatnonzero(done).tolist():
            self.complete[cluster] = self.clocks.pop(cluster, None)
        inside = self.arrived & done[self.cluster]
        self.passed |= inside
        self.arrived &= ~inside
        for pc, (ins, mask) in self.waiting.items():
            free = mask & self.passed
            if free.any():
                self.waiting[pc] = ins, mask & ~free
                self._pass(free)
                self.machine.push(pc + 1, free)

    def _pass(self, lanes: np.ndarray) -> None:
        self.passed &= ~lanes
        race = self.race
        if race is not None and lanes.any():
            for cluster in distinct(self.cluster[lanes]).tolist():
                mine = np.flatnonzero(lanes & (self.cluster == cluster))
                race.acquire(mine, self.complete.get(cluster))


@control("barrier.cluster")
def barrier_cluster(d: Decoder, ins: Instruction) -> Step:
    """barrier.cluster.arrive{.release,.relaxed}{.aligned}, .wait{.acquire}{.aligned}."""
    barriers, arrives = d.part(ClusterBarriers), ins.op[2] == "arrive"
    kinds = ("arrive", "release", "relaxed") if arrives else ("wait", "acquire")
    only(ins, ("cluster", "aligned", *kinds))

    def arrive(group: Group) -> int:
        lanes = guard_mask(d, ins, group)
        if lanes.any():
            barriers.arrive(lanes, ins, not ins.has("relaxed"))
        return ins.pc + 1

    def wait(group: Group) -> None:
        lanes = guard_mask(d, ins, group)
        on = group.mask & ~lanes | barriers.wait(lanes, ins)
        if on.any():
            d.machine.push(ins.pc + 1, on)

    return arrive if arrives else wait
