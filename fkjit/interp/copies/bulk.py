"""cp.async.bulk and cp.reduce.async.bulk between global and shared memory, and their groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fkjit.interp.copies.transfers import CHUNK, Chunks, Transfer, Transfers, Update
from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, SIZE, Instruction, Operand
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import OPCODES, Step, only, opcode
from fkjit.interp.memory.atomics import combine
from fkjit.interp.memory.cluster import Cluster
from fkjit.interp.memory.locate import Locator
from fkjit.interp.spaces.shared import OWN_BLOCK, OWN_BLOCK_BITS

SIGNAL = "mbarrier::complete_tx::bytes"
_SHARED = ("shared::cta", "shared::cluster")
_REDUCTIONS = {
    "global": {
        "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"),
        "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
        "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
        "inc": ("u32",), "dec": ("u32",),
        "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"),
    },
    "shared::cluster": {
        "add": ("u32", "s32", "u64"), "min": ("u32", "s32"), "max": ("u32", "s32"),
        "inc": ("u32",), "dec": ("u32",), "and": ("b32",), "or": ("b32",), "xor": ("b32",),
    },
}  # fmt: skip


class Side:
    """One memory operand of a copy: spans of bytes in one state space."""

    def __init__(self, d: Decoder, ins: Instruction, mem: Operand, space: str, write: bool) -> None:
        self.d, self.ins, self.space, self.write = d, ins, space, write
        self.shared, self.cluster = d.machine.memory.shared, d.part(Cluster)
        half = replace(ins, op=(ins.op[0], space), _registers=None)
        self.locator = Locator(d, half, mem, 8, write)

    def addresses(self, group: Group) -> np.ndarray:
        """The first byte of every lane's span."""
        first = group.pick(self.locator.base)
        return first + self.locator.offset

    def chunks(self, lane: int, address: np.ndarray, width: int) -> Chunks:
        """Checked chunks of `width` bytes at these addresses (int64), for one lane."""
        mask = np.zeros(self.d.machine.layout.lanes, bool)
        mask[lane] = True
        group, memory = Group(mask, -1), self.d.machine.memory
        if self.space == "global":
            address = address.view(np.uint64)
            found = memory.globals.index(address, width, group, self.ins, self.write)
            return Chunks(False, found, width)
        who = np.full(address.size, lane)
        index = self.cluster.index if self.space == "shared::cluster" else self.shared.index
        return Chunks(True, index(address, width, group, self.ins, self.write, who), width)

    def span(self, lane: int, address: int, size: int) -> Chunks:
        """`size` bytes from an address on."""
        if not size:
            return Chunks(self.space != "global", np.zeros(0, np.int64), CHUNK)
        return self.chunks(lane, address + np.arange(0, size, CHUNK), CHUNK)


class Signal:
    """The mbarrier operand of a copy and, for a multicast, the blocks that its mask names."""

    def __init__(self, d: Decoder, ins: Instruction, mem: Operand, mask: Operand | None) -> None:
        self.d, self.ins, self.cluster = d, ins, d.part(Cluster)
        half = replace(ins, op=("cp", "shared::cluster"), _registers=None)
        self.locator = Locator(d, half, mem, 8, True)
        self.mask = None if mask is None else d.src(mask, "u16")

    def ranks(self, group: Group) -> list[list[int] | None]:
        """For every lane the ranks of a multicast; None: the block that the address names."""
        if self.mask is None:
            return [None] * group.lanes.size
        masks = group.pick(self.mask).tolist()
        if not all(masks):
            fault = self.d.machine.reporter.fault
            raise fault("bad multicast", "the mask names no block", self.ins, group.lanes)
        return [[rank for rank in range(16) if mask >> rank & 1] for mask in masks]

    def places(self, lane: int, position: int, ranks: list[int] | None) -> list[int]:
        """Positions of the mbarriers that hear of a lane's copy."""
        if ranks is None:
            return [position]
        lanes = np.full(len(ranks), lane)
        blocks = self.cluster.blocks(np.array(ranks), lanes, self.ins)
        size = self.d.machine.memory.shared.size
        return [block * size + position % size for block in blocks.tolist()]


def spread(address: np.ndarray, ranks: list[int] | None) -> np.ndarray:
    """Addresses of the same offsets in the blocks of a multicast, one block after the other."""
    if ranks is None:
        return address
    offset = address & (OWN_BLOCK - 1)
    return np.concatenate([offset | (rank + 1) << OWN_BLOCK_BITS for rank in ranks])


@dataclass(frozen=True)
class _Form:
    """The parts of an instruction's name."""

    target: str
    source: str
    signals: bool
    multicast: bool
    reduction: tuple[str, str] | None  # operation, type


