"""atom and red: every operation and type, vectors, 128 bits, halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fkjit.interp import Arg, run
from tests.interp.interp_kit import apply

RNG = np.random.default_rng(17)
HALF: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def update(instruction: str, memory: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """Threads in order apply one instruction: address in %a, value(s) in %v0 …; memory after it.

    Thread t works on element t % (elements of `width` bytes) with row t of the values.
    """
    parts = values.shape[1] if values.ndim > 1 else 1
    bits = 8 * values.itemsize
    loads = "".join(f"ld.global.b{bits} %v{i}, [%q+{i * values.itemsize}];" for i in range(parts))
    count = memory.nbytes // width
    text = f""".version 8.6
    .target sm_90
    .address_size 64
    .visible .entry k(.param .u64 m, .param .u64 x) {{
    .reg .b32 %i, %j; .reg .b64 %a, %q, %o; .reg .b{bits} %v<8>, %d<8>; .reg .b64 %policy;
    mov.u32 %i, %tid.x; ld.param.u64 %a, [m]; ld.param.u64 %q, [x]; mov.b64 %policy, 0;
    rem.u32 %j, %i, {count}; mul.wide.u32 %o, %j, {width}; add.u64 %a, %a, %o;
    mul.wide.u32 %o, %i, {values.itemsize * parts}; add.u64 %q, %q, %o;
    {loads}
    {instruction}
    ret; }}"""
    out = memory.copy()
    arguments = [Arg("m", out.view(np.uint8), True), Arg("x", values.view(np.uint8))]
    run(text, "k", 1, len(values), arguments)
    return out


def in_turn(
    memory: np.ndarray, values: np.ndarray, function: Callable[[Any, Any], Any]
) -> np.ndarray:
    out = memory.copy()
    for turn, value in enumerate(values):
        at = turn % len(out)
        out[at] = function(out[at], value)
    return out


INTEGER: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "exch": lambda a, b: b,
}  # fmt: skip
FORMS = [
    *(f"{name}.{kind}" for name in ("min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *(f"{name}.{kind}" for name in ("and", "or", "xor", "exch") for kind in ("b32", "b64")),
    "add.u32", "add.s32", "add.u64",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_integers(form: str) -> None:
    name, kind = form.split(".")
    dtype = f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}"
    limits = np.iinfo(dtype)
    memory = RNG.integers(limits.min, limits.max, 4, dtype)
    values = RNG.integers(limits.min, limits.max, 37, dtype)
    with np.errstate(over="ignore"):
        want = in_turn(memory, values, INTEGER[name])
    for prefix in ("red.relaxed.gpu.global", "red", "atom.acq_rel.sys.global", "atom"):
        if prefix.startswith("red") and name == "exch":
            continue
        target = "%d0, " if prefix.startswith("atom") else ""
        got = update(f"{prefix}.{form} {target}[%a], %v0;", memory, values, memory.itemsize)
        np.testing.assert_array_equal(got, want, prefix)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_floats_and_subnormals(kind: str) -> None:
    dtype = "f4" if kind == "f32" else "f8"
    memory, values = RNG.standard_normal(3).astype(dtype), RNG.standard_normal(40).astype(dtype)
    want = in_turn(memory, values, lambda a, b: a + b)
    got = update(f"red.global.add.{kind} [%a], %v0;", memory, values, memory.itemsize)
    np.testing.assert_array_equal(got, want)
    got = update(f"atom.global.add.{kind} %d0, [%a], %v0;", memory, values, memory.itemsize)
    np.testing.assert_array_equal(got, want)
    tiny = np.array([1e-40 if kind == "f32" else 1e-310], dtype)
    got = update(f"red.global.add.{kind} [%a], %v0;", np.zeros(1, dtype), tiny, tiny.itemsize)
    assert got[0] == (0 if kind == "f32" else tiny[0])  # f32 is flushed in global memory


@pytest.mark.parametrize("kind", list(HALF))
def test_halves_alone_in_pairs_and_in_vectors(kind: str) -> None:
    dtype = HALF[kind]
    memory, values = RNG.standard_normal((2, 8)).astype(dtype), RNG.standard_normal((9, 8))
    values = values.astype(dtype)
    want = in_turn(memory, values, lambda a, b: a + b)
    largest = in_turn(memory, values, np.maximum)

    def names(count: int) -> str:
        return "{" + ", ".join(f"%v{i}" for i in range(count)) + "}"

    got = update(f"red.global.add.noftz.v8.{kind} [%a], {names(8)};", memory, values, 16)
    np.testing.assert_array_equal(got.astype(float), want.astype(float))
    got = update(f"red.global.max.noftz.v8.{kind} [%a], {names(8)};", memory, values, 16)
    np.testing.assert_array_equal(got.astype(float), largest.astype(float))
    pairs = values.view(np.uint32)
    for form in (f"v4.{kind}x2.add.noftz", f"add.noftz.v4.{kind}x2"):  # ptxas takes the first
        text = f"atom.global.{form} {names(4).replace('v', 'd')}, [%a], {names(4)};"
        got = update(text, memory, pairs, 16)
        np.testing.assert_array_equal(got.astype(float), want.astype(float))
    with_nan = memory.copy()
    with_nan[0, ::2] = np.nan
    with np.errstate(invalid="ignore"):
        number = in_turn(with_nan, values, np.fmin)  # it wins over NaN
    got = update(f"red.global.min.noftz.v8.{kind} [%a], {names(8)};", with_nan, values, 16)
    np.testing.assert_array_equal(got.astype(float), number.astype(float))
    for form, one in ((kind, memory[:, :1].copy()), (f"{kind}x2", memory[:, :2].copy())):
        mine = values[:, : one.shape[1]].copy()
        wide = mine if form == kind else mine.view(np.uint32)
        got = update(
            f"red.global.add.noftz.{form} [%a], %v0;", one, wide, one.itemsize * one.shape[1]
        )
        total = in_turn(one, mine, lambda a, b: a + b)
        np.testing.assert_array_equal(got.astype(float), total.astype(float))


def test_vectors_of_floats_with_a_cache_policy() -> None:
    memory = RNG.standard_normal((2, 4)).astype("f4")
    values = RNG.standard_normal((9, 4)).astype("f4")
    want = in_turn(memory, values, lambda a, b: a + b)
    text = "red.global.add.L2::cache_hint.v4.f32 [%a], {%v0, %v1, %v2, %v3}, %policy;"
    np.testing.assert_array_equal(update(text, memory, values, 16), want)
    text = "atom.global.add.v2.f32 {%d0, %d1}, [%a], {%v0, %v1};"
    half = update(text, memory, values, 16)
    np.testing.assert_array_equal(half[:, :2], want[:, :2])
    np.testing.assert_array_equal(half[:, 2:], memory[:, 2:])


def test_compare_and_swap_of_every_width() -> None:
    for size in (2, 4, 8):
        memory = np.array([5, 7], f"u{size}")
        values = np.array([[5, 9], [6, 8], [9, 1], [7, 2]], f"u{size}")
        want = in_turn(memory, values, lambda a, row: row[1] if a == row[0] else a)
        got = update(f"atom.global.cas.b{8 * size} %d0, [%a], %v0, %v1;", memory, values, size)
        np.testing.assert_array_equal(got, want)


def test_exchange_and_compare_of_128_bits() -> None:
    memory = RNG.integers(0, 1 << 64, (2, 2), dtype="u8")
    values = np.concatenate(
        [np.tile(memory, (2, 1)), RNG.integers(0, 1 << 64, (4, 2), dtype="u8")], 1
    )
    values[1, 0] ^= np.uint64(1)  # thread 1 expects something else
    setup = "{ .reg .b128 old, want, new; mov.b128 want, {%v0, %v1}; mov.b128 new, {%v2, %v3};"
    text = setup + "atom.global.cas.b128 old, [%a], want, new; }"
    got = update(text, memory, values, 16)
    np.testing.assert_array_equal(got, [values[0, 2:], values[3, 2:]])
    text = setup + "atom.global.exch.b128 old, [%a], new; st.global.b128 [%a], old; }"
    np.testing.assert_array_equal(update(text, memory, values[:2].copy(), 16), memory)


def test_wide_moves_loads_and_stores() -> None:
    a, b = RNG.integers(0, 1 << 64, (2, 50), dtype="u8")
    got = apply("{ .reg .b128 q; mov.b128 q, {%a, %b}; mov.b128 {_, %d}, q; }", a, b, out="u8")
    np.testing.assert_array_equal(got, b)
    memory = RNG.integers(0, 1 << 32, (4, 8), dtype="u4")
    loads = "ld.global.v8.b32 {%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, [%a];"
    store = "st.global.v8.b32 [%a], {%d7, %d6, %d5, %d4, %d3, %d2, %d1, %d0};"
    got = update(loads + store, memory, np.zeros(4, "u4"), 32)
    np.testing.assert_array_equal(got, memory[:, ::-1])
