"""wgmma.mma_async: types, widths, where A comes from, layouts in shared memory, scales.

Shared memory is full of small numbers; which of them are multiplied is what the descriptors say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.golden.case import Case
from tests.golden.hopper import block_case
from tests.golden.values import Random, random_bits, small

A_WORDS, B_WORDS = 2048, 8192  # of shared memory: A below, B above
_SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "b1": 0}
_DEPTH = {2: 16, 4: 8, 1: 32, 0: 256}
_SWIZZLE_BITS = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Layout:
    """A descriptor: bytes of leading and stride offset, swizzle in bytes, and what a step adds."""

    leading: int
    stride: int
    swizzle: int
    step: int

    def bits(self) -> int:
        low = (self.leading >> 4) << 16
        return low | (self.stride >> 4) << 32 | _SWIZZLE_BITS[self.swizzle] << 62


# Rows of K: a swizzle's span of K in a row, eight rows after another; a step is 32 bytes of K.
K_MAJOR = {
    0: Layout(128, 512, 0, 256), 32: Layout(16, 256, 32, 0),
    64: Layout(16, 512, 64, 32), 128: Layout(16, 1024, 128, 32),
}  # fmt: skip
# Rows of M or N: a swizzle's span of it in a row, eight of K after another.
MN_MAJOR = {
    0: Layout(256, 128, 0, 2048), 32: Layout(512, 256, 32, 2048),
    64: Layout(1024, 512, 64, 2048), 128: Layout(2048, 1024, 128, 2048),
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """What a case multiplies: two steps of K on one accumulator."""

    d: str
    a: str
    b: str
    n: int
    registers_a: bool = False
    layout_a: Layout = K_MAJOR[128]
    layout_b: Layout = K_MAJOR[128]
    trans: tuple[int, int] = (0, 0)
    scale_d: int = 1
    signs: tuple[int, int] = (1, 1)
    more: str = ""

    @property
    def registers(self) -> int:
        """Accumulator registers of a thread."""
        return self.n // 4 if self.d == "f16" else self.n // 2


def _values(rng: Random, type_: str, words: int) -> np.ndarray:
    if type_ in ("s8", "u8", "b1", "s32"):
        return random_bits(rng, "u32", words)
    size = 4 if type_ == "f32" else _SIZES[type_]
    return small(rng, type_, words * 4 // size, 3).view(np.uint32)


def _instruction(form: Form) -> str:
    """The assembly of one step: accumulators, A (descriptor or four registers), B, scale-d."""
    count = form.registers
    a_count = 4 if form.registers_a else 1
    at = [f"%{i}" for i in range(count + a_count + 2)]
    a = "{" + ", ".join(at[count : count + 4]) + "}" if form.registers_a else at[count]
    b, scale = at[count + a_count], at[count + a_count + 1]
    tail = ""
    if form.d != "s32":
        tail = f", {form.signs[0]}, {form.signs[1]}"
        if form.a in ("f16", "bf16"):
            trans = form.trans[1:] if form.registers_a else form.trans
            tail += "".join(f", {t}" for t in trans)
    k = _DEPTH[_SIZES[form.a]]
    name = f"wgmma.mma_async.sync.aligned.m64n{form.n}k{k}.{form.d}.{form.a}.{form.b}{form.more}"
    accumulators = "{" + ", ".join(at[:count]) + "}"
    return (f"{{ .reg .pred p; setp.ne.b32 p, {scale}, 0; "
            f"{name} {accumulators}, {a}, {b}, p{tail}; }}")  # fmt: skip


def _case(name: str, form: Form) -> Case:
    count, total = form.registers, A_WORDS + B_WORDS
    outs = ", ".join(f'"+r"(d[{j}])' for j in range(count))
    a = (
        ", ".join(f'"r"(a[4 * step + {j}])' for j in range(4))
        if form.registers_a
        else '"l"(from_a)'
    )
    body = f"""  __shared__ __align__(1024) u32 tile[{total}];
  for (u32 j = i; j < {total}; j += 128) tile[j] = x[j];
  u32 a[8], d[{count}];
  for (u32 j = 0; j < 8; ++j) a[j] = x[{total} + 128 * j + i];
  for (u32 j = 0; j < {count}; ++j) d[j] = x[{total + 1024} + 128 * j + i];
  fence_async();
  __syncthreads();
  const u64 start = shared_address(tile);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (u32 step = 0; step < 2; ++step) {{
    const u64 from_a = {form.layout_a.bits():#x}ull | ((start + step * {form.layout_a.step}) >> 4);
    const u64 from_b =
        {form.layout_b.bits():#x}ull | ((start + {4 * A_WORDS} + step * {form.layout_b.step}) >> 4);
    asm volatile("{_instruction(form)}"
                 : {outs} : {a}, "l"(from_b), "r"(step ? 1 : {form.scale_d}));
  }}
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (u32 j = 0; j < {count}; ++j) result[128 * j + i] = d[j];"""

    def x(rng: Random) -> np.ndarray:
        parts = [_values(rng, form.a, A_WORDS), _values(rng, form.b, B_WORDS),
                 _values(rng, form.a, 1024), _values(rng, form.d, 128 * count)]  # fmt: skip
        return np.concatenate(parts)

    words = total + 1024 + 128 * count
    out = {"result": {"s32": "u32"}.get(form.d, form.d)}
    return block_case(f"wgmma.{name}", body, words, 128 * count, x, out, block=128)


_TYPES = [
    ("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
    *((d, a, b) for d in ("f16", "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *(("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")),
]  # fmt: skip


def _types() -> Iterator[Case]:
    for d, a, b in _TYPES:
        for registers in (False, True):
            way = "rs" if registers else "ss"
            yield _case(f"{way}.{d}.{a}.{b}", Form(d, a, b, 16, registers))
    for a in ("s8", "u8"):
        yield _case(f"satfinite.{a}", Form("s32", a, a, 16, more=".satfinite"))
    yield _case("b1", Form("s32", "b1", "b1", 16, more=".and.popc"))


def _widths() -> Iterator[Case]:
    for d, a in (("f32", "f16"), ("f16", "f16"), ("f32", "e4m3"), ("s32", "s8")):
        for n in (8, 24 if a != "s8" else 48, 64, 128):
            yield _case(f"n{n}.{d}.{a}", Form(d, a, a, n))
    for n in (104, 192, 256):
        yield _case(f"n{n}.f32.bf16", Form("f32", "bf16", "bf16", n))


def _layouts() -> Iterator[Case]:
    for swizzle in (0, 32, 64, 128):
        k = K_MAJOR[swizzle]
        for d, a in (("f32", "f16"), ("f32", "tf32"), ("s32", "u8")):
            yield _case(f"k.{swizzle}.{a}", Form(d, a, a, 32, layout_a=k, layout_b=k))
        mn = MN_MAJOR[swizzle]
        for a in ("f16", "bf16"):
            yield _case(f"tn.{swizzle}.{a}",
                        Form("f32", a, a, 32, layout_a=mn, layout_b=k, trans=(1, 0)))  # fmt: skip
            yield _case(f"nt.{swizzle}.{a}",
                        Form("f32", a, a, 128, layout_a=k, layout_b=mn, trans=(0, 1)))  # fmt: skip
        both = Form("f32", "f16", "f16", 8, layout_a=mn, layout_b=mn, trans=(1, 1))
        yield _case(f"tt.{swizzle}", both)
        yield _case(f"rs.nt.{swizzle}",
                    Form("f32", "f16", "f16", 64, True, layout_b=mn, trans=(0, 1)))  # fmt: skip


def _scales() -> Iterator[Case]:
    for signs in ((-1, 1), (1, -1), (-1, -1)):
        name = "".join("+" if s > 0 else "-" for s in signs)
        yield _case(f"signs.{name}", Form("f32", "f16", "f16", 8, signs=signs))
        yield _case(f"signs.{name}.rs", Form("f16", "f16", "f16", 8, True, signs=signs))
    for d, a in (("f32", "bf16"), ("f16", "f16"), ("s32", "s8"), ("f32", "tf32")):
        yield _case(f"fresh.{d}.{a}", Form(d, a, a, 16, scale_d=0))


CASES = [*_types(), *_widths(), *_layouts(), *_scales()]
