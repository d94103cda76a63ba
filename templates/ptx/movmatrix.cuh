// An 8x8 matrix of 16-bit elements, transposed between the lanes of a warp (sm_75). Lane i has two
// neighbours of row i / 4 before, and of column i / 4 after:
//
//   lane     column  0  1  2  3  4  5  6  7            lane     column  0  1  2 ...
//            row 0   0  0  1  1  2  2  3  3                     row 0   0  4  8
//            row 1   4  4  5  5  6  6  7  7      ->             row 1   0  4  8
//            row 2   8  8  9  9 10 10 11 11                     row 2   1  5  9
#pragma once
#include "prelude.cuh"

// PTX ISA: movmatrix.sync.aligned.m8n8.trans
__device__ __forceinline__ u32 transposed_8x8(u32 pair) {
  u32 found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(pair));
  return found;
}
