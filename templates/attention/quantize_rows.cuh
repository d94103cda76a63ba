// Rows of Q, K and V on their way to codes: ROWS rows of a head a block, eight columns a lane.
#pragma once
#include "quantize/hadamard.cuh"
#include "quantize/scale.cuh"

// The rows of a block: which head's, from which on, and this thread's part of each.
template <int HEAD_DIM, int ROWS, int THREADS>
struct RowTile {
  static constexpr int LANES = HEAD_DIM / 8, TEAM = THREADS / LANES, PASSES = ROWS / TEAM;
  static_assert(LANES <= WARP_SIZE && ROWS % TEAM == 0, "whole passes of rows within a warp");
  int head, first, team, column;

  __device__ __forceinline__ RowTile(int index, int seqlen)
      : head(index / ceil_div(seqlen, ROWS)),
        first(index % ceil_div(seqlen, ROWS) * ROWS),
        team(threadIdx.x / LANES),
        column(threadIdx.x % LANES * 8) {}

  __device__ __forceinline__ int row(int pass) const { return first + pass * TEAM + team; }

  // Zeros behind the last row and the last column.
  template <typename T>
  __device__ __forceinline__ Eight load(const T* x, const Strides& strides, int heads, int pass,
                                        int rows, int columns) const {
    x += head / heads * strides.batch + head % heads * strides.head;
    return load_eight<true>(x + row(pass) * strides.row, column, row(pass) < rows ? columns : 0);
  }

  // A row of K less its mean, rotated; zeros behind the last row stay.
  template <bool SMOOTH, bool ROTATE, typename T>
  __device__ __forceinline__ Eight load_key(const T* k, const Strides& strides, int heads, int pass,
                                            int rows, int columns, Eight& mean) const {
    Eight x = load(k, strides, heads, pass, rows, columns);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (SMOOTH && row(pass) < rows) x[i] -= mean[i];
    if (ROTATE) rotate_row<LANES>(x);
    return x;
  }
};
