// A tile whose k is shared out over several blocks. Each leaves its sums in memory; who comes last
// adds all of them up, in the order of k, so that bits do not depend on who that was.
//
//   block      0        1        2             of one tile, or the half of one that a consumer has
//   k          0 ..     K/3 ..   2K/3 ..
//   partials   [0]      [1]      [2]           last: ((0 + [0]) + [1]) + [2]
//
// In memory a thread's sums are 16 bytes by 16 bytes, beside those of the other threads.
#pragma once
#include "ptx/atomic.cuh"
#include "ptx/named_barrier.cuh"

struct PartialSums {
  float4* sums;   // [tiles, splits, fragments, 128 threads]
  u32* counters;  // [tiles], 0 before and after
  int splits;

  // By all threads of a warpgroup, `thread` of 128; they meet at named barrier `barrier`, and one
  // of them tells the others by `flag`, in shared memory. True for the last one of a tile, whose
  // `acc` has the sums then.
  template <int BLOCKS, int N>
  __device__ __forceinline__ bool add(float (&acc)[BLOCKS][N][4], int tile, int part, int thread,
                                      int barrier, volatile u32* flag) const {
    constexpr int FRAGMENTS = BLOCKS * N;
    float4* const first = sums + static_cast<i64>(tile) * splits * (FRAGMENTS * 128) + thread;
    float4* const own = first + part * (FRAGMENTS * 128);
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
      const float (&d)[4] = acc[i / N][i % N];
      own[i * 128] = make_float4(d[0], d[1], d[2], d[3]);
    }
    named_barrier_wait_aligned<128>(barrier);
    if (thread == 0) *flag = atom_inc_acq_rel(counters + tile, splits) == splits - 1;
    named_barrier_wait_aligned<128>(barrier);
    if (!*flag) return false;
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
      float (&d)[4] = acc[i / N][i % N];
      d[0] = d[1] = d[2] = d[3] = 0.f;
    }
    for (int from = 0; from < splits; ++from) {
#pragma unroll
      for (int i = 0; i < FRAGMENTS; ++i) {
        float (&d)[4] = acc[i / N][i % N];
        const float4 more = __ldcg(first + (from * FRAGMENTS + i) * 128);
        d[0] += more.x, d[1] += more.y, d[2] += more.z, d[3] += more.w;
      }
    }
    return true;
  }
};
