// wgmma (sm_90a): a warpgroup of 128 threads multiplies 64 x K by K x N, asynchronously; B comes
// from shared memory, A from shared memory or registers. Here is what surrounds the products, which
// are in ptx/wgmma_products.cuh:
//
//   register_fence(d), wgmma_fence();   then products,   wgmma_commit();   ...   wgmma_wait<0>();
#pragma once
#include "prelude.cuh"

// A tile with the 128-byte swizzle, as a descriptor. `address` is a multiple of 16 in shared
// memory.
//
//   K-major   rows of 64 k, 8 rows in 1024 bytes; the next 16 k are 32 bytes further on, the next
//   (Q, K)    panel of 64 k wherever the tile has it. `panel_bytes` is not looked at.
//   MN-major  rows of 64 n, one for each k; the next 16 k are 2048 bytes further on, the next 64 n
//   (V)       `panel_bytes`
//
//   bits  63-62      45-32          29-16           13-0          of the descriptor, in 16-byte units
//         swizzle    stride         leading         address
//         1: 128 B   1024 bytes     panel_bytes
//
// PTX ISA: matrix descriptor (start, leading and stride byte offset in 16-byte units, swizzle)
__device__ __forceinline__ u64 wgmma_tile(u32 address, int panel_bytes) {
  return (1ull << 62) | (static_cast<u64>(1024 >> 4) << 32) |
         (static_cast<u64>(panel_bytes >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

// Before the first product, and after registers it uses have been written. PTX ISA: wgmma.fence
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// PTX ISA: wgmma.commit_group
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// All but the newest PENDING groups are done. PTX ISA: wgmma.wait_group
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
