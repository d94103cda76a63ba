"""Shuffles, votes, matches, reductions; divergence, barriers and who waits for whom."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.interp import Arg, run
from tests.interp.interp_kit import apply, compile_ptx

LANE = np.arange(96) % 32
WARP = np.arange(96) // 32 * 32
VALUES = np.random.default_rng(6).integers(0, 1 << 32, 96, dtype="u4")


def shuffle(mode: str, amount: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """CUDA's definition: source lane within segments of `width`, else the own lane."""
    first = LANE // width * width
    source = {"up": LANE - amount, "down": LANE + amount, "bfly": LANE ^ amount,
              "idx": first + amount % width}[mode]  # fmt: skip
    # bfly may reach into earlier segments; up and down stay within their own
    inside = (
        source < first + width if mode == "bfly" else (source >= first) & (source < first + width)
    )
    return np.where(inside, source, LANE) + WARP, inside


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str, width: int) -> None:
    control = (32 - width) << 8 | (0 if mode == "up" else 31)
    for amount in (0, 1, 3, 8, 17):
        text = (f"shfl.sync.{mode}.b32 %t|%p, %a, {amount}, {control}, -1;"
                "selp.u32 %u, 1, 0, %p; mov.b64 %d, {%t, %u};")  # fmt: skip
        got = apply(text, VALUES, out="u8", block=96)
        source, inside = shuffle(mode, amount, width)
        np.testing.assert_array_equal(got & np.uint64(0xFFFFFFFF), VALUES[source])
        np.testing.assert_array_equal(got >> np.uint64(32), inside)


def test_shuffle_by_register_and_with_partial_mask() -> None:
    where = np.random.default_rng(7).integers(0, 32, 96).astype("u4")
    got = apply("shfl.sync.idx.b32 %d, %a, %b, 31, -1;", VALUES, where, block=96)
    np.testing.assert_array_equal(got, VALUES[WARP + where])
    text = """setp.lt.u32 %p, %b, 8; mov.u32 %d, 0; @!%p bra OUT;
              shfl.sync.bfly.b32 %d, %a, 7, 31, 255;
              OUT:"""
    got = apply(text, VALUES, LANE.astype("u4"), block=96)
    np.testing.assert_array_equal(got, np.where(LANE < 8, VALUES[WARP + (LANE ^ 7)], 0))


def test_votes() -> None:
    odd = VALUES & 1
    got = apply("and.b32 %t, %a, 1; setp.eq.u32 %p, %t, 1; vote.sync.ballot.b32 %d, %p, -1;",
                VALUES, block=96)  # fmt: skip
    want = (odd.astype("u8").reshape(-1, 32) << np.arange(32, dtype="u8")).sum(1)
    np.testing.assert_array_equal(got, np.repeat(want, 32))
    limits = np.repeat([0, 5, 32], 32).astype("u4")
    for mode, function in (("all", np.all), ("any", np.any)):
        text = f"setp.lt.u32 %p, %b, %a; vote.sync.{mode}.pred %q, %p, -1; selp.u32 %d, 1, 0, %q;"
        got = apply(text, limits, LANE.astype("u4"), block=96)
        want = function((limits > LANE).reshape(-1, 32), axis=1)
        np.testing.assert_array_equal(got, np.repeat(want, 32))
    text = "setp.lt.u32 %p, %b, %a; vote.sync.uni.pred %q, !%p, -1; selp.u32 %d, 1, 0, %q;"
    got = apply(text, limits, LANE.astype("u4"), block=96)
    np.testing.assert_array_equal(got, np.repeat([1, 0, 1], 32))


def test_match_redux_and_masks() -> None:
    a = VALUES % 4
    want = [sum(1 << j for j in range(32) if a[w + j] == v) for w, v in zip(WARP, a, strict=True)]
    np.testing.assert_array_equal(apply("match.any.sync.b32 %d, %a, -1;", a, block=96), want)
    text = "match.all.sync.b32 %t|%p, %a, -1; selp.u32 %d, %t, 7, %p;"
    np.testing.assert_array_equal(apply(text, a, block=96), 7)
    same = np.repeat([3, 4, 5], 32).astype("u4")
    np.testing.assert_array_equal(apply(text, same, block=96), 0xFFFFFFFF)
    rows = VALUES.reshape(-1, 32)
    for name, want in (("add.u32", rows.sum(1, dtype="u4")), ("min.u32", rows.min(1)),
                       ("max.s32", rows.view("i4").max(1).view("u4")),
                       ("xor.b32", np.bitwise_xor.reduce(rows, 1))):  # fmt: skip
        got = apply(f"redux.sync.{name} %d, %a, -1;", VALUES, block=96)
        np.testing.assert_array_equal(got, np.repeat(want, 32), name)
    np.testing.assert_array_equal(apply("mov.u32 %d, %lanemask_lt;", VALUES, block=96),
                                  (1 << LANE) - 1)  # fmt: skip
    text = "setp.lt.u32 %p, %a, 20; mov.u32 %d, 0; @!%p bra OUT; activemask.b32 %d; OUT:"
    got = apply(text, LANE.astype("u4"), block=96)
    np.testing.assert_array_equal(got, np.where(LANE < 20, (1 << 20) - 1, 0))


