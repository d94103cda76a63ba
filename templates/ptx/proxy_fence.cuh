// What threads read and write by ordinary instructions, and what engines do (TMA, bulk copies,
// wgmma), are two ways into memory, "proxies", which have no order but by these fences (sm_90).
//
//   store_shared_word(...);  proxy_fence();  one thread: tma_store(...)
//
// PTX ISA: fence.proxy.async
#pragma once
#include "prelude.cuh"

// What threads have read and written in shared memory comes before what engines do there next.
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same in global memory.
__device__ __forceinline__ void proxy_fence_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
