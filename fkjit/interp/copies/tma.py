"""cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, prefetches: copies through tensor maps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fkjit.interp.copies.bulk import SIGNAL, Side, Signal, spread, update_of
from fkjit.interp.copies.tile import (
    ALIGNMENT,
    Tile,
    fill_of,
    rounded_to_tf32,
    swizzled,
    tile,
)
from fkjit.interp.copies.transfers import CHUNK, Chunks, Transfer, Transfers
from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import Instruction, Mem, Operand
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, opcode
from fkjit.interp.spaces.arena import GLOBAL_WINDOW, BoundMap, in_hole
from fkjit.interp.spaces.tensor_map import ALIGN, BYTES, number_of

_TYPES = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    **dict.fromkeys(("and", "or", "xor"), ("u32", "s32", "u64", "s64")),
}


@dataclass(frozen=True)
class _Form:
    """The parts of an instruction's name."""

    rank: int
    kind: str  # load, store, reduce, prefetch
    space: str  # of the box
    multicast: bool = False
    operation: str = ""


def _form(ins: Instruction) -> _Form:
    """Read the name; raises ValueError for what is not supported (im2col, gather, Blackwell's)."""
    parts = [part for part in ins.op[1:] if part not in ("L2::cache_hint", "tile")]
    multicast = "multicast::cluster" in parts
    parts = [part for part in parts if part != "multicast::cluster"]
    rank = next(int(part[0]) for part in parts if part in ("1d", "2d", "3d", "4d", "5d"))
    at = parts.index(f"{rank}d")
    head, tail = parts[:at], parts[at + 1 :]
    if head == ["async", "bulk", "prefetch", "tensor"] and tail == ["L2", "global"]:
        return _Form(rank, "prefetch", "")
    if head == ["async", "bulk", "tensor"]:
        if tail[1:] == ["global", SIGNAL] and tail[0] in ("shared::cta", "shared::cluster"):
            return _Form(rank, "load", tail[0], multicast)
        if tail == ["global", "shared::cta", "bulk_group"] and not multicast:
            return _Form(rank, "store", tail[1])
    reduces = head == ["reduce", "async", "bulk", "tensor"] and tail[2] in _TYPES and not multicast
    if reduces and tail == ["global", "shared::cta", tail[2], "bulk_group"]:
        return _Form(rank, "reduce", tail[1], operation=tail[2])
    raise ValueError(f"form .{'.'.join(ins.op[1:])}")


class _Tensor:
    """The operand [map, {coordinates}]."""

    def __init__(self, d: Decoder, ins: Instruction, mem: Operand, form: _Form) -> None:
        assert isinstance(mem, Mem)
        self.d, self.ins, self.form = d, ins, form
        self.base, self.offset = d.src(mem.base, "u64"), mem.offset
        self.coordinates = [d.src(item, "s32") for item in d.items(mem.extra[0])]
        if len(mem.extra) != 1 or len(self.coordinates) != form.rank:
            raise ValueError(f"coordinates of a {form.rank}d copy")

    def of(self, group: Group) -> list[tuple[BoundMap, list[int]]]:
        """Every lane's tensor map and coordinates."""
        addresses = (group.pick(self.base).astype(np.int64) + self.offset).tolist()
        columns = [group.pick(values).tolist() for values in self.coordinates]
        rows = [list(row) for row in zip(*columns, strict=True)]
        lanes = group.lanes
        maps = [self._map(a, lanes[i : i + 1]) for i, a in enumerate(addresses)]
        for i, (found, row) in enumerate(zip(maps, rows, strict=True)):
            self._check_start(found, row, lanes[i : i + 1])
        return list(zip(maps, rows, strict=True))

    def _check_start(self, found: BoundMap, at: list[int], lane: np.ndarray) -> None:
        """An H200 stops at these with "illegal instruction"; the PTX ISA does not speak of them."""
        fault, name = self.d.machine.reporter.fault, found.place.name
        byte = at[0] * found.map.itemsize
        if byte % CHUNK:
            detail = f"coordinate {at[0]} of dimension 0 is byte {byte:,} of a row of {name}; it "
            detail += f"must be a multiple of {CHUNK} bytes"
            raise fault("misaligned tensor coordinate", detail, self.ins, lane)
        if self.form.kind in ("store", "reduce") and min(at) < 0:
            axis = next(axis for axis, where in enumerate(at) if where < 0)
            detail = f"coordinate {at[axis]} of dimension {axis} of {name}: only loads may begin "
            detail += "before the tensor"
            raise fault("negative tensor coordinate", detail, self.ins, lane)

    def _map(self, address: int, lane: np.ndarray) -> BoundMap:
        fault, memory = self.d.machine.reporter.fault, self.d.machine.memory.globals
        if address % ALIGN:
            detail = f"its address {address:#x} is not a multiple of {ALIGN}"
            raise fault("misaligned tensor map", detail, self.ins, lane)
        place = memory.place_of(address, address + BYTES, False)
        if address < GLOBAL_WINDOW or place is None:
            detail = f"there are no {BYTES} bytes of a tensor map at address {address:#x}"
            raise fault("bad tensor map", detail, self.ins, lane)
        at = address - place.address + place.start
        number = number_of(memory.raw[at : at + BYTES].tobytes())
        if number is None or number >= len(memory.tensor_maps):
            detail = f"byte {address - place.address} of {place.name} holds no tensor map"
            raise fault("bad tensor map", detail, self.ins, lane)
        found = memory.tensor_maps[number]
        if len(found.map.dims) != self.form.rank:
            detail = f"a {self.form.rank}d copy; the map of {found.place.name} has "
            detail += f"{len(found.map.dims)} dimensions"
            raise fault("bad tensor map", detail, self.ins, lane)
        return found


