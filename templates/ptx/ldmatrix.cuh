// Shared memory -> mma fragments: four 8x8 matrices of 16-bit elements in one warp instruction.
//
// Lane i gives the address of row i % 8 of matrix i / 8 (16 bytes, 16-byte aligned); register j of
// lane i then holds elements (row i/4, columns 2*(i%4), 2*(i%4)+1) of matrix j. With .trans each
// matrix arrives transposed: that is how V, stored [key][dim], becomes the B operand of P * V.
//
//   which lane gets an element      column  0  1  2  3  4  5  6  7     .trans    0  1  2 ...  7
//   of matrix j, in its r[j]        row 0   0  0  1  1  2  2  3  3               0  4  8 ... 28
//                                   row 1   4  4  5  5  6  6  7  7               0  4  8 ... 28
//                                   row 2   8  8  9  9 10 10 11 11               1  5  9 ... 29
//                                     ...                                          ...
//                                   row 7  28 28 29 29 30 30 31 31               3  7 11 ... 31
#pragma once
#include "prelude.cuh"

// PTX ISA: ldmatrix.sync.aligned.m8n8.x4 (sm_75+)
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Two matrices: of lanes 0 to 15 addresses count.
// PTX ISA: ldmatrix.sync.aligned.m8n8.x2 (sm_75+)
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
