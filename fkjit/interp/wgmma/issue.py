"""Issuing a wgmma: what it will read, on which accumulators it goes on, and whether it may."""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.lanes import WARP, Group
from fkjit.interp.core.ptx import Instruction, Operand, Vec, registers_in
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.race.finder import race_of
from fkjit.interp.wgmma.flow import unfenced
from fkjit.interp.wgmma.form import ROWS, parse_form
from fkjit.interp.wgmma.operand import chunk_addresses, fragment
from fkjit.interp.wgmma.product import Addend, Product, from_registers
from fkjit.interp.wgmma.registers import Carrier, Carriers, Entry
from fkjit.interp.wgmma.warpgroup import WARPGROUP, Warpgroups


class Issue:
    """One wgmma.mma_async instruction, decoded."""

    def __init__(self, d: Decoder, ins: Instruction) -> None:
        self.d, self.ins, self.form = d, ins, parse_form(ins)
        self.warpgroups, self.carriers = d.part(Warpgroups), d.part(Carriers)
        self.shared, self.reporter = d.machine.memory.shared, d.machine.reporter
        self.unfenced = unfenced(d.function).get(ins.pc, {})
        self.results = self._carriers(ins.args[0])
        self.inputs = self._carriers(ins.args[1]) if self.form.in_registers else []
        if len({carrier.name for carrier in self.results}) != self.form.registers:
            raise ValueError("a register of D named twice")
        self.a = None if self.form.in_registers else d.src(ins.args[1], "b64")
        self.b = d.src(ins.args[2], "b64")
        self.scale, self.inverted = d.registers.predicate(ins.args[3])

    def _carriers(self, operand: Operand) -> list[Carrier]:
        if not isinstance(operand, Vec) or any(len(registers_in(i)) != 1 for i in operand.items):
            raise ValueError("operands")
        found = [self.carriers.table[name] for name in registers_in(operand)]
        if any(carrier.array.dtype != np.uint32 for carrier in found):
            raise ValueError("registers of 32 bits")
        return found

    def products(self, group: Group, which: np.ndarray) -> list[Product]:
        """The products of warpgroups `which`, one for those that accumulate on the same one."""
        mask = group.mask
        for carrier in self.inputs:
            if carrier.entries:
                self.carriers.materialise(carrier, mask, self.ins)
        keep = self._uniform(self.scale, which, "scale-d") != self.inverted
        made = []
        for part, before in self._accumulators(which, mask):
            some = part if part.size == which.size else np.searchsorted(which, part)
            kept = keep if part.size == which.size else keep[some]
            lanes = mask if part.size == which.size else self.warpgroups.mask(part)
            made.append(self._product(part, lanes, before, kept))
        return made

    def _product(
        self, which: np.ndarray, lanes: np.ndarray, before: Product | None, keep: np.ndarray
    ) -> Product:
        form = self.form
        if self.a is None:
            values = [self.warpgroups.pick(one.array, which) for one in self.inputs]
            a = fragment(form.a, values)
        else:
            a = self._chunks(self.a, which, ROWS, form.a_transposed)
        b = self._chunks(self.b, which, form.n, form.b_transposed)
        product = Product(self.ins, form, which, lanes, a, b, self._addend(which, before, keep))
        self._start(product)
        for carrier in self.inputs:
            carrier.inputs = [*(one for one in carrier.inputs if not one.finished), product]
        for slot, carrier in enumerate(self.results):
            self._replace(carrier, Entry(product, slot, lanes))
        return product

    def _addend(self, which: np.ndarray, before: Product | None, keep: np.ndarray) -> Addend | None:
        if not keep.any():
            return None
        kept = None if keep.all() else keep
        if before is None:
            rows = np.stack([self.warpgroups.pick(one.array, which) for one in self.results])
            return Addend(from_registers(self.form, rows), keep=kept)
        same = before.which.size == which.size
        return Addend(None, before, None if same else np.searchsorted(before.which, which), kept)

    def _replace(self, carrier: Carrier, entry: Entry) -> None:
        """D stands for the new product from now on."""
        rest: list[Entry] = []
        for old in carrier.entries:
            left = old.lanes & ~entry.lanes
            if left.any():
                rest.append(Entry(old.product, old.slot, left))
            else:
                old.product.holders[old.slot] -= 1
        carrier.entries = [*rest, entry]
        entry.product.holders[entry.slot] += 1
        if carrier.inputs:
            self.carriers.overwrite(carrier, np.zeros_like(entry.lanes), self.ins)

    # -- accumulators ----------------------------------------------------------------------------

    def _accumulators(
        self, which: np.ndarray, mask: np.ndarray
    ) -> list[tuple[np.ndarray, Product | None]]:
        """The warpgroups by the product that their accumulators stand for (None: registers)."""
        if not any(carrier.entries for carrier in self.results):
            return [(which, None)]
        parts: list[tuple[np.ndarray, Product | None]] = []
        left = which
        for entry in list(self.results[0].entries):
            first = entry.lanes[self.warpgroups.lanes[left, 0]]
            if first.any() and self._goes_on(entry.product, left[first]):
                entry.product.consumed = True
                parts.append((left[first], entry.product))
                left = left[~first]
        if left.size:
            rest = mask if left.size == which.size else self.warpgroups.mask(left)
            for carrier in self.results:
                if carrier.entries:
                    self.carriers.materialise(carrier, rest, self.ins)
            parts.append((left, None))
        return parts

    def _goes_on(self, product: Product, which: np.ndarray) -> bool:
        """Whether D is a product's whole result, in order, of the same shape and type."""
        one, other = product.form, self.form
        if (one.n, one.k, one.to) != (other.n, other.k, other.to):
            return False
        lanes = self.warpgroups.lanes[which]
        for slot, carrier in enumerate(self.results):
            if not any(
                entry.product is product
                and entry.slot == slot
                and (entry.lanes is product.lanes or entry.lanes[lanes].all())
                for entry in carrier.entries
            ):
                return False
        return True

    # -- operands --------------------------------------------------------------------------------

    def _uniform(self, register: np.ndarray, which: np.ndarray, name: str) -> np.ndarray:
        """A value that all threads of a warpgroup have to agree on, by warpgroup."""
        values = self.warpgroups.pick(register, which)
        agree = (values == values[:, :1]).all(1)
        if self.d.machine.checked and not agree.all():
            lanes = self.warpgroups.lanes[which[~agree]]
            detail = f"the threads of a warpgroup give different values of {name}"
            raise self.reporter.fault("bad wgmma", detail, self.ins, lanes.reshape(-1))
        return values[:, 0]

    def _chunks(
        self, register: np.ndarray, which: np.ndarray, rows: int, transposed: bool
    ) -> np.ndarray:
        """Positions in shared memory of an operand's chunks: [which, chunks]; faults."""
        descriptors = self._uniform(register, which, "a descriptor")
        addresses = chunk_addresses(descriptors, rows, transposed)
        first = self.warpgroups.lanes[which, 0]
        positions = addresses + self.shared.start[first][:, None]
        if self.shared.checked:
            self._check(addresses, positions, first)
        return positions

    def _check(self, addresses: np.ndarray, positions: np.ndarray, first: np.ndarray) -> None:
        shared, group = self.shared, Group(np.ones(1, bool), 1)
        lanes = np.repeat(first, addresses.shape[1])
        if not shared.within(int(addresses.min()), int(addresses.max()) + 16):
            shared.index(addresses.reshape(-1), 16, group, self.ins, False, lanes)
        shared.check_initialised(positions.reshape(-1), 16, group, self.ins, lanes)

    def _start(self, product: Product) -> None:
        """Tell the race checker what each warp will read: all of B, its own 16 rows of A."""
        race = race_of(self.d)
        if race is None:
            return
        layout = self.d.machine.layout
        for index, number in enumerate(product.which.tolist()):
            lanes = self.warpgroups.lanes[number]
            engine = ("wgmma", int(layout.cta[lanes[0]]), int(layout.thread[lanes[0]]) // WARPGROUP)
            operations = []
            for warp in range(WARPGROUP // WARP):
                read = product.b[index]
                if not self.form.in_registers:
                    rows = product.a[index].reshape(WARPGROUP // WARP, -1)[warp]
                    read = np.concatenate([rows, read])
                mine = lanes[WARP * warp : WARP * warp + WARP]
                operations.append(race.start(mine, engine, read, 16, self.ins, write=False))
            product.races.append(operations)
