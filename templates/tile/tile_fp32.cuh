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
// past rows_left and columns at or past columns_left become zero. ALIGNED: every row of the tensor
// starts on a 16-byte boundary; then a thread has up to eight loads on their way at a time.
template <int ROWS, int COLUMNS, int PITCH, int THREADS, bool ALIGNED, typename T>
__device__ __forceinline__ void copy_tile_fp32(float* __restrict__ tile,
                                               const T* __restrict__ global, i64 row_stride,
                                               int rows_left, int columns_left) {
  constexpr int VECTORS = COLUMNS / 4, COUNT = ROWS * VECTORS;
  constexpr int EACH = COUNT / THREADS;  // of a thread
  constexpr int BATCH = EACH % 8 == 0 ? 8 : EACH % 4 == 0 ? 4 : EACH % 2 == 0 ? 2 : 1;
  static_assert(COLUMNS % 4 == 0 && PITCH % 4 == 0, "float4s are 16-byte aligned");
  static_assert(COUNT % THREADS == 0, "every thread copies the same number of float4s");
#pragma unroll 1
  for (int first = threadIdx.x; first < COUNT; first += BATCH * THREADS) {
    float4 x[BATCH];
    if (ALIGNED && columns_left % 4 == 0) {
#pragma unroll
      for (int n = 0; n < BATCH; ++n) {
        const int row = (first + n * THREADS) / VECTORS,
                  column = (first + n * THREADS) % VECTORS * 4;
        x[n] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (row < rows_left && column < columns_left)
          x[n] = load_global4<true>(global + row * row_stride + column, 4);
      }
    } else {
#pragma unroll
      for (int n = 0; n < BATCH; ++n) {
        const int row = (first + n * THREADS) / VECTORS,
                  column = (first + n * THREADS) % VECTORS * 4;
        x[n] = load_global4<false>(global + row * row_stride + column,
                                   row < rows_left ? columns_left - column : 0);
      }
    }
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
      const int row = (first + n * THREADS) / VECTORS, column = (first + n * THREADS) % VECTORS * 4;
      *reinterpret_cast<float4*>(tile + row * PITCH + column) = x[n];
    }
  }
}
