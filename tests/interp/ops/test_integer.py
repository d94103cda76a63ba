"""Integer arithmetic and bits: every opcode against Python's own integers."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest

from tests.interp.interp_kit import INTEGERS, apply, pairs

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
WIDE = np.unique(
    np.concatenate([INTEGERS.astype("u8"), INTEGERS.astype("u8") << np.uint64(32),
                    np.array([M64, M64 - 1, 1 << 63, (1 << 63) - 1, 0x123456789ABCDEF0], "u8")])
)  # fmt: skip


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def trunc_div(a: int, b: int) -> int:
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def trunc_rem(a: int, b: int) -> int:
    return a if b == 0 else a - trunc_div(a, b) * b


def check(text: str, kind: str, function: Callable[..., int], out_bits: int | None = None) -> None:
    width = int(kind[1:])
    values = {16: INTEGERS.astype("u2"), 32: INTEGERS, 64: WIDE}[width]
    a, b = pairs(values)
    result = apply(text, a, b, out=f"u{(out_bits or width) // 8}")
    convert = (lambda v: signed(v, width)) if kind[0] == "s" else int
    mask = (1 << (out_bits or width)) - 1
    expected = [
        function(convert(int(x)), convert(int(y))) & mask for x, y in zip(a, b, strict=True)
    ]
    np.testing.assert_array_equal(result, np.array(expected, result.dtype))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize(
    ("name", "function"),
    [("add", operator.add), ("sub", operator.sub), ("mul.lo", operator.mul), ("min", min),
     ("max", max), ("div", trunc_div), ("rem", trunc_rem)],
)  # fmt: skip
def test_binary(kind: str, name: str, function: Callable[[int, int], int]) -> None:
    check(f"{name}.{kind} %d, %a, %b;", kind, function)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_mul_hi(kind: str) -> None:
    check(f"mul.hi.{kind} %d, %a, %b;", kind, lambda a, b: a * b >> int(kind[1:]))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_mul_wide_and_mad_wide(kind: str) -> None:
    bits = 2 * int(kind[1:])
    check(f"mul.wide.{kind} %d, %a, %b;", kind, operator.mul, bits)
    text = f"mul.wide.{kind} %d, %b, %b; mad.wide.{kind} %d, %a, %b, %d;"
    check(text, kind, lambda a, b: a * b + b * b, bits)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_mad(kind: str) -> None:
    check(f"mad.lo.{kind} %d, %a, %b, %b;", kind, lambda a, b: a * b + b)
    width = int(kind[1:])
    check(f"mad.hi.{kind} %d, %a, %b, %b;", kind, lambda a, b: (a * b >> width) + b)


def test_add_sat_and_carry() -> None:
    def clamp(value: int) -> int:
        return max(-(1 << 31), min((1 << 31) - 1, value))

    check("add.sat.s32 %d, %a, %b;", "s32", lambda a, b: clamp(a + b))
    check("sub.sat.s32 %d, %a, %b;", "s32", lambda a, b: clamp(a - b))
    split = "mov.b64 {%t, %u}, %a; mov.b64 {%v, %w}, %b;"
    add = f"{split} add.cc.u32 %t, %t, %v; addc.u32 %u, %u, %w; mov.b64 %d, {{%t, %u}};"
    check(add, "u64", operator.add)
    sub = f"{split} sub.cc.u32 %t, %t, %v; subc.u32 %u, %u, %w; mov.b64 %d, {{%t, %u}};"
    check(sub, "u64", operator.sub)


@pytest.mark.parametrize(
    ("name", "function"),
    [("and", operator.and_), ("or", operator.or_), ("xor", operator.xor),
     ("not", lambda a, b: ~a), ("cnot", lambda a, b: int(a == 0))],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_logic(kind: str, name: str, function: Callable[[int, int], int]) -> None:
    second = "" if name.endswith("not") else ", %b"
    check(f"{name}.{kind} %d, %a{second};", "u" + kind[1:], function)


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_neg_and_abs(kind: str) -> None:
    check(f"neg.{kind} %d, %a;", kind, lambda a, b: -a)
    check(f"abs.{kind} %d, %a;", kind, lambda a, b: abs(a))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_shifts_by_registers_and_constants(kind: str) -> None:
    bits = int(kind[1:])
    values = {16: INTEGERS.astype("u2"), 32: INTEGERS, 64: WIDE}[bits]
    amounts = np.array([0, 1, 5, bits - 1, bits, bits + 1, 64, 100, M32], np.uint32)
    a, n = (x.ravel().copy() for x in np.meshgrid(values, amounts))
    convert = (lambda v: signed(int(v), bits)) if kind[0] == "s" else int
    right = [convert(x) >> min(int(y), 100) for x, y in zip(a, n, strict=True)]
    left = [int(x) << int(y) if y < bits else 0 for x, y in zip(a, n, strict=True)]
    mask = (1 << bits) - 1
    got = apply(f"shr.{kind} %d, %a, %b;", a, n, out=a.dtype)
    np.testing.assert_array_equal(got, np.array([x & mask for x in right], a.dtype))
    got = apply(f"shl.b{bits} %d, %a, %b;", a, n, out=a.dtype)
    np.testing.assert_array_equal(got, np.array([x & mask for x in left], a.dtype))
    got = apply(f"shr.{kind} %d, %a, {bits + 3};", values, out=a.dtype)
    expected = np.array([(convert(x) >> (bits + 3)) & mask for x in values], a.dtype)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
@pytest.mark.parametrize("way", ["l", "r"])
def test_funnel_shift(way: str, mode: str) -> None:
    a, b = pairs(INTEGERS)
    for amount in (0, 1, 13, 31, 32, 33, 70):
        n = amount & 31 if mode == "wrap" else min(amount, 32)
        pair = [(int(y) << 32) | int(x) for x, y in zip(a, b, strict=True)]
        shifted = [(p << n) >> 32 if way == "l" else p >> n for p in pair]
        got = apply(f"shf.{way}.{mode}.b32 %d, %a, %b, {amount};", a, b)
        np.testing.assert_array_equal(got, np.array([s & M32 for s in shifted], np.uint32))


def test_lop3_every_table() -> None:
    a, b, c = np.array([0xF0F0], "u4"), np.array([0xCCCC], "u4"), np.array([0xAAAA], "u4")
    for table in range(256):
        got = int(apply(f"lop3.b32 %d, %a, %b, %c, {table};", a, b, c)[0])
        for row in range(8):
            bit = (0xF0 >> row & 1) << 2 | (0xCC >> row & 1) << 1 | (0xAA >> row & 1)
            assert got >> row & 1 == table >> bit & 1, f"table {table:#x}"


def prmt_default(a: int, b: int, control: int) -> int:
    pair, out = a | b << 32, 0
    for byte in range(4):
        select = control >> 4 * byte & 15
        value = pair >> 8 * (select & 7) & 255
        if select & 8:
            value = 255 if value & 128 else 0
        out |= value << 8 * byte
    return out


def test_prmt() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 1 << 32, (3, 500), dtype="u4")
    expected = [prmt_default(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(apply("prmt.b32 %d, %a, %b, %c;", a, b, c), expected)
    modes = {"f4e": 0x5432, "b4e": 0x7012, "rc8": 0x2222, "ecl": 0x3222, "ecr": 0x2210,
             "rc16": 0x1010}  # fmt: skip
    for mode, control in modes.items():
        got = apply(f"prmt.b32.{mode} %d, %a, %b, 2;", a, b)
        expected = [prmt_default(int(x), int(y), control) for x, y in zip(a, b, strict=True)]
        np.testing.assert_array_equal(got, expected, mode)


def bfe(value: int, at: int, count: int, bits: int, is_signed: bool) -> int:
    """The PTX manual's own loop."""
    msb = bits - 1
    at, count = at & 255, count & 255
    top = min(at + count - 1, msb)
    sign = 0 if not is_signed or count == 0 else value >> top & 1
    out = 0
    for i in range(bits):
        out |= (value >> (at + i) & 1 if i < count and at + i <= msb else sign) << i
    return out


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    bits = int(kind[1:])
    rng = np.random.default_rng(1)
    a = rng.integers(0, M64, 600, dtype="u8", endpoint=True).astype(f"u{bits // 8}")
    b = rng.integers(0, M64, 600, dtype="u8", endpoint=True).astype(f"u{bits // 8}")
    at, count = rng.integers(0, bits + 8, (2, 600), dtype="u4")
    count[:50], at[50:80] = 0, 255
    rows = list(zip(a.tolist(), b.tolist(), at.tolist(), count.tolist(), strict=True))
    got = apply(f"bfe.{kind} %d, %a, %b, %c;", a, at, count, out=a.dtype)
    expected = [bfe(x, p, n, bits, kind[0] == "s") for x, _, p, n in rows]
    np.testing.assert_array_equal(got, np.array(expected, a.dtype))
    got = apply(f"bfi.b{bits} %d, %a, %b, %c, %e;", a, b, at, count, out=a.dtype)
    expected = []
    for x, y, p, n in rows:
        out = y
        for i in range(n):
            if p + i < bits:
                out = out & ~(1 << p + i) | (x >> i & 1) << p + i
        expected.append(out)
    np.testing.assert_array_equal(got, np.array(expected, a.dtype))


