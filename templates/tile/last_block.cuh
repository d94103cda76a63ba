// How the last block of a group to finish finds out that it is: one launch does what needs the
// results of all blocks, in an order that does not depend on who was last.
//
//   partial[block] = ...;                     // by thread 0
//   if (!last_block(counter, blocks)) return; // every thread; what others wrote before is visible
//   ... = partial[0] ... partial[blocks - 1]
//
// The counter is 0 before the launch, and 0 again afterwards.
#pragma once
#include "ptx/atomic.cuh"

// Called by every thread of a block. What thread 0 wrote before is published; in the last block all
// threads see what the thread 0 of every block of the group wrote. One atomic does both, which two
// fences beside it would do as well, more slowly.
__device__ __forceinline__ bool last_block(u32* counter, u32 blocks) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    is_last = atom_inc_acq_rel(counter, blocks) == blocks - 1;  // and the counter has wrapped to 0
  }
  __syncthreads();
  return is_last;
}
