"""ldmatrix, stmatrix and movmatrix with rows anywhere in shared memory, in every form."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fkjit.errors import InterpreterError, SanitizerError
from tests.interp.mma.mma_kit import G, T, run_kernel

RNG = np.random.default_rng(33)
FORMS = [(count, trans) for count in (1, 2, 4) for trans in ("", ".trans")]
# Each warp has 512 bytes at %r0; lane l's are at %r1, and %r2 is the address of row (5 l) mod 32.
BEGIN = """.shared .align 16 .b8 tile[1536]; mov.u32 %r0, tile; mad.lo.u32 %r0, %warp, 512, %r0;
mad.lo.u32 %r1, %lane, 16, %r0; mul.lo.u32 %r2, %lane, 5; and.b32 %r2, %r2, 31;
mad.lo.u32 %r2, %r2, 16, %r0; mov.b32 %d0, 7; mov.b32 %d1, 7; mov.b32 %d2, 7; mov.b32 %d3, 7;
"""
PUT = "st.shared.v4.b32 [%r1], {%NAME0, %NAME1, %NAME2, %NAME3}; bar.sync 0;\n"
GET = "bar.sync 0; ld.shared.v4.b32 {%d0, %d1, %d2, %d3}, [%r1];\n"
GENERIC = """cvt.u64.u32 %o, %r2; cvta.shared.u64 %g, %o;
"""


def arrays() -> dict[str, np.ndarray]:
    """Operand a: 32 rows of 16 bytes for each of three warps, or four registers of each lane."""
    some = np.zeros((3, 32, 1), "u4")
    a = RNG.integers(0, 1 << 32, (3, 32, 4), dtype="u4")
    return {"a": a, "b": some, "c": some, "d": np.zeros_like(a)}


def vector(name: str, count: int) -> str:
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


def load(count: int, trans: str, space: str = ".shared", address: str = "%r2") -> str:
    op = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16"
    return f"{op} {vector('d', count)}, [{address}];"


def store(count: int, trans: str, space: str = ".shared", address: str = "%r2") -> str:
    op = f"stmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16"
    return f"{op} [{address}], {vector('a', count)};"


def loaded(a: np.ndarray, count: int, trans: str) -> np.ndarray:
    """What each lane's registers become: matrix i has the rows that lanes 8i to 8i+7 address."""
    rows = a.view("u2").reshape(3, 32, 8)[:, np.arange(32) * 5 % 32].reshape(3, 4, 8, 8)
    want = np.full((3, 32, 4), 7, "u4")
    for i in range(count):
        matrix = rows[:, i].swapaxes(1, 2) if trans else rows[:, i]
        low, high = matrix[:, G, 2 * T].astype("u4"), matrix[:, G, 2 * T + 1].astype("u4")
        want[:, :, i] = low | high << np.uint32(16)
    return want


def stored(a: np.ndarray, count: int, trans: str) -> np.ndarray:
    """What the rows of memory become."""
    want = np.full((3, 32, 8), 7, "u2")
    want[:, :, 1::2] = 0  # the number 7 in four registers
    halves = a.view("u2").reshape(3, 32, 4, 2)
    for i in range(count):
        matrix = np.zeros((3, 8, 8), "u2")
        matrix[:, G, 2 * T], matrix[:, G, 2 * T + 1] = halves[:, :, i, 0], halves[:, :, i, 1]
        place = np.arange(8 * i, 8 * i + 8) * 5 % 32
        want[:, place] = matrix.swapaxes(1, 2) if trans else matrix
    return want.view("u4")


@pytest.mark.parametrize(("count", "trans"), FORMS)
def test_ldmatrix(count: int, trans: str) -> None:
    given = arrays()
    want = loaded(given["a"], count, trans)
    begin = BEGIN + PUT.replace("NAME", "a")
    np.testing.assert_array_equal(run_kernel(given, begin + load(count, trans)), want)
    generic = begin + GENERIC + load(count, trans, "", "%g")
    np.testing.assert_array_equal(run_kernel(given, generic), want)
    some = begin + "setp.eq.u32 %p, %warp, 1; @!%p " + load(count, trans)
    want[1] = 7
    np.testing.assert_array_equal(run_kernel(given, some), want)


