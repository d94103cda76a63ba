"""A ring of three stages: a warp brings tiles by TMA, others multiply them; and its bugs."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.interp import Arg, Checks, TensorMap
from tests.core.sampling import one_in
from tests.interp.copies.hopper_kit import fault, launch

RNG = np.random.default_rng(60)
STAGES = 3
RING = r"""
// c[m, n] = sum over k of a[m, k] * b[n, k]: tiles of 32 x 32, one block each, k in steps of 16.
constexpr int STAGES = 3, TILE = 32, STEP = 16;
struct Stage { alignas(1024) float a[TILE][STEP]; alignas(1024) float b[TILE][STEP]; };
extern "C" __global__ void k(const __grid_constant__ Map a, const __grid_constant__ Map b,
                             const __grid_constant__ Map c, int steps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Stage* ring = (Stage*)memory;
  __shared__ alignas(1024) float out[TILE][TILE];
  __shared__ u64 full[STAGES], empty[STAGES];
  const int t = threadIdx.x, row = blockIdx.y * TILE, column = blockIdx.x * TILE;
  if (t == 0) {
    for (int s = 0; s < STAGES; ++s) { init(&full[s], 1); init(&empty[s], 4); }
    ready();
  }
  __syncthreads();
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < steps; ++i) {
        const int s = i % STAGES;
        if (i >= STAGES) wait(&empty[s], i / STAGES - 1 & 1);
        expect(&full[s], sizeof ring->a + sizeof ring->b);
        load2(ring[s].a, &a, i * STEP, row, &full[s]);
        load2(ring[s].b, &b, i * STEP, column, &full[s]);
      }
    return;
  }
  float sum[8] = {};
  for (int i = 0; i < steps; ++i) {
    const int s = i % STAGES;
    wait(&full[s], i / STAGES & 1);
    for (int j = 0; j < 8; ++j) {
      const int m = t / 32 * 8 + j, n = t % 32;
      for (int x = 0; x < STEP; ++x)  // 64-byte swizzle: chunks change places by row / 2
        sum[j] += ring[s].a[m][x ^ (m / 2 % 4 * 4)] * ring[s].b[n][x ^ (n / 2 % 4 * 4)];
    }
    __syncwarp();
    if (t % 32 == 0) arrive(&empty[s]);
  }
  for (int j = 0; j < 8; ++j) out[t / 32 * 8 + j][t % 32] = sum[j];
  proxy();
  ASM("bar.sync 1, 128;" ::: "memory");
  if (t == 0) { store2(&c, column, row, out); commit(); waited<0>(); }
}"""


def arguments(m: int, n: int, k: int) -> tuple[list[Arg], np.ndarray, np.ndarray]:
    a, b = RNG.standard_normal((m, k)).astype("f4"), RNG.standard_normal((n, k)).astype("f4")
    c = np.full((m, n), np.nan, "f4")
    maps = [TensorMap(x, (k, x.shape[0]), (4 * k,), (16, 32), swizzle="64B") for x in (a, b)]
    store = TensorMap(c, (n, m), (4 * n,), (32, 32))
    given = [Arg("a", maps[0]), Arg("b", maps[1]), Arg("c", store, True),
             Arg("steps", np.int32(-(-k // 16)))]  # fmt: skip
    return given, c, a.astype("f8") @ b.astype("f8").T


SHARED = STAGES * 2 * 32 * 16 * 4


CHECKS = [Checks(), Checks(race=True), Checks(mem=False)]
SIZES = [(32, 32, 16), (64, 96, 160), (40, 72, 124)]


@one_in(2, checks=CHECKS, size=SIZES)
@pytest.mark.parametrize("checks", CHECKS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_ragged_matrices(size: tuple[int, int, int], checks: Checks) -> None:
    m, n, k = size
    given, c, expected = arguments(m, n, k)
    launch(RING, *given, grid=(-(-n // 32), -(-m // 32)), block=160, shared=SHARED, checks=checks)
    np.testing.assert_allclose(c, expected, atol=1e-4)


@one_in(2)
@pytest.mark.parametrize(
    ("old", "new", "texts", "race"),
    [
        ("    wait(&full[s], i / STAGES & 1);\n    for (int j = 0; j < 8; ++j) {\n",
         "    for (int j = 0; j < 8; ++j) {\n", ["memory"], False),
        ("wait(&full[s], i / STAGES & 1);", "wait(&full[s], ~(i / STAGES) & 1);", ["memory"],
         False),
        ("i / STAGES - 1 & 1);", "i / STAGES & 1);",
         ["over-arrival: the mbarrier at byte 0 of full",
          "1 arrivals where phase 0 has 1 of 1 arrivals and 8,192 bytes outstanding"], False),
        ("if (i >= STAGES) wait(&empty[s], i / STAGES - 1 & 1);", "", [], True),
        ("init(&empty[s], 4); }", "init(&empty[s], 5); }", ["deadlock", "has 4 of 5 arrivals"],
         False),
        ("init(&empty[s], 4); }", "init(&empty[s], 3); }", ["race", "memory"], True),
        ("sizeof ring->a + sizeof ring->b);", "sizeof ring->a);",
         ["mbarrier transaction underflow: the mbarrier at byte", "2,048 bytes that were "
          "expected; copies of 2,048 more bytes to it are in flight"], False),
        ("init(&full[s], 1); init", "init", ["uninitialised mbarrier", "full"], False),
        ("load2(ring[s].a, &a, i", "load2(ring[s].a[1], &a, i",
         ["misaligned tensor copy", "multiple of 512"], False),
        ("load2(ring[s].b, &b", "load2(ring[s + STAGES].b, &b", ["out-of-bounds shared write"],
         False),
        ("proxy();\n  ASM", "ASM", ["missing fence", "fence.proxy.async"], True),
        ("commit(); waited<0>(); }", "commit(); }",
         ["block ended under an asynchronous copy", "wait_group.read 0"], False),
        ('ASM("bar.sync 1, 128;" ::: "memory");', "__syncwarp();", ["out"], True),
    ],
)  # fmt: skip
def test_planted_bugs(old: str, new: str, texts: list[str], race: bool) -> None:
    """Each is found in one block and in several that run together; races need the race check."""
    source = RING.replace(old, new)
    assert source != RING
    for m, checks in ((32, Checks(race=True)), (64, Checks(race=race))):
        given, c, _ = arguments(m, 32, 160)
        report = fault(source, *given, grid=(1, m // 32), block=160, shared=SHARED, checks=checks,
                       line="")  # fmt: skip
        assert np.isnan(c).all()
        assert "kernels_cu/test/hopper.cu:" in report
        if m == 64:
            for text in texts:
                assert text in report, report
