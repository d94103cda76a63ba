"""wgmma.mma_async bit for bit: types, shapes, layouts of operands in shared memory, scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fkjit.errors import InterpreterError
from fkjit.interp import run
from tests.interp.interp_kit import compile_ptx
from tests.interp.wgmma.wgmma_kit import DEPTH, TYPES, Case, Place, kernel, tight, values

RNG = np.random.default_rng(90)
FORMS = [
    ("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
    ("f32", "e4m3", "e4m3"), ("f32", "e4m3", "e5m2"), ("f16", "e5m2", "e4m3"),
    ("f32", "e5m2", "e5m2"), ("s32", "s8", "s8"), ("s32", "u8", "s8"), ("s32", "s8", "u8"),
    ("s32", "u8", "u8"),
]  # fmt: skip


def case(
    to: str, a: str, b: str, n: int, place_a: Place | None, place_b: Place,
    blocks: int = 1, groups: int = 1,
) -> Case:  # fmt: skip
    size = np.dtype(TYPES[a]).itemsize
    k = DEPTH[size]
    transposes = (place_a is not None) + 1
    tail = "" if to == "s32" else ", 1, 1"
    if size == 2:
        flags = [place_a.mn_major] if place_a else []
        tail += "".join(f", {int(flag)}" for flag in [*flags, place_b.mn_major][-transposes:])
    each = (blocks, groups)
    return Case(
        f"m64n{n}k{k}.{to}.{a}.{b}", n, to, values(RNG, a, (*each, 64, k)),
        values(RNG, b, (*each, n, k)), values(RNG, "f16", (*each, 64, n)).astype(TYPES[to]),
        RNG.integers(0, 2, each), place_a, place_b, tail,
    )  # fmt: skip


def expected(one: Case, sign: int = 1) -> np.ndarray:
    product = one.a.astype("f8") @ one.b.astype("f8").swapaxes(2, 3)
    kept = one.keep[:, :, None, None] * one.d.astype("f8")
    return (sign * product + kept).astype(one.d.dtype)


def check(one: Case, sign: int = 1) -> None:
    got = one.run(RNG)
    np.testing.assert_array_equal(got, expected(one, sign))
    assert np.abs(got.astype("f8")).max() > 0


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize(("to", "a", "b"), FORMS)
def test_types(to: str, a: str, b: str, in_registers: bool) -> None:
    place_a = None if in_registers else tight(128, False, 64)
    check(case(to, a, b, 48, place_a, tight(64, False, 48), blocks=3, groups=2))


@pytest.mark.parametrize("to", ["f32", "f16"])
@pytest.mark.parametrize("n", [8, 24, 40, 64, 128, 200, 256])
def test_widths(n: int, to: str) -> None:
    check(case(to, "f16", "f16", n, tight(128, False, 64), tight(128, False, n), groups=2))


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("n", [8, 24, 64, 128, 256])
def test_layouts_of_b(swizzle: int, mn_major: bool, n: int) -> None:
    place = tight(swizzle, mn_major, n, start=1024)
    check(case("f32", "bf16", "bf16", n, tight(0, False, 64), place))


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_layouts_of_a(swizzle: int, mn_major: bool) -> None:
    check(case("f32", "f16", "f16", 16, tight(swizzle, mn_major, 64), tight(0, False, 16)))


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("kind", ["tf32", "e4m3", "s8"])
def test_layouts_of_other_widths(kind: str, swizzle: int) -> None:
    to = "s32" if kind == "s8" else "f32"
    check(case(to, kind, kind, 24, tight(swizzle, False, 64), tight(swizzle, False, 24)))


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_strides_with_room_between_atoms(swizzle: int, mn_major: bool) -> None:
    place = tight(swizzle, mn_major, 72)
    wide = replace(place, leading=place.leading + 2048, stride=place.stride + 4096)
    check(case("f32", "f16", "f16", 72, replace(wide, start=2048), wide))


@pytest.mark.parametrize(("swizzle", "step"), [(128, 32), (128, 64), (128, 96), (64, 32)])
def test_steps_along_k_within_the_swizzled_row(swizzle: int, step: int) -> None:
    place = replace(tight(swizzle, False, 64), start=step)
    check(case("f32", "f16", "f16", 64, place, replace(place, start=1024 + step)))


@pytest.mark.parametrize("scale_a", [1, -1])
@pytest.mark.parametrize("scale_b", [1, -1])
@pytest.mark.parametrize("kind", ["f16", "tf32", "e5m2"])
def test_negative_scales(kind: str, scale_a: int, scale_b: int) -> None:
    one = case("f32", kind, kind, 8, tight(0, False, 64), tight(32, False, 8), groups=4)
    tail = f", {scale_a}, {scale_b}" + one.tail[len(", 1, 1") :]
    check(replace(one, tail=tail), scale_a * scale_b)


@pytest.mark.parametrize("saturated", ["", "m64n16k32.satfinite.s32.u8.s8",
                                       "m64n16k32.s32.u8.s8.satfinite"])  # fmt: skip
def test_integers_wrap_or_saturate(saturated: str) -> None:
    one = case("s32", "u8", "s8", 16, None, tight(128, False, 16))
    limits = np.array([-(2**31), 2**31 - 1, 5])
    d = RNG.choice(limits, one.d.shape).astype("i4")
    one = replace(one, d=d, keep=np.ones_like(one.keep), op=saturated or one.op)
    exact = one.a.astype("i8") @ one.b.astype("i8").swapaxes(2, 3) + d
    want = exact.clip(-(2**31), 2**31 - 1) if saturated else exact.astype("i4")
    got = one.run(RNG)
    np.testing.assert_array_equal(got, want)
    assert (exact != want).any()


def test_tf32_drops_low_bits_and_f16_rounds() -> None:
    one = case("f32", "tf32", "tf32", 8, None, tight(0, False, 8))
    one = replace(one, keep=np.zeros_like(one.keep))
    noisy = (one.a.view("u4") | RNG.integers(0, 1 << 13, one.a.shape).astype("u4")).view("f4")
    np.testing.assert_array_equal(replace(one, a=noisy).run(RNG), expected(one))
    one = case("f16", "f16", "f16", 8, None, tight(0, False, 8))
    one = replace(one, d=np.full_like(one.d, 2048), keep=np.ones_like(one.keep))
    got = one.run(RNG)
    np.testing.assert_array_equal(got, expected(one))
    assert (got % 2 == 0)[got >= 2048].all() and (got > 2048).any()


@pytest.mark.parametrize("in_registers", [False, True])
def test_bits(in_registers: bool) -> None:
    place_a = None if in_registers else tight(32, False, 64)
    one = case("s32", "u8", "u8", 48, place_a, tight(0, False, 48), groups=2)
    got = replace(one, op="m64n48k256.s32.b1.b1.and.popc").run(RNG)
    a, b = np.unpackbits(one.a, axis=3).astype("i4"), np.unpackbits(one.b, axis=3).astype("i4")
    want = a @ b.swapaxes(2, 3) + one.keep[:, :, None, None] * one.d
    np.testing.assert_array_equal(got, want)


def test_special_values() -> None:
    one = case("f32", "f16", "f16", 8, tight(0, False, 64), tight(0, False, 8))
    a, b = np.zeros_like(one.a), np.ones_like(one.b)
    a[..., 0, 0], a[..., 1, 0], a[..., 2, 0], a[..., 3, 0] = np.inf, np.nan, 2.0**-24, 65504
    got = replace(one, a=a, b=b, keep=np.zeros_like(one.keep)).run(RNG)[0, 0]
    assert np.isposinf(got[0]).all() and np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[2:5, 0], np.array([2.0**-24, 65504, 0], "f4"))


@pytest.mark.parametrize(
    ("op", "to", "n", "tail"),
    [
        ("m64n12k16.f32.f16.f16", "f32", 12, ", 1, 1, 0, 0"),
        ("m64n264k16.f32.f16.f16", "f32", 264, ", 1, 1, 0, 0"),
        ("m64n24k16.s32.s8.s8", "s32", 24, ""),
        ("m64n40k32.s32.s8.s8", "s32", 40, ""),
        ("m64n8k16.f16.bf16.bf16", "f16", 8, ", 1, 1, 0, 0"),
        ("m64n8k256.s32.b1.b1.xor.popc", "s32", 8, ""),
        ("m64n8k256.satfinite.s32.b1.b1.and.popc", "s32", 8, ""),
        ("m64n8k32.s32.s8.s8.and.popc", "s32", 8, ""),
        ("m64n8k16.f32.f16.bf16", "f32", 8, ", 1, 1, 0, 0"),
        ("m64n8k16.satfinite.f32.f16.f16", "f32", 8, ", 1, 1, 0, 0"),
        ("m64n8k16.f32.f16.f16", "f32", 8, ", 1, 2, 0, 0"),
        ("m64n8k16.f32.f16.f16", "f32", 8, ", 1, 1, 0, 2"),
        ("m64n8k16.f32.f16.f16", "f32", 8, ", 1, 1"),
        ("m64n8k8.f32.tf32.tf32", "f32", 8, ", 1, 1, 0, 0"),
        ("m64n8k16.f32.f16.f16", "f32", 16, ", 1, 1, 0, 0"),
    ],
)
def test_what_ptx_does_not_have_is_refused(op: str, to: str, n: int, tail: str) -> None:
    source = kernel(op, n, to, False, tail)
    with pytest.raises(InterpreterError, match="not supported"):
        run(compile_ptx(source, "compute_90a"), "k", 1, 128, _no_arguments(), 1024)


@pytest.mark.parametrize("text", ["mma_async.sp.", "mma_async.", "fence.sync.aligned.x"])
def test_other_forms_are_refused(text: str) -> None:
    source = kernel("m64n8k16.f32.f16.f16", 8, "f32", False, ", 1, 1, 0, 0")
    ptx = compile_ptx(source, "compute_90a")
    ptx = ptx.replace(text.split(".x")[0].replace("sp.", "") + (
        "sync.aligned." if "mma" in text else ""), text)  # fmt: skip
    with pytest.raises(InterpreterError, match="not supported"):
        run(ptx, "k", 1, 128, _no_arguments(), 1024)


def _no_arguments() -> list:
    from fkjit.interp import Arg

    words = np.zeros(4096, "u4")
    return [Arg("image", words), Arg("desc", words), Arg("a", words), Arg("keep", words),
            Arg("d", words, True), Arg("bytes", np.int32(0))]  # fmt: skip
