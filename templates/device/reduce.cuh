// Reductions over groups of LANES neighbouring lanes (a power of two) by a butterfly of shuffles:
// after step i every lane holds the result of its aligned group of 2^(i+1), at the end all LANES
// hold the same bits. All 32 lanes of the warp take part.
//
//   lane      0   1   2   3   4   5   6   7
//   xor 4     a+e b+f c+g d+h a+e b+f c+g d+h
//   xor 2     a+e+c+g ...     every lane has the four with its parity
//   xor 1     a+b+c+d+e+f+g+h in all eight
#pragma once
#include "prelude.cuh"

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
