"""ldmatrix, stmatrix, movmatrix: 8x8 matrices of halves between shared memory and registers.

A register holds, in lane 4g+t, elements (g, 2t) and (g, 2t+1) of a matrix: seen as halves, one
register of a warp *is* the matrix, row by row. So nothing here needs a table of indices.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fkjit.interp.core.accesses import READ, WRITE
from fkjit.interp.core.lanes import WARP, Group
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.converge import converge_aligned, whole_warps
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, control
from fkjit.interp.memory.locate import Locator

Wide = np.dtype("c16")


def _pick(register: np.ndarray, warps: np.ndarray | None) -> np.ndarray:
    rows = register.reshape(-1, WARP)
    return rows if warps is None else rows[warps]


def full_lanes(d: Decoder, values: np.ndarray) -> np.ndarray:
    """A constant repeated for all lanes."""
    return values if values.size > 1 else np.full(d.machine.layout.lanes, values[0], values.dtype)


def _put(register: np.ndarray, warps: np.ndarray | None, values: np.ndarray) -> None:
    rows = register.reshape(-1, WARP)
    if warps is None:
        rows[...] = values
    else:
        rows[warps] = values


def _matrix_count(ins: Instruction) -> int:
    for count, part in ((1, "x1"), (2, "x2"), (4, "x4")):
        if ins.has(part):
            return count
    raise ValueError("number of matrices")


def _only_b16(ins: Instruction, known: tuple[str, ...]) -> None:
    if ins.type != "b16" or not ins.has("m8n8"):
        raise ValueError(f"type .{ins.type}")
    if any(part not in known for part in ins.op[1:]):
        raise ValueError("modifier")


_MATRIX_PARTS = (
    "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16",
)  # fmt: skip


def _transposed(rows: np.ndarray) -> np.ndarray:
    """8x8 matrices of halves [..., 8 rows, 4 u32] transposed."""
    square = np.ascontiguousarray(rows).view(np.uint16).reshape(*rows.shape[:-2], 8, 8)
    return np.ascontiguousarray(square.swapaxes(-1, -2)).view(np.uint32)


@control("ldmatrix")
def ldmatrix(d: Decoder, ins: Instruction) -> Step:
    """ldmatrix.sync.aligned.m8n8.x{1,2,4}{.trans}.shared.b16: lane 8i+r has row r of matrix i."""
    _only_b16(ins, _MATRIX_PARTS)
    count, transpose = _matrix_count(ins), ins.has("trans")
    locator = Locator(d, ins, ins.args[1], 16, False)
    outs = [d.dst(target, "b32") for target in d.items(ins.args[0])]
    if len(outs) != count:
        raise ValueError("number of registers")
    shared, observers = d.machine.memory.shared, d.machine.observers
    addressing = _row_lanes(d, count)

    def act(group: Group) -> None:
        warps = whole_warps(d, ins, group)
        rows_of = group if count == 4 else addressing(group)
        at = locator.locate(rows_of)
        if not at.shared:
            raise d.machine.reporter.fault("bad address", "not shared memory", ins, group.lanes)
        for see in observers:
            see(READ, True, at.position, 16, rows_of.lanes, ins)
        shared.check_initialised(at.position, 16, rows_of, ins)
        rows = shared.views[16].take(at.position >> 4).view(np.uint32).reshape(-1, count, 8, 4)
        if transpose:
            rows = _transposed(rows)
        for number, out in enumerate(outs):
            _put(out, warps, rows[:, number].reshape(-1, WARP))

    return converge_aligned(d, ins, act)


def _row_lanes(d: Decoder, count: int) -> Callable[[Group], Group]:
    """The lanes of a group whose addresses count: the first 8 of every matrix."""
    used = np.arange(d.machine.layout.lanes) % WARP < 8 * count
    return lambda group: Group(group.mask & used, -1)


@control("stmatrix")
def stmatrix(d: Decoder, ins: Instruction) -> Step:
    """stmatrix: the reverse of ldmatrix."""
    _only_b16(ins, _MATRIX_PARTS)
    count, transpose = _matrix_count(ins), ins.has("trans")
    locator = Locator(d, ins, ins.args[0], 16, True)
    sources = [full_lanes(d, d.src(source, "b32")) for source in d.items(ins.args[1])]
    if len(sources) != count:
        raise ValueError("number of registers")
    shared, addressing = d.machine.memory.shared, _row_lanes(d, count)
    observers = d.machine.observers

    def act(group: Group) -> None:
        warps = whole_warps(d, ins, group)
        rows_of = group if count == 4 else addressing(group)
        at = locator.locate(rows_of)
        if not at.shared:
            raise d.machine.reporter.fault("bad address", "not shared memory", ins, group.lanes)
        for see in observers:
            see(WRITE, True, at.position, 16, rows_of.lanes, ins)
        rows = np.stack([_pick(source, warps).reshape(-1, 8, 4) for source in sources], 1)
        if transpose:
            rows = _transposed(rows)
        shared.views[16][at.position >> 4] = np.ascontiguousarray(rows).view(Wide).reshape(-1)
        shared.written(at.position, 16)

    return converge_aligned(d, ins, act)


@control("movmatrix")
def movmatrix(d: Decoder, ins: Instruction) -> Step:
    """movmatrix.sync.aligned.m8n8.trans.b16: an 8x8 matrix transposed between lanes."""
    _only_b16(ins, _MATRIX_PARTS)
    out, source = d.dst(ins.args[0], "b32"), full_lanes(d, d.src(ins.args[1], "b32"))

    def act(group: Group) -> None:
        warps = whole_warps(d, ins, group)
        _put(out, warps, _transposed(_pick(source, warps).reshape(-1, 8, 4)).reshape(-1, WARP))

    return converge_aligned(d, ins, act)
