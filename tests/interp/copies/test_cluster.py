"""Clusters: distributed shared memory, cluster barriers, remote mbarriers, multicasts."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.interp import Arg, Checks, TensorMap
from tests.interp.copies.hopper_kit import fault, launch

RNG = np.random.default_rng(50)
CHECKS = pytest.mark.parametrize("checks", [Checks(), Checks(race=True)], ids=["mem", "race"])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_ring_of_blocks_reads_its_neighbours(size: int) -> None:
    """Through shared::cluster and through generic addresses; in two batches of blocks."""
    source = r"""
    extern "C" __global__ void k(const int* x, int* y) {
      __shared__ int mine[64];
      const int t = threadIdx.x, n = blockIdx.x * 64;
      if (t < 64) mine[t] = x[n + t];
      cluster_sync();
      u32 count, other;
      ASM("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
      const u32 next = (rank() + 1) % count;
      int value;
      if (t < 64) {
        ASM("ld.shared::cluster.u32 %0, [%1+0];" : "=r"(value) : "r"(mapped(mine + 63 - t, next)));
        y[n * 3 + t] = value;
        u64 generic;
        ASM("mapa.u64 %0, %1, %2;" : "=l"(generic) : "l"(mine + t), "r"(next));
        y[n * 3 + 64 + t] = *(int*)generic;
        ASM("getctarank.u64 %0, %1;" : "=r"(other) : "l"(generic));
        ASM("getctarank.shared::cluster.u32 %0, %1;" : "=r"(count) : "r"(mapped(mine, next)));
        y[n * 3 + 128 + t] = other * 100 + count * 10 + __isShared((void*)generic);
      }
      cluster_sync();
    }"""
    x = RNG.integers(-999, 999, (48, 64)).astype("i4")
    y = np.zeros((48, 3, 64), "i4")
    launch(source, Arg("x", x), Arg("y", y, True), grid=48, cluster=size)
    blocks = np.arange(48)
    following = blocks // size * size + (blocks + 1) % size
    np.testing.assert_array_equal(y[:, 0], x[following, ::-1])
    np.testing.assert_array_equal(y[:, 1], x[following])
    ranks = np.broadcast_to((following % size)[:, None], (48, 64))
    np.testing.assert_array_equal(y[:, 2] // 10, ranks * 11)


def test_atomics_and_stores_go_to_the_first_block() -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
      __shared__ int sum, row[4];
      const int t = threadIdx.x, n = blockIdx.x;
      if (t == 0) sum = 1000;
      cluster_sync();
      int old;
      ASM("atom.add.shared::cluster.u32 %0, [%1], %2;" : "=r"(old) : "r"(mapped(&sum, 0)), "r"(t));
      ASM("red.add.shared::cluster.u32 [%0], 1;" ::"r"(mapped(&sum, 0)) : "memory");
      if (t == 7) ASM("st.shared::cluster.u32 [%0], %1;" ::"r"(mapped(row + rank(), 0)), "r"(n * 5)
                      : "memory");
      cluster_sync();
      if (t == 0) y[2 * n] = sum;
      if (t == 0) y[2 * n + 1] = rank() ? -1 : row[0] + row[1] + row[2] + row[3];
    }"""
    y = np.zeros((8, 2), "i4")
    launch(source, Arg("y", y, True), grid=8, cluster=(4, 1, 1))
    each = 127 * 64 + 128
    assert y[:, 0].tolist() == 2 * [1000 + 4 * each, 1000, 1000, 1000]
    assert y[:, 1].tolist() == [5 * 6, -1, -1, -1, 5 * 22, -1, -1, -1]


def test_spaces_of_addresses() -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
      __shared__ int mine;
      u64 other;
      mine = 3;
      ASM("mapa.u64 %0, %1, 1;" : "=l"(other) : "l"(&mine));
      u64 list[3] = {(u64)&mine, other, (u64)y};
      int out = 0;
      for (int i = 0; i < 3; ++i) {
        u32 a, b;
        ASM("{.reg .pred P; isspacep.shared::cta P, %1; selp.u32 %0, 1, 0, P;}" : "=r"(a)
            : "l"(list[i]));
        ASM("{.reg .pred P; isspacep.shared::cluster P, %1; selp.u32 %0, 1, 0, P;}" : "=r"(b)
            : "l"(list[i]));
        out = out * 100 + a * 10 + b;
      }
      if (threadIdx.x == 0 && rank() == 0) *y = out;
      cluster_sync();
    }"""
    y = np.zeros(1, "i4")
    launch(source.replace("mine = 3;", "if (threadIdx.x == 0) mine = 3;"), Arg("y", y, True),
           grid=2, cluster=2)  # fmt: skip
    assert y[0] == 110100


def test_the_cluster_barrier_has_two_halves() -> None:
    source = r"""
    extern "C" __global__ void k(int* y, int rounds) {
      __shared__ int value[2];
      int sum = 0;
      for (int i = 0; i < rounds; ++i) {
        if (threadIdx.x == 0) value[i % 2] = i * 10 + rank();
        ASM("fence.acq_rel.cluster;" ::: "memory");
        ASM("barrier.cluster.arrive.relaxed;" ::: "memory");
        if (threadIdx.x == 5 && i == 3) sum += 7;
        ASM("barrier.cluster.wait;" ::: "memory");
        int other;
        ASM("ld.shared::cluster.u32 %0, [%1];" : "=r"(other)
            : "r"(mapped(&value[i % 2], 1 - rank())) : "memory");
        sum += other;
      }
      y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
      cluster_sync();
    }"""
    y = np.zeros((4, 64), "i4")
    launch(source, Arg("y", y, True), Arg("rounds", np.int32(5)), grid=4, block=64, cluster=2)
    expected = np.full((4, 64), 100) + 5 * (1 - np.arange(4) % 2)[:, None]
    expected[:, 5] += 7
    np.testing.assert_array_equal(y, expected)


REMOTE = r"""
extern "C" __global__ void k(int* y) {
  __shared__ alignas(16) int data[128];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, ARRIVALS); ready(); }
  if (SET) data[t] = t;
  cluster_sync();
  const u32 peer = 1 - rank(), there = mapped(&bar, peer), to = mapped(data + t, peer);
  if (t == 0) expect(&bar, BYTES);
  SEND
  wait(&bar, 0);
  y[blockIdx.x * 128 + t] = data[t];
  cluster_sync();
}"""
TAG = "shared::cluster.mbarrier::complete_tx::bytes"


def remote(send: str, arrivals: int, size: int, preset: bool = False) -> str:
    return (
        REMOTE.replace("SEND", send).replace("ARRIVALS", str(arrivals)).replace("BYTES", str(size))
    ).replace("SET", str(preset).lower())


@pytest.mark.parametrize(
    ("send", "size", "preset", "expected"),
    [
        (f'ASM("st.async.{TAG}.u32 [%0], %1, [%2];" ::"r"(to), "r"(t * 3 + peer), "r"(there) '
         ': "memory");', 512, False, lambda t, peer: t * 3 + peer),
        (f'if (t % 4 == 0) ASM("st.async.{TAG}.v4.s32 [%0], {{%1, %1, 5, %2}}, [%3];" ::"r"(to), '
         '"r"(t), "r"(peer), "r"(there) : "memory");', 512, False,
         lambda t, peer: np.select([t % 4 < 2, t % 4 == 2], [t // 4 * 4, 5], peer)),
        (f'ASM("red.async.relaxed.cluster.{TAG}.add.s32 [%0], %1, [%2];" ::'
         '"r"(mapped(data + t / 2, peer)), "r"(t + peer), "r"(there) : "memory");', 512, True,
         lambda t, peer: np.where(t < 64, t + 4 * t + 1 + 2 * peer, t)),
        (f'ASM("red.async.relaxed.cluster.{TAG}.max.u32 [%0], %1, [%2];" ::"r"(to), '
         '"r"(100 * peer), "r"(there) : "memory");', 512, True,
         lambda t, peer: np.maximum(t, 100 * peer)),
    ],
)  # fmt: skip
def test_asynchronous_stores_and_reductions(
    send: str, size: int, preset: bool, expected: object
) -> None:
    y = np.zeros((4, 128), "i4")
    launch(remote(send, 1, size, preset), Arg("y", y, True), grid=4, cluster=2)
    for block in range(4):  # what came is from the block whose peer this one is
        wanted = expected(np.arange(128), block % 2)  # type: ignore[operator]
        np.testing.assert_array_equal(y[block], wanted)


def test_remote_arrivals() -> None:
    send = """
      ASM("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(t * 7) : "memory");
      ASM("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
      if (t == 1)
        ASM("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(there), "r"(2)
            : "memory");
      if (t == 2) {
        ASM("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;"
            ::"r"(there), "r"(32) : "memory");
        ASM("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;"
            ::"r"(there), "r"(32) : "memory");
      }
      if (t == 3)
        ASM("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
      ASM("{\\n.reg .pred P;\\nAGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P,"
          " [%0], 0;\\n@!P bra AGAIN;\\n}" ::"r"(at(&bar)) : "memory");"""
    y = np.zeros((2, 128), "i4")
    launch(remote(send, 128 + 1 + 2 + 1 + 1, 0), Arg("y", y, True), grid=2, cluster=2)
    np.testing.assert_array_equal(y, np.tile(np.arange(128) * 7, (2, 1)))


def test_copies_between_blocks() -> None:
    send = """
      __shared__ alignas(16) int mine[128];
      mine[t] = t + 1000 * rank();
      proxy();
      __syncthreads();
      if (t == 0)
        ASM("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            " [%0], [%1], 512, [%2];" ::"r"(to), "r"(at(mine)), "r"(there) : "memory");"""
    y = np.zeros((2, 128), "i4")
    launch(remote(send, 1, 512), Arg("y", y, True), grid=2, cluster=2)
    np.testing.assert_array_equal(y, np.arange(128) + 1000 * np.array([[1], [0]]))


MULTICAST = r"""
extern "C" __global__ void k(const __grid_constant__ Map m, const float* x, float* y) {
  __shared__ alignas(128) float tile[SIZE][8][32];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); ready(); }
  cluster_sync();
  if (t == 0) {
    expect(&bar, TOTAL * 8 * 32 * 4);
    const int r = rank(), row = (blockIdx.x / SIZE * SIZE + r) * 8;
    if (r % 2 == 0)
      ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
          ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;"
          ::"r"(at(tile[r])), "l"(&m), "r"(0), "r"(row), "r"(at(&bar)), "h"((short)MASK), "l"(0ull)
          : "memory");
    else
      ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
          " [%0], [%1], %2, [%3], %4;"
          ::"r"(at(tile[r])), "l"(x + row * 32), "r"(1024), "r"(at(&bar)), "h"((short)MASK)
          : "memory");
  }
  wait(&bar, 0);
  for (int i = t; i < SIZE * 256; i += 128) y[blockIdx.x * SIZE * 256 + i] = (&tile[0][0][0])[i];
  cluster_sync();
}"""


@pytest.mark.parametrize("size", [2, 4])
def test_multicasts_to_the_whole_cluster(size: int) -> None:
    """Each block brings one part of the tile, to all blocks, by tensor or by span."""
    x = RNG.standard_normal((2 * size * 8, 32)).astype("f4")
    y = np.zeros((2, size, size * 8, 32), "f4")
    source = MULTICAST.replace("SIZE", str(size)).replace("TOTAL", str(size))
    launch(source.replace("MASK", str((1 << size) - 1)),
           Arg("m", TensorMap(x, (32, 2 * size * 8), (128,), (32, 8))), Arg("x", x),
           Arg("y", y, True), grid=2 * size, cluster=size)  # fmt: skip
    for cluster in range(2):
        part = x[cluster * size * 8 : (cluster + 1) * size * 8]
        np.testing.assert_array_equal(y[cluster], np.tile(part, (size, 1, 1)))


BUGS = r"""
extern "C" __global__ void k(int* y) {
  __shared__ alignas(16) int data[64];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); ready(); }
  if (t < 64) data[t] = t;
  CODE
}"""
READ = 'ASM("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(mapped(data + WHERE, 1)));'


@CHECKS
@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("cluster_sync(); int v; if (t == 3) { " + READ.replace("1)", "2)") + " } // BUG",
         ["address outside the cluster: rank 2; the cluster has 2 blocks"]),
        ("cluster_sync(); int v; if (t == 3) { " + READ.replace("WHERE", "64") + " } // BUG",
         ["out-of-bounds shared read", "byte 256 of data"]),
        ("int v = 0; if (t == 3) ASM(\"ld.shared.u32 %0, [%1];\" : \"=r\"(v)"
         " : \"r\"(mapped(data, 1))); // BUG\ny[0] = v;", ["out-of-bounds shared read"]),
        ("ASM(\"barrier.cluster.wait;\" ::: \"memory\"); // BUG",
         ["cluster barrier out of turn", "waits without having arrived"]),
        ("ASM(\"barrier.cluster.arrive;\" ::: \"memory\");\n"
         "ASM(\"barrier.cluster.arrive;\" ::: \"memory\"); // BUG",
         ["cluster barrier out of turn", "has arrived before and has not waited since"]),
        ("cluster_sync(); if (t == 0)\nASM(\"st.async." + TAG + ".u32 [%0], 1, [%1];\""
         " ::\"r\"(mapped(data, 1)), \"r\"(mapped(&bar, 0)) : \"memory\"); // BUG\ncluster_sync();",
         ["belong to different blocks"]),
        ("cluster_sync(); if (t == 0 && !rank()) ASM(\"st.async." + TAG + ".u32 [%0], 1, [%1];\""
         " ::\"r\"(mapped(data, 1)), \"r\"(mapped(&bar, 1)) : \"memory\"); // BUG",
         ["block ended under an asynchronous copy"]),
    ],
)  # fmt: skip
def test_planted_bugs(code: str, texts: list[str], checks: Checks) -> None:
    y = np.zeros(4, "i4")
    report = fault(BUGS.replace("CODE", code.replace("WHERE", "0")), Arg("y", y, True), grid=2,
                   cluster=2, checks=checks)  # fmt: skip
    for text in texts:
        assert text in report, report


@CHECKS
def test_a_block_that_ends_takes_its_memory_with_it(checks: Checks) -> None:
    """The copy arrives late, when the other block has ended; races see it whenever it arrives."""
    code = """cluster_sync();
      int v;
      if (rank()) return;
      if (t == 0) {
        expect(&bar, 16);
        ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], 16, [%2];" ::"r"(at(data)), "l"(y), "r"(at(&bar)) : "memory");
      }
      wait(&bar, 0);
      if (t == 3) { READ y[0] = v; } // BUG"""
    source = BUGS.replace("CODE", code).replace("READ", READ.replace("WHERE", "0"))
    source = source.replace("data[t] = t;", "data[t] = t;\nproxy();", 1)
    source = source.replace("cluster_sync();", "__syncthreads(); cluster_sync();", 1)
    report = fault(source, Arg("y", np.zeros(4, "i4"), True), grid=2, cluster=2, checks=checks)
    assert "access to the shared memory of an ended block: all threads of the cluster" in report
    early = source.replace("wait(&bar, 0);", "").replace("expect(&bar, 16);", "return;")
    if checks.race:
        report = fault(early, Arg("y", np.zeros(4, "i4"), True), grid=2, cluster=2)
        assert "access to the shared memory of a" in report and "block 1" in report


def test_a_block_that_leaves_no_longer_has_to_come() -> None:
    source = BUGS.replace("CODE", "if (rank()) return;\ncluster_sync(); y[t % 4] = 6;")
    y = np.zeros(4, "i4")
    launch(source.replace("t % 4", "0").replace("y[0]", "if (!t) y[0]"), Arg("y", y, True), grid=2,
           cluster=2)  # fmt: skip
    assert y.tolist() == [6, 0, 0, 0]


def test_a_cluster_barrier_that_some_threads_miss() -> None:
    code = "if (t < 64) cluster_sync(); // BUG\nelse wait(&bar, 0);"
    source = BUGS.replace("CODE", "__syncthreads(); " + code)
    report = fault(source, Arg("y", np.zeros(4, "i4"), True), grid=2, cluster=2)
    assert (
        "deadlock" in report and "barrier.cluster.wait" in report and "threads 0-63 wait" in report
    )


def test_remote_accesses_without_a_cluster_barrier_race() -> None:
    code = "int v; " + READ.replace("WHERE", "t % 64") + " // BUG\ny[t % 4 * 0] = v * 0;"
    source = BUGS.replace("CODE", code.replace("y[t % 4 * 0] = v * 0;", "if (v < 0) y[0] = v;"))
    source = source.replace("data[t] = t;", "data[t] = t;\n__syncthreads();")
    report = fault(source, Arg("y", np.zeros(4, "i4"), True), grid=2, cluster=2)
    assert "race" in report and "data" in report
