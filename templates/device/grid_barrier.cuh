// All blocks of a grid meet, once a launch, through memory: nobody asks the host, so a launch may be
// captured into a CUDA graph. Blocks wait for one another, so all of them have to run at the same
// time: launch cooperatively, with no more blocks than fit (in fkjit: `cooperative=True`).
//
//   table[blockIdx.x] = ...;              // by any thread
//   const u32 left = grid_barrier(counters, gridDim.x);
//   ... = table[...];                     // by any thread: what every block wrote before is visible
//   grid_leave(counters, gridDim.x, left) // at the end
//
// counters[0] counts who has come, counters[1] who has left; both are 0 before the launch and again
// after it: the last one to leave, when nobody looks at counters[0] any more, sets it back.
#pragma once
#include "prelude.cuh"

// Called by every thread of every block.
// PTX ISA: red.release.gpu, ld.acquire.gpu, atom.relaxed.gpu.inc
__device__ __forceinline__ u32 grid_barrier(u32* counters, u32 blocks) {
  u32 left = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    const size_t here = __cvta_generic_to_global(counters);
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(here) : "memory");
    u32 come;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(come) : "l"(here) : "memory");
    } while (come < blocks);
    // Nothing is waiting for the answer until grid_leave: it comes meanwhile.
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(left)
                 : "l"(here + sizeof(u32)), "r"(blocks - 1)
                 : "memory");
  }
  __syncthreads();
  return left;
}

// PTX ISA: st.relaxed.gpu
__device__ __forceinline__ void grid_leave(u32* counters, u32 blocks, u32 left) {
  if (threadIdx.x == 0 && left == blocks - 1)
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counters)),
                 "r"(0)
                 : "memory");
}
