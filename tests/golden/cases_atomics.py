"""atom and red: every operation and type, with an address a thread and with many threads on one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import PREAMBLE, Case
from tests.golden.forms import random_result
from tests.golden.values import Random, mixed, small

HOPPER = "compute_90a"
_SIZES = {"b16": 2, "f16": 2, "bf16": 2, "u64": 8, "s64": 8, "b64": 8, "f64": 8}
_LETTERS = {2: ("u16", "h"), 4: ("u32", "r"), 8: ("u64", "l")}
_FLOATS = {
    "f16": "f16",
    "f16x2": "f16",
    "bf16": "bf16",
    "bf16x2": "bf16",
    "f32": "f32",
    "f64": "f64",
}
THREADS = 256
SPOTS = 8  # addresses that many threads share


def _kind(type_: str) -> str:
    """The kind of values for a PTX type."""
    return type_ if type_ in _FLOATS else f"u{8 * _SIZES.get(type_, 4)}"


def _source(asm: str, size: int, space: str, shared_spots: bool) -> str:
    """`asm` has %0 the old value, %1 the address, %2 and %3 the operands."""
    ctype, letter = _LETTERS[size]
    spot = f"i % {SPOTS}" if shared_spots else "i"
    spots = SPOTS if shared_spots else THREADS
    if space == "global":
        memory, address, pointer, back = "", f"&memory[{spot}]", "l", ""
    else:
        memory = (f"  __shared__ {ctype} copy[{spots}];\n  if (i < {spots}) copy[i] = memory[i];\n"
                  "  __syncthreads();\n")  # fmt: skip
        address, pointer = f"shared_address(&copy[{spot}])", "r"
        back = f"\n  __syncthreads();\n  if (i < {spots}) memory[i] = copy[i];"
    store = "" if shared_spots else "\n  old[i] = before;"
    return f"""{PREAMBLE}
