"""Registers that stand for a wgmma's result: followed through copies, filled in when read.

A result becomes register contents only when an ordinary instruction reads it, which is a fault
before the wgmma was waited for. So a chain of wgmma on the same accumulators touches no register,
however often the compiler copies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import Instruction, reads_and_writes
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.guards import guard_mask
from fkjit.interp.machine.opcodes import Step, intercept
from fkjit.interp.wgmma.flow import carriers, copied, unfenced
from fkjit.interp.wgmma.product import Product
from fkjit.interp.wgmma.warpgroup import Warpgroups


@dataclass(eq=False, slots=True)
class Entry:
    """Part `slot` of a product's result, in one register of some lanes (a mask)."""

    product: Product
    slot: int
    lanes: np.ndarray


class Carrier:
    """A register that may stand for results, or be an A operand in flight."""

    __slots__ = ("array", "entries", "inputs", "name", "watchers")

    def __init__(self, name: str, array: np.ndarray, watchers: list[Callable[[], None]]) -> None:
        self.name, self.array, self.watchers = name, array, watchers
        self.entries: list[Entry] = []
        self.inputs: list[Product] = []  # that have it as operand A


class Carriers:
    """All such registers of a kernel, and what ordinary instructions do with them."""

    def __init__(self, d: Decoder) -> None:
        self.d, self.reporter = d, d.machine.reporter
        self.warpgroups = d.part(Warpgroups)
        self.clock = 1  # counts what wgmma instructions do, and writes that need a fence
        self.written: dict[int, int] = {}  # clock of instructions whose results need a fence
        self.suspects = {
            pc for pairs in unfenced(d.function).values() for pc in pairs.values()
        }  # fmt: skip
        self.table = {
            name: Carrier(name, d.registers.raw(name), d.watchers.setdefault(name, []))
            for name in carriers(d.function)
        }
        d.machine.on_start.append(self._clear)

    def _clear(self) -> None:
        for carrier in self.table.values():
            carrier.entries, carrier.inputs = [], []
        self.clock = 1
        self.written.clear()

    # -- ordinary instructions -----------------------------------------------------------------

    def wrapped(self, ins: Instruction, step: Step) -> Step:
        """The step of an instruction, following the results that it copies, reads or destroys."""
        if ins.pc in self.suspects:
            step = self._noted(ins, step)
        reads, writes = self._used(ins)
        if not reads and not writes:
            return step
        pair = copied(ins)
        if pair and reads and writes and self._same_width(*pair):
            return self._copying(ins, step, writes[0], reads[0])

        def run(group: Group) -> object:
            for carrier in reads:
                if carrier.entries:
                    self.materialise(carrier, guard_mask(self.d, ins, group), ins)
            for carrier in writes:
                if carrier.entries or carrier.inputs:
                    self.overwrite(carrier, guard_mask(self.d, ins, group), ins)
            return step(group)

        return run

    def _used(self, ins: Instruction) -> tuple[list[Carrier], list[Carrier]]:
        together = [ins]
        if ins.op[0] == "mma":  # neighbours are executed as one
            following = self.d.function.instructions[ins.pc + 1 :]
            for other in following:
                if other.op[0] != "mma":
                    break
                together.append(other)
        used: tuple[list[Carrier], list[Carrier]] = ([], [])
        for one in together:
            for found, names in zip(used, reads_and_writes(one), strict=True):
                found += [self.table[n] for n in dict.fromkeys(names) if n in self.table]
        return used

    def _same_width(self, target: str, source: str) -> bool:
        return self.table[target].array.itemsize == self.table[source].array.itemsize == 4

    def _noted(self, ins: Instruction, step: Step) -> Step:
        def run(group: Group) -> object:
            if guard_mask(self.d, ins, group).any():
                self.clock += 1
                self.written[ins.pc] = self.clock
            return step(group)

        return run

    def _copying(self, ins: Instruction, step: Step, target: Carrier, source: Carrier) -> Step:
        def run(group: Group) -> object:
            if not (source.entries or target.entries or target.inputs):
                return step(group)
            if target is source:
                return None
            moved = [(e.product, e.slot, _within(e.lanes, group)) for e in source.entries]
            self.overwrite(target, group.mask, ins, [(e, s) for e, s, _ in moved])
            everywhere = False
            for product, slot, lanes in moved:
                if lanes is not None:
                    self._stand(target, product, slot, lanes)
                    everywhere = everywhere or (lanes is product.lanes and lanes is group.mask)
            return None if everywhere else step(group)

        return run

    def _stand(self, carrier: Carrier, product: Product, slot: int, lanes: np.ndarray) -> None:
        carrier.entries.append(Entry(product, slot, lanes))
        product.holders[slot] += 1

    # -- what happens to results -----------------------------------------------------------------

    def materialise(self, carrier: Carrier, mask: np.ndarray, ins: Instruction) -> None:
        """Fill in a register that lanes of `mask` read; a fault if they have not waited."""
        kept: list[Entry] = []
        for entry in carrier.entries:
            if not (entry.lanes & mask).any():
                kept.append(entry)
                continue
            product = entry.product
            flying = product.flying(entry.lanes, self.warpgroups)
            self._fault_if(flying & mask, "reads", carrier, product, ins)
            if product.matrix is not None:
                self._fill(carrier, entry, flying)
            if flying.any():
                kept.append(Entry(product, entry.slot, flying))
            else:
                product.holders[entry.slot] -= 1
        carrier.entries = kept
        for watcher in carrier.watchers:
            watcher()

    def _fill(self, carrier: Carrier, entry: Entry, flying: np.ndarray) -> None:
        product, row = entry.product, entry.product.rows()[entry.slot]
        if entry.lanes is product.lanes and product.finished:
            self.warpgroups.put(carrier.array, product.which, row)
            return
        values = np.zeros_like(carrier.array)
        self.warpgroups.put(values, product.which, row)
        np.copyto(carrier.array, values, where=entry.lanes & ~flying)

    def overwrite(
        self, carrier: Carrier, mask: np.ndarray, ins: Instruction,
        by: list[tuple[Product, int]] | None = None,
    ) -> None:  # fmt: skip
        """Lanes of `mask` get another value (`by`: a copy of one of these results)."""
        kept: list[Entry] = []
        for entry in carrier.entries:
            product, slot = entry.product, entry.slot
            lost = entry.lanes & mask
            if not lost.any():
                kept.append(entry)
                continue
            last = product.holders[slot] == 1 and not product.consumed
            if last and (product, slot) not in (by or []):
                self._fault_if(product.flying(lost, self.warpgroups), "overwrites", carrier,
                               product, ins)  # fmt: skip
            rest = entry.lanes & ~mask
            if rest.any():
                kept.append(Entry(product, slot, rest))
            else:
                product.holders[slot] -= 1
        carrier.entries = kept
        if carrier.inputs:
            carrier.inputs = [one for one in carrier.inputs if not one.finished]
            for one in carrier.inputs:
                self._fault_if(one.flying(one.lanes & mask, self.warpgroups),
                               "overwrites operand A in", carrier, one, ins)  # fmt: skip

    def _fault_if(
        self, lanes: np.ndarray, does: str, carrier: Carrier, product: Product, ins: Instruction
    ) -> None:
        if self.d.machine.checked and lanes.any():
            raise self.reporter.fault(
                "register of a wgmma in flight",
                f"this {does} {carrier.name}, which the wgmma at {product.ins.location} still uses "
                "(wgmma.wait_group must stand before it)",
                ins, np.flatnonzero(lanes),
            )  # fmt: skip


def _within(lanes: np.ndarray, group: Group) -> np.ndarray | None:
    """Those of `lanes` that are in the group, the same array for all; None for none."""
    if group.full or group.mask is lanes:
        return lanes
    inside = lanes & group.mask
    if (inside == lanes).all():
        return lanes
    return inside if inside.any() else None


@intercept
def follow(d: Decoder, ins: Instruction, step: Step) -> Step:
    """Every instruction of a kernel with wgmma; wgmma's own look at their registers themselves."""
    if ins.op[0] == "wgmma" or not carriers(d.function):
        return step
    return d.part(Carriers).wrapped(ins, step)
