// Programmatic dependent launch (sm_90): in a CUDA graph a kernel's blocks may come in while the
// kernel before it on the stream runs out, which hides the time that a launch takes.
//
//   extern "C" __global__ void kernel(...) {
//     after_previous_kernel();  // before anything is read or written
//
// A kernel that begins so is `dependent` in its spec. Launched in any other way it does the same:
// then there is nothing to wait for.
#pragma once
#include "prelude.cuh"

// From here on, in all of this kernel's blocks, the next one's may come in.
// PTX ISA: griddepcontrol.launch_dependents
__device__ __forceinline__ void let_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The kernel before this one is over, and what it wrote is there. With `let_next` the next kernel's
// blocks may come in as soon as all of this one's have, else when they are done.
// PTX ISA: griddepcontrol.launch_dependents, griddepcontrol.wait
__device__ __forceinline__ void after_previous_kernel(bool let_next = true) {
#if __CUDA_ARCH__ >= 900
  if (let_next) let_next_kernel();
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
