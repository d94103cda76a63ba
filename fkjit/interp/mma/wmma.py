"""wmma.load, wmma.mma, wmma.store: what nvcuda::wmma is compiled to.

Which thread holds which element is left to the hardware, so the layout here is the simplest one:
lane l has the l-th part of the matrix. Operands a and b lie in the order of memory, along rows or
columns as their layout says; accumulators always row after row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fkjit.interp.core.accesses import READ, WRITE
from fkjit.interp.core.lanes import WARP, Group
from fkjit.interp.core.ptx import Imm, Instruction, Operand, Vec
from fkjit.interp.machine.converge import converge_aligned, whole_warps
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, control, only
from fkjit.interp.memory.locate import Located, Locator, by_space
from fkjit.interp.mma.ldmatrix import full_lanes
from fkjit.interp.numbers.elements import BITS, matrix_type, raw_type, spread, unpack

_HALVES = ("m16n16k16", "m32n8k16", "m8n32k16")
_SHAPES = {
    "f16": _HALVES, "bf16": _HALVES, "s8": _HALVES, "u8": _HALVES, "tf32": ("m16n16k8",),
    "f64": ("m8n8k4",), "s4": ("m8n8k32",), "u4": ("m8n8k32",),
}  # fmt: skip
_ACCUMULATORS = {
    "f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "f64": ("f64",),
    "s8": ("s32",), "u8": ("s32",), "s4": ("s32",), "u4": ("s32",),
}  # fmt: skip
_SUM = {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "s32": np.dtype("i4")}
_S32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class Tile:
    """One operand of a wmma instruction."""

    operand: str  # a, b, c, d
    rows: int
    columns: int
    kind: str
    by_column: bool

    @property
    def bits(self) -> int:
        return BITS.get(self.kind, 32)

    @property
    def lane_bytes(self) -> int:
        """Bytes of the matrix in each lane."""
        return self.rows * self.columns * self.bits // 8 // WARP

    @property
    def line(self) -> int:
        """Elements that follow each other in memory."""
        return self.rows if self.by_column else self.columns

    def accesses(self) -> tuple[int, np.ndarray, np.ndarray]:
        """How lanes reach memory: bytes of an access; its line and byte, [lanes, accesses]."""
        lane = np.arange(WARP)[:, None]
        if self.operand in "cd" and self.by_column:
            width = self.bits // 8
            element = lane * (self.lane_bytes // width) + np.arange(self.lane_bytes // width)
            return width, element % self.columns, element // self.columns * width
        line = self.line * self.bits // 8
        width = min(16, self.lane_bytes, line)
        start = lane * self.lane_bytes + np.arange(0, self.lane_bytes, width)
        return width, start // line, start % line

    def registers(self, operand: Operand) -> tuple[Operand, ...]:
        """The operand's registers; f16 multiplicands have 8 in every shape."""
        items = operand.items if isinstance(operand, Vec) else (operand,)
        doubled = self.kind == "f16" and self.operand in "ab"
        if len(items) != (8 if doubled else self.lane_bytes // self.register_bytes):
            raise ValueError("number of registers")
        return items

    @property
    def register_bytes(self) -> int:
        return 8 if self.kind == "f64" else 4


def _tile(operand: str, shape: str, kind: str, by_column: bool) -> Tile:
    m, n, k = (int(extent) for extent in re.findall(r"\d+", shape))
    rows, columns = {"a": (m, k), "b": (k, n)}.get(operand, (m, n))
    return Tile(operand, rows, columns, kind, by_column)


def _moved_tile(ins: Instruction) -> Tile:
    """The tile of a load or a store."""
    operand, layout, shape, kind = ins.op[2], ins.op[5], ins.op[6], ins.type
    only(ins, ("load", "store", operand, "sync", "aligned", layout, shape, kind, "global",
               "shared", "shared::cta"))  # fmt: skip
    multiplied = operand in ("a", "b")
    shapes = _SHAPES.get(kind, ()) if multiplied else _accumulator_shapes(kind)
    known = operand in (("a", "b", "c") if ins.op[1] == "load" else ("d",))
    if not known or layout not in ("row", "col") or shape not in shapes:
        raise ValueError("this combination of shape and type of wmma")
    return _tile(operand, shape, kind, layout == "col")


def _accumulator_shapes(kind: str) -> tuple[str, ...]:
    return tuple(s for of, accs in _ACCUMULATORS.items() if kind in accs for s in _SHAPES[of])


@control("wmma")
def wmma(d: Decoder, ins: Instruction) -> Step:
    """wmma.load.{a,b,c}, wmma.mma, wmma.store.d, all .sync.aligned."""
    return {"load": _load, "store": _store, "mma": _multiply}[ins.op[1]](d, ins)


class _Memory:
    """Where a tile's accesses to memory go."""

    def __init__(
        self, d: Decoder, ins: Instruction, tile: Tile, address: Operand, stride: Operand | None
    ) -> None:
        self.d, self.ins, self.tile = d, ins, tile
        self.width, line, byte = tile.accesses()
        warps = d.machine.layout.lanes // WARP
        self.line, self.byte = (np.tile(x, (warps, 1)) for x in (line, byte))
        self.locator = Locator(d, ins, address, self.width, tile.operand == "d")
        self.start = self.locator.base
        self.stride = full_lanes(d, d.src(stride or Imm(tile.line), "u32"))
        self.locator.base = d.scratch(self.start.dtype, "wmma address")
        self.locator.range = None

    def accesses(self, group: Group) -> list[Located]:
        """Each lane's accesses; raises SanitizerError."""
        if self.d.machine.checked:
            self._check_uniform(group)
        found = []
        for number in range(self.line.shape[1]):
            elements = self.stride.astype(np.int64) * self.line[:, number]
            offset = elements * self.tile.bits // 8 + self.byte[:, number]
            np.add(self.start, offset.astype(self.start.dtype), out=self.locator.base)
            at = self.locator.locate(group)
            if at.local:
                raise self._fault("bad address", "neither global nor shared memory", group.lanes)
            found.append(at)
        return found

    def _check_uniform(self, group: Group) -> None:
        for name, values in (("address", self.start), ("stride", self.stride)):
            if values.size > 1:
                rows = values.reshape(-1, WARP)
                bad = np.flatnonzero((rows != rows[:, :1]).reshape(-1) & group.mask)
                if bad.size:
                    raise self._fault(
                        "bad operand", f"the {name} differs between threads of a warp", bad
                    )

    def _fault(self, kind: str, detail: str, lanes: np.ndarray) -> Exception:
        return self.d.machine.reporter.fault(kind, detail, self.ins, lanes)

    def step(self, act: Callable[[Group], None]) -> Step:
        """The control step, once for each window of generic addresses."""
        return converge_aligned(self.d, self.ins, by_space(act, self.locator, self.start))


def _load(d: Decoder, ins: Instruction) -> Step:
    """wmma.load.{a,b,c}.sync.aligned.layout.shape{.space}.type r, [p]{, stride}."""
    tile = _moved_tile(ins)
    outs = [d.dst(item, None) for item in tile.registers(ins.args[0])]
    memory = _Memory(d, ins, tile, ins.args[1], ins.args[2] if len(ins.args) > 2 else None)
    shared, width = d.machine.memory.shared, memory.width
    observers = d.machine.observers

    def act(group: Group) -> None:
        whole_warps(d, ins, group)
        columns = []
        for at in memory.accesses(group):
            for see in observers:
                see(READ, at.shared, at.position, width, group.lanes, ins)
            if at.shared:
                shared.check_initialised(at.position, width, group, ins)
            columns.append(at.views[width].take(at.position // width))
        words = np.stack(columns, 1).view(f"u{tile.register_bytes}")
        for number, out in enumerate(outs):  # those beyond the matrix repeat it
            group.put(out, words[:, number % words.shape[1]])

    return memory.step(act)


def _store(d: Decoder, ins: Instruction) -> Step:
    """wmma.store.d.sync.aligned.layout.shape{.space}.type [p], r{, stride}."""
    tile = _moved_tile(ins)
    sources = _sources(d, tile, ins.args[1])
    memory = _Memory(d, ins, tile, ins.args[0], ins.args[2] if len(ins.args) > 2 else None)
    shared, width = d.machine.memory.shared, memory.width
    observers = d.machine.observers

    def act(group: Group) -> None:
        whole_warps(d, ins, group)
        words = np.stack([source[group.lanes] for source in sources], 1)
        for number, at in enumerate(memory.accesses(group)):
            for see in observers:
                see(WRITE, at.shared, at.position, width, group.lanes, ins)
            view = at.views[width]
            view[at.position // width] = words.view(view.dtype)[:, number]
            if at.shared:
                shared.written(at.position, width)

    return memory.step(act)


def _sources(d: Decoder, tile: Tile, operand: Operand) -> list[np.ndarray]:
    """The registers that hold the matrix, without repetitions."""
    kind = f"b{8 * tile.register_bytes}"
    used = tile.registers(operand)[: tile.lane_bytes // tile.register_bytes]
    return [full_lanes(d, d.src(item, kind)) for item in used]


def _matrix(tile: Tile, sources: list[np.ndarray], warps: np.ndarray | slice) -> np.ndarray:
    """The matrix in registers, [warps, rows, columns], as its type computes."""
    words = np.stack([source.reshape(-1, WARP)[warps] for source in sources], 2)
    lines = words.reshape(words.shape[0], -1)
    if tile.operand in "cd":
        return lines.view(_SUM[tile.kind]).reshape(-1, tile.rows, tile.columns)
    bits = spread(tile.kind, lines.view(raw_type(tile.kind)))
    out = np.empty(bits.shape, matrix_type(tile.kind))
    unpack(tile.kind, bits, out)
    if tile.by_column:
        return out.reshape(-1, tile.columns, tile.rows).swapaxes(1, 2)
    return out.reshape(-1, tile.rows, tile.columns)


def _multiplied(ins: Instruction) -> tuple[list[Tile], bool]:
    """The tiles of d, a, b, c of a wmma.mma, and whether integers saturate."""
    op = tuple(part for part in ins.op if part != "satfinite")
    layouts, shape, types = op[4:6], op[6], op[7:]
    if types[:1] == ("rn",) and types[1:2] == ("f64",):
        types = types[1:]
    if len(types) == 2:  # of f16 only d and c are named
        types = (types[0], "f16", "f16", types[1])
    if len(types) != 4 or types[2] not in _SHAPES:
        raise ValueError("this combination of shape and types of wmma")
    to, a, b, of = types
    known = shape in _SHAPES.get(a, ()) and {to, of} <= set(_ACCUMULATORS[a])
    if a != b or op[2:4] != ("sync", "aligned") or not known or not set(layouts) <= {"row", "col"}:
        raise ValueError("this combination of shape and types of wmma")
    saturate = "satfinite" in ins.op
    if saturate and to != "s32":
        raise ValueError("modifier .satfinite")
    tiles = [_tile(x, shape, kind, False) for x, kind in zip("dabc", types, strict=True)]
    for number, layout in enumerate(layouts, 1):
        tiles[number] = replace(tiles[number], by_column=layout == "col")
    return tiles, saturate


def _multiply(d: Decoder, ins: Instruction) -> Step:
    """wmma.mma.sync.aligned.alayout.blayout.shape.types d, a, b, c."""
    (to, *tiles), saturate = _multiplied(ins)
    outs = [d.dst(item, None).reshape(-1, WARP) for item in to.registers(ins.args[0])]
    operands = [_sources(d, tile, arg) for tile, arg in zip(tiles, ins.args[1:4], strict=True)]

    def act(group: Group) -> None:
        some = whole_warps(d, ins, group)
        warps = slice(None) if some is None else some
        a, b, c = (_matrix(t, s, warps) for t, s in zip(tiles, operands, strict=True))
        product = a @ b
        if to.kind == "s32":
            total = product.astype(np.int64) + c
            product = total.clip(_S32.min, _S32.max) if saturate else total
        else:
            product += c
        result = product.astype(_SUM[to.kind]).reshape(product.shape[0], WARP, -1)
        words = result.view(f"u{to.register_bytes}")
        for number, out in enumerate(outs):
            out[warps] = words[..., number]

    return converge_aligned(d, ins, act)
