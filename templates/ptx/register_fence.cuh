// Fences for the compiler, without an instruction: a value is made before one, and what follows
// from it is made after it.
//
// What is computed at the top of a kernel stays in registers until its last use, across the whole
// main loop. Where registers are short it is cheaper to compute it again: behind a fence the
// compiler takes the value for another, and cannot merge what is made of it with what was made
// before.
//
// PTX ISA has nothing to say here: an empty asm statement that "changes" its operands.
#pragma once
#include "prelude.cuh"

__device__ __forceinline__ void register_fence(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void register_fence(u32& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void register_fence(int& x, int& y, int& z) {
  asm volatile("" : "+r"(x), "+r"(y), "+r"(z));
}

// The same number, which the compiler takes for another.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// An address that stays in a register: where an array in shared memory begins is otherwise asked of the
// special registers at each use, some 40 cycles before it.
__device__ __forceinline__ u32 kept(u32 address) {
  asm volatile("" : "+r"(address));
  return address;
}

// Fragments, before wgmma reads or writes them: arithmetic may move past wgmma.fence, which
// clobbers memory only, and the compiler then adds fences of its own (C7519).
template <int N>
__device__ __forceinline__ void register_fence(u32 (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3])::"memory");
}
template <int N>
__device__ __forceinline__ void register_fence(float (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])::"memory");
}

// Loads and stores before it stay before those after it, in what the compiler makes; the hardware
// knows nothing of it.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }
