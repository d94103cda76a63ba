// N sums over the warps of a block, of one row after the other with one barrier a row: every thread
// gets the same bits, added in the same order each time.
#pragma once
#include "tile/reduce.cuh"

template <int WARPS, int N>
struct WarpSums {
  float parts[2][N][WARPS];

  // `turn`: 0 and 1 in turns, since a row's barrier is what says that the row before is done with.
  __device__ __forceinline__ void join(float (&values)[N], int turn) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = lanes_sum<WARP_SIZE>(values[i]);
    if (WARPS == 1) return;
    const int lane = threadIdx.x % WARP_SIZE;
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < N; ++i) parts[turn][i][threadIdx.x / WARP_SIZE] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = lanes_sum<WARPS>(parts[turn][i][lane % WARPS]);
  }
};
