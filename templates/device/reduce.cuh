// Reductions over groups of LANES neighbouring lanes (a power of two) by a butterfly of shuffles,
// the xor distances going down: after a step a lane holds the result of the lanes whose index
// differs from its own only in the distances used so far: after distance d, of those that equal it
// modulo d. At the end all LANES hold the same bits. All 32 lanes of the warp take part.
//
//   lane      0   1   2   3   4   5   6   7
//   start     a   b   c   d   e   f   g   h
//   xor 4     a+e b+f c+g d+h a+e b+f c+g d+h    the two lanes equal modulo 4
//   xor 2     a+c+e+g in 0, 2, 4 and 6, b+d+f+h in 1, 3, 5 and 7
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