def _form(ins: Instruction) -> _Form:
    """Read the name; raises ValueError for what does not exist or is not supported."""
    reduces = ins.op[1] == "reduce"
    parts = list(ins.op[4:] if reduces else ins.op[3:])
    target, source, completion = parts[:3]
    rest = [part for part in parts[3:] if part != "L2::cache_hint"]
    multicast = "multicast::cluster" in rest
    rest = [part for part in rest if part != "multicast::cluster"]
    reduction = None
    if reduces:
        operation, *noftz, kind = rest
        allowed = _REDUCTIONS[target].get(operation, ())
        needs = ["noftz"] if (operation, kind) in (("add", "f16"), ("add", "bf16")) else []
        if kind not in allowed or noftz != needs:
            raise ValueError(f"reduction .{'.'.join(rest)}")
        reduction, rest = (operation, kind), []
    ways = [("global", "shared::cta", "bulk_group"), ("shared::cluster", "shared::cta", SIGNAL)]
    if not reduces:
        ways += [(space, "global", SIGNAL) for space in _SHARED]
    if (target, source, completion) not in ways or rest or (multicast and source != "global"):
        raise ValueError(f"form .{'.'.join(parts)}")
    return _Form(target, source, completion == SIGNAL, multicast, reduction)


def update_of(operation: str, kind: str) -> Update:
    """What a reduction of elements of a PTX type computes."""
    function: Callable[..., np.ndarray] = combine(operation, kind)
    return Update(DTYPE[kind], function)


@opcode("cp.async.bulk")
def bulk(d: Decoder, ins: Instruction) -> Step:
    """cp{.reduce}.async.bulk.*: groups, prefetches, tensors, copies."""
    at = 4 if ins.op[1] == "reduce" else 3
    kind = ins.op[at]
    if kind == "tensor" or ins.op[at : at + 2] == ("prefetch", "tensor"):
        return OPCODES["cp.async.bulk.tensor"](d, ins)
    if kind == "prefetch":
        return _prefetch(d, ins)
    if kind in ("commit_group", "wait_group"):
        return _groups(d, ins, kind)
    return _copy(d, ins, _form(ins))


def _groups(d: Decoder, ins: Instruction, kind: str) -> Step:
    transfers = d.part(Transfers)
    only(ins, ("async", "bulk", kind, "read") if kind == "wait_group" else ("async", "bulk", kind))
    if kind == "commit_group":
        return transfers.commit
    pending, reading = d.immediate(ins.args[0]), ins.has("read")
    return lambda group: transfers.wait(group, pending, reading)


def _sizes(d: Decoder, ins: Instruction, operand: Operand) -> Callable[[Group], np.ndarray]:
    """Every lane's size in bytes, checked."""
    size = d.src(operand, "u32")

    def sizes(group: Group) -> np.ndarray:
        found = group.pick(size).astype(np.int64)
        bad = np.flatnonzero(found % CHUNK)
        if bad.size:
            detail = f"{int(found[bad[0]]):,} bytes: not a multiple of {CHUNK}"
            raise d.machine.reporter.fault("bad copy size", detail, ins, group.lanes[bad])
        return found

    return sizes


def _prefetch(d: Decoder, ins: Instruction) -> Step:
    """cp.async.bulk.prefetch.L2.global [a], size: only checked."""
    only(ins, ("async", "bulk", "prefetch", "L2", "global", "L2::cache_hint"))
    side = Side(d, ins, ins.args[0], "global", False)
    sizes = _sizes(d, ins, ins.args[1])

    def run(group: Group) -> None:
        rows = zip(group.lanes.tolist(), side.addresses(group).tolist(), sizes(group).tolist(),
                   strict=True)  # fmt: skip
        for lane, address, size in rows:
            side.span(lane, address, size)

    return run


def _copy(d: Decoder, ins: Instruction, form: _Form) -> Step:
    """[target], [source], size{, [mbarrier]}{, mask}{, cache policy}."""
    transfers = d.part(Transfers)
    target = Side(d, ins, ins.args[0], form.target, True)
    source = Side(d, ins, ins.args[1], form.source, False)
    sizes = _sizes(d, ins, ins.args[2])
    mask = ins.args[4] if form.multicast else None
    signal = Signal(d, ins, ins.args[3], mask) if form.signals else None
    update = update_of(*form.reduction) if form.reduction else None
    width = SIZE[form.reduction[1]] if form.reduction else CHUNK

    def one(
        lane: int, to: int, start: int, size: int, ranks: list[int] | None, barrier: int
    ) -> None:
        for side, address in ((target, to), (source, start)):
            side.span(lane, address, size)  # aligned to CHUNK, whatever the type of a reduction
        if not size:
            return
        steps = np.arange(0, size, width)
        near = source.chunks(lane, np.tile(start + steps, len(ranks or (0,))), width)
        far = target.chunks(lane, spread(to + steps, ranks), width)
        heard = [] if signal is None else signal.places(lane, barrier, ranks)
        transfers.start(
            Transfer(
                ins, np.array([lane]), ("bulk", lane if signal is None else barrier), near, far,
                update=update, signals=[(place, size) for place in heard],
            )
        )  # fmt: skip

    def run(group: Group) -> None:
        lanes = group.lanes.tolist()
        ranks = [None] * len(lanes) if signal is None else signal.ranks(group)
        heard = [0] * len(lanes) if signal is None else signal.locator.locate(group).position
        rows = zip(lanes, target.addresses(group).tolist(), source.addresses(group).tolist(),
                   sizes(group).tolist(), ranks, [int(p) for p in heard], strict=True)  # fmt: skip
        for row in rows:
            one(*row)

    return run
