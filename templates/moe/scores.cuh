// Greatest values, sums and scores of a token's logits, which some lanes have in registers.
#pragma once
#include "ptx/math.cuh"
#include "tile/reduce.cuh"

// By a tree, so that maxima need not wait for one another.
template <int N>
__device__ __forceinline__ float greatest_of(const float* x) {
  if constexpr (N == 1)
    return x[0];
  else
    return fmaxf(greatest_of<N / 2>(x), greatest_of<N / 2>(x + N / 2));
}

// By a tree like that of lanes_sum: those that are farthest apart first. A token's sum is then the
// same to the bit, however many lanes it has.
template <int N, int STEP = 1>
__device__ __forceinline__ float sum_of(const float* x) {
  if constexpr (N == 1)
    return x[0];
  else
    return sum_of<N / 2, STEP * 2>(x) + sum_of<N / 2, STEP * 2>(x + STEP);
}

template <int LANES>
__device__ __forceinline__ int lanes_min(int x) {
#if __CUDA_ARCH__ >= 800
  if (LANES == WARP_SIZE) return __reduce_min_sync(FULL_MASK, x);  // PTX ISA: redux.sync.min.s32
#endif
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    x = min(x, __shfl_xor_sync(FULL_MASK, x, distance));
  return x;
}

// Bits as numbers in the order of the floats they are, and back.
__device__ __forceinline__ int in_order(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// No x is NaN. A whole warp needs no shuffles, but integers.          PTX ISA: redux.sync.max.s32
template <int LANES>
__device__ __forceinline__ float lanes_greatest(float x) {
#if __CUDA_ARCH__ >= 800
  if (LANES == WARP_SIZE)
    return __int_as_float(in_order(__reduce_max_sync(FULL_MASK, in_order(__float_as_int(x)))));
#endif
  return lanes_max<LANES>(x);
}

// 1 for the greatest, even where that is +inf.
__device__ __forceinline__ float softmax_term(float x, float peak) {
  return x == peak ? 1.f : expf(x - peak);
}
// A logit's score where it depends on no other: 1, sigmoid; 2, the square root of softplus, of
// logits beyond 1e30 as of that.
constexpr int SQRTSOFTPLUS = 2;
__device__ __forceinline__ float sqrtsoftplus_of(float x) {
  return sqrtf(x > 20.f ? fminf(x, 1e30f) : log1pf(expf(x)));
}
__device__ __forceinline__ float score_of(float x, int scoring) {
  return scoring == SQRTSOFTPLUS ? sqrtsoftplus_of(x) : 1.f / (1.f + expf(-x));
}
