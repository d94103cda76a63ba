// One thread of a warp (sm_90), for what a warp does once.
//
//   if (elect_one()) tma_load(...);
//
// All of the warp's threads come here together. The compiler knows then that one goes on, and that
// its addresses are the warp's: after `threadIdx.x == 0` it makes each TMA instruction a loop over
// threads.
#pragma once
#include "prelude.cuh"

// True for one thread, the same each time.                                   PTX ISA: elect.sync
__device__ __forceinline__ bool elect_one() {
  u32 chosen;
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      ".reg .b32 lane;\n"
      "elect.sync lane|chosen, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, chosen;\n"
      "}"
      : "=r"(chosen));
  return chosen != 0;
}
