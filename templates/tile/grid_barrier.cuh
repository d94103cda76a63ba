// A barrier of all blocks of a grid, met again and again in one launch. Blocks wait for one another,
// so all of them have to run at the same time: launch cooperatively (in fkjit: `cooperative=True`).
//
//   GridBarrier barrier(counter, times);   // the counter is 0 before the launch, and 0 afterwards
//   ... write; barrier.arrive(); load what nobody writes; barrier.wait(); read what others wrote
//
// `times` is how often a block arrives; after the last time nobody waits, or the counter would have
// wrapped to 0 before he looks. Called by one thread of a block, between two barriers of the block:
// the first has its threads' writes behind it, the second lets them read.
#pragma once
#include "ptx/atomic.cuh"

struct GridBarrier {
  u32* const counter;
  const u32 arrivals;  // in the whole launch
  u32 seen = 0;        // arrivals that this block has waited for

  __device__ __forceinline__ GridBarrier(u32* counter, int times)
      : counter(counter), arrivals(times * gridDim.x) {}

  __device__ __forceinline__ void arrive() const { red_inc_release(counter, arrivals); }

  __device__ __forceinline__ void wait() {
    seen += gridDim.x;
    while (load_acquire(counter) < seen) {
    }
  }

  // The last arrival of a block: whether it was the last one of all.
  __device__ __forceinline__ bool leave() const {
    return atom_inc_acq_rel(counter, arrivals) == arrivals - 1;
  }
};
