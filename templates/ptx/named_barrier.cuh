// Named barriers: 16 to a block, at which a stated number of its threads meet; __syncthreads is
// number 0. Some of the threads may arrive without waiting: they let the others pass.
//
//   producer    ... write    arrive<64>(1)   go on           32 that arrive and 32 that wait: 64
//   consumer    wait<64>(1) ------------->   read ...
#pragma once
#include "prelude.cuh"

// Wait until THREADS threads, these among them, have come.                   PTX ISA: barrier.sync
template <int THREADS>
__device__ __forceinline__ void named_barrier_wait(int barrier) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Be counted, and go on.                                                   PTX ISA: barrier.arrive
template <int THREADS>
__device__ __forceinline__ void named_barrier_arrive(int barrier) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Wait, where whole warps come, each with all of its lanes together.
// PTX ISA: bar.sync
template <int THREADS>
__device__ __forceinline__ void named_barrier_wait_aligned(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
