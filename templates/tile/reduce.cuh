// Reductions over groups of LANES neighbouring lanes (a power of two) by a butterfly of shuffles,
// the xor distances going down: after a step a lane holds the result of the lanes whose index
// differs from its own only in the distances used so far: after distance d, of those that equal it
// modulo d. At the end all LANES hold the same bits. All 32 lanes of the warp take part. A block is
// reduced by its warps first, and their results by one warp.
//
//   lane      0   1   2   3   4   5   6   7
//   start     a   b   c   d   e   f   g   h
//   xor 4     a+e b+f c+g d+h a+e b+f c+g d+h    the two lanes equal modulo 4
//   xor 2     a+c+e+g in 0, 2, 4 and 6, b+d+f+h in 1, 3, 5 and 7
//   xor 1     a+b+c+d+e+f+g+h in all eight
#pragma once
#include "ptx/max.cuh"

// PTX ISA: shfl.sync.bfly.b32
template <int LANES>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    x += __shfl_xor_sync(FULL_MASK, x, distance);
  return x;
}

template <int LANES>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, distance));
  return x;
}

// What is done to two values, and what changes nothing.
struct Sum {
  static __device__ __forceinline__ float identity() { return 0.f; }
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// NaN wins, as in torch; fmaxf would drop it.
struct MaxOrNaN {
  static __device__ __forceinline__ float identity() { return NEG_INFINITY; }
  __device__ __forceinline__ float operator()(float a, float b) const { return max_or_nan(a, b); }
};

// Over groups of `lanes` neighbours, a power of two up to 32: the same in each of them.
template <typename Op>
__device__ __forceinline__ float lanes_reduce(float x, int lanes, Op op) {
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    x = op(x, __shfl_xor_sync(FULL_MASK, x, distance));
  return x;
}

template <typename Op>
__device__ __forceinline__ float warp_reduce(float x, Op op) {
#pragma unroll
  for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
    x = op(x, __shfl_xor_sync(FULL_MASK, x, distance));
  return x;
}

// Over a block of THREADS, a multiple of 32; every thread gets the result. `warps` is shared memory
// for THREADS / 32 floats, which may be used again after the caller's next barrier.
template <int THREADS, typename Op>
__device__ __forceinline__ float block_reduce(float x, float* warps, Op op) {
  constexpr int NUM_WARPS = THREADS / WARP_SIZE;
  static_assert(THREADS % WARP_SIZE == 0 && NUM_WARPS <= WARP_SIZE, "whole warps, one of results");
  x = warp_reduce(x, op);
  if (NUM_WARPS == 1) return x;
  if (threadIdx.x % WARP_SIZE == 0) warps[threadIdx.x / WARP_SIZE] = x;
  __syncthreads();
  const int lane = threadIdx.x % WARP_SIZE;
  return warp_reduce(lane < NUM_WARPS ? warps[lane] : Op::identity(), op);
}
