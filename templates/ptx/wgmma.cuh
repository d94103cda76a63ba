// wgmma (sm_90a): a warpgroup of 128 threads multiplies 64 x K by K x N, asynchronously; B comes
// from shared memory, A from shared memory or registers. The products themselves are written out by
// the kernels (their operand lists follow N); here is what surrounds them.
//
// The accumulators lie as mma's D fragments do, warp w of the group holding rows 16w .. 16w + 15:
// lane (g, t) has rows g, g + 8 and columns 2t, 2t + 1 of every eight columns.
#pragma once
#include "prelude.cuh"

// A tile with the 128-byte swizzle, as a descriptor. `address` is a multiple of 16 in shared memory.
//
//   K-major   rows of 64 k, 8 rows in 1024 bytes; the next 16 k are 32 bytes further on, the next
//   (Q, K)    panel of 64 k wherever the tile has it. `panel_bytes` is not looked at.
//   MN-major  rows of 64 n, one for each k; the next 16 k are 2048 bytes further on, the next 64 n
//   (V)       `panel_bytes`
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

// Computes the registers here: arithmetic may move past a fence, which clobbers memory only, and the
// compiler then adds fences of its own (C7519).
template <int N>
__device__ __forceinline__ void settle(u32 (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3])::"memory");
}

template <int N>
__device__ __forceinline__ void settle(float (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])::"memory");
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

// The threads of a warpgroup wait for one another; each warpgroup has a barrier of its own (not 0).
// PTX ISA: bar.sync
__device__ __forceinline__ void warpgroup_sync(int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

// What each thread has when a block starts: setmaxnreg gives to some what it has taken from others.
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
