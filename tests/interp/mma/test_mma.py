"""mma.sync in every shape and type against NumPy, by the fragment layouts of the PTX manual."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import InterpreterError
from tests.interp.mma.mma_kit import (
    FORMS,
    TYPES,
    matrix_of,
    parts,
    place_a,
    place_b,
    run_kernel,
    run_mma,
    vector,
)

RNG = np.random.default_rng(8)
INTEGERS = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7), "u4": (0, 15)}


def integers(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random values that every type holds exactly, all values of the integer types."""
    low, high = INTEGERS.get(kind, (-3, 3))
    return RNG.integers(low, high, shape, endpoint=True)


def operands(form: str, warps: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m, k, a, b, _ = parts(form)
    c = RNG.integers(-100, 100, (warps, m, 8))
    return integers(a, (warps, m, k)), integers(b, (warps, k, 8)), c


@pytest.mark.parametrize("form", FORMS)
def test_products_are_exact(form: str) -> None:
    a, b, c = operands(form)
    np.testing.assert_array_equal(run_mma(form, a, b, c), (a @ b + c).astype(TYPES[parts(form)[4]]))


@pytest.mark.parametrize("form", [f for f in FORMS if parts(f)[4] in ("f16", "f32", "f64")])
def test_random_values(form: str) -> None:
    m, k, kind_a, kind_b, acc = parts(form)
    shapes = zip(((3, m, k), (3, k, 8), (3, m, 8)), (kind_a, kind_b, acc), strict=True)
    a, b, c = (RNG.standard_normal(shape).astype(TYPES[kind]) for shape, kind in shapes)
    if kind_a == "tf32":
        a, b = (np.ascontiguousarray(x).view("u4") & 0xFFFFE000 for x in (a, b))
        a, b = a.astype("u4").view("f4"), b.astype("u4").view("f4")
    want = a.astype("f8") @ b.astype("f8") + c.astype("f8")
    tolerance = {"f16": 2e-3, "f32": 3e-6, "f64": 1e-14}[acc]
    got = run_mma(form, a, b, c).astype("f8")
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("operation", ["xor", "and"])
@pytest.mark.parametrize(("m", "k"), [(8, 128), (16, 128), (16, 256)])
def test_bits_are_counted(operation: str, m: int, k: int) -> None:
    def bits(rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Bits [3, rows, k]; the 32-bit words of every 8 rows, first along a row of 128 bits."""
        made = RNG.integers(0, 2, (3, rows, k), np.uint8)
        whole = np.packbits(made, axis=2, bitorder="little").view("u4")
        parts = whole.reshape(3, rows // 8, 8, k // 128, 4).transpose(0, 2, 4, 3, 1)
        return made, np.ascontiguousarray(parts).reshape(3, 32, -1)

    (x, a), (y, b) = bits(m), bits(8)
    c = RNG.integers(-1000, 1000, (3, 32, m // 4), np.int32).view("u4")
    counts = [vector(name, part.shape[2]) for name, part in zip("dabc", (c, a, b, c), strict=True)]
    shape = f"m{m}n8k{k}.row.col.s32.b1.b1.s32.{operation}.popc"
    body = f"mma.sync.aligned.{shape} {', '.join(counts)};"
    got = run_kernel({"a": a, "b": b, "c": c, "d": np.zeros_like(c)}, body)
    function = np.bitwise_xor if operation == "xor" else np.bitwise_and
    expected = function(x[:, :, None], y[:, None]).sum(3, dtype=np.int32)
    form = f"m{m}n8k{k}.s32.b1.b1.s32"
    np.testing.assert_array_equal(matrix_of(form, got - c), expected)


# (form, element, its row and column in lanes 0, 5 and 31), read off the manual's figures.
@pytest.mark.parametrize(
    ("form", "i", "places"),
    [
        ("m16n8k16.f32.f16.f16.f32", 5, [(0, 9), (1, 11), (7, 15)]),
        ("m16n8k8.f32.tf32.tf32.f32", 3, [(8, 4), (9, 5), (15, 7)]),
        ("m16n8k32.s32.s8.s8.s32", 6, [(8, 2), (9, 6), (15, 14)]),
        ("m16n8k32.s32.s4.s4.s32", 9, [(8, 1), (9, 9), (15, 25)]),
        ("m16n8k64.s32.u4.u4.s32", 17, [(0, 33), (1, 41), (7, 57)]),
        ("m8n8k16.s32.u8.u8.s32", 3, [(0, 3), (1, 7), (7, 15)]),
        ("m16n8k16.f64.f64.f64.f64", 6, [(0, 12), (1, 13), (7, 15)]),
    ],
)
def test_places_of_operand_a(form: str, i: int, places: list[tuple[int, int]]) -> None:
    m, _, kind, _, _ = parts(form)
    row, column = place_a(m, kind, i)
    assert [(row[lane], column[lane]) for lane in (0, 5, 31)] == places


def test_places_of_operand_b() -> None:
    row, column = place_b("s8", 6)
    assert [(row[lane], column[lane]) for lane in (0, 5, 31)] == [(18, 0), (22, 1), (30, 7)]


@pytest.mark.parametrize("form", [f for f in FORMS if parts(f)[4] == "s32"])
def test_integers_wrap_or_saturate(form: str) -> None:
    m, k, kind_a, kind_b, _ = parts(form)
    a = np.full((3, m, k), INTEGERS[kind_a][1])
    b = np.where(np.arange(8) % 2, *INTEGERS[kind_b]) * np.ones((3, k, 1), int)
    c = np.where(np.arange(8) % 2, -(2**31) + 5, 2**31 - 6) * np.ones((3, m, 1), int)
    exact = a @ b + c
    wrapped = exact.astype(np.int32)
    assert (exact > 2**31 - 1).any() and (wrapped != exact).any()
    np.testing.assert_array_equal(run_mma(form, a, b, c), wrapped)
    clamped = exact.clip(-(2**31), 2**31 - 1)
    np.testing.assert_array_equal(run_mma(form.replace("col.", "col.satfinite."), a, b, c), clamped)


@pytest.mark.parametrize("form", [f for f in FORMS if parts(f)[4] == "f16"])
def test_f16_accumulators_are_rounded_once(form: str) -> None:
    a, b, c = (np.zeros_like(x) for x in operands(form))
    a[:, :, 1:3], b[:, 1] = 1, 1
    b[:, 2] = np.arange(8) % 3  # sums of 1 to 3, added to 2048, where f16 steps by 2
    c[...] = 2048
    got = run_mma(form, a, b, c)
    want = (2049 + np.arange(8) % 3).astype("f4").astype("f2") * np.ones((3, 16, 1), "f2")
    assert {2048, 2050, 2052} == set(want.ravel().tolist())
    np.testing.assert_array_equal(got, want)
    a[...], b[...], c[...] = 448, 448, 0
    assert np.isposinf(run_mma(form, a, b, c)).all()


def test_the_low_bits_of_tf32_do_not_count() -> None:
    form = "m16n8k8.row.col.f32.tf32.tf32.f32"
    a, b, c = (x.astype("f4") for x in operands(form))
    noisy = (a.view("u4") | RNG.integers(0, 1 << 13, a.shape, dtype="u4")).view("f4")
    assert (noisy != a).any()
    np.testing.assert_array_equal(run_mma(form, noisy, b, c), a @ b + c)


@pytest.mark.parametrize(("kind", "top"), [("e4m3", 448), ("e5m2", 57344)])
def test_all_eight_bit_floats(kind: str, top: float) -> None:
    form = f"m16n8k16.row.col.f32.{kind}.{kind}.f32"
    values = np.arange(256, dtype="u1").view(TYPES[kind]).reshape(1, 16, 16)
    c, one = np.zeros((1, 16, 8)), np.zeros((1, 16, 8))
    for column in range(16):
        one[...] = 0
        one[0, column] = 1
        finite = np.where(np.isfinite(values.astype("f4")), values, 0).astype(TYPES[kind])
        got = run_mma_once(form, finite, one, c)
        np.testing.assert_array_equal(got[0, :, 0], finite[0, :, column].astype("f4"))
        assert np.abs(got).max() <= top
    special = run_mma_once(form, values, np.ones((1, 16, 8)), c)
    assert np.isnan(special[0, 7]).all() and np.isnan(special[0, 15]).all()


def run_mma_once(form: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One warp's mma."""
    return run_mma(form, *(np.repeat(x, 3, 0) for x in (a, b, c)))[:1]


def test_infinities_subnormals_and_nan() -> None:
    form = "m16n8k16.row.col.f32.f16.f16.f32"
    a, b, c = np.zeros((3, 16, 16)), np.zeros((3, 16, 8)), np.zeros((3, 16, 8))
    a[:, 0, 0], a[:, 1, 0], a[:, 2, 0], b[:, 0] = np.inf, 2.0**-24, 65504, 1
    got = run_mma(form, a, b, c)
    assert np.isinf(got[:, 0]).all()
    np.testing.assert_array_equal(got[:, 1], np.float32(2.0**-24))
    np.testing.assert_array_equal(got[:, 2], np.float32(65504))
    assert np.isnan(run_mma(form, a, 0 * b, c)[:, 0]).all()  # inf * 0
    np.testing.assert_array_equal(run_mma(form, np.minimum(-a, 0), b, c)[:, 0], -np.inf)


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sparse mma"),
        ("sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sparse mma"),
        ("sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0",
         "block scales"),
        ("sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", "this combination"),
        ("sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.or.popc", "this combination"),
        ("sync.aligned.m16n8k256.row.col.s32.b1.b1.s32", "this combination"),
        ("sync.aligned.m16n8k64.row.col.s32.u4.u4.s32.xor.popc", "this combination"),
        ("sync.aligned.m16n8k128.row.col.satfinite.s32.b1.b1.s32.xor.popc", "this combination"),
        ("sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.xor.popc", "number of registers"),
        ("sync.aligned.m16n8k16.col.row.f32.f16.f16.f32", "this combination"),
        ("sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32", "this combination"),
        ("sync.aligned.m16n8k16.row.col.f32.f16.f16.f16", "this combination"),
        ("sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32", "this combination"),
        ("sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "number of registers"),
    ],
)  # fmt: skip
def test_other_forms_are_refused(op: str, why: str) -> None:
    arrays = {n: np.zeros((3, 32, 4), "u4") for n in "abcd"}
    arrays["b"] = np.zeros((3, 32, 2), "u4")
    body = f"mma.{op} {{%d0,%d1,%d2,%d3}}, {{%a0,%a1,%a2,%a3}}, {{%b0,%b1}}, {{%c0,%c1,%c2,%c3}};"
    with pytest.raises(InterpreterError, match=f"not supported.*{why}"):
        run_kernel(arrays, body)
