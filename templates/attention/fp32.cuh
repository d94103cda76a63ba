// Products of attention and its backward in fp32 FMAs. LANES = 16 threads share a row of the
// block's own tile, a warp has two groups of them: thread (g, x) has rows g, g + 2, ... of its warp,
// in products with the other tile its rows x, x + 16, ..., in sums over them columns 4x .. 4x + 3 of
// each 64. What stands for scores goes from the first kind of product to the second through shared
// memory, within a warp. Rows of tiles are 4 banks apart (see tile/tile_fp32.cuh).
#pragma once
#include "tile/tile_fp32.cuh"

constexpr int LANES = 16;

__device__ __forceinline__ float4 load4(const float* shared) {
  return *reinterpret_cast<const float4*>(shared);
}

// s = A B^T: A are this thread's rows of the own tile, two apart, B those of the other, 16 apart.
template <int COLUMNS, int PITCH, int ROWS, int OTHERS>
__device__ __forceinline__ void dot_rows(float (&s)[ROWS][OTHERS], const float* own,
                                         const float* other) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < OTHERS; ++j) s[i][j] = 0.f;
#pragma unroll 2
  for (int d = 0; d < COLUMNS; d += 4) {
    float4 b[OTHERS];
#pragma unroll
    for (int j = 0; j < OTHERS; ++j) b[j] = load4(other + j * LANES * PITCH + d);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float4 a = load4(own + 2 * i * PITCH + d);
#pragma unroll
      for (int j = 0; j < OTHERS; ++j)
        s[i][j] =
            fmaf(a.x, b[j].x, fmaf(a.y, b[j].y, fmaf(a.z, b[j].z, fmaf(a.w, b[j].w, s[i][j]))));
    }
  }
}

// acc += W B: W[row][k] of this thread's rows, two apart, with the COUNT rows k of the other tile.
template <int COUNT, int WEIGHT_PITCH, int PITCH, int ROWS, int VECTORS>
__device__ __forceinline__ void add_rows(float (&acc)[ROWS][VECTORS][4], const float* weights,
                                         const float* columns) {
#pragma unroll 1
  for (int k = 0; k < COUNT; k += 4) {
    float w[ROWS][4];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      *reinterpret_cast<float4*>(w[i]) = load4(weights + 2 * i * WEIGHT_PITCH + k);
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int c = 0; c < VECTORS; ++c) {
        const float4 b = load4(columns + (k + step) * PITCH + c * 4 * LANES);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          acc[i][c][0] = fmaf(w[i][step], b.x, acc[i][c][0]);
          acc[i][c][1] = fmaf(w[i][step], b.y, acc[i][c][1]);
          acc[i][c][2] = fmaf(w[i][step], b.z, acc[i][c][2]);
          acc[i][c][3] = fmaf(w[i][step], b.w, acc[i][c][3]);
        }
      }
  }
}

// The first `rows_left` rows of acc * factor; `x` and `row0` are this thread's, as above.
template <bool ALIGNED, int ROWS, int VECTORS, typename T>
__device__ __forceinline__ void store_rows(T* __restrict__ target, i64 row_stride,
                                           float (&acc)[ROWS][VECTORS][4], float factor, int x,
                                           int row0, int rows_left, int columns) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = row0 + 2 * i;
    if (row >= rows_left) continue;
#pragma unroll
    for (int c = 0; c < VECTORS; ++c) {
      const int column = 4 * (x + c * LANES);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][c][e] *= factor;
      store_global4<ALIGNED>(target + row * row_stride + column, acc[i][c], columns - column);
    }
  }
}
