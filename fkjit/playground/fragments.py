"""Which lane holds which element of a tensor-core operand, found by asking the interpreter.

Nothing is drawn from a table: each element of a register gets a number, bit by bit as ones and
zeros of the operand's type, and the interpreter's own code takes the registers apart (mma, wgmma)
or runs the instruction (ldmatrix). Where a number comes out is where that lane's element goes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from fkjit.errors import InterpreterError
from fkjit.interp.core.lanes import WARP
from fkjit.interp.core.parse import parse
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.launch import run
from fkjit.interp.mma.accumulators import elements_of
from fkjit.interp.mma.forms import COLUMNS, form_of
from fkjit.interp.mma.fragments import Fragment
from fkjit.interp.numbers.elements import BITS
from fkjit.interp.spaces.arguments import Arg
from fkjit.interp.wgmma.form import parse_form
from fkjit.interp.wgmma.operand import fragment
from fkjit.interp.wgmma.product import from_registers
from fkjit.playground.listing import Ptx

_ONE = {
    "f64": 0x3FF0000000000000, "tf32": 0x3F800000, "f32": 0x3F800000, "f16": 0x3C00,
    "bf16": 0x3F80, "e4m3": 0x38, "e5m2": 0x3C,
}  # fmt: skip
_WIDEST = 32  # columns of wgmma that a picture has; the others repeat them

_LDMATRIX = """\
.version 7.8
.target sm_90
.address_size 64
.visible .entry probe(.param .u64 out) {{
  .reg .b32 %r<16>;
  .reg .b64 %rd<8>;
  .shared .align 16 .b8 tile[512];
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, tile;
  shl.b32 %r2, %r0, 4;
  add.u32 %r1, %r1, %r2;
  mul.lo.u32 %r3, %r0, 524296;
  add.u32 %r4, %r3, 65536;
  add.u32 %r5, %r3, 196610;
  add.u32 %r6, %r3, 327684;
  add.u32 %r7, %r3, 458758;
  st.shared.v4.b32 [%r1], {{%r4, %r5, %r6, %r7}};
  bar.sync 0;
  {instruction} {{{registers}}}, [%r1];
  ld.param.u64 %rd1, [out];
  mul.wide.u32 %rd2, %r0, {stride};
  add.u64 %rd1, %rd1, %rd2;
{stores}
  ret;
}}
"""


def found(ptx: Ptx, name: str) -> list[dict[str, Any]]:
    """Each form of mma, ldmatrix and wgmma in a kernel's PTX, the template's lines that it stands
    on, and its operands' owners. `name`: the template's."""
    forms: dict[str, tuple[Instruction, set[int]]] = {}
    for function in parse("\n".join(ptx.lines)).functions.values():
        for ins in function.instructions:
            if ins.op[0] in ("mma", "ldmatrix") or ins.op[:2] == ("wgmma", "mma_async"):
                _, lines = forms.setdefault(_form(ins), (ins, set()))
                lines.update(ptx.template_lines(name, ins.line))
    made = []
    for form, (ins, lines) in forms.items():
        operands = _operands(ins)
        if operands:
            made.append({"instruction": form, "lines": sorted(lines), "operands": operands})
    return made


def _form(ins: Instruction) -> str:
    """What tells layouts apart: the opcode, and whether wgmma has A in registers."""
    text = ".".join(ins.op)
    if ins.op[0] != "wgmma":
        return text
    return f"{text} (A in {'registers' if parse_form(ins).in_registers else 'shared memory'})"


def _operands(ins: Instruction) -> list[dict[str, Any]]:
    try:
        if ins.op[0] == "mma":
            return _of_mma(ins)
        return _of_wgmma(ins) if ins.op[0] == "wgmma" else _of_ldmatrix(ins.op)
    except (ValueError, InterpreterError):  # a form that the interpreter does not have
        return []


def _of_mma(ins: Instruction) -> list[dict[str, Any]]:
    form = form_of(ins)
    counts = form.counts

    def taken(kind: str, blocks: int, transposed: bool) -> Callable[[np.ndarray], np.ndarray]:
        def matrix(registers: np.ndarray) -> np.ndarray:
            room = np.zeros(1 << 14, np.uint8)
            one = Fragment(kind, list(registers), blocks, transposed, room, None)
            return np.asarray(one.matrix())[0]

        return matrix

    a = _probed(form.a, counts[1], WARP, taken(form.a, form.m // 8, True))
    b = _probed(form.b, counts[2], WARP, taken(form.b, 1, False))
    d = np.empty((form.m, COLUMNS, 3), np.int64)
    for register, part in enumerate(
        elements_of(np.arange(COLUMNS * form.m).reshape(1, COLUMNS, -1))
    ):
        for lane, at in enumerate(part.reshape(-1)):
            halves = form.accumulator == "f16"
            owner = (lane, register // 2, register % 2) if halves else (lane, register, 0)
            d[at % form.m, at // form.m] = owner
    return [
        _picture(f"A, {form.m} × {form.k}", a.swapaxes(0, 1)),
        _picture(f"B, {form.k} × {COLUMNS}", b.swapaxes(0, 1)),
        _picture(f"C and D, {form.m} × {COLUMNS}", d),
    ]


def _of_wgmma(ins: Instruction) -> list[dict[str, Any]]:
    form = parse_form(ins)
    lanes = 4 * WARP

    def results(registers: np.ndarray) -> np.ndarray:
        return from_registers(form, registers.reshape(form.registers, 1, lanes))[0]

    kind = {"f32": "f32", "f16": "f16", "s32": "s32"}[form.to]
    made = []
    if form.in_registers:
        a = _probed(form.a, 4, lanes, lambda r: fragment(form.a, [x[None] for x in r])[0])
        made.append(_picture(f"A of the first warp, 16 of 64 × {form.k}", a[:16]))
    d = _probed(kind, form.registers, lanes, results)
    shown = min(form.n, _WIDEST)
    title = f"D of the first warp, 16 of 64 × {shown} of {form.n}"
    return [*made, _picture(title, d[:16, :shown])]


@lru_cache(maxsize=16)
def _of_ldmatrix(op: tuple[str, ...]) -> list[dict[str, Any]]:
    """The instruction itself, run on numbers: element h of row l of shared memory is 8 l + h."""
    count = next(n for n, part in ((1, "x1"), (2, "x2"), (4, "x4")) if part in op)
    registers = [f"%r{8 + n}" for n in range(count)]
    stores = "\n".join(f"  st.global.b32 [%rd1+{4 * n}], {r};" for n, r in enumerate(registers))
    text = _LDMATRIX.format(
        instruction=".".join(op), registers=", ".join(registers), stride=4 * count, stores=stores
    )
    out = np.zeros((WARP, count, 2), np.uint16)
    run(text, "probe", 1, WARP, [Arg("out", out, writable=True)])
    made = []
    for matrix in range(count):
        owners = np.empty((8, 8, 3), np.int64)
        for lane in range(WARP):
            for part in range(2):
                row, column = divmod(int(out[lane, matrix, part]) - 64 * matrix, 8)
                owners[row, column] = lane, matrix, part
        title = f"matrix {matrix}: rows at the addresses of lanes {8 * matrix} to {8 * matrix + 7}"
        made.append(_picture(title, owners))
    return made


def _probed(
    kind: str, count: int, lanes: int, taken: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Owners [rows, columns, 3] of a matrix that `taken` makes of `count` registers."""
    bits = 32 if kind in ("f32", "s32") else BITS[kind]
    wide = np.dtype("u8" if bits == 64 else "u4")
    parts = max(32 // bits, 1)
    one = _ONE.get(kind, 1)
    number = np.arange(count * lanes * parts).reshape(count, lanes, parts)
    shifts = (np.arange(parts) * bits).astype(np.uint64)
    owner: Any = 0
    for digit in range(int(number.size - 1).bit_length()):
        set_ = (number >> digit & 1).astype(np.uint64) * np.uint64(one)
        registers = (set_ << shifts).sum(-1).astype(wide)
        matrix = np.asarray(taken(registers))
        ones = (matrix < 0) if kind == "b1.xor" else (matrix != 0)
        owner = owner + (ones.astype(np.int64) << digit)
    register, rest = np.divmod(owner, lanes * parts)
    return np.stack([rest // parts, register, rest % parts], -1)


def _picture(title: str, owners: np.ndarray) -> dict[str, Any]:
    return {
        "title": title,
        "owners": owners.tolist(),
        "parts": int(owners[..., 2].max()) + 1,
    }
