// A [rows, columns] piece of a strided tensor <-> fp32 in shared memory or registers, four columns
// at a time: float4 is what one lane can take from shared memory in one instruction.
#pragma once
#include "prelude.cuh"

template <typename T>
struct alignas(4 * sizeof(T)) Vector4 {
  T x[4];
};

// Four elements as fp32, of which the first `elements` exist; the others are zero.
// ALIGNED: `source` is on a boundary of four elements.
template <bool ALIGNED, typename T>
__device__ __forceinline__ float4 load_global4(const T* __restrict__ source, int elements) {
  float x[4];
  if (ALIGNED && elements >= 4) {
    const Vector4<T> vector = *reinterpret_cast<const Vector4<T>*>(source);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(vector.x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = i < elements ? static_cast<float>(source[i]) : 0.f;
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

// The first `elements` of four fp32, rounded to T.
template <bool ALIGNED, typename T>
__device__ __forceinline__ void store_global4(T* __restrict__ target, const float (&x)[4],
                                              int elements) {
  if (ALIGNED && elements >= 4) {
    Vector4<T> vector;
#pragma unroll
    for (int i = 0; i < 4; ++i) vector.x[i] = static_cast<T>(x[i]);
    *reinterpret_cast<Vector4<T>*>(target) = vector;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < elements) target[i] = static_cast<T>(x[i]);
  }
}

// A tile in shared memory whose rows are PITCH floats apart. With PITCH % 32 == 4 a float4 column
// read down eight rows touches all 32 banks once:
//
//   row            0    1    2    3    4    5    6    7
//   banks of x..   0-3  4-7  8-11 ...                 28-31        (PITCH = HEAD_DIM + 4)
//
// Filled by all THREADS of the block, neighbours taking neighbouring float4s of a row; rows at or
// past rows_left and columns at or past columns_left become zero.
template <int ROWS, int COLUMNS, int PITCH, int THREADS, bool ALIGNED, typename T>
__device__ __forceinline__ void copy_tile_fp32(float* __restrict__ tile,
                                               const T* __restrict__ global, i64 row_stride,
                                               int rows_left, int columns_left) {
  constexpr int VECTORS = COLUMNS / 4;  // in a row
  static_assert(COLUMNS % 4 == 0 && PITCH % 4 == 0, "float4s are 16-byte aligned");
#pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
    const int row = i / VECTORS, column = i % VECTORS * 4;
    const int elements = row < rows_left ? columns_left - column : 0;
    const T* source = global + (elements > 0 ? row * row_stride + column : 0);
    *reinterpret_cast<float4*>(tile + row * PITCH + column) =
        load_global4<ALIGNED>(source, elements);
  }
}
