// A block's way along k: tiles of both operands come into shared memory one after the other, and
// `multiply(stage)` takes each. A stage is x's tile and, WEIGHT_OFFSET bytes on, the weight's.
#pragma once
#include "ptx/cp_async.cuh"
#include "gemm/operand_copy.cuh"

// By way of registers: the next tile is on its way in them while this one multiplies. Two stages.
template <int STAGE_BYTES, int WEIGHT_OFFSET, typename X, typename Weight, typename Multiply>
__device__ __forceinline__ void walk_staged(X& x, Weight& weight, u32 ring, int k,
                                            const Multiply& multiply) {
  uint4 next_x[X::COPIES], next_weight[Weight::COPIES];
  x.fetch(next_x, k), weight.fetch(next_weight, k);
  x.store(ring, next_x), weight.store(ring + WEIGHT_OFFSET, next_weight);
  __syncthreads();

  u32 stage = ring, other = ring + STAGE_BYTES;
#pragma unroll 1
  for (int k_left = k; k_left > 0; k_left -= X::BLOCK_K) {
    const int next_left = k_left - X::BLOCK_K;
    if (next_left > 0) x.fetch(next_x, next_left), weight.fetch(next_weight, next_left);
    multiply(stage);
    if (next_left > 0) x.store(other, next_x), weight.store(other + WEIGHT_OFFSET, next_weight);
    // The next tile is there, and nobody reads this one any more.
    __syncthreads();
    const u32 last = stage;
    stage = other, other = last;
  }
}

// A ring of STAGES tiles, filled while others multiply, by cp.async or from registers.
template <int STAGES, int STAGE_BYTES, int WEIGHT_OFFSET, typename X, typename Weight,
          typename Multiply>
__device__ __forceinline__ void walk_async(X& x, Weight& weight, u32 ring, int k,
                                           const Multiply& multiply) {
  const auto copy = [&](u32 stage, int k_left) {
    if (k_left > 0) {
      x.copy(stage, k_left);
      weight.copy(stage + WEIGHT_OFFSET, k_left);
    }
    cp_async_commit();
  };
  x.begin(k), weight.begin(k);
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; ++tile)
    copy(ring + tile * STAGE_BYTES, k - tile * X::BLOCK_K);

  u32 stage = ring, filled = ring + (STAGES - 1) * STAGE_BYTES;
#pragma unroll 1
  for (int k_left = k; k_left > 0; k_left -= X::BLOCK_K) {
    // This tile has arrived, and every warp is done with the one before: its stage is free.
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    copy(filled, k_left - (STAGES - 1) * X::BLOCK_K);
    multiply(stage);
    filled = stage;
    stage = stage == ring + (STAGES - 1) * STAGE_BYTES ? ring : stage + STAGE_BYTES;
  }
}
