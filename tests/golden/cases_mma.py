"""mma.sync in every shape and type of sm_75 to sm_90, fragments as they are in and out.

Floating-point elements are small integers, so that no order of summation and no width of the
accumulator can show; integers are random bits over their whole range.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import PREAMBLE, Case
from tests.golden.forms import random_result
from tests.golden.values import Random, random_bits, small, special

_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8,
         "s4": 4, "u4": 4, "b1": 1, "f32": 32, "s32": 32}  # fmt: skip
_MOST = {"e4m3": 4, "e5m2": 4, "f16": 4}


def _registers(elements: int, type_: str) -> int:
    """32-bit (for f64: 64-bit) registers of a lane for a fragment of so many elements."""
    return elements // 32 if type_ == "f64" else max(1, elements * _BITS[type_] // 32 // 32)


def _words(rng: Random, type_: str, count: int, odd: bool = False) -> np.ndarray:
    """`count` registers of each of 32 lanes; `odd` with infinities and NaN."""
    wide = "u8" if type_ == "f64" else "u4"
    size = 32 * count * np.dtype(wide).itemsize
    if type_ in ("s8", "u8", "s4", "u4", "b1"):
        return random_bits(rng, "u32", 32 * count).reshape(count, 32)
    elements = size * 8 // _BITS[type_]
    if type_ == "s32":  # near the limits too: there satfinite shows
        values = random_bits(rng, "u32", elements)
        limits = np.array([0x7FFFFFFF, 0x80000000, 0x7FFFFF00, 0x80000100], np.uint32)
        chosen = np.where(
            rng.randint(0, 2, elements) > 0, limits[rng.randint(0, 4, elements)], values
        )
        return chosen.reshape(count, 32)
    if odd:
        return special(rng, type_, elements).view(wide).reshape(count, 32)
    return small(rng, type_, elements, _MOST.get(type_, 16)).view(wide).reshape(count, 32)


def _case(
    shape: tuple[int, int, int], d: str, a: str, b: str, arch: str, more: str = "", tail: str = "",
    odd: bool = False,
) -> Case:  # fmt: skip
    m, n, k = shape
    counts = [_registers(m * n, d), _registers(m * k, a), _registers(k * n, b)]
    wide = d == "f64"
    ctype, letter = ("u64", "l") if wide else ("u32", "r")
    if wide:
        letter = "d"
        ctype = "double"
    at, groups = 0, []
    for count in (counts[0], counts[1], counts[2]):
        groups.append("{" + ", ".join(f"%{at + i}" for i in range(count)) + "}")
        at += count
    full = f"mma.sync.aligned.m{m}n{n}k{k}.row.col{more}.{d}.{a}.{b}.{d}{tail}"
    outs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(counts[0]))
    ins = [f'"{letter}"(a[{32 * i} + lane])' for i in range(counts[1])]
    ins += [f'"{letter}"(b[{32 * i} + lane])' for i in range(counts[2])]
    source = f"""{PREAMBLE}
K k(const {ctype}* a, const {ctype}* b, const {ctype}* c, {ctype}* result) {{
  const int lane = threadIdx.x;
  {ctype} d[{counts[0]}];
  for (int j = 0; j < {counts[0]}; ++j) d[j] = c[32 * j + lane];
  asm volatile("{full} {groups[0]}, {groups[1]}, {groups[2]}, {groups[0]};"
               : {outs} : {", ".join(ins)});
  for (int j = 0; j < {counts[0]}; ++j) result[32 * j + lane] = d[j];
}}
"""

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        parts = {"a": (a, counts[1]), "b": (b, counts[2]), "c": (d, counts[0])}
        made = {name: _words(rng, *part, odd) for name, part in parts.items()}
        return {**made, "result": random_result(rng, (counts[0], 32), "u8" if wide else "u4")}

    name = full.replace("mma.sync.aligned.", "mma.") + (".special" if odd else "")
    return Case(name, source, arrays,
                {"result": {"s32": "u32"}.get(d, d)}, arch)  # fmt: skip


def _floats() -> Iterator[Case]:
    for d in ("f16", "f32"):
        yield _case((16, 8, 8), d, "f16", "f16", "compute_75")
        yield _case((16, 8, 16), d, "f16", "f16", "compute_80")
    for k in (8, 16):
        yield _case((16, 8, k), "f32", "bf16", "bf16", "compute_80")
    for k in (4, 8):
        yield _case((16, 8, k), "f32", "tf32", "tf32", "compute_80")
    yield _case((8, 8, 4), "f64", "f64", "f64", "compute_80")
    for k in (4, 8, 16):
        yield _case((16, 8, k), "f64", "f64", "f64", "compute_90a")
    for a in ("e4m3", "e5m2"):
        for b in ("e4m3", "e5m2"):
            for d in ("f16", "f32"):
                for k in (16, 32):
                    yield _case((16, 8, k), d, a, b, "compute_89")


def _special() -> Iterator[Case]:
    for d in ("f16", "f32"):
        yield _case((16, 8, 16), d, "f16", "f16", "compute_80", odd=True)
        yield _case((16, 8, 32), d, "e4m3", "e5m2", "compute_89", odd=True)
    yield _case((16, 8, 16), "f32", "bf16", "bf16", "compute_80", odd=True)
    yield _case((16, 8, 8), "f32", "tf32", "tf32", "compute_80", odd=True)


def _integers() -> Iterator[Case]:
    for bits, small_k in (("8", 16), ("4", 32)):
        for a in (f"s{bits}", f"u{bits}"):
            for b in (f"s{bits}", f"u{bits}"):
                for more in ("", ".satfinite"):
                    yield _case((8, 8, small_k), "s32", a, b, "compute_75", more)
                    yield _case((16, 8, small_k), "s32", a, b, "compute_80", more)
                    yield _case((16, 8, 2 * small_k), "s32", a, b, "compute_80", more)
    for op in ("xor", "and"):
        arch = "compute_75" if op == "xor" else "compute_80"
        yield _case((8, 8, 128), "s32", "b1", "b1", arch, tail=f".{op}.popc")
        yield _case((16, 8, 128), "s32", "b1", "b1", "compute_80", tail=f".{op}.popc")
        yield _case((16, 8, 256), "s32", "b1", "b1", "compute_80", tail=f".{op}.popc")


CASES = [*_floats(), *_special(), *_integers()]