def test_loops_of_different_length_meet_again() -> None:
    source = """
    extern "C" __global__ void k(const int* a, int* o, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i >= n) return;
      int x = a[i], steps = 0;
      while (x != 1) { x = x & 1 ? 3 * x + 1 : x >> 1; if (++steps > 60) break; }
      unsigned together = __ballot_sync(__activemask(), 1);
      o[i] = steps * 100 + __popc(together);
    }"""
    n = 150
    a = np.arange(1, n + 1, dtype="i4")
    o = np.zeros(n, "i4")
    run(compile_ptx(source), "k", 3, 64, [Arg("a", a), Arg("o", o, True), Arg("n", np.int32(n))])
    for i in range(n):
        x, steps = i + 1, 0
        while x != 1:
            x = 3 * x + 1 if x & 1 else x >> 1
            steps += 1
            if steps > 60:
                break
        lanes = 32 if i // 32 < n // 32 else n % 32
        assert o[i] == steps * 100 + lanes


def test_named_barriers_between_a_producer_and_a_consumer() -> None:
    source = """
    extern "C" __global__ void k(int* o) {
      __shared__ int buffer[32];
      int lane = threadIdx.x & 31;
      for (int turn = 0; turn < 4; ++turn) {
        if (threadIdx.x < 32) {
          if (turn) asm volatile("bar.sync 2, 64;" ::: "memory");
          buffer[lane] = turn * 1000 + lane;
          asm volatile("bar.arrive 1, 64;" ::: "memory");
        } else {
          asm volatile("bar.sync 1, 64;" ::: "memory");
          o[turn * 32 + lane] = buffer[31 - lane];
          if (turn < 3) asm volatile("bar.arrive 2, 64;" ::: "memory");
        }
      }
    }"""
    o = np.zeros((4, 32), "i4")
    run(compile_ptx(source), "k", 1, 64, [Arg("o", o, True)])
    np.testing.assert_array_equal(o, np.arange(4)[:, None] * 1000 + 31 - np.arange(32))


def test_barrier_reductions() -> None:
    source = """
    extern "C" __global__ void k(const int* a, int* o) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      int n = __syncthreads_count(a[i] > 0);
      o[i] = n * 4 + (__syncthreads_and(a[i] > 0) ? 2 : 0) + (__syncthreads_or(a[i] > 0) ? 1 : 0);
    }"""
    a = np.ones((3, 96), "i4")
    a[1, 40:] = 0
    a[2] = 0
    o = np.zeros_like(a)
    run(compile_ptx(source), "k", 3, 96, [Arg("a", a), Arg("o", o, True)])
    np.testing.assert_array_equal(o, np.repeat([[96 * 4 + 3], [40 * 4 + 1], [0]], 96, 1))


def test_threads_that_ended_need_not_come_to_a_barrier() -> None:
    source = """
    extern "C" __global__ void k(int* o) {
      __shared__ int s[64];
      if (threadIdx.x >= 40) return;
      s[threadIdx.x] = threadIdx.x;
      __syncthreads();
      o[threadIdx.x] = s[39 - threadIdx.x];
    }"""
    o = np.zeros(40, "i4")
    run(compile_ptx(source), "k", 1, 64, [Arg("o", o, True)])
    np.testing.assert_array_equal(o, 39 - np.arange(40))


def test_a_lock_among_threads_of_a_block() -> None:
    source = """
    extern "C" __global__ void k(int* lock, int* o) {
      for (bool done = false; !done;) {
        if (atomicCAS(lock, 0, 1) == 0) { *o = *o * 3 + 1; atomicExch(lock, 0); done = true; }
      }
    }"""
    lock, o = np.zeros(1, "i4"), np.zeros(1, "i4")
    run(compile_ptx(source), "k", 1, 40, [Arg("lock", lock, True), Arg("o", o, True)])
    want = 0
    for _ in range(40):
        want = want * 3 + 1
    assert o[0] == np.array(want % (1 << 32), "u4").view("i4")
