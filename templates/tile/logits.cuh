// Four columns of a row of fp32 logits, and four of its gradient, for kernels of losses.
#pragma once
#include "tile/vector.cuh"

constexpr int LOGITS = 4;  // columns of an access

// -inf where there are no columns; `row` on a 16-byte boundary, `column` a multiple of four.
__device__ __forceinline__ Vector<float> four_logits(const float* row, int column, int columns) {
  if (column + LOGITS <= columns) return load_vector(row + column);
  Vector<float> found;
#pragma unroll
  for (int k = 0; k < LOGITS; ++k)
    found.set(k, column + k < columns ? row[column + k] : NEG_INFINITY);
  return found;
}

// Four elements in one access.
template <typename T>
__device__ __forceinline__ void store_four(T* target, const float (&x)[LOGITS]) {
  struct alignas(LOGITS * sizeof(T)) Four {
    T x[LOGITS];
  } made;
#pragma unroll
  for (int k = 0; k < LOGITS; ++k) made.x[k] = static_cast<T>(x[k]);
  *reinterpret_cast<Four*>(target) = made;
}
