// Rows of Q, K and V on their way to codes: ROWS rows of a head a block, eight columns a lane.
#pragma once
#include "attention/packed_codes.cuh"
#include "quantize/hadamard.cuh"
#include "quantize/scale.cuh"

// The rows of a block: which head's, from which on, and this thread's part of each. Of packed sequences
// there is a head for each, whose rows begin at `start` in q, k or v.
template <int HEAD_DIM, int ROWS, int THREADS, bool PACKED>
struct RowTile {
  static constexpr int LANES = HEAD_DIM / 8, TEAM = THREADS / LANES, PASSES = ROWS / TEAM;
  static_assert(LANES <= WARP_SIZE && ROWS % TEAM == 0, "whole passes of rows within a warp");
  int head, sequence, of_sequence;  // of all, whose, and which of its heads
  int start, length;                // of the sequence
  int first, team, column;

  // `blocks`: of a head. `longest`: rows of a sequence, at most.
  __device__ __forceinline__ RowTile(int index, int blocks, int heads, const int* cu_seqlens,
                                     int longest)
      : head(index / blocks),
        sequence(head / heads),
        of_sequence(head % heads),
        first(index % blocks * ROWS),
        team(threadIdx.x / LANES),
        column(threadIdx.x % LANES * 8) {
    const SequenceRows<PACKED> rows(cu_seqlens, sequence, longest);
    start = rows.start, length = rows.length;
  }

  __device__ __forceinline__ int row(int pass) const { return first + pass * TEAM + team; }

  // Of codes and of what a head has one of: a head of one sequence or of all that are packed.
  __device__ __forceinline__ i64 code_head() const { return PACKED ? of_sequence : head; }
  // Of a row among the rows of codes; `total`: of a head.
  __device__ __forceinline__ i64 place(int row, int total) const {
    return code_head() * total + start + row;
  }

  // Zeros behind the last row and the last column.
  template <typename T>
  __device__ __forceinline__ Eight load(const T* x, const Strides& strides, int row,
                                        int columns) const {
    x += sequence * strides.batch + of_sequence * strides.head;
    return load_eight<true>(x + (start + row) * strides.row, column, row < length ? columns : 0);
  }

  // A row of K less its mean, rotated; zeros behind the last row stay.
  template <bool SMOOTH, bool ROTATE, typename T>
  __device__ __forceinline__ Eight load_key(const T* k, const Strides& strides, int row,
                                            int columns, Eight& mean) const {
    Eight x = load(k, strides, row, columns);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (SMOOTH && row < length) x[i] -= mean[i];
    if (ROTATE) rotate_row<LANES>(x);
    return x;
  }
};
