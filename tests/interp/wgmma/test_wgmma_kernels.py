"""Kernels with wgmma as compilers emit them: accumulators copied in flight, groups overlapping."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, Checks, run
from tests.core.sampling import one_in
from tests.interp.interp_kit import compile_ptx, line_of
from tests.interp.wgmma.wgmma_kit import PRELUDE, mma_function

RNG = np.random.default_rng(91)
HALF = "#include <cuda_fp16.h>"

GEMM = (
    HALF
    + PRELUDE
    + mma_function("mma", 64, "f32.f16.f16", ", 1, 1, 0, 0")
    + """
extern "C" __global__ void __launch_bounds__(256) k(const __half* a, const __half* b, float* c,
                                                    int depth) {
  extern __shared__ __align__(1024) unsigned char sm[];
  const unsigned base = shared_address(sm);
  const int group = threadIdx.x / 128;
  float d[32] = {};
  for (int t = 0; t < depth; ++t) {
    unsigned char* stage = sm + t % 2 * 24576;  // a: two tiles of 64 rows, b: one
    for (int i = threadIdx.x; i < 128 * 64; i += 256)
      *(__half*)(stage + swizzled(i * 2)) =
          a[(blockIdx.x * 128 + i / 64) * depth * 64 + t * 64 + i % 64];
    for (int i = threadIdx.x; i < 64 * 64; i += 256)
      *(__half*)(stage + 16384 + swizzled(i * 2)) = b[i / 64 * depth * 64 + t * 64 + i % 64];
    proxy_fence();
    __syncthreads();
    const unsigned at = base + t % 2 * 24576;
    fence();
    UNROLL
    for (int k = 0; k < 4; ++k)
      mma(d, descriptor(at + group * 8192 + 32 * k), descriptor(at + 16384 + 32 * k), 1);
    commit();
    wait<WAITS>();
    __syncthreads();
  }
  wait<0>();
  store(d, c + (blockIdx.x * 128 + group * 64) * 64, 64);
}"""
)


@pytest.mark.parametrize("unroll", ["#pragma unroll", "#pragma unroll 1"])
@pytest.mark.parametrize("waits", [0, 1])
@pytest.mark.parametrize("depth", [1, 4, 5])
def test_accumulators_through_a_loop(depth: int, waits: int, unroll: str) -> None:
    a = RNG.integers(-3, 4, (3 * 128, depth * 64)).astype("f2")
    b = RNG.integers(-3, 4, (64, depth * 64)).astype("f2")
    c = np.zeros((3 * 128, 64), "f4")
    source = GEMM.replace("WAITS", str(waits)).replace("UNROLL", unroll)
    run(compile_ptx(source, "compute_90a"), "k", 3, 256,
        [Arg("a", a), Arg("b", b), Arg("c", c, True), Arg("depth", np.int32(depth))],
        49152)  # fmt: skip
    np.testing.assert_array_equal(c, a.astype("f4") @ b.astype("f4").T)


ATTENTION = (
    HALF
    + PRELUDE
    + mma_function("score", 64, "f32.f16.f16", ", 1, 1, 0, 0")
    + mma_function("weigh", 64, "f32.f16.f16", ", 1, 1, 1", from_registers=True)
    + """
