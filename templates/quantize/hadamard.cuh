// A row times a Hadamard matrix, in registers: LANES neighbours have 8 numbers each, of 8 * LANES. (Of
// many rows: quantize/sixteen_rows.cuh.)
// Products of two such rows are what they were; an outlier is spread over all numbers.
//
//   y = H D x / sqrt(n)      H[i][j] = (-1)^(bits that i and j share)       D[i] = (-1)^(pairs of
//                                                                          neighbouring ones in i)
//
// Signs D are the sequence of Rudin and Shapiro: without them a row of equal numbers, which smooth
// keys are near to, would come to one place.
//                                       Source: Ashkboos et al., "QuaRot" (2024), for the rotation
#pragma once
#include "quantize/codes.cuh"

__device__ __forceinline__ bool is_turned(int column) {
  return __popc(column & column >> 1) % 2 == 1;
}

template <int COLUMNS>
constexpr float HADAMARD_NORM = 0.08838834764831845f;
template <>
constexpr float HADAMARD_NORM<64> = 0.125f;
template <>
constexpr float HADAMARD_NORM<256> = 0.0625f;

// H D x, not normalized.                                            PTX ISA: shfl.sync.bfly.b32
template <int LANES>
__device__ __forceinline__ void rotate_row(Eight& x) {
  static_assert(LANES == 8 || LANES == 16 || LANES == 32, "rows of 64, 128 or 256 numbers");
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (is_turned(lane * 8 + i)) x[i] = -x[i];
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if ((i & distance) == 0) {
        const float a = x[i], b = x[i + distance];
        x[i] = a + b, x[i + distance] = a - b;
      }
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(FULL_MASK, x[i], distance);
      x[i] = (lane & distance) == 0 ? x[i] + other : other - x[i];
    }
}
