// Registers -> shared memory: mma fragments in 16 bits, four 8x8 matrices in one warp instruction
// (sm_90).
#pragma once
#include "prelude.cuh"

// The reverse of ldmatrix_x4: lane i gives the address of row i % 8 of matrix i / 8.
// PTX ISA: stmatrix.sync.aligned.m8n8.x4
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
