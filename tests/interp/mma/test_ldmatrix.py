"""ldmatrix and cp.async as they come from the compiler."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.interp import Arg, run
from tests.interp.interp_kit import compile_ptx

RNG = np.random.default_rng(8)
G, T = np.arange(32) // 4, np.arange(32) % 4  # groupID and threadID_in_group of the manual

MATRIX = """
extern "C" __global__ void k(const unsigned* a, unsigned* o) {
  __shared__ __align__(16) unsigned s[3][4 * 32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int j = 0; j < 4; ++j) s[warp][j * 32 + lane] = a[warp * 128 + j * 32 + lane];
  __syncwarp();
  unsigned r[4] = {}, p = (unsigned)__cvta_generic_to_shared(&s[warp][lane % (8 * N) * 4]);
  asm volatile("ldmatrix.sync.aligned.m8n8.xN.OPT.shared.b16 {LIST}, [%N];" : OUTS : "r"(p));
  for (int j = 0; j < N; ++j) o[(warp * 4 + j) * 32 + lane] = r[j];
}"""


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, trans: bool) -> None:
    source = MATRIX.replace("xN", f"x{count}").replace("%N", f"%{count}")
    source = source.replace("N;", f"{count};").replace("8 * N", f"8 * {count}")
    source = source.replace(".OPT", ".trans" if trans else "")
    source = source.replace("LIST", ", ".join(f"%{i}" for i in range(count)))
    source = source.replace("OUTS", ", ".join(f'"=r"(r[{i}])' for i in range(count)))
    a = np.arange(3 * 4 * 64, dtype="u2").reshape(3, 4, 8, 8)
    o = np.zeros((3, 4, 32), "u4")
    run(compile_ptx(source), "k", 1, 96, [Arg("a", a), Arg("o", o, True)])
    matrix = a.swapaxes(2, 3) if trans else a
    low, high = matrix[:, :, G, 2 * T].astype("u4"), matrix[:, :, G, 2 * T + 1].astype("u4")
    np.testing.assert_array_equal(o[:, :count], (low | high << np.uint32(16))[:, :count])


COPY = """
extern "C" __global__ void k(const char* a, char* o, int bytes) {
  __shared__ __align__(16) char s[2][64 * SIZE];
  int i = threadIdx.x;
  unsigned p = (unsigned)__cvta_generic_to_shared(&s[0][i * SIZE]);
  unsigned q = (unsigned)__cvta_generic_to_shared(&s[1][i * SIZE]);
  int n = min(SIZE, max(0, bytes - i * SIZE));
  const char* from = a + (n ? i * SIZE : 1 << 30);
  asm volatile("cp.async.MODE.shared.global [%0], [%1], SIZE, %2;" :: "r"(p), "l"(from), "r"(n));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.MODE.shared.global [%0], [%1], SIZE;" :: "r"(q), "l"(a + i * SIZE));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  for (int j = 0; j < SIZE; ++j) o[i * SIZE + j] = s[0][i * SIZE + j];
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  for (int j = 0; j < SIZE; ++j) o[(64 + i) * SIZE + j] = s[1][(i ^ 1) * SIZE + j];
}"""


@pytest.mark.parametrize(("mode", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_cp_async_with_source_size(mode: str, size: int) -> None:
    a = RNG.integers(1, 255, 64 * size).astype("u1")
    o = np.zeros((2, 64, size), "u1")
    source = COPY.replace("MODE", mode).replace("SIZE", str(size))
    bytes_ = 40 * size + size // 2
    run(compile_ptx(source), "k", 1, 64,
        [Arg("a", a), Arg("o", o, True), Arg("bytes", np.int32(bytes_))])  # fmt: skip
    want = np.where(np.arange(a.size) < bytes_, a, 0)
    np.testing.assert_array_equal(o[0].ravel(), want)
    np.testing.assert_array_equal(o[1], a.reshape(64, size)[np.arange(64) ^ 1])
