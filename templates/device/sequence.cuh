// Where a sequence lies in packed arrays, [total, heads, head_dim]: rows cu_seqlens[i] up to
// cu_seqlens[i + 1] of them are sequence i. Lengths are read on the device, so that a captured graph
// follows sequences of other lengths; none is longer than what the grid was made for.
#pragma once
#include "prelude.cuh"

struct Sequence {
  int start;   // first row
  int length;  // 0 .. longest

  __device__ __forceinline__ Sequence(const int* __restrict__ cu_seqlens, int index, int longest) {
    start = cu_seqlens[index];
    length = min(max(cu_seqlens[index + 1] - start, 0), longest);
  }
};
