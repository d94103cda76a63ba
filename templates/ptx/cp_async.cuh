// Asynchronous copies global -> shared (sm_80+). A thread's copies are grouped by commit; wait<N>
// returns when at most the N newest groups of this thread are still in flight. Other threads see
// the bytes after a barrier that follows the wait.
#pragma once
#include "prelude.cuh"

// 16 bytes, past L1; only the first `bytes` (0..16) are read, the rest of the 16 become zero.
// PTX ISA: cp.async.cg.shared.global with src-size
__device__ __forceinline__ void cp_async_16(u32 shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// All 16 bytes.
__device__ __forceinline__ void cp_async_16(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// 4 bytes, on a boundary of as many; zero unless `there`, and then nothing is read.
// PTX ISA: cp.async.ca.shared.global with src-size
__device__ __forceinline__ void cp_async_4(u32 shared, const void* global, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global),
               "r"(there ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_4(u32 shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// How L2 keeps what is read once: it is the first to leave. Volatile: made anew where it is wanted,
// rather than held in two registers.
// PTX ISA: createpolicy.fractional
__device__ __forceinline__ u64 first_to_leave() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As above, kept in L2 as `policy` says.
// PTX ISA: cp.async, cache-policy
__device__ __forceinline__ void cp_async_16(u32 shared, const void* global, int bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
               "l"(global), "r"(bytes), "l"(policy)
               : "memory");
}

// PTX ISA: cp.async.commit_group
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX ISA: cp.async.wait_group
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
