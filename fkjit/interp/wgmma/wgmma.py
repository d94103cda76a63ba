"""wgmma: matrix products of warpgroups that run on their own until they are waited for.

The product is computed, and shared memory read, by the wait_group that covers it: as late as the
rules allow, so that a buffer filled anew too early shows in the numbers.
"""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.core.report import where
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, control
from fkjit.interp.race.finder import race_of
from fkjit.interp.spaces.shared import INITIALISED
from fkjit.interp.wgmma.issue import Issue
from fkjit.interp.wgmma.operand import tile
from fkjit.interp.wgmma.product import Product
from fkjit.interp.wgmma.registers import Carriers
from fkjit.interp.wgmma.warpgroup import Warpgroups, converge_warpgroup


class Flight:
    """All wgmma of the batch that have not been waited for, in order of issue."""

    def __init__(self, d: Decoder) -> None:
        self.machine, self.race = d.machine, race_of(d)
        self.shared = d.machine.memory.shared
        self.warpgroups, self.carriers = d.part(Warpgroups), d.part(Carriers)
        count = self.warpgroups.count
        self.products: list[Product] = []
        self.commits = np.zeros(count, np.int64)  # groups committed, by warpgroup
        self.fenced = np.zeros(count, np.int64)  # clock of the last fence; 0: none
        self.waited = np.zeros(count, np.int64)  # clock of the last wait
        d.machine.on_start.append(self._clear)
        d.machine.on_exit.append(self._ended)

    def _clear(self) -> None:
        self.products.clear()
        for counts in (self.commits, self.fenced, self.waited):
            counts[:] = 0

    def tick(self, clocks: np.ndarray, which: np.ndarray) -> None:
        """Note the time of a fence or a wait."""
        self.carriers.clock += 1
        clocks[which] = self.carriers.clock

    def commit(self, which: np.ndarray) -> None:
        """wgmma.commit_group."""
        for product in self.products:
            mine = self._mine(product, which) & (product.group < 0)
            product.group[mine] = self.commits[product.which[mine]]
        self.commits[which] += 1

    def wait(self, which: np.ndarray, pending: int) -> None:
        """wgmma.wait_group: all but the newest `pending` groups of each warpgroup are done."""
        for product in self.products:
            due = self._mine(product, which) & (product.group >= 0) & ~product.done
            due &= product.group < self.commits[product.which] - pending
            if due.any():
                self._land(product, np.flatnonzero(due))
        self.products = [product for product in self.products if not product.finished]
        self.tick(self.waited, which)

    def _mine(self, product: Product, which: np.ndarray) -> np.ndarray:
        chosen = np.zeros(self.warpgroups.count, bool)
        chosen[which] = True
        return chosen[product.which]

    def _land(self, product: Product, due: np.ndarray) -> None:
        form = product.form
        a = product.a[due] if form.in_registers else (
            self._read(product, product.a[due], form.a, form.a_transposed)
        )  # fmt: skip
        b = self._read(product, product.b[due], form.b, form.b_transposed)
        product.land(due, a, b, self.machine.checks.short_sums)
        race = self.race
        if race is not None:
            for index in due.tolist():
                lanes = self.warpgroups.lanes[product.which[index]]
                race.acquire(lanes, race.finish(*product.races[index]))

    def _read(
        self, product: Product, positions: np.ndarray, kind: str, transposed: bool
    ) -> np.ndarray:
        self._still_there(product, positions)
        return tile(kind, self.shared.views[16].take(positions >> 4), transposed)

    def _still_there(self, product: Product, positions: np.ndarray) -> None:
        """No asynchronous copy may have begun to overwrite an operand."""
        shared = self.shared
        if not shared.checked:
            return
        changed = shared.init_views[16].take(positions >> 4) != INITIALISED[16]
        if changed.any():
            lanes = self.warpgroups.lanes[product.which[changed.any(1)]].reshape(-1)
            raise self.machine.reporter.fault(
                "operand of a wgmma in flight overwritten",
                "an asynchronous copy into its shared memory began before wgmma.wait_group",
                product.ins, lanes,
            )  # fmt: skip

    def _ended(self) -> None:
        """Threads have ended: nothing of theirs may be in flight."""
        if not self.machine.checked:
            return
        for product in self.products:
            lanes = product.flying(product.lanes, self.warpgroups) & ~self.machine.alive
            if lanes.any():
                raise self.machine.reporter.fault(
                    "wgmma never waited for", "its threads end without wgmma.wait_group",
                    product.ins, np.flatnonzero(lanes),
                )  # fmt: skip


@control("wgmma")
def wgmma(d: Decoder, ins: Instruction) -> Step:
    """wgmma.fence, .commit_group, .wait_group n, .mma_async."""
    flight, kind = d.part(Flight), ins.op[1]
    if kind == "mma_async":
        return _multiply(d, ins, flight)
    if ins.op[2:] != ("sync", "aligned") or kind not in ("fence", "commit_group", "wait_group"):
        raise ValueError(f"modifier .{'.'.join(ins.op[1:])}")
    pending = d.immediate(ins.args[0]) if kind == "wait_group" else 0

    def act(group: Group, which: np.ndarray) -> None:
        if kind == "fence":
            flight.tick(flight.fenced, which)
        elif kind == "commit_group":
            flight.commit(which)
        else:
            flight.wait(which, pending)

    return converge_warpgroup(d, ins, act)


def _multiply(d: Decoder, ins: Instruction, flight: Flight) -> Step:
    """wgmma.mma_async.sync.aligned.shape{.satfinite}.dtype.atype.btype d, a, b, scale-d, …"""
    issue = Issue(d, ins)

    def act(group: Group, which: np.ndarray) -> None:
        if d.machine.checked:
            _check_fence(d, ins, flight, issue, which)
        flight.products += issue.products(group, which)

    return converge_warpgroup(d, ins, act)


def _check_fence(
    d: Decoder, ins: Instruction, flight: Flight, issue: Issue, which: np.ndarray
) -> None:
    bad = which[flight.fenced[which] == 0]
    detail = "no wgmma.fence stands before the first wgmma.mma_async"
    if not bad.size and issue.unfenced:
        stale = which[flight.waited[which] > flight.fenced[which]]
        for name, pc in issue.unfenced.items():
            late = stale[flight.carriers.written.get(pc, 0) > flight.waited[stale]]
            if late.size:
                bad = late
                detail = (
                    f"{name} was computed at {where(d.function.instructions[pc])} and no "
                    "wgmma.fence stands in between"
                )
    if bad.size:
        lanes = flight.warpgroups.lanes[bad].reshape(-1)
        raise d.machine.reporter.fault("missing wgmma.fence", detail, ins, lanes)
