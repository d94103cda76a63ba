// Threads of different blocks that add to something in global memory in an order known to all: the
// result of the additions is then the same every time.
//
//   ordered_wait(counter, rank);    // until `rank` others are done
//   ... += ...;
//   ordered_done(counter, others);  // of so many in all
//
// The counter is 0 before the first of them and again after the last one. Blocks wait for one
// another: launch cooperatively, so that all of them run at the same time. The fences order bulk
// copies (ptx/bulk.cuh) that others made before and that follow here.
#pragma once
#include "ptx/atomic.cuh"
#include "ptx/proxy_fence.cuh"

__device__ __forceinline__ void ordered_wait(const u32* counter, u32 rank) {
  if (rank == 0) return;
  while (load_acquire(counter) != rank) {
  }
  proxy_fence_global();
}

__device__ __forceinline__ void ordered_done(u32* counter, u32 all) {
  proxy_fence_global();
  red_inc_release(counter, all);
}
