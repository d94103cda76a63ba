"""mma.sync in kernels: branches, guards, aliasing operands, results that others read."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, run
from tests.interp.interp_kit import compile_ptx
from tests.interp.mma.mma_kit import fragments, matrix_of, parts, run_kernel, vector

RNG = np.random.default_rng(12)
F32 = "m16n8k16.row.col.f32.f16.f16.f32"
F16 = "m16n8k16.row.col.f16.f16.f16.f16"
S32 = "m16n8k32.row.col.s32.s8.s8.s32"
COUNTS = {F32: (4, 4, 2), F16: (2, 4, 2), S32: (4, 4, 2)}  # registers of d, a, b


def matrices(form: str, warps: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m, k, _, _, _ = parts(form)
    shapes = ((m, k), (k, 8), (m, 8))
    a, b, c = (RNG.integers(-3, 3, (warps, *shape), endpoint=True) for shape in shapes)
    return a, b, c


def mma(form: str, d: str = "d", a: str = "a", b: str = "b", c: str = "c") -> str:
    """The instruction on registers %d0…, %a0…, %b0…, %c0…, or on vectors that are written out."""
    counts = dict(zip("dabc", (*COUNTS[form], COUNTS[form][0]), strict=True))
    operands = {"d": d, "a": a, "b": b, "c": c}
    texts = [x if x[0] == "{" else vector(x, counts[n]) for n, x in operands.items()]
    return f"mma.sync.aligned.{form} {', '.join(texts)};"


def result(form: str, body: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """What stands in %d0… after `body`, as a matrix; it begins as 77 everywhere."""
    registers = dict(zip("abc", fragments(form, a, b, c), strict=True))
    _, _, untouched = fragments(form, a, b, np.full_like(c, 77))
    begin = "\n".join(f"mov.b32 %d{i}, {int(untouched[0, 0, i])};" for i in range(COUNTS[form][0]))
    registers["d"] = np.zeros_like(registers["c"])
    return matrix_of(form, run_kernel(registers, f"{begin}\n{body}"))


@pytest.mark.parametrize("form", [F32, F16, S32])
def test_some_warps_in_a_branch(form: str) -> None:
    a, b, c = matrices(form)
    body = f"setp.eq.u32 %p, %warp, 1; @%p bra SKIP; {mma(form)} SKIP:"
    want = a @ b + c
    want[1] = 77
    np.testing.assert_array_equal(result(form, body, a, b, c), want)


@pytest.mark.parametrize("form", [F32, F16, S32])
@pytest.mark.parametrize("negated", ["", "!"])
def test_guard_on_which_warps_agree(form: str, negated: str) -> None:
    a, b, c = matrices(form)
    body = f"setp.eq.u32 %p, %warp, 1; @{negated}%p {mma(form)}"
    does = (np.arange(3) == 1) == (not negated)
    want = np.where(does[:, None, None], a @ b + c, 77)
    np.testing.assert_array_equal(result(form, body, a, b, c), want)


@pytest.mark.parametrize(
    "instruction", [mma(F32), "movmatrix.sync.aligned.m8n8.trans.b16 %d0, %a0;"]
)
def test_guard_on_which_a_warp_disagrees(instruction: str) -> None:
    body = f"setp.ne.u32 %p, %i, 37; @%p {instruction}"  # all but one of the second warp
    with pytest.raises(SanitizerError, match=r"incomplete warp.*guard"):
        result(F32, body, *matrices(F32))


def test_lanes_that_have_left_are_missed() -> None:
    body = f"setp.eq.u32 %p, %lane, 9; @%p ret; {mma(S32)}"
    with pytest.raises(SanitizerError, match="incomplete warp"):
        result(S32, body, *matrices(S32))


def test_a_block_of_less_than_whole_warps() -> None:
    registers = dict(zip("abc", fragments(F32, *matrices(F32)), strict=True))
    registers["d"] = np.zeros_like(registers["c"])
    with pytest.raises(SanitizerError, match="incomplete warp"):
        run_kernel(registers, mma(F32), block=48)


@pytest.mark.parametrize("form", [F32, F16, S32])
def test_d_may_be_c(form: str) -> None:
    a, b, c = matrices(form)
    count = COUNTS[form][0]
    moves = " ".join(f"mov.b32 %d{i}, %c{i};" for i in range(count))
    np.testing.assert_array_equal(result(form, moves + mma(form, c="d"), a, b, c), a @ b + c)
    twisted = "{" + ", ".join(f"%d{i}" for i in reversed(range(count))) + "}"
    moves = " ".join(f"mov.b32 %d{count - 1 - i}, %c{i};" for i in range(count))
    np.testing.assert_array_equal(result(form, moves + mma(form, c=twisted), a, b, c), a @ b + c)


@pytest.mark.parametrize("form", [F32, F16, S32])
def test_d_may_be_a_or_b(form: str) -> None:
    a, b, c = matrices(form)
    for operand, count in (("a", COUNTS[form][1]), ("b", COUNTS[form][2])):
        if count < COUNTS[form][0]:
            continue
        back = " ".join(f"mov.b32 %d{i}, %{operand}{i};" for i in range(COUNTS[form][0]))
        got = result(form, mma(form, d=operand) + back, a, b, c)
        np.testing.assert_array_equal(got, a @ b + c)


@pytest.mark.parametrize("form", [F32, F16, S32])
def test_neighbours_share_operands(form: str) -> None:
    """A run of three with one a; then a changes, and b is used again."""
    a, b, c = matrices(form)
    count = COUNTS[form][0]
    one = {F32: "0f3F800000", F16: "0x3c003c00", S32: "1"}[form]
    ones = "{" + ", ".join([one] * count) + "}"
    mixed = "{" + ", ".join([one, *(f"%c{i}" for i in range(1, count))]) + "}"
    swapped = "{%a1, %a0, %a3, %a2}"  # rows 8-15 first
    body = f""".reg .b32 %x<{count}>; .reg .b32 %y<{count}>; .reg .b32 %z<{count}>;
    {mma(form, d="x", c=ones)} {mma(form, d="y")} {mma(form, d="z", c=mixed)}
    mov.b32 %r0, %a0; mov.b32 %a0, %a1; mov.b32 %a1, %r0;
    mov.b32 %r0, %a2; mov.b32 %a2, %a3; mov.b32 %a3, %r0;
    {mma(form, d="x", c="x")} {mma(form, d="x", a=swapped, c="x")}
    """
    for name in "xyz":
        copies = " ".join(f"mov.b32 %d{i}, %{name}{i};" for i in range(count))
        first = c.copy()
        # the constant replaces register 0: row g, both columns of a pair in f16
        first[:, :8, :: 1 if form == F16 else 2] = 1
        upside = np.roll(a, 8, 1) @ b + a @ b
        want = {"x": a @ b + 1 + upside, "y": a @ b + c, "z": a @ b + first}[name]
        np.testing.assert_array_equal(result(form, body + copies, a, b, c), want)


@pytest.mark.parametrize("rounds", [1, 5])
def test_accumulators_that_only_mma_touches(rounds: int) -> None:
    """Chains through registers that no other instruction reads, in a loop and in one warp only."""
    a, b, c = matrices(F32)
    body = f""".reg .b32 %x<4>; .reg .b32 %y<4>; .reg .b32 %z<4>;
    {mma(F32, d="x")} {mma(F32, d="y", c="x")} {mma(F32, d="x", c="{0,0,0,0}")}
    mov.u32 %r0, 0;
    LOOP: {mma(F32, d="y", c="y")}
    setp.eq.u32 %p, %warp, 2; @%p bra SKIP;
    {mma(F32, d="y", c="y")} {mma(F32, d="z", c="y")}
    SKIP: add.u32 %r0, %r0, 1; setp.lt.u32 %q, %r0, {rounds}; @%q bra LOOP;
    {mma(F32, c="y")}"""
    times = np.array([2, 2, 1])[:, None, None] * rounds + 3
    np.testing.assert_array_equal(result(F32, body, a, b, c), times * (a @ b) + c)


def test_accumulators_in_a_branch_from_registers() -> None:
    """Warp 2 replaces an accumulator that only mma touches by a sum with registers."""
    a, b, c = matrices(F32)
    body = f""".reg .b32 %z<4>; {mma(F32, d="z", c="{0,0,0,0}")}
    setp.ne.u32 %p, %warp, 2; @%p bra SKIP; {mma(F32, d="z")}
    SKIP: {mma(F32, c="z")}"""
    want = 2 * (a @ b) + np.where(np.arange(3) == 2, 1, 0)[:, None, None] * c
    np.testing.assert_array_equal(result(F32, body, a, b, c), want)


def test_accumulators_that_overlap() -> None:
    """Registers 2 and 3 of one are those of another."""
    a, b, c = matrices(F32)
    both = "{%x0, %x1, %y2, %y3}"
    body = f""".reg .b32 %x<4>; .reg .b32 %y<4>; {mma(F32, d="x", c="{0,0,0,0}")}
    {mma(F32, d="y", c="x")} {mma(F32, d=both, c="y")} {mma(F32, c=both)} {mma(F32, c="x")}"""
    got = result(F32, body, a, b, c)
    product = a @ b
    np.testing.assert_array_equal(got[:, :8], 4 * product[:, :8])
    np.testing.assert_array_equal(got[:, 8:], 2 * product[:, 8:])


@pytest.mark.parametrize("form", [F32, F16, S32])
def test_neighbours_that_are_no_run(form: str) -> None:
    """One with another a, then one with a guard, then one that is jumped to."""
    a, b, c = matrices(form)
    count = COUNTS[form][0]
    body = f""".reg .b32 %x<{count}>; .reg .b32 %y<{count}>; .reg .b32 %z<{count}>;
    {" ".join(f"mov.b32 %{n}{i}, 0;" for n in "xyz" for i in range(count))}
    setp.eq.u32 %p, %warp, 1; setp.eq.u32 %q, %warp, 2; @%q bra SKIP;
    {mma(form, d="x")} {mma(form, d="y", a="{%a1, %a0, %a3, %a2}")} {mma(form, d="z")}
    @%p {mma(form)}
    {mma(form, d="x", c="y")}
    SKIP: {mma(form, d="z", c="z")}"""
    upside = np.roll(a, 8, 1) @ b
    first = np.array([1, 1, 0])[:, None, None]
    wants = {
        "x": first * (a @ b + upside + c),
        "y": first * (upside + c),
        "z": a @ b + first * (a @ b + c),
        "d": np.where(np.arange(3)[:, None, None] == 1, a @ b + c, 77),
    }
    for name, want in wants.items():
        copies = " ".join(f"mov.b32 %d{i}, %{name}{i};" for i in range(count))
        np.testing.assert_array_equal(result(form, body + copies, a, b, c), want)


def test_operands_written_by_other_warp_wide_instructions() -> None:
    """activemask gives all ones, which are -1 as four signed bytes."""
    a, b, c = matrices(S32)
    body = f""".reg .b32 %x<4>; {mma(S32, d="x")}
    activemask.b32 %b0; activemask.b32 %b1; {mma(S32, c="x")}"""
    np.testing.assert_array_equal(result(S32, body, a, b, c), a @ b - a.sum(2, keepdims=True) + c)


def test_results_of_mma_are_operands_of_mma() -> None:
    """An f16 accumulator of one instruction is operand b of the next two."""
    a, b, c = matrices(F16)
    body = f""".reg .b32 %x<2>; .reg .b32 %z<2>;
    {mma(F16, d="x", c="{0, 0}")} {mma(F16, d="z", b="x")} {mma(F16, d="x", b="b")}
    {mma(F16, b="x", c="z")}"""
    got = result(F16, body, a, b, c)

    def as_b(matrix: np.ndarray) -> np.ndarray:
        """Registers of an accumulator seen as an operand b: its rows are columns now."""
        return np.concatenate([matrix[:, :8].swapaxes(1, 2), matrix[:, 8:].swapaxes(1, 2)], 1)

    z = (a @ as_b(a @ b) + c).astype("f2")
    want = a @ as_b(a @ b + c) + z.astype("f8")
    np.testing.assert_array_equal(got, want.astype("f2"))


def test_results_of_mma_are_addresses() -> None:
    """The second of two neighbours writes an address register that was used before."""
    a, b, c = matrices(S32)
    c[...] = np.arange(8) * 4
    a[:, :8] = 0  # so rows 0-7 of d are c
    body = f""".shared .align 4 .b8 table[128]; .reg .b32 %x<4>;
    shl.b32 %r1, %lane, 2; mov.u32 %r2, table; add.u32 %r1, %r1, %r2;
    mul.lo.u32 %r3, %lane, 10; st.shared.u32 [%r1], %r3; bar.sync 0;
    mov.u32 %x0, %r2; ld.shared.u32 %r4, [%x0]; add.u32 %c0, %c0, %r2;
    {mma(S32)} {mma(S32, d="x")}
    ld.shared.u32 %d0, [%x0];"""
    got = result(S32, body, a, b, c)[:, :8, ::2]  # d0: row g, column 2t
    np.testing.assert_array_equal(got, 10 * np.arange(0, 8, 2) * np.ones((3, 8, 1)))


CUDA = """
extern "C" __global__ void k(const unsigned* a, const unsigned* b, const float* c, float* o,
                             int odd) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float d[2][4];
  for (int n = 0; n < 2; ++n)
    for (int j = 0; j < 4; ++j) d[n][j] = c[i * 4 + j];
  if ((threadIdx.x / 32) % 2 == odd)
    for (int n = 0; n < 2; ++n)
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, "
        "{%6}, {%0,%1,%2,%3};" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
        : "r"(a[i * 2]), "r"(a[i * 2 + 1]), "r"(b[i]));
  for (int j = 0; j < 4; ++j) o[i * 4 + j] = d[0][j] + d[1][j];
}"""


@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_89"])
@pytest.mark.parametrize("odd", [0, 1])
def test_compiled_cuda(arch: str, odd: int) -> None:
    form, warps = "m16n8k8.row.col.f32.f16.f16.f32", 6
    shapes = ((16, 8), (8, 8), (16, 8))
    a, b, c = (RNG.integers(-9, 9, (warps, *shape)) for shape in shapes)
    out = np.zeros((warps, 32, 4), "f4")
    arguments = [Arg(n, x) for n, x in zip("abc", fragments(form, a, b, c), strict=True)]
    arguments += [Arg("o", out, True), Arg("odd", np.int32(odd))]
    run(compile_ptx(CUDA, arch), "k", 2, 96, arguments)
    does = (np.arange(warps) % 3 % 2 == odd)[:, None, None]
    np.testing.assert_array_equal(matrix_of(form, out), 2 * (c + np.where(does, a @ b, 0)))
