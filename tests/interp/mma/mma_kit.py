"""Fragments by the formulas of the PTX manual, and kernels around one mma.sync."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

from fkjit.interp import Arg, run

G, T = np.arange(32) // 4, np.arange(32) % 4  # groupID and threadID_in_group of the manual
TYPES: dict[str, Any] = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "f32": np.float32,
    "f64": np.float64, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8, "u8": np.uint8, "s4": np.int8, "u4": np.uint8, "s32": np.int32,
}  # fmt: skip
FAMILIES = {  # shapes; pairs of a and b; accumulators
    "f16": ("m16n8k8 m16n8k16", [("f16", "f16")], "f32 f16"),
    "bf16": ("m16n8k8 m16n8k16", [("bf16", "bf16")], "f32"),
    "tf32": ("m16n8k4 m16n8k8", [("tf32", "tf32")], "f32"),
    "fp8": ("m16n8k16 m16n8k32", [(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")],
            "f32 f16"),
    "int8": ("m8n8k16 m16n8k16 m16n8k32", [(a, b) for a in ("s8", "u8") for b in ("s8", "u8")],
             "s32"),
    "int4": ("m8n8k32 m16n8k32 m16n8k64", [(a, b) for a in ("s4", "u4") for b in ("s4", "u4")],
             "s32"),
    "f64": ("m8n8k4 m16n8k4 m16n8k8 m16n8k16", [("f64", "f64")], "f64"),
}  # fmt: skip
FORMS = [
    f"{shape}.row.col.{acc}.{a}.{b}.{acc}"
    for shapes, types, accs in FAMILIES.values()
    for shape in shapes.split()
    for a, b in types
    for acc in accs.split()
]


def parts(form: str) -> tuple[int, int, str, str, str]:
    """m, k, the types of a, b and the accumulator of "m16n8k16.row.col.f32.f16.f16.f32"."""
    m, k = (int(x) for x in re.findall(r"[mk](\d+)", form.split(".")[0]))
    acc, a, b, _ = form.split(".")[-4:]
    return m, k, a, b, acc


def in_register(kind: str) -> int:
    """Elements of a 32-bit register (of a 64-bit one for f64)."""
    return 1 if kind == "f64" else 8 if kind[1:] == "4" else 4 // np.dtype(TYPES[kind]).itemsize


def place_a(m: int, kind: str, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of element i of operand a, for the 32 lanes."""
    e = in_register(kind)
    register, low = divmod(i, e)
    down = register % 2 if m == 16 else 0
    along = register // 2 if m == 16 else register
    return G + 8 * down, T * e + low + 4 * e * along


def place_b(kind: str, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of element i of operand b."""
    e = in_register(kind)
    return T * e + i % e + 4 * e * (i // e), G


def place_c(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of element i of an accumulator."""
    return G + 8 * (i // 2), 2 * T + i % 2


def pack(kind: str, values: np.ndarray) -> np.ndarray:
    """Elements [warps, 32, n] -> registers [warps, 32, registers] as unsigned integers."""
    values = np.ascontiguousarray(values.astype(TYPES[kind]))
    if kind == "f64":
        return values.view("u8")
    if kind[1:] == "4":
        nibbles = values.view("u1") & 15
        values = np.ascontiguousarray(nibbles[..., ::2] | nibbles[..., 1::2] << 4)
    return values.view("u4")


def fragments(
    form: str, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matrices [warps, rows, columns] -> registers of the three operands."""
    m, k, kind_a, kind_b, acc = parts(form)
    take_a = [a[(slice(None), *place_a(m, kind_a, i))] for i in range(m * k // 32)]
    take_b = [b[(slice(None), *place_b(kind_b, i))] for i in range(k * 8 // 32)]
    take_c = [c[(slice(None), *place_c(i))] for i in range(m * 8 // 32)]
    return (pack(kind_a, np.stack(take_a, 2)), pack(kind_b, np.stack(take_b, 2)),
            pack(acc, np.stack(take_c, 2)))  # fmt: skip


def matrix_of(form: str, registers: np.ndarray) -> np.ndarray:
    """The accumulator's registers [warps, 32, n] -> [warps, m, 8]."""
    m, _, _, _, acc = parts(form)
    values = np.ascontiguousarray(registers).view(TYPES[acc])
    out = np.zeros((registers.shape[0], m, 8), TYPES[acc])
    for i in range(values.shape[2]):
        out[(slice(None), *place_c(i))] = values[:, :, i]
    return out


def kernel(arrays: dict[str, np.ndarray], body: str, target: str = "sm_90a") -> str:
    """PTX that loads each thread's row of a, b, c into %a0…, %b0…, %c0…, and stores %d0… into d."""
    lines = [f".version 8.7\n.target {target}\n.address_size 64"]
    lines.append(f".visible .entry k({', '.join(f'.param .u64 p_{n}' for n in arrays)})\n{{")
    lines.append(".reg .b32 %i, %n, %lane, %warp, %r<9>; .reg .b64 %g, %o; .reg .pred %p, %q;")
    lines.append("mov.u32 %i, %ctaid.x; mov.u32 %n, %ntid.x; mov.u32 %lane, %tid.x;")
    lines.append("mad.lo.u32 %i, %i, %n, %lane; shr.u32 %warp, %lane, 5;")
    lines.append("and.b32 %lane, %lane, 31;")
    moves: dict[str, list[str]] = {"ld": [], "st": []}
    for name, array in arrays.items():
        bits, count = 8 * array.itemsize, array.shape[-1]
        lines.append(f".reg .b{bits} %{name}<{count}>;")
        way = moves["st" if name == "d" else "ld"]
        way.append(f"ld.param.u64 %g, [p_{name}]; mul.wide.u32 %o, %i, {count * array.itemsize};")
        way.append("add.s64 %g, %g, %o;")
        for j in range(count):
            at, register = f"[%g+{j * array.itemsize}]", f"%{name}{j}"
            way.append(f"st.global.b{bits} {at}, {register};" if name == "d"
                       else f"ld.global.b{bits} {register}, {at};")  # fmt: skip
    return "\n".join([*lines, *moves["ld"], body, *moves["st"], "ret;\n}"])


def vector(name: str, count: int) -> str:
    """{%a0, %a1, …}"""
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


def run_kernel(arrays: dict[str, np.ndarray], body: str, block: int = 96) -> np.ndarray:
    """Run `kernel` for every warp of the arrays ([warps, 32, registers]); returns d."""
    warps = arrays["a"].shape[0]
    arguments = [Arg(n, np.ascontiguousarray(x), n == "d") for n, x in arrays.items()]
    grid = warps * 32 // block
    assert grid * block == warps * 32
    run(kernel(arrays, body), "k", grid, block, arguments)
    return next(np.asarray(x.value) for x in arguments if x.name == "d")


def run_mma(form: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One mma of every warp from matrices [warps, rows, columns]; d as a matrix."""
    registers = dict(zip("abc", fragments(form, a, b, c), strict=True))
    registers["d"] = np.zeros_like(registers["c"])
    operands = ", ".join(vector(n, registers[n].shape[2]) for n in "dabc")
    return matrix_of(form, run_kernel(registers, f"mma.sync.aligned.{form} {operands};"))
