"""Where an instruction's address operand leads: a state space, and checked positions in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fkjit.interp.core.lanes import Group, distinct
from fkjit.interp.core.ptx import Instruction, Mem, Operand, Reg, Sym
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step
from fkjit.interp.memory.cluster import Cluster
from fkjit.interp.spaces.arena import GLOBAL_WINDOW
from fkjit.interp.spaces.local import LOCAL_WINDOW
from fkjit.interp.spaces.shared import OWN_BLOCK, SHARED_WINDOW, SharedMemory

_SPACES = ("global", "shared", "local", "const", "param")


def space_of(ins: Instruction) -> str:
    """The state space an instruction names, or "generic"."""
    for part in ins.op[1:]:
        if part == "shared::cluster":
            return "cluster"
        if part.split("::")[0] in _SPACES:
            return part.split("::")[0]
    return "generic"


@dataclass
class Located:
    """Where an access goes: an array seen as elements of 1 to 16 bytes, and byte positions."""

    views: dict[int, np.ndarray]
    position: np.ndarray
    shared: bool
    local: bool = False


class Base:
    """An address register: its values' range, kept until the register or the group changes.

    Neighbouring accesses mostly differ only in their constant offset.
    """

    def __init__(self, register: np.ndarray) -> None:
        self.register = register
        self.group: Group | None = None
        self.values, self.positions = register, register
        self.low = self.high = self.bits = 0

    def touch(self) -> None:
        """The register has been written."""
        self.group = None

    def refresh(self, group: Group, shared: SharedMemory | None) -> None:
        """Look at the group's values; positions in shared memory too if `shared` is given."""
        if self.group is group:
            return
        values = group.pick(self.register)
        self.low, self.high = int(np.minimum.reduce(values)), int(np.maximum.reduce(values))
        self.bits = int(np.bitwise_or.reduce(values))
        self.values, self.group = values, group
        if shared is not None:
            start = shared.start if group.full else shared.start[group.lanes]
            self.positions = start + (values if values.itemsize == 4 else values.view(np.int64))


class Locator:
    """Turns the address operand of an instruction into positions, checked."""

    def __init__(self, d: Decoder, ins: Instruction, mem: Operand, width: int, write: bool) -> None:
        assert isinstance(mem, Mem)
        self.memory, self.ins, self.width, self.write = d.machine.memory, ins, width, write
        self.space = space_of(ins)
        narrow = d.registers.width(mem.base) == 4 or (
            self.space in ("shared", "cluster") and isinstance(mem.base, Sym)
        )
        self.cluster = d.part(Cluster) if self.space in ("generic", "cluster") else None
        kind = "u32" if narrow else "u64"
        self.base = d.src(mem.base, kind)
        self.signed_offset = mem.offset
        self.offset = self.base.dtype.type(mem.offset & ((1 << (32 if narrow else 64)) - 1))
        self.local_parameter = isinstance(mem.base, Sym) and mem.base.name in (
            d.machine.memory.local.offsets
        )
        self.range = self._range(d, mem)

    def _range(self, d: Decoder, mem: Mem) -> Base | None:
        """What is known of the base register; shared by the instructions that use it."""
        if not isinstance(mem.base, Reg) or self.base.size == 1:
            return None
        if self.space in ("local", "param", "cluster"):
            return None
        kept = d.bases.setdefault((mem.base.name, self.space), Base(self.base))
        if kept.touch not in d.watchers.setdefault(mem.base.name, []):
            d.watchers[mem.base.name].append(kept.touch)
        return kept

    def locate(self, group: Group) -> Located:
        """The positions of the group's lanes; raises SanitizerError."""
        if self.range is not None:
            known = self._known(group, self.range)
            if known is not None:
                return known
        address = group.pick(self.base)
        if self.offset:
            address = address + self.offset
        space = self.space
        if space == "generic":
            space, address = self._resolve(address, group)
        memory = self.memory
        if space == "shared":
            at = memory.shared.index(address, self.width, group, self.ins, self.write)
            return Located(memory.shared.views, at, True)
        if space == "cluster" and self.cluster is not None:
            at = self.cluster.index(address, self.width, group, self.ins, self.write)
            return Located(memory.shared.views, at, True)
        if space == "local" or (space == "param" and self.local_parameter):
            at = memory.local.index(address, self.width, group, self.ins, self.write)
            return Located(memory.local.views, at, False, local=True)
        if address.dtype != np.uint64:
            address = address.astype(np.uint64)
        at = memory.globals.index(address, self.width, group, self.ins, self.write)
        return Located(memory.globals.views, at, False)

    def _known(self, group: Group, base: Base) -> Located | None:
        """The short way: all lanes within one variable or array, and aligned; else None."""
        shared = self.memory.shared if self.space == "shared" else None
        base.refresh(group, shared)
        offset = self.signed_offset
        if (base.bits | offset) & (self.width - 1):
            return None
        low, end = base.low + offset, base.high + offset + self.width
        if shared is not None:
            if not shared.within(low, end):
                return None
            return Located(
                shared.views, base.positions + offset if offset else base.positions, True
            )
        arena = self.memory.globals
        place = arena.place_of(low, end, self.write)
        if place is None:
            return None
        shift = np.int64(place.start - place.address + offset)
        return Located(arena.views, base.values.view(np.int64) + shift, False)

    def locate_bytes(self, group: Group, size: int) -> np.ndarray:
        """Arena offsets of global accesses that read only the first `size` bytes of their width."""
        address = group.pick(self.base) + self.offset
        arena = self.memory.globals
        if size == self.width:
            return arena.index(address, size, group, self.ins, False)
        first = arena.index(address, 1, group, self.ins, False)
        for byte in range(1, size):
            arena.index(address + np.uint64(byte), 1, group, self.ins, False)
        if (address & np.uint64(self.width - 1)).any():
            arena.index(address, self.width, group, self.ins, False)
        return first

    def _resolve(self, address: np.ndarray, group: Group) -> tuple[str, np.ndarray]:
        """The window of generic addresses; all lanes of an access have to be in one."""
        low, high = int(address.min()), int(address.max())
        if low >= GLOBAL_WINDOW:
            return "global", address
        if low >= SHARED_WINDOW and high < LOCAL_WINDOW:
            space = "shared" if high < SHARED_WINDOW + OWN_BLOCK else "cluster"
            return space, address - np.uint64(SHARED_WINDOW)
        if low >= LOCAL_WINDOW and high < 2 * LOCAL_WINDOW:
            return "local", address - np.uint64(LOCAL_WINDOW)
        if high >= GLOBAL_WINDOW and low >= SHARED_WINDOW:
            raise self.memory.globals.reporter.fault(
                "mixed generic access", "lanes address different state spaces",
                self.ins, group.lanes,
            )  # fmt: skip
        return "global", address


def by_space(step: Step, locator: Locator, base: np.ndarray) -> Step:
    """Run a generic access once for each window that its lanes address."""
    if locator.space != "generic" or base.size == 1:
        return step

    def run(group: Group) -> None:
        window = np.minimum(group.pick(base) >> np.uint64(44), np.uint64(16))
        if (window == window[0]).all():
            step(group)
            return
        for one in distinct(window).tolist():
            mask = np.zeros(group.mask.size, bool)
            mask[group.lanes[window == one]] = True
            step(Group(mask, -1))

    return run
