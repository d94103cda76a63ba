"""What PTX text is made of: operands, instructions, variables, kernels; and its scalar types."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# Bytes of every scalar type that an instruction or a declaration may name.
SIZE = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16, "pred": 1,
}  # fmt: skip

# 16 bytes are complex numbers to NumPy: it only ever copies them.
UNSIGNED = {**{n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}, 16: np.dtype("c16")}

# The NumPy type in which an instruction of that PTX type computes (halves stay raw bits).
DTYPE = {
    **{f"{kind}{8 * n}": np.dtype(f"u{n}") for kind in "bu" for n in (1, 2, 4, 8)},
    **{f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    "f16": np.dtype("u2"), "bf16": np.dtype("u2"),
    "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"),
    "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool),
    "f32x2": np.dtype("u8"), "b128": UNSIGNED[16],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, special ones included: `%r1`, `%tid.x`; `_` is the sink that drops values."""

    name: str

    @property
    def sink(self) -> bool:
        return self.name == "_"


@dataclass(frozen=True, slots=True)
class Imm:
    """An integer literal."""

    value: int


@dataclass(frozen=True, slots=True)
class Float:
    """A floating literal by its bits: 0f3F800000 (width 4), 0d… (width 8)."""

    bits: int
    width: int


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable, label or function name, plus bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Not:
    """`!%p1`."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b}` of vector operands, `(a, b)` of calls."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`%r1|%p1`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Mem:
    """`[base+offset]`; `extra` are further coordinates inside the brackets."""

    base: Operand
    offset: int
    extra: tuple[Operand, ...] = ()


Operand = Reg | Imm | Float | Sym | Not | Vec | Pair | Mem


@dataclass(slots=True)
class Instruction:
    """One PTX instruction: opcode parts, operands, guard predicate, where it came from."""

    op: tuple[str, ...]  # split at '.', e.g. ("add", "s32"); "shared::cta" stays one part
    args: tuple[Operand, ...]
    guard: tuple[str, bool] | None  # register, negated
    location: str  # "kernels_cu/attention/flash.cu:12 (inlined at …:40)"
    text: str
    pc: int = -1
    line: int = 0  # of the PTX text, where its end stands
    _registers: tuple[list[str], list[str]] | None = None  # see reads_and_writes

    @property
    def type(self) -> str:
        """The last part of the opcode: the type for nearly all instructions."""
        return self.op[-1]

    def has(self, part: str) -> bool:
        return part in self.op


@dataclass(frozen=True, slots=True)
class Variable:
    """A declared variable. `external` shared arrays get the launch's dynamic size."""

    name: str
    space: str  # global, const, shared, local, param
    align: int
    size: int
    data: bytes = b""
    relocations: tuple[tuple[int, str, int], ...] = ()  # (byte offset, symbol, addend)
    external: bool = False


@dataclass(slots=True, eq=False)
class Frame:
    """Where a function that is not inlined has its variables: offsets in its frame on the stack."""

    name: str
    offsets: dict[str, int] = field(default_factory=dict)
    size: int = 0
    variables: list[Variable] = field(default_factory=list)
    parameters: list[tuple[int, int]] = field(default_factory=list)  # offset, size
    registers: list[str] = field(default_factory=list)  # what the body uses, saved by its calls

    @property
    def entry(self) -> str:
        """The label of the body."""
        return f"{self.name}.entry"

    def add(self, variable: Variable) -> int:
        """Give a variable a place; returns its offset."""
        at = -(-self.size // variable.align) * variable.align
        self.offsets[variable.name] = at
        self.variables.append(variable)
        self.size = at + variable.size
        return at

    @property
    def bytes(self) -> int:
        """What the frame takes of the stack."""
        return -(-self.size // 16) * 16


@dataclass(slots=True, eq=False)
class Function:
    """A kernel (`.entry`) or a device function (`.func`)."""

    name: str
    entry: bool
    params: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # .branchtargets
    frames: dict[str, Frame] = field(default_factory=dict)  # of functions that are not inlined
    max_threads: int | None = None
    cluster: tuple[int, int, int] | None = None  # of __cluster_dims__


@dataclass(slots=True, eq=False)
class Module:
    """Everything one PTX text declares."""

    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # .file number -> path


def words(text: str) -> frozenset[str]:
    """A set of names, written as one text."""
    return frozenset(text.split())


# Opcodes whose first operand is no destination.
NO_DESTINATION = words(
    "st red bra brx bar barrier ret exit trap call cp membar fence prefetch prefetchu "
    "stmatrix nanosleep brkpt pmevent discard applypriority griddepcontrol setmaxnreg "
    "%call %resume %return %printf %assertfail"
)


def registers_in(operand: Operand) -> list[str]:
    """The names of all registers inside an operand."""
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Mem):
        inner: tuple[Operand, ...] = (operand.base, *operand.extra)
    elif isinstance(operand, Vec):
        inner = operand.items
    elif isinstance(operand, Pair):
        inner = (operand.first, operand.second)
    elif isinstance(operand, Not):
        inner = (operand.reg,)
    else:
        return []
    return [name for item in inner for name in registers_in(item)]


def reads_and_writes(ins: Instruction) -> tuple[list[str], list[str]]:
    """The registers an instruction reads (its guard included) and those it writes."""
    if ins._registers is None:
        to_barrier = ins.op[0] in ("bar", "barrier") and "red" in ins.op
        has_destination = to_barrier or ins.op[0] not in NO_DESTINATION
        if not ins.args or isinstance(ins.args[0], Mem):  # mbarrier.init [a], n
            has_destination = False
        split = 1 if has_destination else 0
        reads: list[str] = []
        writes: list[str] = []
        for at, arg in enumerate(ins.args):
            names = writes if at < split else reads
            if isinstance(arg, Reg):  # of most operands
                names.append(arg.name)
            elif not isinstance(arg, Imm):
                names += registers_in(arg)
        if ins.op[:2] == ("wgmma", "mma_async"):  # accumulates
            reads += writes
        if ins.guard:
            reads.append(ins.guard[0])
        ins._registers = reads, writes
    return ins._registers
