"""cvt, mov, setp, set, selp, slct."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.interp.interp_kit import EDGES, INTEGERS, apply, pairs, same_floats

RNG = np.random.default_rng(4)
F32 = np.concatenate([EDGES, RNG.standard_normal(200).astype("f4"),
                      RNG.integers(0, 1 << 32, 400, dtype="u4").view("f4")])  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def test_f16_widens_exactly_for_every_value() -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype("u2")
    got = apply("cvt.f32.f16 %d, %a;", every, out=np.float32, block=256)
    same_floats(got, every.view(np.float16).astype("f4"))
    got = apply("cvt.f32.bf16 %d, %a;", every, out=np.float32, block=256)
    same_floats(got, every.view(ml_dtypes.bfloat16).astype("f4"))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_f32_narrows_to_nearest_even(kind: str) -> None:
    dtype: Any = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    got = apply(f"cvt.rn.{kind}.f32 %d, %a;", F32, out="u2")
    nan = np.isnan(F32)
    np.testing.assert_array_equal(got[nan], 0x7FFF)
    np.testing.assert_array_equal(got[~nan], F32.astype(dtype).view("u2")[~nan])
    truncated = apply(f"cvt.rz.{kind}.f32 %d, %a;", F32, out="u2").view(dtype).astype("f4")
    fine = np.isfinite(F32) & (np.abs(F32) < 60000)
    assert (np.abs(truncated[fine]) <= np.abs(F32[fine])).all()
    nearest = F32[fine].astype(dtype).astype("f4")
    smaller = np.abs(nearest) <= np.abs(F32[fine])
    np.testing.assert_array_equal(truncated[fine][smaller], nearest[smaller])
    a, b = F32[:400], F32[200:600]
    packed = apply(f"cvt.rn.{kind}x2.f32 %d, %a, %b;", a, b)
    upper = apply(f"cvt.rn.{kind}.f32 %d, %a;", a, out="u2").astype("u4")
    lower = apply(f"cvt.rn.{kind}.f32 %d, %a;", b, out="u2")
    np.testing.assert_array_equal(packed, upper << np.uint32(16) | lower)
    relu = apply(f"cvt.rn.relu.{kind}x2.f32 %d, %a, %a;", a).view("u2")[::2].view(dtype)
    np.testing.assert_array_equal(relu.astype("f4")[a < 0], 0)


def test_f64_to_halves_and_f32_is_one_rounding() -> None:
    tie = 1 + 2.0**-11 + 2.0**-40  # through float32 this would become a tie and go down
    values = np.array([tie, -tie, 1 + 2.0**-11, 65519.999999999, 65520.0, 1e-8, np.nan], "f8")
    got = apply("cvt.rn.f16.f64 %d, %a;", values, out="u2")
    np.testing.assert_array_equal(got[:-1], values.astype(np.float16).view("u2")[:-1])
    assert got[0] == 0x3C01 and got[2] == 0x3C00 and got[-1] == 0x7FFF
    got = apply("cvt.rn.f32.f64 %d, %a;", values, out=np.float32)
    same_floats(got, values.astype("f4"))
    got = apply("cvt.f64.f32 %d, %a;", F32, out=np.float64)
    same_floats(got, F32.astype("f8"))


ROUND = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("mode", list(ROUND))
@pytest.mark.parametrize("of", ["f32", "f64", "f16"])
def test_float_to_integer_saturates(of: str, mode: str, kind: str) -> None:
    dtype = {"f32": "f4", "f64": "f8", "f16": "f2"}[of]
    values = F32.astype(dtype)
    width = int(kind[1:])
    low, high = (
        (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "s" else (0, (1 << width) - 1)
    )

    def convert(value: float) -> int:
        if math.isnan(value):
            return 1 << width - 1 if of == "f64" or width == 64 else 0  # at its own width
        whole = value if math.isinf(value) else ROUND[mode](value)
        return int(max(low, min(high, whole)))

    out_width = max(width, 16)
    got = apply(f"cvt.{mode}.{kind}.{of} %d, %a;", values, out=f"u{out_width // 8}")
    mask = (1 << out_width) - 1
    if kind == "s8" and of == "f64":
        got = np.where(np.isnan(values), got & 0xFF, got)  # the sign of -128 goes further up
    np.testing.assert_array_equal(
        got, np.array([convert(float(v)) & mask for v in values], got.dtype)
    )


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_integer_to_float_is_correctly_rounded(kind: str) -> None:
    base = INTEGERS if kind[1:] == "32" else np.concatenate(
        [INTEGERS.astype("u8") << np.uint64(s) | INTEGERS for s in (0, 20, 32)]
    )  # fmt: skip
    values = base.view(f"i{base.itemsize}") if kind[0] == "s" else base
    got = apply(f"cvt.rn.f32.{kind} %d, %a;", base, out=np.float32)
    for value, result in zip(values.tolist(), got, strict=True):
        error = abs(Fraction(float(result)) - value)
        for other in (np.nextafter(result, np.float32(s)) for s in (-np.inf, np.inf)):
            assert error <= abs(Fraction(float(other)) - value)
    np.testing.assert_array_equal(
        apply(f"cvt.rn.f64.{kind} %d, %a;", base, out=np.float64), values.astype("f8")
    )
    small = RNG.integers(0, 70000, 100).astype(base.dtype)
    np.testing.assert_array_equal(apply(f"cvt.rn.f16.{kind} %d, %a;", small, out="u2"),
                                  small.astype("f4").astype("f2").view("u2"))  # fmt: skip


def test_integer_widths_and_saturation() -> None:
    values = INTEGERS
    cases: dict[str, Any] = {
        "cvt.s32.s8": values.astype("i1").astype("i4"),
        "cvt.u32.u8": values.astype("u1").astype("u4"),
        "cvt.s32.s16": values.astype("i2").astype("i4"),
        "cvt.u32.u16": values.astype("u2").astype("u4"),
        "cvt.s8.s32": values.astype("i1").astype("i4"),
        "cvt.sat.s8.s32": np.clip(values.view("i4"), -128, 127),
        "cvt.sat.u8.s32": np.clip(values.view("i4"), 0, 255),
        "cvt.sat.s32.u32": np.minimum(values, 0x7FFFFFFF),
    }
    for text, want in cases.items():
        got = apply(f"{text} %d, %a;", values)
        np.testing.assert_array_equal(got, want.astype("i8").astype("u4"), text)
    np.testing.assert_array_equal(
        apply("cvt.s64.s32 %d, %a;", values, out="i8"), values.view("i4").astype("i8")
    )
    np.testing.assert_array_equal(
        apply("cvt.u64.u32 %d, %a;", values, out="u8"), values.astype("u8")
    )
    wide = values.astype("u8") * np.uint64(0x100000001)
    np.testing.assert_array_equal(apply("cvt.u32.u64 %d, %a;", wide), wide.astype("u4"))


@pytest.mark.parametrize("mode", list(ROUND))
def test_round_to_integral_float(mode: str) -> None:
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    same_floats(apply(f"cvt.{mode}.f32.f32 %d, %a;", F32, out=np.float32), function(F32))


def test_tf32_ties_away() -> None:
    a = np.array([0x3F801000, 0x3F800FFF, 0xBF801000, 0x3F803000, 0x7F800000], "u4")
    want = np.array([0x3F802000, 0x3F800000, 0xBF802000, 0x3F804000, 0x7F800000], "u4")
    np.testing.assert_array_equal(apply("cvt.rna.tf32.f32 %d, %a;", a), want)


def test_tf32_of_nan() -> None:
    a = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FF04C74], "u4")
    want = np.array([0x7FC00000, 0x7F800000, 0xFFFFE000, 0x7FF04000], "u4")
    np.testing.assert_array_equal(apply("cvt.rna.tf32.f32 %d, %a;", a), want)
    np.testing.assert_array_equal(apply("cvt.rn.tf32.f32 %d, %a;", a), 0x7FFFE000)


def test_subnormal_halves_are_not_flushed() -> None:
    halves = np.array([0x0001, 0x83FF, 0x0200], "u2")
    got = apply("cvt.ftz.f32.f16 %d, %a;", halves, out="f4")
    np.testing.assert_array_equal(got, halves.view("f2").astype("f4"))
    tiny = np.array([1, 0x80400000], "u4")
    got = apply("cvt.rp.ftz.f16.f32 %d, %a;", tiny, out="u2")
    np.testing.assert_array_equal(got, [1, 0x8000])


def test_integers_saturate_to_one() -> None:
    a = np.array([0, 1, 7, 0x80000000], "u4")
    np.testing.assert_array_equal(apply("cvt.rn.sat.f32.u32 %d, %a;", a, out="f4"), [0, 1, 1, 1])
    np.testing.assert_array_equal(apply("cvt.rn.sat.f32.s32 %d, %a;", a, out="f4"), [0, 1, 1, 0])


COMPARE: dict[str, Any] = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
                           "gt": np.greater, "ge": np.greater_equal}  # fmt: skip
CHOOSE = "selp.u32 %d, 1, 0, %p;"


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_setp_of_floats_with_nan(kind: str) -> None:
    dtype: Any = {"f32": "f4", "f64": "f8", "f16": "f2", "bf16": ml_dtypes.bfloat16}[kind]
    a, b = pairs(EDGES.astype(dtype))
    x, y = a.astype("f8"), b.astype("f8")
    raw = [v.view(f"u{v.itemsize}") for v in (a, b)]
    nan = np.isnan(x) | np.isnan(y)
    for name, function in COMPARE.items():
        got = apply(f"setp.{name}.{kind} %p, %a, %b; {CHOOSE}", *raw)
        np.testing.assert_array_equal(got, function(x, y) & ~nan, name)
        got = apply(f"setp.{name}u.{kind} %p, %a, %b; {CHOOSE}", *raw)
        np.testing.assert_array_equal(got, function(x, y) | nan, name + "u")
    for name, want in (("num", ~nan), ("nan", nan)):
        got = apply(f"setp.{name}.{kind} %p, %a, %b; {CHOOSE}", *raw)
        np.testing.assert_array_equal(got, want, name)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u16", "b32"])
def test_setp_of_integers(kind: str) -> None:
    a, b = pairs(INTEGERS.astype(f"u{int(kind[1:]) // 8}"))
    x, y = (v.view(f"i{v.itemsize}") if kind[0] == "s" else v for v in (a, b))
    names = ["eq", "ne"] if kind[0] == "b" else list(COMPARE)
    for name in names:
        got = apply(f"setp.{name}.{kind} %p, %a, %b; {CHOOSE}", a, b)
        np.testing.assert_array_equal(got, COMPARE[name](x, y))
    if kind[0] == "u":
        for name, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
            got = apply(f"setp.{name}.{kind} %p, %a, %b; {CHOOSE}", a, b)
            np.testing.assert_array_equal(got, COMPARE[same](x, y))


def test_setp_combines_and_has_two_destinations() -> None:
    a, b = pairs(INTEGERS)
    x, y = a.view("i4"), b.view("i4")
    for name, function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        text = f"setp.lt.s32 %q, %a, 5; setp.gt.{name}.s32 %p, %a, %b, !%q; {CHOOSE}"
        np.testing.assert_array_equal(apply(text, a, b), function(x > y, ~(x < 5)))
    text = "setp.lt.s32 %p|%q, %a, %b; selp.u32 %t, 1, 0, %p; selp.u32 %d, 2, %t, %q;"
    np.testing.assert_array_equal(apply(text, a, b), np.where(x < y, 1, 2))
    text = "setp.lt.s32 %p, %a, %b; setp.eq.s32 %q, %a, 7; and.pred %p, %p, !%q; " + CHOOSE
    np.testing.assert_array_equal(apply(text, a, b), (x < y) & (x != 7))
    text = "setp.lt.s32 %p, %a, %b; not.pred %p, %p; " + CHOOSE
    np.testing.assert_array_equal(apply(text, a, b), x >= y)


def test_setp_and_set_of_pairs_of_halves() -> None:
    a, b = RNG.standard_normal((2, 400)).astype("f2")
    text = "setp.gt.f16x2 %p|%q, %a, %b; selp.u32 %t, 1, 0, %p; selp.u32 %u, 2, 0, %q;"
    got = apply(text + "or.b32 %d, %t, %u;", a.view("u4"), b.view("u4"))
    np.testing.assert_array_equal(got, (a > b)[0::2] + 2 * (a > b)[1::2])
    got = apply("set.gt.f16x2.f16x2 %d, %a, %b;", a.view("u4"), b.view("u4"))
    np.testing.assert_array_equal(got.view("f2"), (a > b).astype("f2"))
    got = apply("set.gt.u32.f16x2 %d, %a, %b;", a.view("u4"), b.view("u4"))
    np.testing.assert_array_equal(got.view("u2"), np.where(a > b, 0xFFFF, 0))


def test_set_selp_slct() -> None:
    a, b = pairs(EDGES)
    got = apply("set.lt.u32.f32 %d, %a, %b;", a, b)
    np.testing.assert_array_equal(got, np.where(a < b, 0xFFFFFFFF, 0))
    got = apply("set.lt.f32.f32 %d, %a, %b;", a, b, out=np.float32)
    np.testing.assert_array_equal(got, (a < b).astype("f4"))
    got = apply("slct.u32.f32 %d, 11, 22, %a;", EDGES)
    np.testing.assert_array_equal(got, np.where(EDGES >= 0, 11, 22))
    got = apply("slct.u32.s32 %d, 11, 22, %a;", INTEGERS)
    np.testing.assert_array_equal(got, np.where(INTEGERS.view("i4") >= 0, 11, 22))
    got = apply("setp.lt.f32 %p, %a, %b; selp.f32 %d, %a, %b, !%p;", a, b, out=np.float32)
    same_floats(got, np.where(a < b, b, a))


def test_constants_in_registers_are_bits() -> None:
    a = np.arange(40, dtype="f4")
    got = apply("mov.b32 %v, 1065353216; add.f32 %d, %v, %a;", a, out=np.float32)  # 1.0f
    np.testing.assert_array_equal(got, a + 1)
    got = apply("mov.f32 %v, 0f3F800000; mov.b64 %d, {%v, %a};", a, out=np.uint64)
    np.testing.assert_array_equal(got & np.uint64(0xFFFFFFFF), 0x3F800000)
    got = apply(".reg .b64 c; mov.b64 c, -2; cvt.s16.s64 %h, c; cvt.s32.s16 %d, %h;", a)
    np.testing.assert_array_equal(got, 0xFFFFFFFE)
    text = "mov.u32 %d, 7; setp.lt.f32 %p, %a, 0f41200000; @%p mov.u32 %d, 9;"  # below ten
    np.testing.assert_array_equal(apply(text, a), np.where(a < 10, 9, 7))


def test_mov_packs_and_unpacks() -> None:
    a, b = pairs(INTEGERS)
    got = apply("mov.b64 %d, {%a, %b};", a, b, out="u8")
    np.testing.assert_array_equal(got, a.astype("u8") | b.astype("u8") << np.uint64(32))
    got = apply("mov.b64 {%t, %u}, %a; sub.u32 %d, %t, %u;", got)
    np.testing.assert_array_equal(got, a - b)
    got = apply("mov.b32 {%h, %l}, %a; mov.b32 %d, {%l, %h};", a)
    np.testing.assert_array_equal(got, a >> np.uint32(16) | a << np.uint32(16))
    got = apply("mov.b64 {_, %d}, %a;", a.astype("u8") << np.uint64(32) | b)
    np.testing.assert_array_equal(got, a)
    got = apply("{ .reg .f32 f; mov.f32 f, 0f40490FDB; mov.b32 %d, f; }", a)
    np.testing.assert_array_equal(got, np.full(a.size, 0x40490FDB, "u4"))
