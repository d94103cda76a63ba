"""Clocks, sleeping, fences, hints, register counts; redux of floats; the predicate form of lop3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fkjit.errors import InterpreterError, SanitizerError
from fkjit.interp import Arg, Checks, run
from tests.interp.interp_kit import apply, compile_ptx

RNG = np.random.default_rng(23)


@pytest.mark.parametrize("call", ["clock64()", "globaltimer()", "(long long)clock()"])
def test_loops_with_a_time_limit_end(call: str) -> None:
    source = f"""
    __device__ long long globaltimer() {{
      long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t;
    }}
    extern "C" __global__ void k(long long* y, volatile int* flag) {{
      long long start = {call}, now = start;
      while (!*flag && now - start < 1000000) {{ __nanosleep(100); now = {call}; }}
      y[threadIdx.x] = now - start;
    }}"""
    y = np.zeros(32, "i8")
    run(compile_ptx(source), "k", 1, 32, [Arg("y", y, True), Arg("flag", np.zeros(1, "i4"))])
    assert (y >= 1000000).all() and (y < 2000000).all()


def test_sleeping_takes_its_time_and_runs_repeat_themselves() -> None:
    a = np.array([500, 80000, 3], "u4")
    text = (
        "mov.u64 %g, %globaltimer; nanosleep.u32 %a; mov.u64 %o, %globaltimer; sub.u64 %d, %o, %g;"
    )
    got = apply(text, a, out="u8")
    assert (got >= 80000).all() and (got < 90000).all()
    np.testing.assert_array_equal(apply(text, a, out="u8"), got)


@pytest.mark.parametrize("race", [False, True])
def test_fences_and_hints_change_nothing(race: bool) -> None:
    text = """.version 8.6
    .target sm_90a
    .address_size 64
    .visible .entry k(.param .u64 y) {
    .reg .b32 %r; .reg .b64 %a, %o;
    mov.u32 %r, %tid.x; ld.param.u64 %a, [y]; mul.wide.u32 %o, %r, 4; add.u64 %a, %a, %o;
    membar.cta; membar.gl; membar.sys; fence.sc.gpu; fence.acq_rel.cluster; fence.acquire.sys;
    fence.proxy.alias; fence.proxy.async; fence.proxy.async.shared::cta;
    fence.mbarrier_init.release.cluster; griddepcontrol.wait; griddepcontrol.launch_dependents;
    createpolicy.fractional.L2::evict_first.b64 %o, 1.0;
    prefetch.global.L2 [%a]; prefetchu.L1 [%a]; applypriority.global.L2::evict_normal [%a], 128;
    pmevent 3; setmaxnreg.inc.sync.aligned.u32 232; setmaxnreg.dec.sync.aligned.u32 24;
    st.relaxed.gpu.global.u32 [%a], %r; st.release.sys.global.u32 [%a], %r;
    ld.acquire.gpu.global.u32 %r, [%a]; ld.volatile.global.u32 %r, [%a];
    ld.relaxed.sys.global.L1::no_allocate.L2::128B.u32 %r, [%a];
    st.mmio.relaxed.sys.global.u32 [%a], %r;
    ret; }"""
    y = np.zeros(64, "u4")
    run(text, "k", 1, 64, [Arg("y", y, True)], checks=Checks(race=race))
    np.testing.assert_array_equal(y, np.arange(64))


def setmaxnreg(count: int, guard: str = "") -> None:
    text = f""".version 8.6
    .target sm_90a
    .address_size 64
    .visible .entry k(.param .u64 y) {{
    .reg .b32 %r; .reg .pred %p;
    mov.u32 %r, %tid.x; setp.lt.u32 %p, %r, 7;
    {guard}setmaxnreg.dec.sync.aligned.u32 {count}; @%p bra L; add.u32 %r, %r, 1;
    L: ret; }}"""
    run(text, "k", 1, 64, [Arg("y", np.zeros(1, "u4"))])


def test_setmaxnreg_is_checked() -> None:
    setmaxnreg(40)
    for count in (20, 44, 264):
        with pytest.raises(InterpreterError, match="not a multiple of 8 from 24 to 256"):
            setmaxnreg(count)


def test_redux_of_floats() -> None:
    a = RNG.standard_normal(64).astype("f4")
    a[5], a[40] = np.nan, -np.inf
    warps = a.reshape(2, 32)
    cases: dict[str, Any] = {
        "min": np.fmin.reduce(warps, 1), "max": np.fmax.reduce(warps, 1),
        "min.abs": np.fmin.reduce(np.abs(warps), 1), "max.NaN": np.maximum.reduce(warps, 1),
        "min.abs.NaN": np.minimum.reduce(np.abs(warps), 1),
    }  # fmt: skip
    for name, want in cases.items():
        got = apply(f"redux.sync.{name}.f32 %d, %a, -1;", a, out=np.float32, target="sm_100a")
        np.testing.assert_array_equal(got, want.repeat(32), name)


def test_lop3_with_a_predicate() -> None:
    a, b, c = RNG.integers(0, 4, (3, 300), dtype="u4")
    text = ("setp.lt.u32 %q, %a, 2; lop3.{}.b32 %v|%p, %a, %b, %c, 0x80, {}%q; "
            "selp.u32 %u, 16, 0, %p; or.b32 %d, %u, %v;")  # fmt: skip
    value, small = a & b & c, a < 2
    for operation, bang, want in (
        ("or", "", (value != 0) | small), ("and", "", (value != 0) & small),
        ("or", "!", (value != 0) | ~small), ("and", "!", (value != 0) & ~small),
    ):  # fmt: skip
        got = apply(text.format(operation, bang), a, b, c)
        np.testing.assert_array_equal(got, np.where(want, 16, 0) | value)


def test_bit_fields_by_masks_and_widths() -> None:
    a, b = RNG.integers(0, 1 << 32, 400, dtype="u4"), RNG.integers(0, 40, 400, dtype="u4")
    for mode in ("clamp", "wrap"):
        width = [min(int(w), 32) if mode == "clamp" else int(w) & 31 for w in b]
        got = apply(f"szext.{mode}.u32 %d, %a, %b;", a, b)
        low = [int(v) & ((1 << w) - 1) for v, w in zip(a, width, strict=True)]
        np.testing.assert_array_equal(got, low)
        got = apply(f"szext.{mode}.s32 %d, %a, %b;", a, b)
        signs = [v >> (w - 1) & 1 if w else 0 for v, w in zip(low, width, strict=True)]
        want = [(v - (s << w)) & 0xFFFFFFFF for v, s, w in zip(low, signs, width, strict=True)]
        np.testing.assert_array_equal(got, want)
        got = apply(f"bmsk.{mode}.b32 %d, %b, %a;", a % np.uint32(36), b)
        count = [int(w) % 36 for w in a]
        count = [min(w, 32) if mode == "clamp" else w & 31 for w in count]
        want = [((1 << n) - 1 << at) & 0xFFFFFFFF for n, at in zip(count, width, strict=True)]
        np.testing.assert_array_equal(got, want)


def test_a_shuffle_whose_constant_mask_leaves_the_lane_out() -> None:
    with pytest.raises(SanitizerError, match="bad member mask: the member mask 0x0000ffff"):
        apply("shfl.sync.idx.b32 %d, %a, 0, 31, 65535;", np.arange(32, dtype="u4"))
