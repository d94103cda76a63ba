"""A product by clusters as Hopper's matrix kernels do it: each block brings its part of B to all
blocks by multicast, and frees a stage for all of them by arrivals at their mbarriers. The device
functions are those of templates/ptx."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, Checks, TensorMap, run
from tests.core.sampling import one_in
from tests.interp.interp_kit import compile_ptx

RNG = np.random.default_rng(61)
STAGES = 2
KERNEL = r"""
#include "ptx/cluster.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_products.cuh"
#include "tile/ring.cuh"
// c[m, n] = sum over k of a[m, k] b[n, k]: 64 x N a block, CLUSTER blocks along m, steps of 64 k.
// Stages hold A as 64 rows (k, or m where A_T) of 64, B as N rows of k, or panels of 64 n with a
// row for each k.
constexpr int N = $N, CLUSTER = $CLUSTER, STAGES = 2, STEP = 64;
constexpr bool A_T = $A_T, B_T = $B_T;
constexpr int A_BYTES = 64 * STEP * 2, B_BYTES = N * STEP * 2, STAGE = A_BYTES + B_BYTES;
constexpr u16 ALL = (1 << CLUSTER) - 1;
struct Shared { alignas(8) u64 full[STAGES], empty[STAGES]; };

__device__ u32 at(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ void bring(u32 stage, u32 full, const TensorMap& a, const TensorMap& b, int row,
                      int k, int rank) {
  mbarrier_expect(full, STAGE);
  tma_load(stage, a, full, A_T ? row : k, A_T ? k : row, 0, 0);
  const u32 tile = stage + A_BYTES;
  if (B_T) {
    constexpr int PART = STEP / CLUSTER;
    for (int panel = 0; panel < N / 64; ++panel)
      tma_load_multicast(tile + panel * STEP * 128 + rank * PART * 128, b, full, panel * 64,
                         k + rank * PART, 0, 0, ALL);
  } else {
    constexpr int PART = N / CLUSTER;
    tma_load_multicast(tile + rank * PART * 128, b, full, k, rank * PART, 0, 0, ALL);
  }
}

__device__ void multiply(float (&sums)[N / 8][4], u32 stage, int add) {
  const u64 a = wgmma_tile(stage, 8192), b = wgmma_tile(stage + A_BYTES, 8192);
  register_fence(sums), wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    wgmma_shared<fp16, A_T, B_T>(sums, a + i * (A_T ? 2048 >> 4 : 32 >> 4),
                                 b + i * (B_T ? 2048 >> 4 : 32 >> 4), add | i);
  wgmma_commit(), wgmma_wait<0>();
  register_fence(sums);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(160)
    k(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* c,
      int steps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ Shared shared;
  const int t = threadIdx.x, row = blockIdx.x * 64, rank = cluster_rank();
  if (t == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(at(&shared.full[s]), 1);
      mbarrier_init(at(&shared.empty[s]), CLUSTER);
    }
    mbarrier_init_fence();
  }
  cluster_arrive(), cluster_wait();  // all barriers are there
  RingPlace<STAGES> place;
  if (t == 128) {
    for (int i = 0; i < steps; ++i) {
      mbarrier_wait(at(&shared.empty[place.stage]), place.parity ^ 1);
      bring(at(memory) + place.stage * STAGE, at(&shared.full[place.stage]), a, b, row, i * STEP,
            rank);
      place.advance();
    }
  }
  if (t < 128) {
    float sums[N / 8][4];
    for (int i = 0; i < steps; ++i) {
      mbarrier_wait(at(&shared.full[place.stage]), place.parity);
      multiply(sums, at(memory) + place.stage * STAGE, i);
      if (t < CLUSTER) cluster_arrive_at(at(&shared.empty[place.stage]), t);
      place.advance();
    }
    const int m = t / 32 * 16 + t % 32 / 4, n = t % 4 * 2;
    for (int i = 0; i < N / 8; ++i)
      for (int j = 0; j < 4; ++j)
        c[(row + m + j / 2 * 8) * N + i * 8 + n + j % 2] = sums[i][j];
  }
  __syncwarp();
  cluster_arrive(), cluster_wait();  // no block goes while others write to it or arrive at it
}
"""


def launch(
    n: int, cluster: int, a_t: bool, b_t: bool, checks: Checks, change: tuple[str, str] = ("", "")
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel (with a change) computes for two clusters, and what is right."""
    source = KERNEL.replace(*change) if change[0] else KERNEL
    assert not change[0] or source != KERNEL
    for name, value in {"N": n, "CLUSTER": cluster, "A_T": int(a_t), "B_T": int(b_t)}.items():
        source = source.replace(f"= ${name},", f"= {value},").replace(f"= ${name};", f"= {value};")
    m, depth = 2 * cluster * 64, 4 * 64 + 8
    a = RNG.integers(-3, 4, (m, depth)).astype("f2")
    b = RNG.integers(-3, 4, (n, depth)).astype("f2")
    c = np.full((m, n), np.nan, "f4")
    maps = [
        mapped(a.T.copy() if a_t else a, 64),
        mapped(b.T.copy() if b_t else b, (64 if b_t else n) // cluster),
    ]
    arguments = [Arg("a", maps[0]), Arg("b", maps[1]), Arg("c", c, True),
                 Arg("steps", np.int32(-(-depth // 64)))]  # fmt: skip
    room = STAGES * (64 + n) * 64 * 2
    ptx = compile_ptx(source, "compute_90a")
    run(ptx, "k", m // 64, 160, arguments, room, checks)
    return c, a.astype("f4") @ b.astype("f4").T


def mapped(x: np.ndarray, rows: int) -> TensorMap:
    """Boxes of `rows` rows of 64 elements, as four dimensions."""
    outer = x.nbytes
    return TensorMap(
        x, (x.shape[1], x.shape[0], 1, 1), (x.strides[0], outer, outer), (64, rows, 1, 1),
        swizzle="128B",
    )  # fmt: skip


CHECKS = [Checks(), Checks(race=True)]


@one_in(6)
@pytest.mark.parametrize("checks", CHECKS, ids=["mem", "race"])
@pytest.mark.parametrize("b_t", [False, True])
@pytest.mark.parametrize("a_t", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_layouts_and_clusters(cluster: int, a_t: bool, b_t: bool, checks: Checks) -> None:
    got, right = launch(128, cluster, a_t, b_t, checks)
    np.testing.assert_array_equal(got, right)


@one_in(3, n=range(64, 257, 16))
@pytest.mark.parametrize("n", range(64, 257, 16))
def test_every_width_of_the_products(n: int) -> None:
    got, right = launch(n, 2, False, False, Checks())
    np.testing.assert_array_equal(got, right)


@one_in(2)
@pytest.mark.parametrize(
    ("old", "new", "texts"),
    [
        ("cluster_arrive(), cluster_wait();  // all", "__syncthreads();  // all",
         ["race: byte 16 of shared"]),
        ("mbarrier_init(at(&shared.empty[s]), CLUSTER);", "mbarrier_init(at(&shared.empty[s]), 1);",
         ["over-arrival"]),
        ("cluster_arrive_at(at(&shared.empty[place.stage]), t);",
         "cluster_arrive_at(at(&shared.empty[place.stage]), rank);",
         ["mbarrier transaction underflow"]),
        ("cluster_arrive_at(at(&shared.empty[place.stage]), t);",
         "cluster_arrive_at(at(&shared.empty[place.stage]), t ? rank : CLUSTER);",
         ["address outside the cluster: rank 2"]),
        ("mbarrier_expect(full, STAGE);", "mbarrier_expect(full, STAGE - B_BYTES / CLUSTER);",
         ["mbarrier transaction underflow"]),
        ("ALL = (1 << CLUSTER) - 1", "ALL = (2 << CLUSTER) - 1",
         ["address outside the cluster: rank 2"]),
        ("ALL = (1 << CLUSTER) - 1", "ALL = 1", ["deadlock", "outstanding"]),
        ("tile + rank * PART * 128, b", "tile, b", ["missing wait: byte 8,192"]),
        ("mbarrier_wait(at(&shared.empty[place.stage]), place.parity ^ 1);", "",
         ["over-arrival"]),
        ("cluster_arrive(), cluster_wait();  // no", "// no", ["ended"]),
    ],
)  # fmt: skip
def test_planted_bugs(old: str, new: str, texts: list[str]) -> None:
    """Each is found, as one of these."""
    with pytest.raises(SanitizerError) as caught:
        launch(64, 2, False, False, Checks(race=True), (old, new))
    assert any(text in str(caught.value) for text in texts), str(caught.value)
