// Rows between global and shared memory by the copy engine (sm_90), without a tensor map: runs of
// bytes whose addresses and number are multiples of 16.
#pragma once
#include "device/mbarrier.cuh"

// `bytes` of a row to `shared`; they count on `barrier`.                 PTX ISA: cp.async.bulk
__device__ __forceinline__ void row_fetch(u32 shared, const void* row, int bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(__cvta_generic_to_global(row)), "r"(bytes), "r"(barrier)
      : "memory");
}

// The other way; shared memory stays as it is until row_written().       PTX ISA: cp.async.bulk
__device__ __forceinline__ void row_write(void* row, u32 shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(row)),
               "r"(shared), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// What this thread's writes read has been read.                          PTX ISA: cp.async.bulk.wait_group
__device__ __forceinline__ void row_written() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
