// Threads of different blocks take turns at something in global memory, in an order known to all:
// the result of additions there is then the same every time.
//
//   turn_wait(turns, rank);   // until `rank` others are done
//   ... += ...;
//   turn_done(turns, others);  // of so many in all
//
// The counter is 0 before the first turn and again after the last one. Blocks wait for one another:
// launch cooperatively, so that all of them run at the same time.
#pragma once
#include "prelude.cuh"

// PTX ISA: ld.acquire.gpu; fence.proxy.async orders bulk copies that follow
__device__ __forceinline__ void turn_wait(const u32* turns, u32 rank) {
  if (rank == 0) return;
  u32 done;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(done)
                 : "l"(__cvta_generic_to_global(turns))
                 : "memory");
  } while (done != rank);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// PTX ISA: red.release.gpu.inc: wraps to 0 after the last turn
__device__ __forceinline__ void turn_done(u32* turns, u32 all) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(turns)),
               "r"(all - 1)
               : "memory");
}