def test_counts_and_searches() -> None:
    for values, bits in ((INTEGERS, 32), (WIDE, 64)):
        own = [int(v) for v in values]
        for text, function in (
            (f"popc.b{bits}", lambda v: v.bit_count()),
            (f"clz.b{bits}", lambda v, bits=bits: bits - v.bit_length()),
            (f"bfind.u{bits}", lambda v: (v.bit_length() - 1) & M32),
        ):
            got = apply(f"{text} %d, %a;", values)
            np.testing.assert_array_equal(got, [function(v) for v in own], text)
        got = apply(f"brev.b{bits} %d, %a;", values, out=values.dtype)
        expected = np.array([int(f"{v:0{bits}b}"[::-1], 2) for v in own], values.dtype)
        np.testing.assert_array_equal(got, expected)
        highest = [v if v >> (bits - 1) == 0 else ~v & ((1 << bits) - 1) for v in own]
        expected = [(v.bit_length() - 1) & M32 for v in highest]
        np.testing.assert_array_equal(apply(f"bfind.s{bits} %d, %a;", values), expected)
    shift = [32 - int(v).bit_length() if v else M32 for v in INTEGERS]
    np.testing.assert_array_equal(apply("bfind.shiftamt.u32 %d, %a;", INTEGERS),
                                  shift)  # fmt: skip


def test_sad_and_dp4a() -> None:
    check("sad.s32 %d, %a, %b, %b;", "s32", lambda a, b: abs(a - b) + b)
    a, b = np.random.default_rng(2).integers(0, 1 << 32, (2, 300), dtype="u4")
    for of_a in "us":
        for of_b in "us":
            kinds = [{"u": "u1", "s": "i1"}[k] for k in (of_a, of_b)]
            x, y = (
                v.view(k).reshape(-1, 4).astype(int) for v, k in zip((a, b), kinds, strict=True)
            )
            expected = ((x * y).sum(1) + 7) & M32
            got = apply(f"dp4a.{of_a}32.{of_b}32 %d, %a, %b, 7;", a, b)
            np.testing.assert_array_equal(got, expected)