@opcode("cp.async.bulk.tensor")
def tensor(d: Decoder, ins: Instruction) -> Step:
    """Load [box], [map, {c}], [mbarrier]{, mask}; store and reduce [map, {c}], [box]; prefetch."""
    form = _form(ins)
    if form.kind == "prefetch":
        operand = _Tensor(d, ins, ins.args[0], form)
        return lambda group: operand.of(group)
    return _load(d, ins, form) if form.kind == "load" else _store(d, ins, form)


def _check_alignment(d: Decoder, ins: Instruction, address: int, mode: str, lane: int) -> None:
    if address % ALIGNMENT[mode]:
        shared = d.machine.memory.shared
        detail = f"the box begins at {shared.describe(address % (1 << 24))}; it must be a multiple "
        detail += f"of {ALIGNMENT[mode]:,} in shared memory with swizzle {mode!r}"
        raise d.machine.reporter.fault("misaligned tensor copy", detail, ins, np.array([lane]))


def _check_ends(
    d: Decoder, ins: Instruction, bound: BoundMap, part: Tile, lane: int, write: bool
) -> None:
    """The whole chunks that a store writes must be the array's own bytes; and what is read through
    a map with an origin."""
    place, globals_ = bound.place, d.machine.memory.globals
    at = bound.start - place.start + part.tensor
    wrong = (at < 0) | (at > place.size - part.width)
    if place.holes is not None and at.size:
        wrong |= in_hole(place.holes, at, part.width)
    if globals_.checked and wrong.any():
        kind = "write" if write else "read"
        detail = f"{part.width}-byte {kind} at {place.describe(int(at[wrong][0]))}"
        if write:
            detail += f": tensor copies write the last {CHUNK} bytes of a row as a whole"
        raise d.machine.reporter.fault(
            f"out-of-bounds global {kind}", detail, ins, np.array([lane])
        )


def _load(d: Decoder, ins: Instruction, form: _Form) -> Step:
    transfers, operand = d.part(Transfers), _Tensor(d, ins, ins.args[1], form)
    target = Side(d, ins, ins.args[0], form.space, True)
    signal = Signal(d, ins, ins.args[2], ins.args[3] if form.multicast else None)

    def one(
        lane: int, bound: BoundMap, at: list[int], address: int, barrier: int,
        ranks: list[int] | None,
    ) -> None:  # fmt: skip
        mode = bound.map.swizzle
        _check_alignment(d, ins, address, mode, lane)
        part = tile(bound.map, at)
        if bound.map.origin:
            _check_ends(d, ins, bound, part, lane, False)
        copies = len(ranks) if ranks else 1
        whole = swizzled(address + part.chunks, mode)
        box = target.chunks(lane, spread(whole, ranks), CHUNK)
        fill = None if part.whole else (box, fill_of(bound.map))
        there = Chunks(True, np.zeros(0, np.int64), part.width)
        if part.box.size:
            there = target.chunks(
                lane, spread(swizzled(address + part.box, mode), ranks), part.width
            )
        source = Chunks(False, np.tile(bound.start + part.tensor, copies), part.width)
        heard = signal.places(lane, barrier, ranks)
        transfers.start(
            Transfer(
                ins, np.array([lane]), ("tma", barrier), source, there, fill=fill,
                convert=rounded_to_tf32 if bound.map.dtype == "tf32" else None,
                signals=[(place, part.size) for place in heard],
            )
        )  # fmt: skip

    def run(group: Group) -> None:
        barriers = signal.locator.locate(group).position.tolist()
        rows = zip(
            group.lanes.tolist(), operand.of(group), target.addresses(group).tolist(), barriers,
            signal.ranks(group), strict=True,
        )  # fmt: skip
        for lane, (bound, at), address, barrier, ranks in rows:
            one(lane, bound, at, address, barrier, ranks)

    return run


def _store(d: Decoder, ins: Instruction, form: _Form) -> Step:
    """store and reduce: elements of the box that are outside the tensor are dropped."""
    transfers, operand = d.part(Transfers), _Tensor(d, ins, ins.args[0], form)
    source = Side(d, ins, ins.args[1], form.space, False)

    def one(lane: int, bound: BoundMap, at: list[int], address: int) -> None:
        tensor, who = bound.map, np.array([lane])
        fault = d.machine.reporter.fault
        if not bound.place.writable:
            detail = f"a tensor copy to {bound.place.name}"
            raise fault("write to a read-only argument", detail, ins, who)
        if form.operation and tensor.dtype not in _TYPES[form.operation]:
            detail = f".{form.operation} of elements of type {tensor.dtype}"
            raise fault("bad tensor reduction", detail, ins, who)
        _check_alignment(d, ins, address, tensor.swizzle, lane)
        part = tile(tensor, at, tensor.itemsize if form.operation else None, stores=True)
        _check_ends(d, ins, bound, part, lane, True)
        whole = swizzled(address + part.chunks, tensor.swizzle)
        source.chunks(lane, whole, CHUNK)
        if not part.box.size:
            return
        box = source.chunks(lane, swizzled(address + part.box, tensor.swizzle), part.width)
        there = Chunks(False, bound.start + part.tensor, part.width)
        update = update_of(form.operation, tensor.dtype) if form.operation else None
        transfers.start(Transfer(ins, who, ("bulk", lane), box, there, update=update))

    def run(group: Group) -> None:
        rows = zip(
            group.lanes.tolist(), operand.of(group), source.addresses(group).tolist(), strict=True
        )
        for lane, (bound, at), address in rows:
            one(lane, bound, at, address)

    return run
