"""Floating arithmetic: f32 and f64 bit for bit, halves against ml_dtypes and exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.interp.interp_kit import EDGES, apply, pairs, same_floats

RNG = np.random.default_rng(3)
F32 = np.concatenate([EDGES, RNG.standard_normal(30).astype("f4"),
                      RNG.integers(0, 1 << 32, 30, dtype="u4").view("f4")])  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def halves(kind: str) -> np.ndarray:
    dtype: Any = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    return np.concatenate([EDGES.astype(dtype), RNG.standard_normal(40).astype(dtype)])


@pytest.mark.parametrize(
    ("name", "function"),
    [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div.rn", np.divide)],
)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_ieee_arithmetic(kind: str, name: str, function: Any) -> None:
    a, b = pairs(F32.astype(np.float64 if kind == "f64" else np.float32))
    rounded = name if name.endswith("rn") else f"{name}.rn"
    got = apply(f"{rounded}.{kind} %d, %a, %b;", a, b, out=a.dtype)
    same_floats(got, function(a, b))


def test_fma_is_rounded_once() -> None:
    a, b, c = (RNG.standard_normal(2000).astype("f4") for _ in range(3))
    c[:500] = -(a[:500] * b[:500])  # cancellation shows the product's low bits
    got = apply("fma.rn.f32 %d, %a, %b, %c;", a, b, c, out=np.float32)
    for x, y, z, value in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below = Fraction(float(np.nextafter(value, np.float32(-np.inf))))
        above = Fraction(float(np.nextafter(value, np.float32(np.inf))))
        error = abs(exact - Fraction(float(value)))
        assert error <= abs(exact - below) and error <= abs(exact - above)
    same_floats(apply("mad.rn.f32 %d, %a, %b, %c;", a, b, c, out=np.float32), got)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding(mode: str) -> None:
    a, b = pairs(RNG.standard_normal(30).astype("f4"))
    got = apply(f"add.{mode}.f32 %d, %a, %b;", a, b, out=np.float32)
    for x, y, value in zip(a, b, got, strict=True):
        exact = Fraction(float(x)) + Fraction(float(y))
        up = mode == "rp" or (mode == "rz" and exact < 0)
        next_in = np.nextafter(value, np.float32(-np.inf if up else np.inf))
        if up:
            assert Fraction(float(value)) >= exact > Fraction(float(next_in))
        else:
            assert Fraction(float(value)) <= exact < Fraction(float(next_in))


def test_saturation_and_flush() -> None:
    a, b = pairs(EDGES)
    got = apply("add.sat.f32 %d, %a, %b;", a, b, out=np.float32)
    total = a + b
    np.testing.assert_array_equal(got, np.where(np.isnan(total), 0, np.clip(total, 0, 1)))
    tiny = np.array([1e-40, -1e-40, 1e-38, 2e-38, -2e-38], "f4")
    got = apply("mul.ftz.f32 %d, %a, %b;", tiny, np.full(5, 1e10, "f4"), out=np.float32)
    flushed = np.where(np.abs(tiny) < 1.1754944e-38, np.copysign(0, tiny), tiny).astype("f4")
    same_floats(got, flushed * np.float32(1e10))
    got = apply("mul.ftz.f32 %d, %a, %b;", np.full(2, 2e-38, "f4"), np.full(2, -0.25, "f4"),
                out=np.float32)  # fmt: skip
    assert (got == 0).all() and np.signbit(got).all()
    kept = apply("mul.f32 %d, %a, %b;", np.full(2, 2e-38, "f4"), np.full(2, -0.25, "f4"),
                 out=np.float32)  # fmt: skip
    assert (kept != 0).all()


def test_min_max_nan_and_zeros() -> None:
    a, b = pairs(F32)
    number = ~(np.isnan(a) & np.isnan(b))
    for name, function in (("min", np.fmin), ("max", np.fmax)):
        got = apply(f"{name}.f32 %d, %a, %b;", a, b, out=np.float32)
        assert np.isnan(got[~number]).all()
        np.testing.assert_array_equal(got[number], function(a, b)[number])
        strict = apply(f"{name}.NaN.f32 %d, %a, %b;", a, b, out=np.float32)
        np.testing.assert_array_equal(np.isnan(strict), np.isnan(a) | np.isnan(b))
        three = apply(f"{name}.f32 %d, %a, %b, 0f40000000;", a, b, out=np.float32)
        np.testing.assert_array_equal(three, function(function(a, b), np.float32(2)))
    zeros = np.array([0.0, -0.0], "f4")
    x, y = pairs(zeros)
    for text, sign in (("max.NaN.f32", np.logical_and), ("min.NaN.f32", np.logical_or)):
        got = apply(f"{text} %d, %a, %b;", x, y, out=np.float32)
        np.testing.assert_array_equal(np.signbit(got), sign(np.signbit(x), np.signbit(y)))


def test_max_xorsign_abs() -> None:
    a, b = np.array([3, -3, 2, -2], "f4"), np.array([-1, -5, 4, 1], "f4")
    got = apply("max.xorsign.abs.f32 %d, %a, %b;", a, b, out=np.float32)
    np.testing.assert_array_equal(got, [-3, 5, 4, -2])


def test_neg_abs_copysign_testp() -> None:
    np.testing.assert_array_equal(
        apply("neg.f32 %d, %a;", F32, out=np.uint32), F32.view("u4") ^ np.uint32(1 << 31)
    )
    np.testing.assert_array_equal(
        apply("abs.f32 %d, %a;", F32, out=np.uint32), F32.view("u4") & np.uint32(0x7FFFFFFF)
    )
    a, b = pairs(EDGES)
    got = apply("copysign.f32 %d, %a, %b;", a, b, out=np.uint32)
    want = (a.view("u4") & np.uint32(1 << 31)) | (b.view("u4") & np.uint32(0x7FFFFFFF))
    np.testing.assert_array_equal(got, want)
    tests = {"finite": np.isfinite(F32), "infinite": np.isinf(F32), "notanumber": np.isnan(F32),
             "normal": np.isfinite(F32) & ((np.abs(F32) >= 2.0**-126) | (F32 == 0)),
             "subnormal": (np.abs(F32) < 2.0**-126) & (F32 != 0)}  # fmt: skip
    for name, want in tests.items():
        got = apply(f"testp.{name}.f32 %p, %a; selp.u32 %d, 1, 0, %p;", F32)
        np.testing.assert_array_equal(got, want.astype("u4"), name)


def test_what_rounding_makes_normal_is_flushed_too() -> None:
    a = np.array([0x3F7FFFFF, 0x3F800000, 0xBF7FFFFF], "u4").view("f4")
    b = np.full(3, 2.0**-126, "f4")
    for mode, flushed in (("rn", [1, 0, 1]), ("rp", [1, 0, 1]), ("rz", [1, 0, 1])):
        got = apply(f"mul.{mode}.ftz.f32 %d, %a, %b;", a, b, out="f4")
        np.testing.assert_array_equal(got == 0, np.array(flushed, bool))
        np.testing.assert_array_equal(np.signbit(got), a < 0)
    plain = apply("mul.rn.f32 %d, %a, %b;", a, b, out="f4")
    np.testing.assert_array_equal(np.abs(plain), b)
    half, tiny = np.full(2, 0x3BFF, "u2"), np.array([0x0400, 0x0402], "u2")
    got = apply("mul.ftz.f16 %d, %a, %b;", half, tiny, out="u2")
    np.testing.assert_array_equal(got, [0, 0x0401])


def test_products_with_what_copies_fill_in_are_zero() -> None:
    a = np.array([0x7FF7, 0x3C00, 0x3C00, 0x7E00], "u2")
    b = np.array([0x3C00, 0x7FF7, 0x4000, 0x3C00], "u2")
    c = np.array([0x3C00, 0x3C00, 0xFC00, 0x3C00], "u2")
    got = apply("fma.rn.oob.f16 %d, %a, %b, %c;", a, b, c, out="u2", target="sm_90")
    np.testing.assert_array_equal(got, [0, 0, 0xFC00, 0x7FFF])


def test_division_by_what_has_no_reciprocal() -> None:
    a = np.array([1e30, -1e30, np.inf, 4.0], "f4")
    b = np.array([2.0**127, 2.0**127, 2.0**127, 2.0**126], "f4")
    got = apply("div.approx.f32 %d, %a, %b;", a, b, out="f4")
    same_floats(got, np.array([0.0, -0.0, np.nan, 2.0**-124], "f4"))


@pytest.mark.parametrize(
    ("text", "function"),
    [("ex2.approx.f32", np.exp2), ("lg2.approx.f32", np.log2), ("rcp.rn.f32", lambda x: 1 / x),
     ("rcp.approx.f32", lambda x: 1 / x), ("sqrt.rn.f32", np.sqrt), ("sqrt.approx.f32", np.sqrt),
     ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x)), ("sin.approx.f32", np.sin),
     ("cos.approx.f32", np.cos), ("tanh.approx.f32", np.tanh)],
)  # fmt: skip
def test_functions_are_correctly_rounded(text: str, function: Any) -> None:
    values = np.concatenate([EDGES, RNG.standard_normal(500).astype("f4") * 8])
    same_floats(
        apply(f"{text} %d, %a;", values, out=np.float32),
        function(values.astype("f8")).astype("f4"),
    )


def test_ex2_of_large_and_small_arguments() -> None:
    values = np.array([-200, -149, -126.5, -1e30, 127.5, 128, np.inf, -np.inf], "f4")
    got = apply("ex2.approx.ftz.f32 %d, %a;", values, out=np.float32)
    want = np.exp2(values.astype("f8")).astype("f4")
    same_floats(got, np.where(want < 2.0**-126, 0, want).astype("f4"))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("name", "function"),
    [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("min", np.fmin),
     ("max", np.fmax)],
)  # fmt: skip
def test_half_arithmetic(kind: str, name: str, function: Any) -> None:
    a, b = pairs(halves(kind))
    wide = function(a.astype("f4"), b.astype("f4")).astype(a.dtype)
    rounding = ".rn" if name in ("add", "sub", "mul") and kind == "bf16" else ""
    got = apply(f"{name}{rounding}.{kind} %d, %a, %b;", a.view("u2"), b.view("u2"), out=np.uint16)
    compare_halves(got, wide)
    pad = np.resize(np.arange(2), a.size + a.size % 2).astype(bool)
    a2, b2, wide2 = (np.resize(x, pad.size) for x in (a, b, wide))
    got = apply(f"{name}{rounding}.{kind}x2 %d, %a, %b;", a2.view("u4"), b2.view("u4"))
    compare_halves(got.view("u2"), wide2)


def compare_halves(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want.astype("f4"))
    np.testing.assert_array_equal(got[nan] & 0x7FFF, 0x7FFF)
    zero = want.astype("f4") == 0  # the sign of min/max of zeros is not the subject here
    np.testing.assert_array_equal(got[~nan & ~zero], want.view("u2")[~nan & ~zero])
    np.testing.assert_array_equal(got[zero] & 0x7FFF, 0)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_fma_is_rounded_once(kind: str) -> None:
    dtype: Any = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    a, b, c = (RNG.standard_normal(3000).astype(dtype) for _ in range(3))
    c[:1000] = (RNG.standard_normal(1000) * 2.0**-9).astype(dtype)
    got = apply(f"fma.rn.{kind} %d, %a, %b, %c;", *(x.view("u2") for x in (a, b, c)), out="u2")
    below = (got - np.uint16(1)).view(dtype).astype("f8")
    above = (got + np.uint16(1)).view(dtype).astype("f8")
    exact = a.astype("f8") * b.astype("f8") + c.astype("f8")
    error = np.abs(got.view(dtype).astype("f8") - exact)
    assert (error <= np.abs(below - exact)).all() and (error <= np.abs(above - exact)).all()
    ties = (error == np.abs(below - exact)) | (error == np.abs(above - exact))
    assert (got[ties & (error > 0)] % 2 == 0).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_signs_relu_and_functions(kind: str) -> None:
    a = halves(kind)
    raw = a.view("u2")
    np.testing.assert_array_equal(apply(f"neg.{kind} %d, %a;", raw, out="u2"), raw ^ 0x8000)
    np.testing.assert_array_equal(apply(f"abs.{kind} %d, %a;", raw, out="u2"), raw & 0x7FFF)
    one = np.full(a.size, 1, a.dtype).view("u2")
    zero = np.zeros(a.size, "u2")
    got = apply(f"fma.rn.relu.{kind} %d, %a, %b, %c;", raw, one, zero, out="u2")
    value = a.astype("f4")
    np.testing.assert_array_equal(got.view(a.dtype).astype("f4")[value < 0], 0)
    np.testing.assert_array_equal(got[value > 0], raw[value > 0])
    small = RNG.standard_normal(200).astype(a.dtype)
    got = apply(f"tanh.approx.{kind} %d, %a;", small.view("u2"), out="u2")
    compare_halves(got, np.tanh(small.astype("f8")).astype(a.dtype))
    ftz = ".ftz" if kind == "bf16" else ""
    got = apply(f"ex2.approx{ftz}.{kind} %d, %a;", small.view("u2"), out="u2")
    compare_halves(got, np.exp2(small.astype("f8")).astype(a.dtype))


def test_pairs_of_floats() -> None:
    a, b, c = (RNG.standard_normal(200).astype("f4") for _ in range(3))
    packed = [v.view(np.uint64) for v in (a, b, c)]
    for name, want in (("add", a + b), ("sub", a - b), ("mul", a * b)):
        got = apply(f"{name}.rn.f32x2 %d, %a, %b;", *packed[:2], out="u8", target="sm_100")
        same_floats(got.view("f4"), want)
    for mode in ("rn", "rz", "rm", "rp"):
        got = apply(f"fma.{mode}.f32x2 %d, %a, %b, %c;", *packed, out="u8", target="sm_100")
        alone = apply(f"fma.{mode}.f32 %d, %a, %b, %c;", a, b, c, out=np.float32)
        same_floats(got.view("f4"), alone)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sums_of_narrow_and_wide_floats(kind: str) -> None:
    narrow = halves(kind)
    wide = RNG.standard_normal(narrow.size).astype("f4")
    got = apply(f"add.f32.{kind} %d, %a, %b;", narrow, wide, out=np.float32, target="sm_100")
    same_floats(got, narrow.astype("f4") + wide)
    got = apply(f"sub.rn.f32.{kind} %d, %a, %b;", narrow, wide, out=np.float32, target="sm_100")
    same_floats(got, narrow.astype("f4") - wide)
    text = f"fma.rn.f32.{kind} %d, %a, %b, %c;"
    got = apply(text, narrow, narrow[::-1].copy(), wide, out=np.float32, target="sm_100")
    exact = narrow.astype("f8") * narrow[::-1].astype("f8") + wide
    same_floats(got, exact.astype("f4"))


def test_three_operands_of_min_and_max() -> None:
    a, b = pairs(EDGES)
    c = RNG.permutation(a)
    got = apply("max.f32 %d, %a, %b, %c;", a, b, c, out=np.float32, target="sm_100")
    np.testing.assert_array_equal(got, np.fmax(np.fmax(a, b), c))
    got = apply("min.NaN.f32 %d, %a, %b, %c;", a, b, c, out=np.float32, target="sm_100")
    np.testing.assert_array_equal(got, np.minimum(np.minimum(a, b), c))
    got = apply("max.abs.f32 %d, %a, %b, %c;", a, b, c, out=np.float32, target="sm_100")
    np.testing.assert_array_equal(got, np.fmax(np.fmax(abs(a), abs(b)), abs(c)))
