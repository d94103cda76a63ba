// Where a thread is, read from the special registers anew at each call.
//
// What is computed from the built-ins at the top of a kernel stays in registers until its last use,
// across the whole main loop. Where registers are short it is cheaper to compute it again: the
// compiler cannot merge these reads with earlier ones.
#pragma once
#include "prelude.cuh"

// threadIdx.x                                                  PTX ISA: special registers, %tid
__device__ __forceinline__ int thread_index_again() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// blockIdx.x                                                 PTX ISA: special registers, %ctaid
__device__ __forceinline__ int block_index_again() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// The thread's place in its warp.                            PTX ISA: special registers, %laneid
__device__ __forceinline__ int lane_index_again() {
  int index;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(index));
  return index;
}
