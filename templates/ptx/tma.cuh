// TMA (sm_90): one thread asks for a box of a strided tensor, the copy engine brings it.
//
// The tensor map says where the tensor is and how it is strided; it is a kernel argument
// (`const __grid_constant__ TensorMap`), made on the host. Elements of the box that lie outside the
// tensor come as zeros. With the 128-byte swizzle a box row is 128 bytes (64 elements of 16 bits),
// and 16-byte chunk c of row r lies at chunk position c ^ (r % 8):
//
//   row 0    0 1 2 3 4 5 6 7        eight rows, 1024 bytes, then the same again: the layout of
//   row 1    1 0 3 2 5 4 7 6        SwizzledTile (tile/swizzle.cuh) and the one wgmma reads
//   row 2    2 3 0 1 6 7 4 5
//     ...
//   row 7    7 6 5 4 3 2 1 0
#pragma once
#include "prelude.cuh"

struct alignas(64) TensorMap {
  u64 words[16];
};

// Hides the latency of the map's own fetch. PTX ISA: prefetch.tensormap
__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Of a map in global memory, which was copied there: what is there now counts, not what the copy engine
// has seen before. Before the block's first copy. PTX ISA: fence.proxy.tensormap
__device__ __forceinline__ void tma_acquire(const TensorMap& map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(&map) : "memory");
}

// The box at (x, y, z, w), x innermost, to `shared`; its bytes count on `barrier`.
// PTX ISA: cp.async.bulk.tensor
__device__ __forceinline__ void tma_load(u32 shared, const TensorMap& map, u32 barrier, int x,
                                         int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// The same of a tensor of three dimensions, and of two.
__device__ __forceinline__ void tma_load(u32 shared, const TensorMap& map, u32 barrier, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void tma_load(u32 shared, const TensorMap& map, u32 barrier, int x,
                                         int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// The same to `shared` in each block of the cluster whose rank is a bit of `mask`: one read from L2
// for all of them. The box goes to the same offset in each, and its bytes count there, on the
// barrier at the same offset as `barrier`: each block expects what all of them send it.
//
//   mask 0b11      block 0: load(half 0) --+--> block 0: half 0, half 1     A tile that two blocks
//                  block 1: load(half 1) --+--> block 1: half 0, half 1     need: each brings half
//
// PTX ISA: cp.async.bulk.tensor, .multicast::cluster
__device__ __forceinline__ void tma_load_multicast(u32 shared, const TensorMap& map, u32 barrier,
                                                   int x, int y, int z, int w, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(mask)
      : "memory");
}

// The box at (x, y, z, w) from `shared`; what lies outside the tensor is left out. It belongs to
// this thread's next group (bulk_commit, bulk_wait_read). PTX ISA: cp.async.bulk.tensor
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 shared, int x, int y, int z,
                                          int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(&map),
      "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
