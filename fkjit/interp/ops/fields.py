"""Bit fields: bfe, bfi, bmsk, szext, fns."""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.ptx import DTYPE, SIZE, Instruction, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, only, opcode


def _typed(ins: Instruction, types: str, modifiers: str = "") -> None:
    """Refuse a type or a modifier that the instruction does not have."""
    if ins.type not in words(types):
        raise ValueError(f"type .{ins.type}")
    only(ins, (*words(modifiers), ins.type))


@opcode("bfe")
def bfe(d: Decoder, ins: Instruction) -> Step:
    """bfe d, a, position, length: a bit field, sign-extended for .s types.

    The manual allows positions and lengths up to 255; of greater ones an H200 takes the low byte
    for 32-bit types and the whole number for 64-bit ones.
    """
    _typed(ins, "u32 s32 u64 s64")
    kind, bits = ins.type, 8 * SIZE[ins.type]
    a = d.src(ins.args[1], kind)
    position, length = d.src(ins.args[2], "u32"), d.src(ins.args[3], "u32")
    dtype = DTYPE[kind]
    wide = np.dtype("i8") if dtype.kind == "i" else np.dtype("u8")
    known = np.uint32(255 if bits == 32 else 0xFFFFFFFF)

    def compute(out: np.ndarray) -> None:
        at = np.minimum(position & known, 64).astype(np.int64)
        count = np.minimum(length & known, 64).astype(np.int64)
        end = np.minimum(at + count, bits)  # the sign is that of the highest bit there is
        taken = np.clip(end - at, 0, bits)
        value = a.astype(wide).view(np.uint64)
        top = value << (64 - np.minimum(end, 64)).astype(np.uint64)  # the field's top bit is 63
        down = np.minimum(64 - taken, 63).astype(wide)
        field = top.view(wide) >> down
        sign = np.where(a < 0, wide.type(-1), wide.type(0)) if wide.kind == "i" else wide.type(0)
        field = np.where((at >= bits) & (count > 0), sign, field)
        np.copyto(out, np.where(count == 0, wide.type(0), field), "unsafe")

    return d.step(ins, ins.args[0], kind, compute)


@opcode("bfi")
def bfi(d: Decoder, ins: Instruction) -> Step:
    """bfi d, a, b, position, length: b with a field replaced by the low bits of a."""
    _typed(ins, "b32 b64")
    kind, bits = f"u{ins.type[1:]}", 8 * SIZE[ins.type]
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    position, length = d.src(ins.args[3], "u32"), d.src(ins.args[4], "u32")

    def compute(out: np.ndarray) -> None:
        at = position & np.uint32(255)
        count = np.minimum(length & np.uint32(255), 64).astype(np.uint64)
        low = np.where(
            count >= 64, ~np.uint64(0), (np.uint64(1) << count % np.uint64(64)) - np.uint64(1)
        )
        by = np.minimum(at, 63).astype(np.uint64)
        mask = np.where(at >= bits, np.uint64(0), low << by)
        value = (a.astype(np.uint64) << by) & mask
        np.copyto(out, (b.astype(np.uint64) & ~mask) | value, "unsafe")

    return d.step(ins, ins.args[0], kind, compute)


def _ones(count: np.ndarray) -> np.ndarray:
    """Numbers (u64) of which that many low bits are ones; counts up to 32."""
    return (np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)


@opcode("bmsk")
def bmsk(d: Decoder, ins: Instruction) -> Step:
    """bmsk.clamp/.wrap.b32 d, position, width: ones from a position on."""
    _typed(ins, "b32", "clamp wrap")
    a, b, wrap = d.src(ins.args[1], "u32"), d.src(ins.args[2], "u32"), ins.has("wrap")

    def compute(out: np.ndarray) -> None:
        at, width = (v & np.uint32(31) if wrap else np.minimum(v, np.uint32(32)) for v in (a, b))
        np.copyto(out, _ones(width) << at.astype(np.uint64), casting="unsafe")

    return d.step(ins, ins.args[0], "u32", compute)


@opcode("szext")
def szext(d: Decoder, ins: Instruction) -> Step:
    """szext.clamp/.wrap.u32/.s32 d, a, width: the low bits of a, zero- or sign-extended."""
    _typed(ins, "u32 s32", "clamp wrap")
    a, b, wrap = d.src(ins.args[1], "u32"), d.src(ins.args[2], "u32"), ins.has("wrap")
    signed = ins.type == "s32"

    def compute(out: np.ndarray) -> None:
        width = b & np.uint32(31) if wrap else np.minimum(b, np.uint32(32))
        low = _ones(width).astype(np.uint32)
        top = np.where(width > 0, a >> (np.maximum(width, 1) - np.uint32(1)) & np.uint32(1), 0)
        filled = np.where((top == 1) & signed, a | ~low, a & low)
        np.copyto(out.view(np.uint32), filled, casting="unsafe")

    return d.step(ins, ins.args[0], ins.type, compute)


@opcode("fns")
def fns(d: Decoder, ins: Instruction) -> Step:
    """fns.b32 d, mask, base, n: where the n-th one is, from base up (n > 0) or down (n < 0).

    n = 0 asks for base itself; 0xffffffff where there is no such bit.
    """
    _typed(ins, "b32")
    mask, base = d.src(ins.args[1], "u32"), d.src(ins.args[2], "u32")
    offset = d.src(ins.args[3], "s32")
    bit = np.arange(32)

    def compute(out: np.ndarray) -> None:
        ones = (mask[:, None] >> bit.astype(np.uint32) & np.uint32(1)).astype(bool)
        start, want = base[:, None].astype(np.int64), offset[:, None].astype(np.int64)
        side = np.where(want == 0, bit == start, np.where(want > 0, bit >= start, bit <= start))
        here = ones & side
        up = np.cumsum(here, 1)
        down = np.cumsum(here[:, ::-1], 1)[:, ::-1]
        rank = np.where(want < 0, down, up)
        hit = here & (rank == np.maximum(np.abs(want), 1))
        out[...] = np.where(hit.any(1), hit.argmax(1), 0xFFFFFFFF)

    return d.step(ins, ins.args[0], "u32", compute)