__device__ __forceinline__ void tie(float (&x)[32]) {
  TIE for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(x[i]) :: "memory");
}
__device__ __forceinline__ float over_row(float x, bool sum) {
  for (int i = 1; i < 4; i *= 2) {
    float y = __shfl_xor_sync(~0u, x, i);
    x = sum ? x + y : fmaxf(x, y);
  }
  return x;
}
// s -> exp2(s - max), and by how much what was summed before has to be scaled
__device__ __forceinline__ void softmax(float (&s)[32], float (&m)[2], float (&l)[2],
                                        float (&scale)[2]) {
  for (int h = 0; h < 2; ++h) {
    float top = m[h], sum = 0;
    for (int i = 0; i < 32; ++i) if (i / 2 % 2 == h) top = fmaxf(top, s[i]);
    top = over_row(top, false);
    scale[h] = exp2f(m[h] - top);
    for (int i = 0; i < 32; ++i) if (i / 2 % 2 == h) sum += s[i] = exp2f(s[i] - top);
    l[h] = l[h] * scale[h] + over_row(sum, true);
    m[h] = top;
  }
}
__device__ __forceinline__ void pack(float (&s)[32], unsigned (&p)[16]) {
  for (int i = 0; i < 16; ++i) {
    __half2 pair = __floats2half2_rn(s[2 * i], s[2 * i + 1]);
    p[i] = *(unsigned*)&pair;
  }
}
extern "C" __global__ void __launch_bounds__(256) k(const __half* q, const __half* k,
                                                    const __half* v, float* o, int tiles) {
  extern __shared__ __align__(1024) unsigned char sm[];
  const unsigned base = shared_address(sm);
  const int group = threadIdx.x / 128;
  unsigned char *sk = sm + 16384, *sv = sk + tiles * 8192;
  for (int i = threadIdx.x; i < 128 * 64; i += 256)
    *(__half*)(sm + swizzled(i * 2)) = q[blockIdx.x * 8192 + i];
  for (int i = threadIdx.x; i < tiles * 4096; i += 256) {
    *(__half*)(sk + swizzled(i * 2)) = k[i];
    *(__half*)(sv + swizzled(i * 2)) = v[i];
  }
  proxy_fence();
  __syncthreads();
  const unsigned qa = base + group * 8192, ka = base + 16384, va = ka + tiles * 8192;
  float acc[32] = {}, s[32], m[2] = {-1e30f, -1e30f}, l[2] = {}, scale[2];
  unsigned p[16];
  fence();
  for (int i = 0; i < 4; ++i) score(s, descriptor(qa + 32 * i), descriptor(ka + 32 * i), i > 0);
  commit();
  wait<0>();
  tie(s);
  softmax(s, m, l, scale);
  pack(s, p);
  for (int t = 1; t < tiles; ++t) {
    float next[32];
    tie(next);
    tie(acc);
    fence();
    for (int i = 0; i < 4; ++i)
      score(next, descriptor(qa + 32 * i), descriptor(ka + t * 8192 + 32 * i), i > 0);
    commit();
    for (int i = 0; i < 4; ++i) {
      unsigned part[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
      weigh(acc, part, descriptor(va + (t - 1) * 8192 + 2048 * i), 1);
    }
    commit();
    wait<1>();
    tie(next);
    softmax(next, m, l, scale);
    PACK_EARLY
    wait<0>();
    tie(acc);
    tie(next);
    for (int i = 0; i < 32; ++i) acc[i] *= scale[i / 2 % 2];
    PACK_LATE
  }
  fence();
  for (int i = 0; i < 4; ++i) {
    unsigned part[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
    weigh(acc, part, descriptor(va + (tiles - 1) * 8192 + 2048 * i), 1);
  }
  commit();
  wait<0>();
  tie(acc);
  for (int i = 0; i < 32; ++i) acc[i] /= l[i / 2 % 2];
  store(acc, o + (blockIdx.x * 128 + group * 64) * 64, 64);
}"""
)


@one_in(2)
@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_attention_with_overlapping_products(tiles: int, tied: bool, race: bool) -> None:
    q, k, v = (RNG.standard_normal((rows, 64)).astype("f2") for rows in (256, *[64 * tiles] * 2))
    o = np.zeros((256, 64), "f4")
    source = ATTENTION.replace("TIE", "" if tied else "if (false)")
    source = source.replace("PACK_EARLY", "").replace("PACK_LATE", "pack(next, p);")
    run(compile_ptx(source, "compute_90a"), "k", 2, 256,
        [Arg("q", q), Arg("k", k), Arg("v", v), Arg("o", o, True), Arg("tiles", np.int32(tiles))],
        16384 + tiles * 16384, checks=Checks(race=race))  # fmt: skip
    scores = q.astype("f8") @ k.astype("f8").T
    weights = np.exp2(scores - scores.max(1, keepdims=True))
    want = weights / weights.sum(1, keepdims=True) @ v.astype("f8")
    np.testing.assert_allclose(o, want, rtol=4e-3, atol=4e-3)


TWO_GROUPS = (
    PRELUDE
    + mma_function("mma", 8, "f32.f16.f16", ", 1, 1, 0, 0")
    + """
extern "C" __global__ void k(const unsigned* in, float* o) {
  __shared__ __align__(1024) unsigned sm[2][2560];  // a: 64 rows of 128 bytes, b: 8, swizzled
  for (int i = threadIdx.x; i < 5120; i += 128) sm[0][i] = in[i];
  proxy_fence();
  __syncthreads();
  const unsigned one = shared_address(sm), two = one + 10240;
  float x[4], y[4];
  fence();
  mma(x, descriptor(one), descriptor(one + 8192), 0);
  commit();
  mma(y, descriptor(two), descriptor(two + 8192), 0);
  commit();
  wait<1>();
  __syncthreads();
  for (int i = threadIdx.x; i < 2560; i += 128) sm[1][i] = sm[0][i];  // y has not read yet
  for (int i = threadIdx.x; i < 2560; i += 128) sm[0][i] = 0;         // x has
  store(x, o, 8);
  wait<0>();
  store(y, o + 512, 8);
}"""
)


def test_shared_memory_is_read_by_the_wait_that_covers_the_product() -> None:
    data = RNG.integers(-3, 4, (2, 80, 64)).astype("f2")
    at = np.arange(80 * 64) * 2
    image = np.zeros((2, 80 * 64), "f2")
    image[:, (at ^ (at >> 7 & 7) << 4) // 2] = data.reshape(2, -1)
    o = np.zeros((2, 64, 8), "f4")
    run(compile_ptx(TWO_GROUPS, "compute_90a"), "k", 1, 128,
        [Arg("in", image.view("u4")), Arg("o", o, True)])  # fmt: skip
    want = data[:, :64, :16].astype("f4") @ data[:, 64:72, :16].astype("f4").swapaxes(1, 2)
    np.testing.assert_array_equal(o[0], want[0])
    np.testing.assert_array_equal(o[1], want[0])  # what was overwritten while y was in flight
    assert (want[0] != want[1]).any()


APART = (
    PRELUDE
    + mma_function("mma", 8, "f32.f16.f16", ", 1, 1, 0, 0")
    + """
extern "C" __global__ void k(const unsigned* in, float* o) {
  __shared__ __align__(1024) unsigned sm[2560];
  for (int i = threadIdx.x; i < 2560; i += blockDim.x) sm[i] = in[i];
  proxy_fence();
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (threadIdx.x >= 256) return;  // an incomplete warpgroup that only copies
  const u64 a = descriptor(shared_address(sm)), b = a + 512;
  float x[4], y[4];
  fence();
  mma(x, a, b, 0);
  if (group == blockIdx.x % 2) mma(x, a, b, 1);  // those go on from a product of their own
  mma(x, a, b, 1);
  commit();
  mma(y, a, b, 0);
  commit();
  if (group == 0) wait<0>(); else wait<1>();
  EARLY
  store(x, o + (blockIdx.x * 2 + group) * 1024, 8);
  wait<0>();
  store(y, o + (blockIdx.x * 2 + group) * 1024 + 512, 8);
}"""
)


@pytest.mark.parametrize("mem", [False, True])
@pytest.mark.parametrize("block", [256, 288])
def test_warpgroups_that_part(block: int, mem: bool) -> None:
    data = RNG.integers(-3, 4, (80, 64)).astype("f2")
    at = np.arange(80 * 64) * 2
    image = np.zeros(80 * 64, "f2")
    image[(at ^ (at >> 7 & 7) << 4) // 2] = data.ravel()
    one = data[:64, :16].astype("f4") @ data[64:72, :16].astype("f4").T
    ptx = compile_ptx(APART.replace("EARLY", ""), "compute_90a")
    for _ in range(2):  # the second launch starts from nothing as well
        o = np.zeros((3, 2, 2, 64, 8), "f4")
        run(ptx, "k", 3, block, [Arg("in", image.view("u4")), Arg("o", o, True)],
            checks=Checks(mem=mem))  # fmt: skip
        for of_block, group in np.ndindex(3, 2):
            times = 3 if group == of_block % 2 else 2
            np.testing.assert_array_equal(o[of_block, group, 0], times * one)
            np.testing.assert_array_equal(o[of_block, group, 1], one)


def test_warpgroups_that_wait_for_less() -> None:
    source = APART.replace("EARLY", "o[threadIdx.x] = y[0];  // BUG")
    with pytest.raises(SanitizerError) as caught:
        run(compile_ptx(source, "compute_90a"), "k", 3, 256,
            [Arg("in", np.zeros(2560, "u4")), Arg("o", np.zeros(6144, "f4"), True)])  # fmt: skip
    report = str(caught.value)
    assert "register of a wgmma in flight: this reads" in report
    assert f":{line_of(source, 'BUG')}" in report and "thread (128, 0, 0)" in report
