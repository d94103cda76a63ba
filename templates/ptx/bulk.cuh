// Bulk copies (sm_90): runs of bytes between global and shared memory by the copy engine, without a
// tensor map. Addresses and sizes are multiples of 16.
//
// Loads count their bytes on an mbarrier. Stores, TMA's too (tma.cuh), are counted in groups of the
// thread that starts them.
#pragma once
#include "prelude.cuh"

// What this thread has started since its last group is a group. PTX ISA: cp.async.bulk.commit_group
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// `bytes` from global memory to `shared`; they count on `barrier`.      PTX ISA: cp.async.bulk
__device__ __forceinline__ void bulk_load(u32 shared, const void* global, int bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier)
      : "memory");
}

// `bytes` of global memory come to L2.                       PTX ISA: cp.async.bulk.prefetch.L2
__device__ __forceinline__ void bulk_prefetch(const void* global, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)),
               "r"(bytes));
}

// global[i] += shared[i], in L2: a group of its own.             PTX ISA: cp.reduce.async.bulk
__device__ __forceinline__ void bulk_add(float* global, u32 shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared), "r"(bytes)
               : "memory");
  bulk_commit();
}

// global[i] = shared[i]: a group of its own.                            PTX ISA: cp.async.bulk
__device__ __forceinline__ void bulk_store(float* global, u32 shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared), "r"(bytes)
               : "memory");
  bulk_commit();
}

// What all but the newest PENDING groups of this thread read from shared memory has been read: it
// may be written again. PTX ISA: cp.async.bulk.wait_group
template <int PENDING = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// What this thread's groups write is in place.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
