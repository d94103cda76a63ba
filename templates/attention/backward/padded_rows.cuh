// Where attention's backward keeps what a query row brings along (mma.cuh), or
// finds out about it: arrays in which each head has rows_padded rows, whole tiles for every batch.
//
//   dense    [batch, heads_q, rows_padded]    row i of a batch at i
//   packed   [heads_q, rows_padded]           of sequence b, whose first row of q is `start`, at
//                                             (start rounded down to ROW_STEP) + b * ROW_STEP + i
//
// So each sequence has room for ROW_STEP rows more than it has.
#pragma once
#include "prelude.cuh"

constexpr int ROW_STEP = 128;

template <bool PACKED>
__device__ __forceinline__ i64 first_padded_row(int batch, int head, int heads_q, int rows_padded,
                                                int start) {
  if (PACKED) return static_cast<i64>(head) * rows_padded + (start / ROW_STEP + batch) * ROW_STEP;
  return (static_cast<i64>(batch) * heads_q + head) * rows_padded;
}
