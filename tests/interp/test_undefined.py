"""Reads of registers that were never written: found where it matters, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, Checks, run
from fkjit.interp.core.parse import parse
from fkjit.interp.machine.undefined import affected, early_reads
from tests.interp.interp_kit import compile_ptx


def kernel(body: str) -> str:
    return f""".version 8.0
    .target sm_80
    .address_size 64
    .file 1 "x.cu"
    .visible .entry k(.param .u64 y) {{
    .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<5>; .reg .f32 %f<5>;
    mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [y];
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2;
    setp.lt.u32 %p1, %r1, 20;
    .loc 1 9 0
    {body}
    ret; }}"""


def execute(body: str, checks: Checks = Checks()) -> np.ndarray:
    y = np.zeros(32, "u4")
    run(kernel(body), "k", 1, 32, [Arg("y", y, True)], checks=checks)
    return y


FAULTS = {
    "stored": "@%p1 mov.u32 %r2, 5; st.global.u32 [%rd2], %r2;",
    "after arithmetic": "@%p1 mov.u32 %r2, 5; add.u32 %r3, %r2, 1; st.global.u32 [%rd2], %r3;",
    "after moves": "@%p1 mov.u32 %r2, 5; mov.b32 %r3, %r2; mov.b32 %r4, %r3; "
    "st.global.u32 [%rd2], %r4;",
    "an address": "@%p1 mov.u64 %rd3, %rd2; st.global.u32 [%rd3], 1;",
    "a load's address": "@%p1 mov.u64 %rd3, %rd2; ld.global.u32 %r2, [%rd3];",
    "a branch": "@%p1 setp.eq.u32 %p2, %r1, %r1; @%p2 bra L; L: st.global.u32 [%rd2], 1;",
    "a guard": "@%p1 setp.eq.u32 %p2, %r1, %r1; @%p2 st.global.u32 [%rd2], 1;",
    "a computed predicate": "@%p1 mov.u32 %r2, 5; setp.eq.u32 %p2, %r2, 5; "
    "@%p2 st.global.u32 [%rd2], 1;",
    "an atomic": "@%p1 mov.u32 %r2, 5; red.global.add.u32 [%rd1], %r2;",
    "a branch around": "@%p1 bra L; mov.u32 %r2, 1; bra M; L: mov.u32 %r3, 1; M: "
    "st.global.u32 [%rd2], %r2;",
    "a selected value": "@%p1 mov.u32 %r2, 5; selp.u32 %r3, %r2, 7, %p1; "
    "selp.u32 %r4, 7, %r2, %p1; "
    "st.global.u32 [%rd2], %r4;",
}  # fmt: skip


@pytest.mark.parametrize("body", FAULTS.values(), ids=FAULTS.keys())
def test_uses_are_faults(body: str) -> None:
    with pytest.raises(SanitizerError, match=r"uninitialised register: %[a-z]+[0-9] is used") as e:
        execute(body)
    thread = 0 if body == FAULTS["a branch around"] else 20
    assert f"thread ({thread}, 0, 0)" in str(e.value) and "x.cu:9" in str(e.value)
    execute(body.replace("st.global.u32 [%rd3], 1", "mov.u64 %rd4, %rd3")
            .replace("ld.global.u32 %r2, [%rd3]", "mov.u64 %rd4, %rd3"),
            Checks(mem=False))  # fmt: skip


FINE = {
    "both ways write": "@%p1 mov.u32 %r2, 5; @!%p1 mov.u32 %r2, 6; st.global.u32 [%rd2], %r2;",
    "used where written": "@%p1 mov.u32 %r2, 5; @%p1 st.global.u32 [%rd2], %r2;",
    "the other is chosen": "@%p1 mov.u32 %r2, 5; selp.u32 %r3, %r2, 6, %p1; "
    "st.global.u32 [%rd2], %r3;",
    "moved and dropped": "mov.u32 %r2, %r3; add.u32 %r4, %r2, 1; st.global.u32 [%rd2], 5;",
    "false and anything": "@%p1 setp.eq.u32 %p2, %r1, %r1; and.pred %p3, %p1, %p2; "
    "@%p3 st.global.u32 [%rd2], 5;",
    "not false or anything": "@%p1 setp.eq.u32 %p2, %r1, %r1; or.pred %p3, %p2, !%p1; "
    "@%p3 st.global.u32 [%rd2], 5;",
    "a loop writes first": "mov.u32 %r5, 0; L: setp.eq.u32 %p2, %r5, 0; @%p2 mov.u32 %r2, 5; "
    "add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 3; @%p3 bra L; st.global.u32 [%rd2], %r2;",
    "written again": "mov.u32 %r3, %r2; mov.u32 %r3, 5; st.global.u32 [%rd2], %r3;",
    "offered to others": "@%p1 mov.u32 %r2, 5; shfl.sync.idx.b32 %r3, %r2, 3, 31, -1; "
    "st.global.u32 [%rd2], %r3;",
}  # fmt: skip


@pytest.mark.parametrize("body", FINE.values(), ids=FINE.keys())
def test_what_nobody_uses_is_none(body: str) -> None:
    y = execute(body)
    assert set(y.tolist()) <= {0, 5, 6} and 5 in y


def test_a_local_variable_of_cuda() -> None:
    source = """
    extern "C" __global__ void k(int* y, int n) {
      int value;
      asm volatile("{ .reg .pred p; setp.lt.s32 p, %1, %2; @p mov.b32 %0, 7; }"
                   : "=r"(value) : "r"((int)threadIdx.x), "r"(n));
      y[threadIdx.x] = value;
    }"""
    ptx = compile_ptx(source)
    y = np.zeros(32, "i4")
    run(ptx, "k", 1, 32, [Arg("y", y, True), Arg("n", np.int32(32))])
    np.testing.assert_array_equal(y, 7)
    with pytest.raises(SanitizerError, match="uninitialised register") as caught:
        run(ptx, "k", 1, 32, [Arg("y", y, True), Arg("n", np.int32(31))])
    assert "thread (31, 0, 0)" in str(caught.value)


def test_only_what_may_be_read_early_is_watched() -> None:
    function = parse(kernel("@%p1 mov.u32 %r2, 5; add.u32 %r3, %r2, 1; add.u32 %r4, %r1, 1;"))
    assert early_reads(function.functions["k"]) == {"%r2"}
    assert affected(function.functions["k"]) == {"%r2", "%r3"}
