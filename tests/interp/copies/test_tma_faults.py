"""Planted bugs around tensor copies: each is found, at the line of the source."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.interp import Arg, Checks, TensorMap
from tests.interp.copies.hopper_kit import fault, launch

BUGS = r"""
extern "C" __global__ void k(const __grid_constant__ Map m, const __grid_constant__ Map w,
                             float* y) {
  __shared__ alignas(1024) float tile[8][32];
  __shared__ alignas(1024) float other[8][32];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); ready(); }
  __syncthreads();
  CODE
}"""


def bug(code: str, checks: Checks = Checks(), swizzle: str = "none") -> str:
    x, y = (np.random.default_rng(9).standard_normal((30, 40)).astype("f4") for _ in range(2))
    read = TensorMap(x, (40, 30), (160,), (32, 8), swizzle=swizzle)
    write = TensorMap(y, (40, 30), (160,), (32, 8))
    before = y.copy()
    out = np.zeros(256, "f4")
    report = fault(BUGS.replace("CODE", code), Arg("x", read), Arg("z", write, True),
                   Arg("y", out, True), checks=checks)  # fmt: skip
    np.testing.assert_array_equal(y, before)
    return report


ENDS = r"""
extern "C" __global__ void k(const __grid_constant__ Map to, int x0) {
  __shared__ alignas(128) float tile[4][8];
  if (threadIdx.x < 32) tile[threadIdx.x / 8][threadIdx.x % 8] = threadIdx.x + 1;
  proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    store2(&to, x0, 0, tile); // BUG
    commit();
    waited<0>();
  }
}"""


def test_stores_write_the_last_chunk_of_a_row_as_a_whole() -> None:
    x = np.random.default_rng(12).standard_normal((4, 16)).astype("f4")
    before, wanted = x.copy(), x.copy()
    wanted[:, 8:12] = np.arange(1, 33, dtype="f4").reshape(4, 8)[:, :4]
    rows = TensorMap(x, (9, 4), (64,), (8, 4))  # the other elements of a row are the array's too
    launch(ENDS, Arg("to", rows, True), Arg("x0", np.int32(8)))
    np.testing.assert_array_equal(x, wanted)
    x[...] = before
    launch(ENDS, Arg("to", rows, True), Arg("x0", np.int32(12)))
    np.testing.assert_array_equal(x, before)
    for view in (x[:, :9], x.reshape(-1)[:57]):
        tensor = TensorMap(view, (9, 4), (64,), (8, 4))
        report = fault(ENDS, Arg("to", tensor, True), Arg("x0", np.int32(8)))
        assert "out-of-bounds global write" in report and "16 bytes of a row" in report, report
    np.testing.assert_array_equal(x, before)


BOTH = pytest.mark.parametrize("checks", [Checks(), Checks(race=True)], ids=["mem", "race"])
ISSUE = "if (t == 0) { expect(&bar, sizeof tile); load2(tile, &m, 0, 0, &bar); }\n"


@BOTH
@pytest.mark.parametrize(
    ("code", "texts"),
    [
        (ISSUE + "y[t] = tile[0][t]; // BUG\nwait(&bar, 0);", ["tile"]),
        (ISSUE + "wait(&bar, 1);\ny[t] = tile[0][t]; // BUG\nwait(&bar, 0);", ["tile"]),
        (ISSUE.replace("sizeof tile", "sizeof tile - 64").replace("load2", "\nload2")
         .replace("&bar); }", "&bar); } // BUG") + "wait(&bar, 0);",
         ["mbarrier transaction underflow: the mbarrier at byte 0 of bar",
          "960 bytes were expected and 1,024 have come"]),
        (ISSUE.replace("sizeof tile", "sizeof tile + 16") + "wait(&bar, 0); // BUG",
         ["deadlock", "phase 0 has 1 of 1 arrivals and 16 bytes outstanding"]),
        ("if (t == 0) load2(tile, &m, 0, 0, &bar); // BUG",
         ["block ended under an asynchronous copy", "still writes to shared memory"]),
        ("if (t == 0) load2(tile[0] + 16, &m, 0, 0, &bar); // BUG",
         ["misaligned tensor copy: the box begins at byte 64 of tile", "multiple of 128"]),
        ("if (t == 0) load2(other[1], &m, 0, 0, &bar); // BUG",
         ["out-of-bounds shared write", "byte 1,024 of other"]),
        ("if (t == 0) load2(tile, (const Map*)((const char*)&m + 16), 0, 0, &bar); // BUG",
         ["misaligned tensor map"]),
        ("if (t == 0) load2(tile, &m, 6, 0, &bar); // BUG",
         ["misaligned tensor coordinate: coordinate 6 of dimension 0 is byte 24 of a row of x",
          "a multiple of 16 bytes"]),
        ("if (t == 0) load2(tile, &m, -2, 0, &bar); // BUG", ["coordinate -2 of dimension 0"]),
        ("if (t == 0) store2(&w, 2, 0, tile); // BUG", ["misaligned tensor coordinate"]),
        ("if (t == 0) store2(&w, -4, 0, tile); // BUG",
         ["negative tensor coordinate: coordinate -4 of dimension 0 of z", "only loads"]),
        ("if (t == 0) store2(&w, 4, -1, tile); // BUG", ["coordinate -1 of dimension 1 of z"]),
        ("if (t == 0) ASM(\"cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];\""
         "::\"l\"(&m), \"r\"(1), \"r\"(0)); // BUG", ["misaligned tensor coordinate"]),
        ("if (t == 0) load2(tile, (const Map*)y, 0, 0, &bar); // BUG",
         ["bad tensor map: byte 0 of y holds no tensor map"]),
        ("if (t == 0) load2(tile, &m, 0, 0, (u64*)other); // BUG",
         ["uninitialised mbarrier: the mbarrier at byte 0 of other"]),
        ("if (t == 0) { commit(); store2(&m, 0, 0, tile); } // BUG",
         ["write to a read-only argument: a tensor copy to x"]),
        ("if (t == 0) { store2(&w, 0, 0, tile); // BUG\ncommit(); waited<0>(); }",
         ["uninitialised shared read", "byte 0 of tile", "nothing was written there yet"]),
        ("tile[t / 32][t % 32] = t; proxy(); __syncthreads();\n"
         "if (t == 0) { store2(&w, 0, 29, tile); // BUG\n commit(); }",
         ["block ended under an asynchronous copy", "wait_group.read 0 must stand before the end"]),
        ("if (t == 0) ASM(\"cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx"
         "::bytes [%0], [%1, {%2}], [%3];\" ::\"r\"(at(tile)), \"l\"(&m), \"r\"(0), \"r\"(at(&bar)"
         ")); // BUG", ["bad tensor map: a 1d copy; the map of x has 2 dimensions"]),
    ],
)  # fmt: skip
def test_planted_bugs(code: str, texts: list[str], checks: Checks) -> None:
    report = bug(code, checks)
    for text in texts:
        assert text in report, report


@BOTH
def test_a_swizzled_box_off_its_atoms(checks: Checks) -> None:
    code = "if (t == 0) load2((char*)tile + 512, &m, 0, 0, &bar); // BUG"
    report = bug(code, checks, swizzle="128B")
    assert "byte 512 of tile" in report and "multiple of 1,024" in report and "'128B'" in report


def test_stores_that_reuse_their_source_too_early_race() -> None:
    code = """
      for (int i = t; i < 256; i += 128) tile[0][i] = i;
      proxy();
      __syncthreads();
      if (t == 0) { store2(&w, 0, 0, tile); commit(); WAIT }
      __syncthreads();
      tile[0][t] = 9; // BUG
      __syncthreads();
      if (t == 0) waited<0>();"""
    report = bug(code.replace("WAIT", ""), Checks(race=True))
    assert "missing wait" in report and "tile" in report
    y = np.zeros((30, 40), "f4")
    tensor = TensorMap(y, (40, 30), (160,), (32, 8))
    launch(BUGS.replace("CODE", code.replace("WAIT", "was_read<0>();")), Arg("x", tensor),
           Arg("z", tensor, True), Arg("y", np.zeros(1, "f4")))  # fmt: skip
    np.testing.assert_array_equal(y[:8, :32].reshape(-1), np.arange(256))


def test_stores_without_a_proxy_fence_race() -> None:
    code = """
      for (int i = t; i < 256; i += 128) tile[0][i] = i;
      __syncthreads();
      if (t == 0) { store2(&w, 0, 0, tile); commit(); waited<0>(); } // BUG"""
    report = bug(code, Checks(race=True))
    assert "missing fence" in report and "fence.proxy.async" in report
