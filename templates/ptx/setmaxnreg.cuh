// Registers move between the warpgroups of a block (sm_90a): those that load give up what those
// that multiply get. Every warp of a warpgroup says the same, and a multiple of 8 from 24 to 256;
// who asks for more waits until others have given it.
//
//   fewer_registers<40>();  the producer      more_registers<232>();  consumers
#pragma once
#include "prelude.cuh"

// What each thread has when a block starts.
constexpr int registers_at_start(int threads) { return 65536 / threads / 8 * 8; }

// PTX ISA: setmaxnreg
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
