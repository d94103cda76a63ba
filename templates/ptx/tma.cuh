// TMA (sm_90): one thread asks for a box of a strided tensor, the copy engine brings it.
//
// The tensor map says where the tensor is and how it is strided; it is a kernel argument
// (`const __grid_constant__ TensorMap`), made on the host. Elements of the box that lie outside the
// tensor come as zeros. With the 128-byte swizzle a box row is 128 bytes (64 elements of 16 bits),
// and 16-byte chunk c of row r lies at chunk position c ^ (r % 8): the layout of SwizzledTile
// (tile/swizzle.cuh) and the one wgmma reads. Tiles start at multiples of 1024 bytes.
#pragma once
#include "ptx/mbarrier.cuh"

struct alignas(64) TensorMap {
  u64 words[16];
};

// Hides the latency of the map's own fetch. PTX ISA: prefetch.tensormap
__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
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

// A whole tile of SwizzledTile's layout with 64-wide panels: its rows from `row` on, of one head.
template <typename Tile>
__device__ __forceinline__ void tma_load_tile(u32 shared, const TensorMap& map, u32 barrier,
                                              int row, int head, int batch) {
  mbarrier_expect(barrier, Tile::BYTES);
#pragma unroll
  for (int panel = 0; panel < Tile::PANELS; ++panel)
    tma_load(shared + panel * Tile::PANEL_BYTES, map, barrier, panel * Tile::PANEL_COLUMNS, row,
             head, batch);
}

// The box at (x, y, z, w) from `shared`; what lies outside the tensor is left out.
// PTX ISA: cp.async.bulk.tensor
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 shared, int x, int y, int z,
                                          int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(&map),
      "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// What this thread has stored since is a group of its own. PTX ISA: cp.async.bulk.commit_group
__device__ __forceinline__ void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Rows of a tile, as many as the map's boxes have, to `row` on of one head: a group of its own.
template <typename Tile>
__device__ __forceinline__ void tma_store_tile(const TensorMap& map, u32 shared, int row, int head,
                                               int batch) {
#pragma unroll
  for (int panel = 0; panel < Tile::PANELS; ++panel)
    tma_store(map, shared + panel * Tile::PANEL_BYTES, panel * Tile::PANEL_COLUMNS, row, head,
              batch);
  tma_commit();
}

// Shared memory that this thread's stores read may be written again. PTX ISA: cp.async.bulk.wait_group
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// What threads have read and written in shared memory comes before what engines do there next.
// PTX ISA: fence.proxy.async
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
