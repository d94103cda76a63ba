"""wmma.load, wmma.mma and wmma.store: their fragments are opaque, so matrices go in and out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import PREAMBLE, Case
from tests.golden.forms import random_result
from tests.golden.values import Random, small

# Registers of A and B by type and shape; those of C and D depend on their type alone.
_REGISTERS = {
    ("f16", "m16n16k16"): (8, 8), ("f16", "m32n8k16"): (8, 8), ("f16", "m8n32k16"): (8, 8),
    ("bf16", "m16n16k16"): (4, 4), ("bf16", "m32n8k16"): (8, 2), ("bf16", "m8n32k16"): (2, 8),
    ("s8", "m16n16k16"): (2, 2), ("s8", "m32n8k16"): (4, 1), ("s8", "m8n32k16"): (1, 4),
    ("u8", "m16n16k16"): (2, 2), ("tf32", "m16n16k8"): (4, 4), ("f64", "m8n8k4"): (1, 1),
}  # fmt: skip
_SHAPES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16),
           "m16n16k8": (16, 16, 8), "m8n8k4": (8, 8, 4)}  # fmt: skip
_BYTES = {"f16": 2, "bf16": 2, "s8": 1, "u8": 1, "tf32": 4, "f64": 8, "f32": 4, "s32": 4}


def _braces(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"


def _values(rng: Random, type_: str, count: int) -> np.ndarray:
    if type_ in ("s8", "u8", "s32"):
        return np.frombuffer(rng.bytes(count * _BYTES[type_]), f"u{_BYTES[type_]}").copy()
    return small(rng, type_, count, 8)


def _case(shape: str, d: str, a: str, ways: tuple[str, str], out: str = "row") -> Case:
    (m, n, k), (count_a, count_b) = _SHAPES[shape], _REGISTERS[a, shape]
    wide = a == "f64"
    ctype, letter = ("double", "d") if wide else ("u32", "r")
    count_d = {"f16": 4, "f64": 2}.get(d, 8)
    pad = 16 // _BYTES[a]  # rows stand further apart than they are long
    lead_a = (k if ways[0] == "row" else m) + pad
    lead_b = (n if ways[1] == "row" else k) + pad
    lead_d = (n if out == "row" else m) + 16 // _BYTES[d]
    rows_a = m if ways[0] == "row" else k
    rows_b = k if ways[1] == "row" else n
    rows_d = m if out == "row" else n
    mma = f"{d}.{d}" if a == "f16" else f"{d}.{a}.{a}.{d}"
    lines = []
    for part, count, way, lead, type_ in (("a", count_a, ways[0], lead_a, a),
                                          ("b", count_b, ways[1], lead_b, a),
                                          ("c", count_d, out, lead_d, d)):  # fmt: skip
        registers = ", ".join(f'"={letter}"(r{part}[{j}])' for j in range(count))
        lines.append(f"""  {ctype} r{part}[{count}];
  asm volatile("wmma.load.{part}.sync.aligned.{way}.{shape}.global.{type_} {_braces(0, count)},"
               " [%{count}], {lead};" : {registers} : "l"({part}) : "memory");""")
    texts = [_braces(0, count_d), _braces(count_d, count_a), _braces(count_d + count_a, count_b)]
    operands = [f'"{letter}"(ra[{j}])' for j in range(count_a)]
    operands += [f'"{letter}"(rb[{j}])' for j in range(count_b)]
    outs = ", ".join(f'"+{letter}"(rc[{j}])' for j in range(count_d))
    stored = ", ".join(f'"{letter}"(rc[{j}])' for j in range(count_d))
    name = f"wmma.mma.sync.aligned.{ways[0]}.{ways[1]}.{shape}.{mma}"
    source = f"""{PREAMBLE}
K k(const void* a, const void* b, const void* c, void* result) {{
{chr(10).join(lines)}
  asm volatile("{name} {", ".join(texts)}, {texts[0]};"
               : {outs} : {", ".join(operands)});
  asm volatile("wmma.store.d.sync.aligned.{out}.{shape}.global.{d} [%{count_d}],"
               " {_braces(0, count_d)}, {lead_d};" :: {stored}, "l"(result) : "memory");
}}
"""

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        made = {"a": _values(rng, a, rows_a * lead_a), "b": _values(rng, a, rows_b * lead_b),
                "c": _values(rng, d, rows_d * lead_d)}  # fmt: skip
        result = random_result(rng, (rows_d * lead_d,), f"u{_BYTES[d]}")
        return {**made, "result": result}

    label = f"wmma.{shape}.{ways[0]}.{ways[1]}.{mma}.{out}"
    return Case(label, source, arrays, {"result": {"s32": "u32"}.get(d, d)}, "compute_80")


def _all() -> Iterator[Case]:
    for a, shape in _REGISTERS:
        accumulators = {"f16": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",), "f64": ("f64",)}
        for d in accumulators.get(a, ("f32",)):
            yield _case(shape, d, a, ("row", "col"))
            yield _case(shape, d, a, ("col", "row"), "col")
    for ways in (("row", "row"), ("col", "col")):
        yield _case("m16n16k16", "f32", "f16", ways)


CASES = [*_all()]
