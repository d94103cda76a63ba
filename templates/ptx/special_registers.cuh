// threadIdx.x and blockIdx.x, read from the special registers anew at each call.
//
// What is computed from the built-ins at the top of a kernel stays in registers until its last use,
// across the whole main loop. Where registers are short it is cheaper to compute it again: the
// compiler cannot merge these reads with earlier ones.
#pragma once
#include "prelude.cuh"

// PTX ISA: special registers, %tid
__device__ __forceinline__ int thread_index_again() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// PTX ISA: special registers, %ctaid
__device__ __forceinline__ int block_index_again() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// The same number, which the compiler takes for another: what is made of it is made again, too.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
