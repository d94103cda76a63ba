// dQ of 16 rows a warp, N blocks of 8 columns as wgmma leaves them, on its way to the sums of all
// blocks of keys in device memory (attention/backward/sum_fragments.cuh): from registers, or by way
// of shared memory and the copy engine. Where there is an order, the first one to come stores
// instead of adding: nobody has to set sums to 0.
#pragma once
#include "ptx/atomic.cuh"
#include "ptx/memory.cuh"
#include "tile/tile_copy.cuh"
#include "attention/backward/sum_fragments.cuh"

// A warp's fragments to its part of `staging`.
template <int N>
__device__ __forceinline__ void stage_fragments(u32 staging, const float (&d)[1][N][4], int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) store_shared_floats(staging + (n * WARP_SIZE + lane) * 16, d[0][n]);
}

// A warp's fragments to `sums` from registers, which are 0 before unless it is the first to come.
template <int N>
__device__ __forceinline__ void give_sums(float* sums, const float (&d)[1][N][4], int lane,
                                          bool first) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float* const at = sums + (n * WARP_SIZE + lane) * 4;
    if (first)
      *reinterpret_cast<float4*>(at) = make_float4(d[0][n][0], d[0][n][1], d[0][n][2], d[0][n][3]);
    else
      red_add_floats(at, d[0][n]);
  }
}
