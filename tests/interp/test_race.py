"""Planted races in CUDA kernels: each is found with both lines; what is ordered is let through."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, Checks, run
from tests.core.sampling import one_in
from tests.interp.interp_kit import compile_ptx, line_of

NAME = "kernels_cu/test/race.cu"
RNG = np.random.default_rng(3)


def floats(n: int) -> np.ndarray:
    return RNG.standard_normal(n).astype("f4")


def race(source: str, *arguments: Arg, block: int = 64, grid: int = 2, shared: int = 0) -> str:
    """The report, or "" if there is no race."""
    ptx = compile_ptx(source, name=NAME)
    try:
        run(ptx, "k", grid, block, list(arguments), shared, Checks(race=True), "the title")
    except SanitizerError as error:
        return str(error)
    return ""


REDUCE = """
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float s[256];
  int t = threadIdx.x;
  s[t] = x[blockIdx.x * 256 + t];  // STORE
  AFTER_STORE
  for (int o = 128; o > 0; o >>= 1) {
    if (t < o) s[t] += s[t + o];  // ADD
    AFTER_ADD
  }
  if (t == 0) y[blockIdx.x] = s[0];
}"""


@pytest.mark.parametrize(
    ("after_store", "after_add", "lines", "hint"),
    [
        ("__syncthreads();", "__syncthreads();", (), ""),
        ("", "__syncthreads();", ("ADD", "STORE"), "__syncthreads()"),
        ("__syncthreads();", "", ("ADD", "ADD"), "__syncthreads()"),
        ("__syncthreads();", "__syncwarp();", ("ADD", "ADD"), "__syncthreads()"),
        (
            "__syncthreads();",
            "if (o > 32) __syncthreads();",
            ("ADD", "ADD"),
            "__syncwarp()",
        ),
        ("__syncthreads();", "if (o > 32) __syncthreads(); else __syncwarp();", (), ""),
    ],
)
def test_a_reduction(after_store: str, after_add: str, lines: tuple[str, ...], hint: str) -> None:
    source = REDUCE.replace("AFTER_STORE", after_store).replace("AFTER_ADD", after_add)
    x, y = floats(512), np.zeros(2, "f4")
    report = race(source, Arg("x", x), Arg("y", y, True), block=256)
    if not lines:
        assert report == ""
        np.testing.assert_allclose(y, x.reshape(2, 256).sum(1), rtol=1e-4, atol=1e-4)
        return
    head, first, second, last = report.split("\n")
    assert head.startswith("the title: race: byte ") and " of s (static shared, 1,024" in head
    assert f"{NAME}:{line_of(source, lines[0])}   block" in first and "read" in first
    assert f"{NAME}:{line_of(source, lines[1])}   block" in second and "write" in second
    assert last.strip().startswith("hint: ") and hint in last


FLAG = """
extern "C" __global__ void k(float* y, int* flag) {
  volatile int* f = flag;
  if (blockIdx.x == 0) {
    y[threadIdx.x] = 1;
    ALL
    if (threadIdx.x == 0) { RELEASE *f = 1; }
  } else {
    if (threadIdx.x == 0) { while (*f == 0); ACQUIRE }
    __syncthreads();
    y[threadIdx.x + 64] = y[63 - threadIdx.x];
  }
}"""
SYNC, FENCE = "__syncthreads();", "__threadfence();"


@one_in(2)
@pytest.mark.parametrize(
    ("everybody", "release", "acquire", "racy"),
    [
        (SYNC, FENCE, FENCE, False),
        (FENCE + SYNC, "", FENCE, False),  # each writer has fenced before the barrier
        (FENCE + SYNC, FENCE, FENCE, False),
        ("", FENCE, FENCE, True),
        (SYNC, "", FENCE, True),
        (SYNC, FENCE, "", True),
        (SYNC, "__threadfence_block();", FENCE, True),
        (SYNC, FENCE, "__threadfence_block();", False),
    ],
)
def test_a_flag_between_blocks(everybody: str, release: str, acquire: str, racy: bool) -> None:
    source = FLAG.replace("ALL", everybody).replace("RELEASE", release).replace("ACQUIRE", acquire)
    y, flag = floats(128), np.zeros(1, "i4")
    report = race(source, Arg("y", y, True), Arg("flag", flag, True))
    assert bool(report) == racy, report
    if racy:
        assert "race: byte" in report and "of y (512 bytes" in report
        assert "block (1, 0, 0), thread (0, 0, 0)" in report and "block (0, 0, 0)" in report
        assert "blocks run in any order" in report


@pytest.mark.parametrize("order", ["", "acquire", "release", "both"])
def test_acquire_and_release_instructions(order: str) -> None:
    store = "st.release.gpu" if order in ("release", "both") else "st.relaxed.gpu"
    load = "ld.acquire.gpu" if order in ("acquire", "both") else "ld.relaxed.gpu"
    source = f"""
    extern "C" __global__ void k(float* y, int* flag) {{
      if (threadIdx.x) return;
      if (blockIdx.x == 0) {{
        *y = 1;
        asm volatile("{store}.global.u32 [%0], 1;" :: "l"(flag) : "memory");
      }} else {{
        int seen = 0;
        while (!seen)
          asm volatile("{load}.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        *y += 1;
      }}
    }}"""
    y = np.zeros(1, "f4")
    report = race(source, Arg("y", y, True), Arg("flag", np.zeros(1, "i4"), True), block=32)
    assert bool(report) == (order != "both")
    assert order != "both" or y[0] == 2


LAST = """
extern "C" __global__ void k(float* part, unsigned* count, float* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    part[blockIdx.x] = blockIdx.x;
    RELEASE
    last = atomicAdd(count, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    ACQUIRE
    float s = 0;
    for (int i = 0; i < gridDim.x; ++i) s += part[i];
    *out = s;
  }
}"""


@pytest.mark.parametrize("release", [FENCE, ""])
@pytest.mark.parametrize("acquire", [FENCE, ""])
def test_the_last_block_sums_up(release: str, acquire: str) -> None:
    """Over several batches of blocks: what has been published outlives its block."""
    source = LAST.replace("RELEASE", release).replace("ACQUIRE", acquire)
    part, out = np.full(300, np.nan, "f4"), np.zeros(1, "f4")
    report = race(
        source, Arg("part", part, True), Arg("count", np.zeros(1, "u4"), True),
        Arg("out", out, True), grid=300,
    )  # fmt: skip
    assert bool(report) == (not release or not acquire)
    if not report:
        assert out[0] == 300 * 299 / 2
    else:
        assert "of part (1,200 bytes" in report and "block (299, 0, 0)" in report


def test_blocks_that_overlap() -> None:
    source = 'extern "C" __global__ void k(TYPE* y) { y[threadIdx.x + blockIdx.x * STRIDE] = 1; }'
    for kind in ("float", "char"):
        for stride in (63, 64):
            text = source.replace("TYPE", kind).replace("STRIDE", str(stride))
            y = np.ones(256, {"float": "f4", "char": "i1"}[kind])
            report = race(text, Arg("y", y, True))
            assert bool(report) == (stride == 63)
    assert race(source.replace("TYPE", "char").replace("STRIDE", "63"), Arg("y", y, True)).count(
        "write"
    ) >= 2  # fmt: skip


def test_neighbouring_bytes_are_no_race() -> None:
    source = """
    extern "C" __global__ void k(char* y) {
      __shared__ short s[128];
      s[threadIdx.x] = threadIdx.x;
      __syncwarp();
      s[threadIdx.x + 64] = s[threadIdx.x ^ 1];
      y[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x + 64];
    }"""
    y = np.zeros(128, "i1")
    assert race(source, Arg("y", y, True)) == ""
    assert y.tolist() == [t ^ 1 for t in range(64)] * 2
    assert "__syncthreads()" in race(source.replace("^ 1", "^ 32"), Arg("y", y, True))


def test_atomics_go_together_but_not_with_plain_accesses() -> None:
    source = """
    extern "C" __global__ void k(int* y) {
      __shared__ int s[8];
      if (threadIdx.x < 8) s[threadIdx.x] = 0;
      __syncthreads();
      atomicAdd(s + threadIdx.x % 8, 1);
      BARRIER
      if (threadIdx.x < 8) atomicAdd(y + threadIdx.x, s[threadIdx.x]);
      PLAIN
    }"""
    y = np.zeros(8, "i4")
    assert race(source.replace("BARRIER", SYNC).replace("PLAIN", ""), Arg("y", y, True)) == ""
    assert y.tolist() == [16] * 8
    report = race(source.replace("BARRIER", "").replace("PLAIN", ""), Arg("y", y, True))
    assert "of s (static shared" in report and "atomic" in report
    late = source.replace("BARRIER", SYNC).replace("PLAIN", "if (y[0] == 99) y[1] = 0;")
    assert "of y (32 bytes" in race(late, Arg("y", y, True))


@pytest.mark.parametrize(
    ("count", "racy"), [("128", False), ("64", True)], ids=["whole block", "halves"]
)
def test_named_barriers_order_those_who_take_part(count: str, racy: bool) -> None:
    source = """
    extern "C" __global__ void k(int* y) {
      __shared__ int s[128];
      s[threadIdx.x] = threadIdx.x;
      asm volatile("bar.sync %0, COUNT;" :: "r"(COUNT == 64 ? 1 + threadIdx.x / 64 : 1) : "memory");
      y[blockIdx.x * 128 + threadIdx.x] = s[threadIdx.x ^ 127];
    }"""
    y = np.zeros(256, "i4")
    report = race(source.replace("COUNT", count), Arg("y", y, True), block=128)
    assert bool(report) == racy
    within = source.replace("COUNT", "64").replace("^ 127", "^ 63")
    assert race(within, Arg("y", y, True), block=128) == ""


@pytest.mark.parametrize("arrive_first", [True, False])
def test_an_arrival_releases_and_a_sync_acquires(arrive_first: bool) -> None:
    source = """
    extern "C" __global__ void k(int* y) {
      __shared__ int s[32];
      if (threadIdx.x < 32) {
        ONE
        TWO
      } else {
        asm volatile("bar.sync 2, 64;" ::: "memory");
        y[blockIdx.x * 32 + threadIdx.x - 32] = s[threadIdx.x - 32];
      }
    }"""
    store, arrive = (
        "s[threadIdx.x] = threadIdx.x;",
        'asm volatile("bar.arrive 2, 64;" ::: "memory");',
    )
    one, two = (arrive, store) if arrive_first else (store, arrive)
    y = np.zeros(64, "i4")
    report = race(source.replace("ONE", one).replace("TWO", two), Arg("y", y, True))
    assert bool(report) == arrive_first


COPY = """
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ __align__(16) float s[2][256];
  int t = threadIdx.x;
  unsigned to = (unsigned)__cvta_generic_to_shared(&s[0][4 * t]);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + 4 * t) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");  // COMMIT
  WAIT
  BARRIER
  y[t] = s[0][(t + SHIFT) % 256];  // LOAD
  AGAIN
}"""
AGAIN = "((volatile float*)s[0])[t + 129] = 1;"
WAIT = 'asm volatile("cp.async.wait_group 0;" ::: "memory");'


@pytest.mark.parametrize(
    ("wait", "barrier", "shift", "again", "found"),
    [
        (WAIT, SYNC, 128, "", ""),
        ("", SYNC, 128, "", "missing wait"),
        (WAIT, "", 128, "", "race"),
        (SYNC, WAIT, 128, "", "race"),  # waits after the barrier: others' copies are unordered
        (WAIT, SYNC, 128, AGAIN, "race"),  # overwrites what others may still read
        (WAIT, SYNC, 128, SYNC + AGAIN, ""),
    ],
)
def test_asynchronous_copies(wait: str, barrier: str, shift: int, again: str, found: str) -> None:
    source = COPY.replace("WAIT", wait).replace("BARRIER", barrier).replace("AGAIN", again)
    y = np.zeros(64, "f4")
    x = floats(256)
    report = race(source.replace("SHIFT", str(shift)), Arg("x", x), Arg("y", y, True), grid=1)
    if not found:
        assert report == ""
        np.testing.assert_array_equal(y, x[128:192])
    else:
        assert report.startswith(f"the title: {found}: byte ") and NAME in report


def test_one_word_written_by_a_whole_warp() -> None:
    source = """
    extern "C" __global__ void k(int* y) {
      __shared__ int s;
      if (threadIdx.x < 32) s = threadIdx.x;  // BUG
      __syncthreads();
      y[blockIdx.x * 64 + threadIdx.x] = s;
    }"""
    report = race(source, Arg("y", np.zeros(128, "i4"), True))
    assert report.count(f"{NAME}:{line_of(source, 'BUG')}") == 2
    assert "two threads write it in one instruction" in report


def test_nothing_is_written_when_a_race_is_found() -> None:
    source = REDUCE.replace("AFTER_STORE", "").replace("AFTER_ADD", SYNC)
    y = np.full(2, 7, "f4")
    assert race(source, Arg("x", floats(512)), Arg("y", y, True), block=256)
    assert y.tolist() == [7, 7]


def test_races_are_found_only_when_asked_for() -> None:
    source = REDUCE.replace("AFTER_STORE", "").replace("AFTER_ADD", SYNC)
    ptx = compile_ptx(source, name=NAME)
    run(ptx, "k", 2, 256, [Arg("x", floats(512)), Arg("y", np.zeros(2, "f4"), True)])
