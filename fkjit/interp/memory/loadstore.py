"""ld, st and ldu in every state space, vectors of 2 and 4, and prefetches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fkjit.interp.core.accesses import READ, WRITE
from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, SIZE, UNSIGNED, Instruction, Operand, Reg, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import OPCODES, Step, only, opcode
from fkjit.interp.memory.locate import Located, Locator, by_space, space_of
from fkjit.interp.spaces.arena import GLOBAL_WINDOW
from fkjit.interp.spaces.local import LOCAL_WINDOW
from fkjit.interp.spaces.shared import OWN_BLOCK, SHARED_WINDOW

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
    """The bytes of every access; those of 32 bytes in two halves."""
    if width <= 16:
        return found.views[width].take(found.position >> (width.bit_length() - 1))
    halves = (found.position >> 4)[:, None] + np.arange(2)
    return found.views[16].take(halves.reshape(-1))


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
                halves = (found.position >> 4)[:, None] + np.arange(2)
                found.views[16][halves] = rows.view(found.views[16].dtype)
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
