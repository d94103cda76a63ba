// Sums of a tile that several blocks share (gemm/pieces.cuh). Each leaves its own in memory; who
// comes last adds all of them up, in the order of k, so that bits do not depend on who that was.
//
//   block      3        4        5             last: ((0 + 3's) + 4's) + 5's
//   k          0 ..     9 ..     31 ..
//
// A block has two places: one for a tile that others began, the other for one that it begins itself
// and others end. There a thread's sums lie 16 bytes by 16 bytes, beside those of the other threads.
// Where each tile has as many blocks, and each block one tile, a block has one place.
#pragma once
#include "ptx/atomic.cuh"
#include "ptx/named_barrier.cuh"
#include "gemm/pieces.cuh"

// Of one warpgroup of each block, which is one of `groups` that share no rows.
struct PartialSums {
  float4* sums;   // [blocks, groups, 2, fragments, 128 threads]
  u32* counters;  // [shared tiles, groups], 0 before and after
  int groups, group;

  // By all threads of a warpgroup, `thread` of 128; they meet at named barrier `barrier`, and one
  // of them tells the others by `flag`, in shared memory. True for the last one of a tile, whose
  // `acc` has the sums then. `number`: of the tile among the shared ones; `block`: this one.
  template <int BLOCKS, int N>
  __device__ __forceinline__ bool add(float (&acc)[BLOCKS][N][4], const Sharers& sharers,
                                      int number, int block, int thread, int barrier,
                                      volatile u32* flag) const {
    float4* const own = place<BLOCKS * N>(block, block == sharers.first) + thread;
#pragma unroll
    for (int i = 0; i < BLOCKS * N; ++i) {
      const float (&d)[4] = acc[i / N][i % N];
      own[i * 128] = make_float4(d[0], d[1], d[2], d[3]);
    }
    if (!is_last(number, sharers.count, thread, barrier, flag)) return false;
#pragma unroll
    for (int i = 0; i < BLOCKS * N; ++i) {
      float (&d)[4] = acc[i / N][i % N];
      d[0] = d[1] = d[2] = d[3] = 0.f;
    }
    for (int part = 0; part < sharers.count; ++part)
      add_to(acc, place<BLOCKS * N>(sharers.first + part, part == 0) + thread);
    return true;
  }

  // The same of a tile of its own PARTS blocks, of which this one has part `part` of k.
  template <int PARTS, int BLOCKS, int N>
  __device__ __forceinline__ bool add_split(float (&acc)[BLOCKS][N][4], int tile, int part,
                                            int thread, int barrier, volatile u32* flag) const {
    constexpr int OF_PART = BLOCKS * N * 128;  // of a group
    float4* const first =
        sums + (static_cast<i64>(tile) * PARTS * groups + group) * OF_PART + thread;
    const auto of = [&](int other) { return first + static_cast<i64>(other) * groups * OF_PART; };
#pragma unroll
    for (int i = 0; i < BLOCKS * N; ++i) {
      const float (&d)[4] = acc[i / N][i % N];
      of(part)[i * 128] = make_float4(d[0], d[1], d[2], d[3]);
    }
    if (!is_last(tile, PARTS, thread, barrier, flag)) return false;
    if (part > 0) {
#pragma unroll
      for (int i = 0; i < BLOCKS * N; ++i) {
        float (&d)[4] = acc[i / N][i % N];
        const float4 begun = __ldcg(first + i * 128);
        d[0] = begun.x, d[1] = begun.y, d[2] = begun.z, d[3] = begun.w;
      }
    }
#pragma unroll 1
    for (int other = 1; other < PARTS; ++other) add_to(acc, of(other));
    return true;
  }

 private:
  // Whether all other blocks of a tile have left their sums, which are to be seen then.
  __device__ __forceinline__ bool is_last(int number, int blocks, int thread, int barrier,
                                          volatile u32* flag) const {
    named_barrier_wait_aligned<128>(barrier);
    if (thread == 0)
      *flag = atom_inc_acq_rel(counters + number * groups + group, blocks) == blocks - 1;
    named_barrier_wait_aligned<128>(barrier);
    return *flag;
  }

  // A thread's sums of another block to its own.
  template <int BLOCKS, int N>
  static __device__ __forceinline__ void add_to(float (&acc)[BLOCKS][N][4], const float4* from) {
#pragma unroll
    for (int i = 0; i < BLOCKS * N; ++i) {
      float (&d)[4] = acc[i / N][i % N];
      const float4 more = __ldcg(from + i * 128);
      d[0] += more.x, d[1] += more.y, d[2] += more.z, d[3] += more.w;
    }
  }

  // `begins`: the tile's first steps are this block's.
  template <int FRAGMENTS>
  __device__ __forceinline__ float4* place(int block, bool begins) const {
    return sums + ((static_cast<i64>(block) * groups + group) * 2 + begins) * (FRAGMENTS * 128);
  }
};
