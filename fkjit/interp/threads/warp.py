"""Warp-wide instructions: shuffles, votes, matches, reductions; and how their lanes meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fkjit.interp.core.lanes import WARP, Group
from fkjit.interp.core.ptx import DTYPE, Instruction, Operand, Pair, Reg
from fkjit.interp.machine.converge import ballot, converge_warp
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.guards import guard_mask
from fkjit.interp.machine.opcodes import Step, control, only

_BIT = np.uint64(1) << np.arange(WARP, dtype=np.uint64)


def _full(values: np.ndarray, lanes: int) -> np.ndarray:
    return values if values.size > 1 else np.broadcast_to(values, (lanes,))


def _store(d: Decoder, operand: Operand, kind: str) -> Callable[[np.ndarray, Group], None]:
    out = d.dst(operand, kind)

    def store(values: np.ndarray, group: Group) -> None:
        if group.write is None:
            out[...] = values
        else:
            np.copyto(out, values, where=group.mask, casting="unsafe")

    return store


@control("shfl")
def shfl(d: Decoder, ins: Instruction) -> Step:
    """shfl.sync.{up,down,bfly,idx}.b32 d[|p], a, b, c, members."""
    if ins.op[1] != "sync" or ins.op[2] not in ("up", "down", "bfly", "idx"):
        raise ValueError("only shfl.sync up, down, bfly, idx")
    only(ins, (*ins.op[1:3], "b32"))
    target, valid = ins.args[0], None
    if isinstance(target, Pair):
        target, valid = target.first, _store(d, target.second, "pred")
    a, b, c = (d.src(arg, "b32") for arg in ins.args[1:4])
    store = _store(d, target, "b32")
    lanes = d.machine.layout.lanes
    lane = np.arange(lanes) % WARP
    fixed = _shuffle_source(ins.op[2], lane, b, c) if b.size == 1 and c.size == 1 else None

    def act(group: Group) -> None:
        source, inside = fixed or _shuffle_source(ins.op[2], lane, b, c)
        if d.machine.checked and not group.full:
            bad = group.mask & ~group.mask[source]
            if bad.any():
                where = np.flatnonzero(bad)
                detail = f"lane {int(source[where[0]]) % WARP} is not there"
                raise d.machine.reporter.fault("shuffle from an inactive lane", detail, ins, where)
        values = _full(a, lanes).take(source)
        if valid is not None:
            valid(inside, group)
        store(values, group)

    return converge_warp(d, ins, ins.args[4], act)


def _shuffle_source(
    mode: str, lane: np.ndarray, b: np.ndarray, c: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The lane (of the batch) each lane reads, and whether it is within the segment."""
    b, c = b.astype(np.int64) & 31, c.astype(np.int64)
    segment, clamp = (c >> 8) & 31, c & 31
    highest = (lane & segment) | (clamp & ~segment)
    if mode == "up":
        source = lane - b
        inside = source >= highest
    else:
        ways = {"down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment)}
        source = ways[mode]
        inside = source <= highest
    source = np.where(inside, source, lane)
    return np.arange(lane.size) // WARP * WARP + source, inside


@control("vote")
def vote(d: Decoder, ins: Instruction) -> Step:
    """vote.sync.{all,any,uni}.pred, vote.sync.ballot.b32 d, {!}p, members."""
    mode = ins.op[2]
    only(ins, ("sync", mode, "b32" if mode == "ballot" else "pred"))
    if mode not in ("ballot", "any", "all", "uni"):
        raise ValueError(f"modifier .{mode}")
    predicate, negated = d.registers.predicate(ins.args[1])
    members = d.src(ins.args[2], "u32")
    store = _store(d, ins.args[0], "b32" if mode == "ballot" else "pred")
    lanes = d.machine.layout.lanes

    def act(group: Group) -> None:
        true = _full(~predicate if negated else predicate, lanes) & group.mask
        votes, voters = ballot(true) & members, ballot(group.mask) & members
        results = {
            "ballot": lambda: votes,
            "any": lambda: votes != 0,
            "all": lambda: votes == voters,
            "uni": lambda: (votes == voters) | (votes == 0),
        }
        store(results[mode](), group)

    return converge_warp(d, ins, ins.args[2], act)


@control("match")
def match(d: Decoder, ins: Instruction) -> Step:
    """match.any/all.sync.b32/b64: which lanes hold the same value."""
    mode = ins.op[1]
    if ins.op[1:] not in ((mode, "sync", "b32"), (mode, "sync", "b64")):
        raise ValueError("only match.any.sync, match.all.sync of .b32, .b64")
    target, agree = ins.args[0], None
    if isinstance(target, Pair):
        target, agree = target.first, _store(d, target.second, "pred")
    a, members = d.src(ins.args[1], ins.type), d.src(ins.args[2], "u32")
    store, lanes = _store(d, target, "b32"), d.machine.layout.lanes

    def act(group: Group) -> None:
        value = _full(a, lanes).reshape(-1, WARP)
        here = group.mask.reshape(-1, WARP)
        same = (value[:, :, None] == value[:, None, :]) & here[:, None, :]
        found = np.packbits(same, axis=2, bitorder="little").view(np.uint32).reshape(-1) & members
        if mode == "all":
            everyone = found == (ballot(group.mask) & members)
            found = np.where(everyone, found, np.uint32(0))
            if agree is not None:
                agree(everyone, group)
        store(found, group)

    if mode not in ("any", "all"):
        raise ValueError(f"modifier .{mode}")
    return converge_warp(d, ins, ins.args[2], act)


_REDUX: dict[str, dict[str, Any]] = {
    "u32": {"add": np.add, "min": np.minimum, "max": np.maximum},
    "s32": {"add": np.add, "min": np.minimum, "max": np.maximum},
    "b32": {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    "f32": {"min": np.fmin, "max": np.fmax},
}


@control("redux")
def redux(d: Decoder, ins: Instruction) -> Step:
    """redux.sync.op{.abs}{.NaN}.type d, a, members: the result of all members to each."""
    operation, floating = ins.op[2], ins.type == "f32"
    only(ins, ("sync", operation, ins.type, *(("abs", "NaN") if floating else ())))
    function = _REDUX[ins.type][operation]
    if ins.has("NaN"):
        function = np.minimum if operation == "min" else np.maximum
    a, members = d.src(ins.args[1], ins.type), d.src(ins.args[2], "u32")
    store, lanes = _store(d, ins.args[0], ins.type), d.machine.layout.lanes

    def act(group: Group) -> None:
        value, key = _full(a, lanes), _full(members, lanes)
        if ins.has("abs"):
            value = np.abs(value)
        result = np.zeros(lanes, DTYPE[ins.type])
        here = group.lanes
        order = np.lexsort((here, key[here], here // WARP))
        here = here[order]
        change = (np.diff(here // WARP) != 0) | (np.diff(key[here]) != 0)
        starts = np.flatnonzero(np.concatenate(([True], change)))
        totals = function.reduceat(value[here], starts)
        result[here] = np.repeat(totals, np.diff(np.append(starts, here.size)))
        store(result, group)

    return converge_warp(d, ins, ins.args[2], act)


@control("activemask")
def activemask(d: Decoder, ins: Instruction) -> Step:
    """activemask.b32 d: the lanes that are here together."""
    only(ins, ("b32",))
    store = _store(d, ins.args[0], "b32")

    def run(group: Group) -> int:
        mask = guard_mask(d, ins, group)
        store(ballot(mask), Group(mask, -1))
        return ins.pc + 1

    return run


@control("elect")
def elect(d: Decoder, ins: Instruction) -> Step:
    """elect.sync d|p, members: the lowest member."""
    only(ins, ("sync",))
    pair = ins.args[0]
    assert isinstance(pair, Pair)
    leader = (
        None if isinstance(pair.first, Reg) and pair.first.sink else _store(d, pair.first, "b32")
    )
    chosen = _store(d, pair.second, "pred")
    members = d.src(ins.args[1], "u32")
    lanes = d.machine.layout.lanes
    lane = (np.arange(lanes) % WARP).astype(np.uint32)

    def act(group: Group) -> None:
        present = ballot(group.mask) & members
        lowest = np.log2((present & (~present + np.uint32(1))).astype(np.float64)).astype(np.uint32)
        if leader is not None:
            leader(lowest, group)
        chosen(lowest == lane, group)

    return converge_warp(d, ins, ins.args[1], act)


@control("setmaxnreg")
def setmaxnreg(d: Decoder, ins: Instruction) -> Step:
    """setmaxnreg.inc/.dec.sync.aligned.u32 n: whole warps change their number of registers."""
    if ins.op[1] not in ("inc", "dec") or ins.op[2:] != ("sync", "aligned", "u32"):
        raise ValueError("only setmaxnreg.inc, .dec")
    count = d.immediate(ins.args[0])
    if count % 8 or not 24 <= count <= 256:
        raise ValueError(f"{count} is not a multiple of 8 from 24 to 256")
    return converge_warp(d, ins, None, lambda group: None)
