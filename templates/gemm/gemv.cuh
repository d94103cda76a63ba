// What the products of gemv.cu share: which outputs of a weight a block has, and lines of it that
// come to L2 before anything may be read.
//
// A block's tile are TILE outputs of the weight, of which x . weight is taken: those of out from
// `first` on, or with two HALVES half as many and those n further on (gate and up).
#pragma once
#include "ptx/memory.cuh"

constexpr int TOKENS = 8;  // rows of x, at most

// The weight's output for place `i` of a tile. Where out has no such column it is the last one, or
// the last whole RUN of them: read, but not used.
template <int TILE, int HALVES, int RUN = 1>
__device__ __forceinline__ int weight_output(int first, int i, int n) {
  constexpr int OUTPUTS = TILE / HALVES;
  return min(first + i % OUTPUTS, n - RUN) + i / OUTPUTS * n;
}

// One line each of LINES threads, in equal parts for all rows of a tile; [HALVES * n, k].
template <int TILE, int HALVES, int LINES, typename T>
__device__ __forceinline__ void prefetch_rows(const T* weight, i64 stride, int first, int n,
                                              int k) {
  constexpr int OF_ROW = LINES / TILE, LINE = 128 / sizeof(T);
  const int row = threadIdx.x / OF_ROW, column = threadIdx.x % OF_ROW * LINE;
  static_assert(OF_ROW > 0, "a line of each row");
  if (row < TILE && column < k)
    prefetch_l2(weight + weight_output<TILE, HALVES>(first, row, n) * stride + column);
}

// The same of [k, HALVES * n]: whole rows of k, as many as there are threads for.
template <int TILE, int HALVES, typename T>
__device__ __forceinline__ void prefetch_columns(const T* weight, i64 stride, int first, int n,
                                                 int k) {
  constexpr int LINE = 128 / sizeof(T), OF_ROW = TILE / LINE;
  const int row = threadIdx.x / OF_ROW, place = threadIdx.x % OF_ROW * LINE;
  if (row < k) prefetch_l2(weight + row * stride + weight_output<TILE, HALVES>(first, place, n));
}
