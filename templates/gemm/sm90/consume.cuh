// What a consumer of a product on sm_90 does with the ring of stages: wait for one, multiply it, let
// it go.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_products.cuh"
#include "gemm/sm90/stages.cuh"

// This warp needs a stage no more; CLUSTER blocks fill it.
template <int CLUSTER, typename Stages>
__device__ __forceinline__ void release_stage(const Stages& stages, int stage, int lane) {
  if (CLUSTER == 1) {
    if (lane == 0) mbarrier_arrive(stages.empty(stage));
  } else if (lane < CLUSTER) {
    cluster_arrive_at(stages.empty(stage), lane);
  }
}

// A tile of which no row is this consumer's.
template <int CLUSTER, typename Stages, typename Place>
__device__ __forceinline__ void pass_by(const Stages& stages, Place& place, int steps, int lane) {
  for (int step = 0; step < steps; ++step, place.advance()) {
    mbarrier_wait(stages.full(place.stage), place.parity);
    release_stage<CLUSTER>(stages, place.stage, lane);
  }
}

// 16 of k, by wgmma's most columns: a tile may have more.
template <typename T, typename A, typename B, int N>
__device__ __forceinline__ void multiply_step(float (&acc)[N][4], u64 a, u64 b, int add) {
  if constexpr (N <= 32) {
    wgmma_shared<T, !A::K_MAJOR, !B::K_MAJOR>(acc, a, b, add);
  } else {
    static_assert(B::K_MAJOR, "rows of the second half are behind those of the first");
    constexpr int HALF = N / 2, ROWS = HALF * 8;
    auto& low = reinterpret_cast<float (&)[HALF][4]>(acc[0]);
    auto& high = reinterpret_cast<float (&)[HALF][4]>(acc[HALF]);
    wgmma_shared<T, !A::K_MAJOR, false>(low, a, b, add);
    wgmma_shared<T, !A::K_MAJOR, false>(high, a, b + (ROWS * (BLOCK_K * 2) >> 4), add);
  }
}

constexpr int SLICES = BLOCK_K / 16;  // of k, that wgmma multiplies at once

// The first COUNT slices of a stage.
template <typename T, int COUNT, int BLOCKS, int N, typename Stages>
__device__ __forceinline__ void multiply_slices(float (&acc)[BLOCKS][N][4], const Stages& stages,
                                                int stage, int first_row, bool add) {
  using A = typename Stages::A;
  using B = typename Stages::B;
  const u64 b = B::operand(stages.b(stage), 0);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
      multiply_step<T, A, B>(acc[block],
                             A::operand(stages.a(stage), first_row + block * 64) + i * A::STEP,
                             b + i * B::STEP, add || i > 0);
  wgmma_commit();
}

// So many of them, to the end: where products under way would cross a branch, the compiler waits for
// each.
template <typename T, int COUNT = 1, int BLOCKS, int N, typename Stages>
__device__ __forceinline__ void multiply_tail(float (&acc)[BLOCKS][N][4], const Stages& stages,
                                              int stage, int count, int first_row, bool add) {
  if constexpr (COUNT < SLICES - 1) {
    if (count > COUNT)
      return multiply_tail<T, COUNT + 1>(acc, stages, stage, count, first_row, add);
  }
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) register_fence(acc[block]);
  multiply_slices<T, COUNT>(acc, stages, stage, first_row, add);
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) register_fence(acc[block]);
}

// One tile's products, 64 of k after the other: a stage is released when the next one's products
// have been issued and its own are done. Behind the steps come `tail` slices of one more. Rows of A
// from `first_row` on. `meanwhile` is called once, under products of two steps where there are two: it
// may take a while.
template <typename T, int CLUSTER, int BLOCKS, int N, typename Stages, typename Place,
          typename Turns, typename Meanwhile>
__device__ __forceinline__ void multiply(float (&acc)[BLOCKS][N][4], const Stages& stages,
                                         Place& place, int steps, int tail, int first_row, int lane,
                                         const Turns& turns, const Meanwhile& meanwhile) {
  const int calls = min(steps, 2) - 1;  // at this step
  int last = 0;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(stages.full(place.stage), place.parity);
    multiply_slices<T, SLICES>(acc, stages, place.stage, first_row, step > 0);
    if (step == calls) meanwhile();
    if (step > 0) {
      wgmma_wait<1>();
      release_stage<CLUSTER>(stages, last, lane);
    }
    last = place.stage;
    place.advance();
  }
  if (tail == 0) turns.pass();
  wgmma_wait<0>();
  if (tail == 0 || steps > 0) release_stage<CLUSTER>(stages, last, lane);
  if (tail == 0) return;
  mbarrier_wait(stages.full(place.stage), place.parity);
  multiply_tail<T>(acc, stages, place.stage, tail, first_row, steps > 0);
  turns.pass();
  release_stage<CLUSTER>(stages, place.stage, lane);
  place.advance();
}
