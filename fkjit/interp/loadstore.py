"""ld, st and ldu in every state space, vectors of 2 and 4, and prefetches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fkjit.interp.arena import GLOBAL_WINDOW
from fkjit.interp.cluster import Cluster
from fkjit.interp.decode import OPCODES, Decoder, Step, only, opcode
from fkjit.interp.lanes import Group, distinct
from fkjit.interp.ptx import DTYPE, SIZE, UNSIGNED, Instruction, Mem, Operand, Reg, Sym, words
from fkjit.interp.race import READ, WRITE
from fkjit.interp.shared import LOCAL_WINDOW, OWN_BLOCK, SHARED_WINDOW, SharedMemory

_SPACES = ("global", "shared", "local", "const", "param")
_KNOWN = words(
    "weak relaxed acquire release volatile mmio cta cluster gpu sys ca cg cs lu cv wb wt nc "
    "unified v2 v4 v8 global local const param shared shared::cta shared::cluster param::entry "
    "param::func L1::evict_normal L1::evict_first L1::evict_last L1::no_allocate "
    "L1::evict_unchanged "
    "L2::64B L2::128B L2::256B L2::cache_hint L2::evict_normal L2::evict_first L2::evict_last"
)


_HINTS = words(
    "global local param const L1 L2 tensormap mask L2::evict_last L2::evict_normal "
    "wait launch_dependents"
)
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


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


def _vector(ins: Instruction) -> int:
    return next((count for part, count in _VECTORS.items() if ins.has(part)), 1)


def _check(ins: Instruction) -> None:
    only(ins, (*_KNOWN, ins.type))
    if ins.op.count(ins.type) != 1 or ins.type not in SIZE:
        raise ValueError(f"type .{ins.type}")
    if SIZE[ins.type] * _vector(ins) > 16 and space_of(ins) != "global":
        raise ValueError("32 bytes at once are for .global alone")


@opcode("ld", "ldu")
def ld(d: Decoder, ins: Instruction) -> Step:
    """ld{.space}{.v2,.v4}.type d, [a]: narrow values are extended to the register."""
    _check(ins)
    size, count = SIZE[ins.type], _vector(ins)
    locator = Locator(d, ins, ins.args[1], size * count, False)
    shift = (size * count).bit_length() - 1
    targets = [_loader(d, arg, ins.type) for arg in d.items(ins.args[0])]
    shared, observers = d.machine.memory.shared, d.machine.observers
    local, space = d.machine.memory.local, locator.space

    def run(group: Group) -> None:
        found = locator.locate(group)
        for see in () if found.local else observers:
            see(READ, found.shared, found.position, size * count, group.lanes, ins)
        if found.shared:
            shared.check_initialised(found.position, size * count, group, ins)
        elif found.local and space != "param":  # structs passed by value have padding
            local.check_initialised(found.position, size * count, group, ins)
        if count == 1:
            targets[0](group, found.views[size].take(found.position >> shift))
            return
        rows = _rows(found, size * count).view(UNSIGNED[size]).reshape(-1, count)
        for number, store in enumerate(targets):
            store(group, rows[:, number])

    return by_space(run, locator, locator.base)


def _rows(found: Located, width: int) -> np.ndarray:
    """The bytes of every access; those of 32 bytes in two pieces."""
    if width <= 16:
        return found.views[width].take(found.position >> (width.bit_length() - 1))
    pieces = (found.position >> 4)[:, None] + np.arange(2)
    return found.views[16].take(pieces.reshape(-1))


def _loader(d: Decoder, target: Operand, kind: str) -> Callable[[Group, np.ndarray], None]:
    """How a loaded element gets into its register: sign- or zero-extended."""
    out, size = d.dst(target, None), SIZE[kind]
    if isinstance(target, Reg) and target.sink:
        return lambda group, values: None
    if out.dtype.itemsize == size:
        return lambda group, values: group.put(out, values)
    if kind[0] == "s":
        signed = out.view(f"i{out.dtype.itemsize}")
        narrow = DTYPE[kind]
        return lambda group, values: group.put(signed, values.view(narrow))
    return lambda group, values: group.put(out, values)


@opcode("st")
def st(d: Decoder, ins: Instruction) -> Step:
    """st{.space}{.v2,.v4}.type [a], b: wide registers store their low bytes."""
    if ins.has("async"):
        return OPCODES["st.async"](d, ins)
    _check(ins)
    size, count = SIZE[ins.type], _vector(ins)
    locator = Locator(d, ins, ins.args[0], size * count, True)
    plain = f"b{8 * size}"
    kind = ins.type if ins.type in ("f32", "f64") else plain
    sources = [d.src(arg, kind).view(UNSIGNED[size]) if d.src(arg, kind).flags.c_contiguous
               else d.src(arg, kind) for arg in d.items(ins.args[1])]  # fmt: skip
    shared, shift = d.machine.memory.shared, (size * count).bit_length() - 1
    local, observers = d.machine.memory.local, d.machine.observers

    def run(group: Group) -> None:
        found = locator.locate(group)
        for see in () if found.local else observers:
            see(WRITE, found.shared, found.position, size * count, group.lanes, ins)
        if count == 1:
            found.views[size][found.position >> shift] = group.pick(sources[0])
        else:
            rows = np.empty((found.position.size, count), UNSIGNED[size])
            for number, values in enumerate(sources):
                rows[:, number] = group.pick(values)
            width = size * count
            if width <= 16:
                view = found.views[width]
                view[found.position >> shift] = rows.view(view.dtype).reshape(-1)
            else:
                pieces = (found.position >> 4)[:, None] + np.arange(2)
                found.views[16][pieces] = rows.view(found.views[16].dtype)
        if found.shared:
            shared.written(found.position, size * count)
        elif found.local:
            local.written(found.position, size * count)

    return by_space(run, locator, locator.base)


@opcode("prefetch", "prefetchu", "applypriority", "discard", "pmevent", "griddepcontrol")
def hint(d: Decoder, ins: Instruction) -> Step:
    """Hints to caches, profilers and the next launch change nothing."""
    only(ins, _HINTS)
    return lambda group: None


@opcode("createpolicy")
def createpolicy(d: Decoder, ins: Instruction) -> Step:
    """createpolicy.….b64 d, …: what leaves L2 first changes no value."""
    return d.step(ins, ins.args[0], "u64", lambda out: out.fill(0))


@opcode("isspacep")
def isspacep(d: Decoder, ins: Instruction) -> Step:
    """isspacep.space p, a: whether a generic address lies in a window.

    shared::cta has this block's own addresses only, shared::cluster those of all its cluster.
    """
    space = "cluster" if ins.op[1] == "shared::cluster" else ins.op[1].split("::")[0]
    address = d.src(ins.args[1], "u64")
    first, end = {
        "shared": (SHARED_WINDOW, SHARED_WINDOW + OWN_BLOCK),
        "cluster": (SHARED_WINDOW, LOCAL_WINDOW),
        "local": (LOCAL_WINDOW, 2 * LOCAL_WINDOW),
        "global": (GLOBAL_WINDOW, 1 << 63),
    }[space]
    low, high = np.uint64(first), np.uint64(end)

    def inside(out: np.ndarray) -> None:
        np.logical_and(address >= low, address < high, out)

    return d.step(ins, ins.args[0], "pred", inside)
