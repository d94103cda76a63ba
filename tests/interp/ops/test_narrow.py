"""cvt to and from floats of 4, 6 and 8 bits, tf32, packed integers, and .sat, .relu, .satfinite."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.interp.interp_kit import EDGES, INTEGERS, apply, pairs

RNG = np.random.default_rng(19)
LIMITS = np.array([448, 464, 480, 57344, 61440, 6, 7, 7.75, 28], "f4")
F32 = np.concatenate([EDGES, (RNG.standard_normal(300) * 9).astype("f4"), LIMITS])
FORMATS: dict[str, tuple[Any, float]] = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448), "e5m2": (ml_dtypes.float8_e5m2, 57344),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5), "e3m2": (ml_dtypes.float6_e3m2fn, 28),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("kind", list(FORMATS))
def test_pairs_of_narrow_floats(kind: str) -> None:
    dtype, largest = FORMATS[kind]
    a, b = RNG.permutation(F32), F32
    register = ".reg .b8 n;" if kind == "e2m1" else ".reg .b16 n;"
    width = 4 if kind == "e2m1" else 8

    def codes(flags: str) -> tuple[np.ndarray, np.ndarray]:
        move = f"cvt.u32.u{8 if width == 4 else 16} %d, n;"
        text = f"{{ {register} cvt.rn.satfinite{flags}.{kind}x2.f32 n, %a, %b; {move} }}"
        got = apply(text, a, b)
        mask = np.uint32((1 << width) - 1)
        return (got >> np.uint32(width)) & mask, got & mask

    for flags in ("", ".relu"):
        for got, given in zip(codes(flags), (a, b), strict=True):
            limited = np.where(given <= 0, 0, given) if flags else given
            want = np.clip(limited.astype("f8"), -largest, largest).astype(dtype)
            value = got.astype("u1").view(dtype).astype("f8")
            nan = np.isnan(given)
            np.testing.assert_array_equal(value[~nan], want.astype("f8")[~nan])
            if kind in ("e4m3", "e5m2"):
                assert np.isnan(value[nan]).all()
            else:
                np.testing.assert_array_equal(value[nan], largest)
    every = np.arange(1 << (16 if width == 8 else 8), dtype="u4").astype(
        "u2" if width == 8 else "u1"
    )
    if kind in ("e2m3", "e3m2"):
        every &= np.uint16(0x3F3F)
    load = "mov.b16 n, %a;" if width == 8 else "cvt.u8.u16 n, %a;"
    text = f"{{ {register} {load} cvt.rn.f16x2.{kind}x2 %d, n; }}"
    wide = apply(text, every, block=256).view(np.float16).astype("f8")
    mask = (1 << width) - 1
    for at, shift in ((0, 0), (1, width)):
        want = (every >> shift & mask).astype("u1").view(dtype).astype(np.float16).astype("f8")
        np.testing.assert_array_equal(wide[at::2], want)


def test_narrow_floats_of_half_pairs_and_scales() -> None:
    halves = RNG.standard_normal(400).astype(np.float16) * np.float16(20)
    got = apply("cvt.rn.satfinite.e4m3x2.f16x2 %d, %a;", halves.view("u4"), out="u2")
    want = halves.astype("f8").astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(got.view("u1"), want.view("u1"))
    a = np.array([1.0, 1.5, 2.0**-126, 3e38, 2.0**-130, 0.75], "f4")
    text = "cvt.{}.satfinite.ue8m0x2.f32 %h, %a, %a; cvt.u32.u16 %d, %h;"
    up, down = (apply(text.format(mode), a) & np.uint32(255) for mode in ("rp", "rz"))
    np.testing.assert_array_equal(up, [127, 128, 1, 254, 0, 127])
    np.testing.assert_array_equal(down, [127, 127, 1, 254, 0, 126])
    codes = np.array([0x7F80, 0xFF01, 0x00FE], "u2")
    wide = apply("cvt.rn.bf16x2.ue8m0x2 %d, %a;", codes).view(ml_dtypes.bfloat16).astype("f8")
    np.testing.assert_array_equal(wide, [2.0, 1.0, 2.0**-126, np.nan, 2.0**127, 2.0**-127])


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32(mode: str) -> None:
    got = apply(f"cvt.{mode}.tf32.f32 %d, %a;", F32, out=np.float32).astype("f8")
    exact = F32.astype("f8")
    fine = np.isfinite(exact) & (np.abs(exact) < 3e38)
    assert (got[fine].astype("f4").view("u4") & 0x1FFF == 0).all()
    _, power = np.frexp(exact[fine])
    unit = np.ldexp(1.0, np.maximum(power - 11, -136))
    error = (got[fine] - exact[fine]) / unit
    if mode == "rz":
        assert (np.abs(got[fine]) <= np.abs(exact[fine])).all() and (np.abs(error) < 1).all()
    else:
        assert (np.abs(error) <= 0.5).all()
        ties = np.abs(error) == 0.5
        if mode == "rna":
            assert (np.abs(got[fine]) > np.abs(exact[fine]))[ties].all()
    ties = np.array([0x3F801000, 0x3F803000, 0xBF801000], "u4")
    want = {"rna": [0x3F802000, 0x3F804000, 0xBF802000], "rn": [0x3F800000, 0x3F804000, 0xBF800000],
            "rz": [0x3F800000, 0x3F802000, 0xBF800000]}[mode]  # fmt: skip
    np.testing.assert_array_equal(apply(f"cvt.{mode}.tf32.f32 %d, %a;", ties), want)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_limits_of_halves(kind: str) -> None:
    dtype: Any = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    largest = float(ml_dtypes.finfo(dtype).max)
    got = apply(f"cvt.rn.satfinite.{kind}.f32 %d, %a;", F32, out="u2").view(dtype).astype("f8")
    want = np.clip(F32.astype(dtype).astype("f8"), -largest, largest)
    np.testing.assert_array_equal(got, want)
    got = apply(f"cvt.rn.relu.satfinite.{kind}x2.f32 %d, %a, %b;", F32, -F32).view(dtype)
    both = np.stack([-F32, F32], 1).reshape(-1)
    limited = np.clip(np.where(both <= 0, 0, both).astype(dtype).astype("f8"), 0, largest)
    np.testing.assert_array_equal(got.astype("f8"), np.where(np.isnan(both), np.nan, limited))
    got = apply("cvt.sat.f32.f32 %d, %a;", F32, out=np.float32)
    np.testing.assert_array_equal(got, np.where(np.isnan(F32), 0, np.clip(F32, 0, 1)))
    for mode, way in (("rz", 0.0), ("rm", -np.inf), ("rp", np.inf)):
        beyond = np.array([largest * 1.5, -largest * 1.5], "f8")
        got = apply(f"cvt.{mode}.{kind}.f64 %d, %a;", beyond, out="u2").view(dtype).astype("f8")
        kept = [largest if way < np.inf else np.inf, -largest if way > -np.inf else -np.inf]
        np.testing.assert_array_equal(got, kept)


def test_64_bit_integers_and_doubles_in_every_rounding() -> None:
    values = RNG.integers(-(1 << 63), (1 << 63) - 1, 300)
    for kind, given in (("s64", values), ("u64", values.view("u8"))):
        for to, dtype in (("f32", np.float32), ("f64", np.float64)):
            for mode in ("rz", "rm", "rp"):
                got = apply(f"cvt.{mode}.{to}.{kind} %d, %a;", given, out=dtype)
                for number, value in zip(given.tolist(), got, strict=True):
                    up = mode == "rp" or (mode == "rz" and number < 0)
                    other = np.nextafter(value, dtype(-np.inf if up else np.inf))
                    if up:
                        assert int(other) < number <= int(value), (kind, to, mode)
                    else:
                        assert int(value) <= number < int(other), (kind, to, mode)


def test_packing_of_integers() -> None:
    a, b = pairs(INTEGERS)
    x, y = a.view("i4").astype("i8"), b.view("i4").astype("i8")
    got = apply("cvt.pack.sat.s16.s32 %d, %a, %b;", a, b)
    want = np.clip(x, -32768, 32767) << 16 | (np.clip(y, -32768, 32767) & 0xFFFF)
    np.testing.assert_array_equal(got, want.astype("u4"))
    got = apply("cvt.pack.sat.u8.s32.b32 %d, %a, %b, %c;", a, b, a ^ b)
    want = (a ^ b).astype("i8") << 16 | np.clip(x, 0, 255) << 8 | np.clip(y, 0, 255)
    np.testing.assert_array_equal(got, want.astype("u4"))
