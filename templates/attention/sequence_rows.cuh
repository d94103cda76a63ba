// Which rows of q, k and v belong together: those of one batch, or of one sequence in packed arrays
// [total, heads, head_dim], where rows cu_seqlens[i] up to cu_seqlens[i + 1] are sequence i.
// Lengths are read on the device, so that a captured graph follows sequences of other lengths; none
// is longer than what the grid was made for.
#pragma once
#include "prelude.cuh"

template <bool PACKED>
struct SequenceRows {
  int start;   // first row
  int length;  // 0 .. longest

  __device__ __forceinline__ SequenceRows(int first, int rows) : start(first), length(rows) {}

  __device__ __forceinline__ SequenceRows(const int* __restrict__ cu_seqlens, int index,
                                          int longest) {
    start = PACKED ? cu_seqlens[index] : 0;
    length = PACKED ? min(max(cu_seqlens[index + 1] - start, 0), longest) : longest;
  }
};