@pytest.mark.parametrize(("count", "trans"), FORMS)
def test_stmatrix(count: int, trans: str) -> None:
    given = arrays()
    want = stored(given["a"], count, trans)
    begin = BEGIN + PUT.replace("NAME", "d")
    np.testing.assert_array_equal(run_kernel(given, begin + store(count, trans) + GET), want)
    generic = begin + GENERIC + store(count, trans, "", "%g") + GET
    np.testing.assert_array_equal(run_kernel(given, generic), want)
    some = begin + "setp.eq.u32 %p, %warp, 1; @!%p " + store(count, trans) + GET
    want[1] = 7
    np.testing.assert_array_equal(run_kernel(given, some), want)


def test_movmatrix() -> None:
    given = arrays()
    body = BEGIN + "setp.ne.u32 %p, %warp, 0;\n" + "\n".join(
        f"@%p movmatrix.sync.aligned.m8n8.trans.b16 %d{i}, %a{3 - i};" for i in range(4)
    )  # fmt: skip
    got = run_kernel(given, body)
    for i in range(4):
        before = np.ascontiguousarray(given["a"][:, :, 3 - i]).view("u2").reshape(3, 8, 8)
        after = np.ascontiguousarray(got[:, :, i]).view("u2").reshape(3, 8, 8)
        np.testing.assert_array_equal(after[1:], before[1:].swapaxes(1, 2))
    np.testing.assert_array_equal(got[0], 7)


@pytest.mark.parametrize("instruction", [load(2, ""), store(2, "")])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("add.u32 %r2, %r2, 8;", "misaligned"),
        ("add.u32 %r2, %r2, 1024;", "out-of-bounds"),
        ("setp.eq.u32 %p, %lane, 31; @%p ret;", "incomplete warp"),
    ],
)
def test_faults(instruction: str, change: str, why: str) -> None:
    body = BEGIN + PUT.replace("NAME", "a") + change + instruction
    with pytest.raises(SanitizerError, match=why):
        run_kernel(arrays(), body)


@pytest.mark.parametrize("instruction", [load(1, "", "", "%g"), store(1, "", "", "%g")])
def test_global_memory_is_refused(instruction: str) -> None:
    body = BEGIN + "ld.param.u64 %g, [p_d]; mul.wide.u32 %o, %i, 16; add.s64 %g, %g, %o;"
    with pytest.raises(SanitizerError, match="not shared memory"):
        run_kernel(arrays(), body + instruction)


def test_addresses_of_other_lanes_do_not_count() -> None:
    given = arrays()
    body = BEGIN + PUT.replace("NAME", "a") + "setp.ge.u32 %p, %lane, 8; @%p mov.b32 %r2, 3;"
    want = loaded(given["a"], 1, "")
    np.testing.assert_array_equal(run_kernel(given, body + load(1, "")), want)


def test_memory_nobody_has_written() -> None:
    with pytest.raises(SanitizerError, match="uninitialised"):
        run_kernel(arrays(), BEGIN + load(4, ""))


@pytest.mark.parametrize(
    "instruction",
    [
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%d0, %d1}, [%r2];",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%d0}, [%r2];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r2], {%a0};",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%d0}, [%r2];",
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%a0, %a1};",
        "movmatrix.sync.aligned.m8n8.trans.b32 %d0, %a0;",
    ],
)
def test_other_forms_are_refused(instruction: str) -> None:
    with pytest.raises(InterpreterError, match=f"not supported.*{re.escape(instruction[:-1])}"):
        run_kernel(arrays(), BEGIN + PUT.replace("NAME", "a") + instruction)
