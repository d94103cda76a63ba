// mbarriers (sm_90): a word of shared memory on which threads and asynchronous copies meet.
//
// A phase is over when `count` arrivals have come and as many bytes as were expected. Waiting names
// the parity of the phase waited for: 0 for the first, then 1, 0, ... A fresh barrier has its phase
// "before the first" behind it: waiting for parity 1 returns at once, so that the producer of a
// ring may start with all stages free.
//
//   phase         before 0 |     0      |     1      |     0      | ...
//   its parity        1    |     0      |     1      |     0      |        ends with the count-th
//   wait(.., 0)       waits until here -^            waits ... -^          arrival and the last byte
//
//   full[stage]    1 arrival (the producer's, with the bytes it expects)     consumers wait
//   empty[stage]   1 arrival of each consumer warp                           the producer waits
#pragma once
#include "ptx/proxy_fence.cuh"

// PTX ISA: mbarrier.init
__device__ __forceinline__ void mbarrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After the inits, by the thread that made them: TMA engines (and other CTAs) see the barriers.
// PTX ISA: fence.mbarrier_init
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  proxy_fence();
}

// PTX ISA: mbarrier.arrive.expect_tx
__device__ __forceinline__ void mbarrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// PTX ISA: mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As so many arrivals.                                                  PTX ISA: mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive_times(u32 barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// PTX ISA: mbarrier.try_wait.parity; the hardware suspends the thread for a while by itself.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether that phase is over. PTX ISA: mbarrier.test_wait.parity
__device__ __forceinline__ bool mbarrier_test(u32 barrier, int parity) {
  int over;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over;
}
