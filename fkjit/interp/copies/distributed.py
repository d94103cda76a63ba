"""mapa, getctarank, st.async and red.async: shared memory of the cluster's other blocks."""

from __future__ import annotations

import numpy as np

from fkjit.interp.copies.bulk import SIGNAL, Side, Signal
from fkjit.interp.copies.transfers import Chunks, Transfer, Transfers, Update
from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, SIZE, UNSIGNED, Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, only, opcode
from fkjit.interp.memory.atomics import combine
from fkjit.interp.memory.cluster import Cluster
from fkjit.interp.spaces.shared import OWN_BLOCK, OWN_BLOCK_BITS

_STORED = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
_REDUCED = {
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
}


@opcode("mapa")
def mapa(d: Decoder, ins: Instruction) -> Step:
    """mapa{.shared::cluster}.u32/u64 d, a, rank: the address of the same byte in another block."""
    only(ins, ("shared::cluster", "u32", "u64"))
    address, rank = d.src(ins.args[1], ins.type), d.src(ins.args[2], "u32")
    out, cluster = d.dst(ins.args[0], ins.type), d.part(Cluster)

    def run(group: Group) -> None:
        ranks = group.pick(rank).astype(np.int64)
        cluster.within(ranks, group.lanes, ins)
        rest = group.pick(address).astype(np.int64) & ~(0xFF << OWN_BLOCK_BITS)
        group.put(out, (rest | (ranks + 1) << OWN_BLOCK_BITS).astype(out.dtype))

    return run


@opcode("getctarank")
def getctarank(d: Decoder, ins: Instruction) -> Step:
    """getctarank{.shared::cluster}.u32/u64 d, a: the rank of the block an address belongs to."""
    only(ins, ("shared::cluster", "u32", "u64"))
    address, out = d.src(ins.args[1], ins.type), d.dst(ins.args[0], "u32")
    cluster = d.part(Cluster)

    def run(group: Group) -> None:
        offset = group.pick(address).astype(np.int64) & (0xFF << OWN_BLOCK_BITS | (OWN_BLOCK - 1))
        group.put(out, cluster.ranks(offset, group.lanes).astype(np.uint32))

    return run


def _check_one_block(d: Decoder, ins: Instruction, group: Group, at: np.ndarray,
                     barrier: np.ndarray) -> None:  # fmt: skip
    size = d.machine.memory.shared.size
    bad = np.flatnonzero(at // size != barrier // size)
    if bad.size:
        detail = "the address and the mbarrier belong to different blocks"
        raise d.machine.reporter.fault("bad st.async", detail, ins, group.lanes[bad])


def _send(
    d: Decoder, ins: Instruction, width: int, values: list[np.ndarray], update: Update | None
) -> Step:
    """Every lane sends its values; those of one block to one mbarrier travel together."""
    transfers, cta = d.part(Transfers), d.machine.layout.cta
    target = Side(d, ins, ins.args[0], "shared::cluster", True)
    signal = Signal(d, ins, ins.args[2], None)
    size = width * len(values)

    def run(group: Group) -> None:
        lanes = group.lanes
        addresses = target.addresses(group)
        at = target.cluster.index(addresses, size, group, ins, True)
        barriers = signal.locator.locate(group).position
        _check_one_block(d, ins, group, at, barriers)
        rows = np.stack([group.pick(one) for one in values], 1)
        for barrier, block in sorted(set(zip(barriers.tolist(), cta[lanes].tolist(), strict=True))):
            mine = (barriers == barrier) & (cta[lanes] == block)
            there = Chunks(True, at[mine], size)
            sent = np.ascontiguousarray(rows[mine]).reshape(-1)
            bytes_ = size * int(mine.sum())
            transfers.start(
                Transfer(
                    ins, lanes[mine], ("store", barrier), None, there, values=sent, update=update,
                    signals=[(barrier, bytes_)],
                )
            )  # fmt: skip

    return run


@opcode("st.async")
def st_async(d: Decoder, ins: Instruction) -> Step:
    """st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes{.v2,.v4}.type [a], b, [m]."""
    only(ins, ("async", "weak", "shared::cluster", SIGNAL, "v2", "v4", *_STORED))
    width = SIZE[ins.type]
    if ins.type not in _STORED or SIGNAL not in ins.op or (width == 8 and ins.has("v4")):
        raise ValueError(f"form .{'.'.join(ins.op[1:])}")
    values = [d.src(item, ins.type) for item in d.items(ins.args[1])]
    return _send(d, ins, width, [_bits(value, width) for value in values], None)


def _bits(values: np.ndarray, width: int) -> np.ndarray:
    return values.view(UNSIGNED[width]) if values.flags.c_contiguous else values


@opcode("red.async")
def red_async(d: Decoder, ins: Instruction) -> Step:
    """red.async.relaxed.cluster.shared::cluster.mbarrier::….op.type [a], b, [mbarrier]."""
    operation = ins.op[-2]
    only(ins, ("async", "relaxed", "cluster", "shared::cluster", SIGNAL, operation, ins.type))
    if ins.type not in _REDUCED.get(operation, ()) or SIGNAL not in ins.op:
        raise ValueError(f"form .{'.'.join(ins.op[1:])}")
    update = Update(DTYPE[ins.type], combine(operation, ins.type))
    return _send(d, ins, SIZE[ins.type], [d.src(ins.args[1], ins.type)], update)
