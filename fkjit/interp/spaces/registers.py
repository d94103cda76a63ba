"""The register file: one array a register, one element a lane, seen through typed views."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fkjit.errors import InterpreterError
from fkjit.interp.core.lanes import WARP, Layout
from fkjit.interp.core.ptx import DTYPE, SIZE, UNSIGNED, Float, Imm, Not, Operand, Reg, Sym


def constant(bits: int, dtype: np.dtype) -> np.ndarray:
    """One element of a type from its bits; operations broadcast it over the lanes."""
    width = dtype.itemsize
    raw = (bits & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return np.frombuffer(raw, UNSIGNED[width]).copy().view(dtype)


class Registers:
    """All registers of a kernel for `layout.lanes` lanes."""

    def __init__(self, types: dict[str, str], layout: Layout) -> None:
        self.types = types
        self.layout = layout
        self._raw: dict[str, np.ndarray] = {}
        self._views: dict[tuple[str, np.dtype], np.ndarray] = {}
        self._typed: dict[tuple[str, str], np.ndarray] = {}
        self._spare: dict[np.dtype, list[np.ndarray]] = {}
        self.special = _special(layout)
        self.nbytes = 0

    def _next(self, dtype: np.dtype) -> np.ndarray:
        """A register's lanes; memory is asked for in blocks of many registers."""
        rows = self._spare.get(dtype)
        if not rows:
            block = np.zeros((64, self.layout.lanes), dtype)
            rows = self._spare[dtype] = list(block)
            self.nbytes += block.nbytes
        return rows.pop()

    def start_batch(self) -> None:
        """Set gridDim, and blockIdx for the batch of blocks that begins at `layout.first_cta`."""
        layout = self.layout
        number = np.minimum(layout.first_cta + layout.cta, layout.blocks - 1)
        places = zip("xyz", layout.grid, layout.cluster, layout.coordinates(number), strict=True)
        for axis, extent, together, place in places:
            self.special[f"%nctaid.{axis}"][:] = extent
            self.special[f"%ctaid.{axis}"][:] = place
            self.special[f"%nclusterid.{axis}"][:] = extent // together
            self.special[f"%clusterid.{axis}"][:] = place // together
            self.special[f"%cluster_ctaid.{axis}"][:] = place % together

    def raw(self, name: str) -> np.ndarray:
        """The register in its own width, unsigned; predicates are bool."""
        found = self._raw.get(name)
        if found is None:
            if name in self.special:
                return self.special[name]
            kind = self.types.get(name)
            if kind is None:
                raise InterpreterError(f"interpreter: the PTX register {name} is not declared")
            dtype = DTYPE["pred"] if kind == "pred" else UNSIGNED[SIZE[kind]]
            found = self._raw[name] = self._next(dtype)
        return found

    def view(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The register as a type of its own width, or the low bytes of a wider one."""
        key = (name, dtype)
        found = self._views.get(key)
        if found is None:
            raw = self.raw(name)
            if dtype.itemsize > raw.dtype.itemsize:
                raise InterpreterError(f"interpreter: {name} is narrower than the type used")
            step = raw.dtype.itemsize // dtype.itemsize
            found = raw if dtype == raw.dtype else raw.view(dtype)
            found = self._views[key] = found[::step] if step > 1 else found
        return found

    def typed(self, name: str, kind: str) -> np.ndarray:
        """`view` by the name of a PTX type."""
        key = (name, kind)
        found = self._typed.get(key)
        if found is None:
            found = self._typed[key] = self.view(name, DTYPE[kind])
        return found

    def width(self, operand: Operand) -> int:
        """Bytes of a register operand (8 for what is no register)."""
        return self.raw(operand.name).dtype.itemsize if isinstance(operand, Reg) else 8

    def is_predicate(self, operand: Operand) -> bool:
        """Whether an operand is a predicate register, negated or not."""
        register = operand.reg if isinstance(operand, Not) else operand
        return isinstance(register, Reg) and self.types.get(register.name) == "pred"

    def read(
        self, operand: Operand, kind: str, address: Callable[[str], int] | None = None
    ) -> np.ndarray:
        """An operand as a type: a register's lanes, or one element for a constant.

        `address` maps symbol names to addresses.
        """
        if isinstance(operand, Reg):
            return self.typed(operand.name, kind)
        dtype = DTYPE[kind]
        match operand:
            case Imm(value):
                if dtype.kind == "f":
                    return np.array([value], dtype)
                return np.array([value != 0]) if kind == "pred" else constant(value, dtype)
            case Float(bits, width):
                if width == dtype.itemsize:
                    return constant(bits, dtype)
                if width == 8 and dtype == np.float32:
                    return constant(bits, np.dtype("f8")).astype(dtype)
            case Sym(name, offset) if address is not None:
                return constant(address(name) + offset, dtype)
        raise InterpreterError(f"interpreter: the operand {operand} cannot be a .{kind}")

    def predicate(self, operand: Operand) -> tuple[np.ndarray, bool]:
        """A predicate operand and whether it is negated."""
        if isinstance(operand, Not):
            return self.view(operand.reg.name, DTYPE["pred"]), True
        return self.read(operand, "pred"), False


def _special(layout: Layout) -> dict[str, np.ndarray]:
    lane = (layout.thread % WARP).astype(np.uint64)
    one = np.uint64(1)
    below = (one << lane) - one
    x, y, _ = layout.block
    table = {
        "%tid.x": layout.thread % x,
        "%tid.y": layout.thread // x % y,
        "%tid.z": layout.thread // (x * y),
        "%laneid": lane,
        "%warpid": layout.thread // WARP,
        "%lanemask_lt": below,
        "%lanemask_eq": one << lane,
        "%lanemask_le": below | one << lane,
        "%lanemask_gt": ~(below | one << lane) & np.uint64(0xFFFFFFFF),
        "%lanemask_ge": ~below & np.uint64(0xFFFFFFFF),
        "%nwarpid": [layout.padded // WARP],
    }
    special: dict[str, np.ndarray] = {
        name: np.asarray(values).astype(np.uint32) for name, values in table.items()
    }
    return {**special, **_uniform(layout)}


def _uniform(layout: Layout) -> dict[str, np.ndarray]:
    """Special registers that are the same for a block; blockIdx and gridDim come with the batch."""
    special: dict[str, np.ndarray] = {}
    for axis, name in enumerate("xyz"):
        special[f"%ntid.{name}"] = np.array([layout.block[axis]], np.uint32)
        special[f"%nctaid.{name}"] = np.array([layout.grid[axis]], np.uint32)
        special[f"%nclusterid.{name}"] = np.zeros(1, np.uint32)
        special[f"%cluster_nctaid.{name}"] = np.array([layout.cluster[axis]], np.uint32)
        for each in ("%ctaid", "%clusterid", "%cluster_ctaid"):
            special[f"{each}.{name}"] = np.zeros(layout.lanes, np.uint32)
    together = math.prod(layout.cluster)
    special["%cluster_ctarank"] = layout.rank.astype(np.uint32)
    special["%cluster_nctarank"] = np.array([together], np.uint32)
    special["%is_explicit_cluster"] = np.array([together > 1])
    for name in ("%clock", "%clock_hi", "%smid", "%nsmid", "%gridid", "%globaltimer_lo"):
        special[name] = np.zeros(1, np.uint32)
    for name in ("%clock64", "%globaltimer"):
        special[name] = np.zeros(1, np.uint64)
    return special
