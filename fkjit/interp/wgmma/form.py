"""What a wgmma.mma_async instruction says: shape, types, where its operands are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fkjit.interp.core.ptx import Imm, Instruction, Operand, Vec

ROWS = 64  # of A and D
STEP = 32  # bytes of a row of A or B that one instruction works on
_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "b1": 256}
_PARTNERS = (
    {"f16"}, {"bf16"}, {"tf32"}, {"e4m3", "e5m2"}, {"s8", "u8"}, {"b1"},
)  # fmt: skip
_RESULTS = {
    "f16": ("f32", "f16"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f32", "f16"),
    "e5m2": ("f32", "f16"), "s8": ("s32",), "u8": ("s32",), "b1": ("s32",),
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """One form of wgmma.mma_async: D[64, n] = ±A[64, k] B[k, n] (+ D)."""

    n: int
    k: int
    to: str  # f32, f16, s32
    a: str
    b: str
    in_registers: bool  # A
    saturated: bool
    negated: bool  # the product's sign
    a_transposed: bool  # M-major
    b_transposed: bool  # N-major

    @property
    def is_short(self) -> bool:
        """Whether what is known of tensor cores' sums of e4m3 (short_sums.py) is of this form."""
        return self.a == self.b == "e4m3" and self.to == "f32" and not self.negated

    @property
    def registers(self) -> int:
        """Registers of D that a thread has."""
        return self.n // (4 if self.to == "f16" else 2)


def parse_form(ins: Instruction) -> Form:
    """Read an instruction; raises ValueError for what PTX does not have."""
    n, k, to, a, b, saturated = _types(list(ins.op[2:]))
    in_registers = isinstance(ins.args[1], Vec)
    halves = a in ("f16", "bf16")
    scales, transposed = _immediates(ins.args[4:], to == "s32", halves, in_registers)
    form = Form(n, k, to, a, b, in_registers, saturated, scales[0] != scales[1], *transposed)
    counts = [len(arg.items) for arg in ins.args[:2] if isinstance(arg, Vec)]
    if counts != [form.registers, 4][: 1 + in_registers]:
        raise ValueError("number of registers")
    return form


def _types(parts: list[str]) -> tuple[int, int, str, str, str, bool]:
    """n, k, the types of D, A and B, .satfinite."""
    if parts[:2] != ["sync", "aligned"]:
        raise ValueError("modifiers")
    saturated = "satfinite" in (parts[3], parts[-1])  # assemblers take it in both places
    if saturated:
        parts.remove("satfinite")
    if "b1" in parts:
        if parts[-2:] != ["and", "popc"] or saturated:
            raise ValueError("operation on b1")
        parts = parts[:-2]
    shape, (to, a, b) = parts[2], parts[3:]
    match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    if not match or not any({a, b} <= kinds for kinds in _PARTNERS):
        raise ValueError(f"shape .{shape} or types .{a}.{b}")
    n, k, integer = int(match[1]), int(match[2]), to == "s32"
    if k != _DEPTH[a] or to not in _RESULTS[a] or not _fits(n, integer):
        raise ValueError(f"shape .{shape} with types .{to}.{a}.{b}")
    if saturated and not integer:
        raise ValueError("modifier .satfinite")
    return n, k, to, a, b, saturated


def _fits(n: int, integer: bool) -> bool:
    step = 16 if integer and n > 32 else 8
    return 8 <= n <= 256 and n % step == 0


def _immediates(
    operands: tuple[Operand, ...], integer: bool, halves: bool, in_registers: bool
) -> tuple[tuple[int, int], tuple[bool, bool]]:
    """imm-scale-a, imm-scale-b and imm-trans-a, imm-trans-b."""
    values = [operand.value for operand in operands if isinstance(operand, Imm)]
    wanted = 0 if integer else 2 + (2 - in_registers if halves else 0)
    if len(operands) != wanted or len(values) != wanted:
        raise ValueError("operands")
    if integer:
        return (1, 1), (False, False)
    scales, transposed = values[:2], values[2:]
    if any(value not in (1, -1) for value in scales) or any(v not in (0, 1) for v in transposed):
        raise ValueError("immediates")
    both = [False] * (2 - len(transposed)) + [bool(value) for value in transposed]
    return (scales[0], scales[1]), (both[0], both[1])
