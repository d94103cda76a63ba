"""mbarriers: arrivals, transactions, phases, waits; and what kernels do wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.interp import Arg, Checks
from tests.interp.copies.hopper_kit import fault, launch

RNG = np.random.default_rng(30)


def output(n: int = 128) -> np.ndarray:
    return np.full(n, -1, np.int64)


def test_phases_pass_data_to_and_fro() -> None:
    """Warp 0 produces, warps 1 to 3 consume, through one buffer, a full and an empty mbarrier."""
    source = r"""
    extern "C" __global__ void k(const int* x, int* y, int rounds) {
      __shared__ int tile[32];
      __shared__ u64 full, empty;
      const int t = threadIdx.x;
      if (t == 0) { init(&full, 32); init(&empty, 96); }
      __syncthreads();
      for (int i = 0; i < rounds; ++i) {
        if (t < 32) {
          if (i) wait(&empty, (i - 1) & 1);
          tile[t] = x[i * 32 + t];
          arrive(&full);
        } else {
          wait(&full, i & 1);
          y[i * 96 + t - 32] = tile[t % 32] * (t / 32);
          arrive(&empty);
        }
      }
    }"""
    x = RNG.integers(-999, 999, (7, 32)).astype("i4")
    y = np.zeros((7, 3, 32), "i4")
    launch(source, Arg("x", x), Arg("y", y, True), Arg("rounds", np.int32(7)))
    np.testing.assert_array_equal(y, x[:, None] * np.arange(1, 4)[:, None])


STATES = r"""
extern "C" __global__ void k(long long* y) {
  __shared__ u64 bar;
  u64 state, other;
  u32 done, count, later;
  const int t = threadIdx.x;
  if (t == 0) init(&bar, 96);
  __syncthreads();
  if (t < 64) {
    if (t < 32)
      ASM("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at(&bar)) : "memory");
    else
      ASM("mbarrier.arrive.noComplete.shared::cta.b64 %0, [%1], %2;"
          : "=l"(state) : "r"(at(&bar)), "r"(1) : "memory");
    ASM("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(state));
    ASM("{.reg .pred P; mbarrier.test_wait.shared::cta.b64 P, [%1], %2; selp.u32 %0, 1, 0, P;}"
        : "=r"(done) : "r"(at(&bar)), "l"(state) : "memory");
    y[t] = count * 10 + done;
  }
  __syncthreads();
  if (t == 64) ASM("mbarrier.arrive.b64 _, [%0], %1;" ::"l"(&bar), "r"(31) : "memory");
  __syncthreads();
  if (t == 65) {
    ASM("mbarrier.arrive.release.cta.b64 %0, [%1];" : "=l"(other) : "l"(&bar) : "memory");
    ASM("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(other));
    y[t] = count;
  }
  if (t < 32) {
    ASM("{.reg .pred P;\nW: mbarrier.try_wait.acquire.cta.shared::cta.b64 P, [%1], %2, %3;\n"
        "@!P bra W;\nselp.u32 %0, 1, 0, P;}"
        : "=r"(later) : "r"(at(&bar)), "l"(state), "r"(1000) : "memory");
    y[t] += 100000 * later;
  }
}"""


def test_states_count_what_is_pending_and_name_their_phase() -> None:
    y = output()
    launch(STATES, Arg("y", y, True))
    pending = 96 - np.arange(64)
    np.testing.assert_array_equal(y[:64], pending * 10 + np.where(np.arange(64) < 32, 100000, 0))
    assert y[65] == 1 and (y[66:] == -1).all()


def test_arrive_drop_lowers_the_count_of_later_phases() -> None:
    source = r"""
    extern "C" __global__ void k(long long* y) {
      __shared__ u64 bar;
      const int t = threadIdx.x;
      if (t == 0) init(&bar, 128);
      __syncthreads();
      if (t >= 40) {
        ASM("mbarrier.arrive_drop.shared::cta.b64 _, [%0];" ::"r"(at(&bar)) : "memory");
        return;
      }
      for (int i = 0; i < 3; ++i) { arrive(&bar); wait(&bar, i & 1); }
      u64 state;
      u32 count;
      if (t == 39) {
        ASM("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at(&bar)) : "memory");
        ASM("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(state));
        y[t] = count;
      }
    }"""
    y = output()
    launch(source, Arg("y", y, True))
    assert y[39] == 40 and (np.delete(y, 39) == -1).all()


def test_transactions_hold_a_phase_up() -> None:
    source = r"""
    extern "C" __global__ void k(long long* y) {
      __shared__ u64 bar;
      const int t = threadIdx.x;
      if (t == 0) init(&bar, 1);
      __syncthreads();
      if (t == 0) {
        ASM("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at(&bar)), "r"(100));
        expect(&bar, 28);
        u32 early;
        ASM("{.reg .pred P; mbarrier.test_wait.parity.shared::cta.b64 P, [%1], 0;"
            "selp.u32 %0, 1, 0, P;}" : "=r"(early) : "r"(at(&bar)) : "memory");
        y[0] = early;
      }
      __syncthreads();
      if (t == 32) {
        ASM("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at(&bar)), "r"(128)
            : "memory");
      } else if (t == 64) {
        wait(&bar, 0);
        y[64] = 1;
      }
    }"""
    y = output()
    launch(source, Arg("y", y, True))
    assert y[0] == 0 and y[64] == 1


def test_a_spinning_test_wait_starves_nobody() -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
      __shared__ u64 bar;
      __shared__ int value;
      const int t = threadIdx.x;
      if (t == 0) init(&bar, 1);
      __syncthreads();
      if (t >= 32) {
        ASM("{\n.reg .pred P;\nW: mbarrier.test_wait.parity.shared::cta.b64 P, [%0], 0;\n"
            "@!P bra W;\n}" ::"r"(at(&bar)) : "memory");
        y[t] = value + t;
      } else if (t == 0) {
        for (int i = 0; i < y[0]; ++i) value = i * 3;
        arrive(&bar);
      }
    }"""
    y = np.full(128, 50, np.int32)
    launch(source, Arg("y", y, True))
    np.testing.assert_array_equal(y[32:], 49 * 3 + np.arange(32, 128))


def test_a_try_wait_may_give_up_where_the_kernel_has_other_work_first() -> None:
    """A thread that looks ahead with try_wait makes the phase complete itself afterwards."""
    source = r"""
    extern "C" __global__ void k(int* y) {
      __shared__ u64 bar;
      if (threadIdx.x == 0) {
        init(&bar, 1);
        u32 done;
        ASM("{.reg .pred P; mbarrier.try_wait.parity.shared::cta.b64 P, [%1], 0;"
            "selp.u32 %0, 1, 0, P;}" : "=r"(done) : "r"(at(&bar)) : "memory");
        y[0] = done;
        arrive(&bar);
        wait(&bar, 0);
        y[1] = 5;
      }
    }"""
    y = np.full(2, -1, np.int32)
    launch(source, Arg("y", y, True))
    assert y.tolist() == [0, 5]


def test_cp_async_arrives_when_its_copies_have_landed() -> None:
    source = r"""
    extern "C" __global__ void k(const int4* x, int4* y) {
      __shared__ alignas(16) int4 tile[64];
      __shared__ u64 bars[2];
      const int t = threadIdx.x;
      if (t == 0) { init(&bars[0], 64); init(&bars[1], 1); }
      __syncthreads();
      if (t < 64) {
        ASM("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at(&tile[t])), "l"(x + t) : "memory");
        ASM("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at(&bars[0])) : "memory");
        ASM("cp.async.mbarrier.arrive.b64 [%0];" ::"l"(&bars[1]) : "memory");
        if (t == 0) arrive(&bars[1]);
      } else {
        wait(&bars[0], 0);
        y[t - 64] = tile[127 - t];
        wait(&bars[1], 0);
      }
    }"""
    x = RNG.integers(-(1 << 30), 1 << 30, (64, 4)).astype("i4")
    y = np.zeros_like(x)
    launch(source, Arg("x", x), Arg("y", y, True))
    np.testing.assert_array_equal(y, x[::-1])
    missing = source.replace("wait(&bars[0], 0);", "").replace("y[t - 64] =", "/*BUG*/ y[t - 64] =")
    report = fault(missing, Arg("x", x), Arg("y", y, True), checks=Checks())
    assert "uninitialised shared read" in report and "cp.async to it is in flight" in report


def test_guards_choose_who_arrives_and_who_waits() -> None:
    source = r"""
    extern "C" __global__ void k(long long* y) {
      __shared__ u64 bar;
      __shared__ int value;
      const int t = threadIdx.x;
      if (t == 0) { init(&bar, 5); value = -1; }
      __syncthreads();
      int seen;
      ASM("{.reg .pred P, Q, R;\n"
          "setp.lt.u32 P, %2, 5;\nsetp.eq.u32 Q, %2, 4;\nsetp.gt.u32 R, %2, 9;\n"
          "@Q st.shared.u32 [%3], 33;\n"
          "@P mbarrier.arrive.shared::cta.b64 _, [%1];\n"
          "AGAIN: mov.pred Q, 1;\n@R mbarrier.try_wait.parity.shared::cta.b64 Q, [%1], 0;\n"
          "@!Q bra AGAIN;\nmov.u32 %0, 0;\n@R ld.shared.u32 %0, [%3];\n}"
          : "=&r"(seen) : "r"(at(&bar)), "r"(t), "r"(at(&value)) : "memory");
      y[t] = seen;
    }"""
    y = output()
    launch(source, Arg("y", y, True))
    np.testing.assert_array_equal(y, np.where(np.arange(128) > 9, 33, 0))


def test_an_invalidated_mbarrier_gives_its_bytes_back() -> None:
    source = r"""
    extern "C" __global__ void k(long long* y) {
      __shared__ union { u64 bar; long long value; } s;
      if (threadIdx.x == 0) {
        init(&s.bar, 3);
        ASM("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(at(&s.bar)) : "memory");
        s.value = 1234567;
      }
      __syncthreads();
      y[threadIdx.x] = s.value + threadIdx.x;
    }"""
    y = output()
    launch(source, Arg("y", y, True))
    np.testing.assert_array_equal(y, 1234567 + np.arange(128))


PLAIN = r"""
extern "C" __global__ void k(long long* y) {
  __shared__ alignas(16) u64 bars[3];
  volatile u64* plain = bars;
  const int t = threadIdx.x;
  if (t == 0) { init(&bars[0], COUNT); init(&bars[1], 1); }
  __syncthreads();
  CODE
}"""


def bug(code: str, count: int = 128, checks: Checks = Checks(race=True)) -> str:
    return fault(PLAIN.replace("CODE", code).replace("COUNT", str(count)),
                 Arg("y", output(), True), checks=checks)  # fmt: skip


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("if (t == 9) arrive(&bars[2]); // BUG",
         ["uninitialised mbarrier: the mbarrier at byte 16 of", "no mbarrier.init was executed",
          "thread (9, 0, 0)"]),
        ("if (t == 9) wait(&bars[2], 0); // BUG", ["uninitialised mbarrier", "try_wait"]),
        ("if (t == 9) arrive((u64*)((char*)bars + 4)); // BUG",
         ["misaligned shared access", "8-byte access at byte 4"]),
        ("arrive((u64*)((char*)bars + 24)); // BUG", ["out-of-bounds shared", "byte 24"]),
        ("if (t == 5) y[0] = plain[0]; // BUG",
         ["plain access to an mbarrier", "8-byte read at byte 0 of", "only mbarrier instructions"]),
        ("if (t == 5) ((volatile int*)bars)[3] = 7; // BUG",
         ["plain access to an mbarrier: the mbarrier at byte 8", "4-byte write over it"]),
        ("if (t == 5) init(&bars[2], 0); // BUG", ["bad mbarrier count: the mbarrier at byte 16"]),
        ("if (t == 5) arrive(&bars[0]);\n__syncthreads();\nif (t == 0) init(&bars[0], 4); // BUG",
         ["mbarrier in use: the mbarrier at byte 0", "it is initialised again while phase 0 has 1 "
          "of 128 arrivals"]),
        ("if (t == 5) expect(&bars[1], 1 << 20); // BUG",
         ["mbarrier transaction overflow", "1,048,576 bytes outstanding"]),
    ],
)  # fmt: skip
def test_misuse_is_reported_where_it_happens(code: str, texts: list[str], race: bool) -> None:
    report = bug(code, checks=Checks(race=race))
    for text in texts:
        assert text in report


@pytest.mark.parametrize("race", [False, True])
def test_too_many_arrivals_and_none_left(race: bool) -> None:
    report = bug("if (t < 3) expect(&bars[0], 16); // BUG", count=2, checks=Checks(race=race))
    assert "mbarrier over-arrival: the mbarrier at byte 0" in report
    assert "1 arrivals where phase 0 has 2 of 2 arrivals and 48 bytes outstanding" in report
    assert "thread (2, 0, 0)" in report
    code = """
      if (t == 0)
        ASM("mbarrier.arrive.noComplete.shared::cta.b64 %0, [%1], %2;"
            : "=l"(*(u64*)&y[0]) : "r"(at(&bars[0])), "r"(2) : "memory"); // BUG"""
    report = bug(code, count=2, checks=Checks(race=race))
    assert "a .noComplete arrival would be the last where phase 0 has 0 of 2" in report


def test_a_phase_that_never_completes_is_a_deadlock_with_its_counts() -> None:
    report = bug("if (t < 96) arrive(&bars[0]);\nif (t < 64) wait(&bars[0], 0); // BUG")
    assert "deadlock: every thread that is left waits for others" in report
    assert "threads 0-63 wait for the mbarrier at byte 0 of" in report
    assert "phase 0 has 96 of 128 arrivals\n" in report
    report = bug("if (t == 1) expect(&bars[1], 64);\nif (t == 0) wait(&bars[1], 0); // BUG")
    assert "threads 0 wait for the mbarrier at byte 8 of" in report
    assert "phase 0 has 1 of 1 arrivals and 64 bytes outstanding" in report


def test_the_wrong_parity_waits_for_the_phase_after_next() -> None:
    report = bug("arrive(&bars[0]);\nwait(&bars[0], 0);\nwait(&bars[0], 1); // BUG")
    assert "deadlock" in report and "phase 1 has 0 of 128 arrivals" in report


def test_a_state_of_an_old_phase() -> None:
    code = """
      u64 state;
      if (t == 0) {
        ASM("mbarrier.arrive.b64 %0, [%1];" : "=l"(state) : "l"(&bars[1]) : "memory");
        arrive(&bars[1]);
        ASM("{.reg .pred P; mbarrier.test_wait.b64 P, [%0], %1;}"
            ::"l"(&bars[1]), "l"(state) : "memory"); // BUG
      }"""
    report = bug(code)
    assert "stale mbarrier state: the mbarrier at byte 8" in report


def test_arrivals_before_the_initialisation_is_visible_race() -> None:
    source = PLAIN.replace("__syncthreads();", "").replace("COUNT", "128")
    source = source.replace("CODE", "arrive(&bars[0]); // BUG")
    report = fault(source, Arg("y", output(), True))
    assert "race: byte 0 of bars" in report and "atomic access" in report


def test_idle_mbarriers_may_be_initialised_again() -> None:
    y = output()
    code = "if (t == 0) { init(&bars[0], 5); init(&bars[1], 2); arrive(&bars[1]); y[3] = 8; }"
    launch(PLAIN.replace("CODE", code).replace("COUNT", "3"), Arg("y", y, True))
    assert y[3] == 8
