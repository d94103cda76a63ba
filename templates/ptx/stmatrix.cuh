// Registers -> shared memory: mma fragments in 16 bits, four 8x8 matrices in one warp instruction
// (sm_90). A lane's r[j] are two neighbours of row lane / 4 of matrix j:
//
//   lane     column  0  1  2  3  4  5  6  7        rows are 16 bytes, each anywhere on a boundary
//            row 0   0  0  1  1  2  2  3  3        of as many: lane i of 0 .. 31 says where row
//            row 1   4  4  5  5  6  6  7  7        i % 8 of matrix i / 8 goes
//              ...
//            row 7  28 28 29 29 30 30 31 31
#pragma once
#include "prelude.cuh"

// The reverse of ldmatrix_x4: lane i gives the address of row i % 8 of matrix i / 8.
// PTX ISA: stmatrix.sync.aligned.m8n8.x4
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same with each matrix transposed: row i % 8 of what is stored is column i % 8 of the fragment's.
// PTX ISA: stmatrix.sync.aligned.m8n8.x4.trans
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