K k(const {ctype}* b, const {ctype}* c, {ctype}* memory, {ctype}* old) {{
  const int i = threadIdx.x;
{memory}  {ctype} before = b[i];
  asm volatile("{asm}" : "+{letter}"(before) : "{pointer}"({address}), "{letter}"(b[i]),
               "{letter}"(c[i]) : "memory");{store}{back}
}}
"""


def _alone(name: str, asm: str, type_: str, space: str, arch: str, swaps: bool = False) -> Case:
    """Every thread has an address of its own; operands are edges and random bits."""
    size, kind = _SIZES.get(type_, 4), _kind(type_)

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        memory, b, c = (mixed(kind, THREADS)(rng) for _ in range(3))
        if swaps:  # half of the comparisons succeed
            b = np.where(rng.randint(0, 2, THREADS) > 0, memory, b)
        return {"b": b, "c": c, "memory": memory, "old": random_result(rng, (THREADS,), f"u{size}")}

    form = _FLOATS.get(type_, f"u{8 * size}")
    source = _source(asm, size, space, shared_spots=False)
    return Case(name, source, arrays, {"memory": form, "old": form}, arch, block=THREADS)


def _together(name: str, asm: str, type_: str, space: str, arch: str) -> Case:
    """THREADS threads on SPOTS addresses; the result cannot depend on their order."""
    size, kind = _SIZES.get(type_, 4), _kind(type_)

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        if type_ in _FLOATS:
            scalar, packed = _FLOATS[type_], type_.endswith("x2")
            made = [small(rng, scalar, n * (2 if packed else 1)) for n in (THREADS, SPOTS)]
            b, memory = (m.view(f"u{size}") for m in made)
        else:
            b, memory = mixed(kind, THREADS)(rng), mixed(kind, SPOTS)(rng)
        return {"b": b, "c": b.copy(), "memory": memory, "old": b.copy()}

    form = _FLOATS.get(type_, f"u{8 * size}")
    source = _source(asm, size, space, shared_spots=True)
    return Case(name, source, arrays, {"memory": form}, arch, block=THREADS)


_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.f16x2", "noftz.bf16",
            "noftz.bf16x2"),
    "min": ("u32", "s32", "u64", "s64"), "max": ("u32", "s32", "u64", "s64"),
    "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"),
    "inc": ("u32",), "dec": ("u32",), "exch": ("b32", "b64"),
}  # fmt: skip


def _scalar() -> Iterator[Case]:
    for op, types in _TYPES.items():
        for full in types:
            type_ = full.split(".")[-1]
            arch = HOPPER if "bf16" in type_ else "compute_80"
            for space in ("global", "shared"):
                name = f"atom.{space}.{op}.{full}"
                yield _alone(name, f"{name} %0, [%1], %2;", type_, space, arch)
                if op in ("exch", "inc", "dec"):
                    continue
                red = f"red.{space}.{op}.{full}"
                yield _together(red, f"{red} [%1], %2;", type_, space, arch)
                yield _together(f"{name}.together", f"{name} %0, [%1], %2;", type_, space, arch)
    for type_ in ("b16", "b32", "b64"):
        for space in ("global", "shared"):
            name = f"atom.{space}.cas.{type_}"
            yield _alone(name, f"{name} %0, [%1], %2, %3;", type_, space, "compute_80", swaps=True)
    for more in ("relaxed.gpu", "acq_rel.cta", "release.sys", "acquire.gpu"):
        name = f"atom.{more}.global.add.u32"
        yield _together(name, f"{name} %0, [%1], %2;", "u32", "global", "compute_80")
    for name in ("red.relaxed.gpu.global.max.s32", "red.release.cta.global.xor.b32"):
        yield _together(name, f"{name} [%1], %2;", name[-3:], "global", "compute_80")


def _loops() -> Iterator[Case]:
    """Products by compare-and-swap, as kernels write them."""
    for space in ("global", "shared"):
        asm = (
            f"{{ .reg .pred p; .reg .u32 now, seen, next; ld.volatile.{space}.u32 now, [%1]; "
            "again: mul.lo.u32 next, now, %2; mov.u32 seen, now; "  # %0 may be %2's register
            f"atom.{space}.cas.b32 now, [%1], seen, next; setp.ne.u32 p, now, seen; "
            "@p bra again; mov.u32 %0, now; }"
        )
        yield _together(f"cas.loop.{space}", asm, "u32", space, "compute_80")


def _vector() -> Iterator[Case]:
    """Four to sixteen bytes a thread at once (sm_90)."""
    forms = [("add", "v2", "f32"), ("add", "v4", "f32")]
    for op in ("add", "min", "max"):
        for type_ in ("f16", "bf16"):
            forms += [(op, width, type_) for width in ("v2", "v4", "v8")]
            forms += [(op, width, f"{type_}x2") for width in ("v2", "v4")]
    for op, width, type_ in forms:
        yield _vector_case("red", op, width, type_)
        yield _vector_case("atom", op, width, type_)


def _vector_case(opcode: str, op: str, width: str, type_: str) -> Case:
    count, size, form = int(width[1:]), _SIZES.get(type_, 4), _FLOATS[type_]
    noftz = "" if type_ == "f32" else ".noftz"
    ctype, letter = _LETTERS[size]
    name = f"{opcode}.global.{op}{noftz}.{width}.{type_}"
    text = f"{opcode}.global.{width}.{type_}.{op}{noftz}" if opcode == "atom" else name
    operands = ", ".join(f"%{count + 1 + i}" for i in range(count))
    results = ", ".join(f"%{i}" for i in range(count))
    asm = f"{text} {{{results}}}, [%{count}], {{{operands}}};"
    if opcode == "red":
        asm = f"{text} [%{count}], {{{operands}}};"
    outs = ", ".join(f'"+{letter}"(r[{i}])' for i in range(count))
    ins = ", ".join(f'"{letter}"(b[i * {count} + {j}])' for j in range(count))
    source = f"""{PREAMBLE}
K k(const {ctype}* b, {ctype}* memory, {ctype}* old) {{
  const int i = threadIdx.x;
  {ctype} r[{count}];
  for (int j = 0; j < {count}; ++j) r[j] = j;
  asm volatile("{asm}" : {outs} : "l"(&memory[i * {count}]), {ins} : "memory");
  for (int j = 0; j < {count}; ++j) old[i * {count} + j] = r[j];
}}
"""

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        kind, total = _kind(type_), 64 * count
        b, memory = mixed(kind, total)(rng), mixed(kind, total)(rng)
        return {"b": b, "memory": memory, "old": random_result(rng, (total,), f"u{size}")}

    return Case(name, source, arrays, {"memory": form, "old": form}, HOPPER, block=64)


CASES = [*_scalar(), *_loops(), *_vector()]
