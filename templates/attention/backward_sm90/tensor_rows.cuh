// Where TMA finds rows, and leaves them: coordinates of a map's third and last dimension.
//
//   dense    [batch, head, row, column]       what is past the last row of a head is outside
//   packed   [total, head, column]            what is past the end of a sequence is its neighbour's
//
// A packed array's map has the rows twice, as dimensions with the same stride of which the outer
// one is left as it is and the inner one ends where a sequence does; it begins RAGGED_ROWS before
// the array (`ragged_map` of fkjit/ops/attention_form_backward_hopper.py):
//
//   (column, i, head, j)  is  array[i + j - RAGGED_ROWS, head, column]   for i < RAGGED_ROWS
//
// So a box at i = RAGGED_ROWS - n, j = row + n begins at `row`, and after n rows it is outside:
// what comes from there is zeros, and what goes there is left out.
#pragma once
#include "prelude.cuh"

constexpr int RAGGED_ROWS = 128;  // at least as many as boxes have

template <bool PACKED>
struct TensorRows {
  int row, batch;

  // `place`: the batch, or of packed arrays how many rows there are from `first` on.
  __device__ __forceinline__ TensorRows(int first, int place) : row(first), batch(place) {
    if (!PACKED) return;
    const int count = max(min(place, RAGGED_ROWS), 0);
    row = RAGGED_ROWS - count, batch = first + count;
  }
};
