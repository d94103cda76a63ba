// The k of a tile shared out over the blocks of a cluster (sm_90): each multiplies a part, the first
// one adds the others' sums to its own, in the order of k, and goes on to the epilogue.
//
//   block 0    multiply 0 .. K/2    meet                 meet   + block 1's   epilogue
//   block 1    multiply K/2 .. K    meet   sums -> 0     meet
//
// Sums go where block 0's stages were, first tiles of A, then of B: nothing is loaded into them any
// more, since a block has one tile. A fragment of a warpgroup is 2 KB there, 16 bytes of each of its threads.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"

// What part `rank` of `parts` is, in steps.
struct KPart {
  int first, steps;

  __device__ __forceinline__ KPart(int rank, int parts, int all)
      : first(rank * all / parts), steps((rank + 1) * all / parts - first) {}
};

// The sums of no product.
template <int BLOCKS, int N>
__device__ __forceinline__ void zero(float (&acc)[BLOCKS][N][4]) {
#pragma unroll
  for (int i = 0; i < BLOCKS * N * 4; ++i) acc[i / (4 * N)][i / 4 % N][i % 4] = 0.f;
}

// By the 128 threads of each consumer of a tile, `consumer` of CONSUMERS in a block; the other warps
// meet twice meanwhile. True for block 0, whose `acc` has the sums then.
template <typename Stages, int PARTS, int CONSUMERS, int BLOCKS, int N>
__device__ __forceinline__ bool add_parts(float (&acc)[BLOCKS][N][4], const Stages& stages,
                                          int rank, int consumer, int thread) {
  constexpr int FRAGMENTS = BLOCKS * N, BYTES = 128 * 16, A_STAGE = Stages::A::BYTES / BYTES;
  constexpr int B_STAGE = Stages::B::BYTES / BYTES, IN_A = Stages::STAGES * A_STAGE;
  static_assert((PARTS - 1) * CONSUMERS * FRAGMENTS <= IN_A + Stages::STAGES * B_STAGE,
                "the others' sums have room where tiles were");
  const auto place = [&](int part, int fragment) {
    const int number = ((part - 1) * CONSUMERS + consumer) * FRAGMENTS + fragment;
    if (!Stages::GAPS) return stages.base + number * BYTES + thread * 16;
    const int in_b = number - IN_A;
    const u32 from = in_b < 0 ? stages.a(number / A_STAGE) + number % A_STAGE * BYTES
                              : stages.b(in_b / B_STAGE) + in_b % B_STAGE * BYTES;
    return from + thread * 16;
  };
  meet_cluster();
  if (rank > 0) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
      const float (&d)[4] = acc[i / N][i % N];
      cluster_store_floats(place(rank, i), 0, d);
    }
  }
  meet_cluster();
  if (rank > 0) return false;
#pragma unroll
  for (int part = 1; part < PARTS; ++part) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
      float (&d)[4] = acc[i / N][i % N];
      const uint4 more = load_shared_chunk(place(part, i));
      d[0] += __uint_as_float(more.x), d[1] += __uint_as_float(more.y);
      d[2] += __uint_as_float(more.z), d[3] += __uint_as_float(more.w);
    }
  }
  return true;
}
