// Whole tiles of SwizzledTile's layout (swizzle.cuh) by TMA (sm_90): a box for each panel of 64
// columns, since a box row is 128 bytes with the 128-byte swizzle. Tiles start at multiples of
// 1024.
//
//   tile in shared memory        panel 0      panel 1  ...        each [rows][64], chunk c of row r
//   tensor                       columns      columns             at chunk place c ^ (r % 8)
//                                0 .. 63      64 .. 127
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

// Rows from `row` on, of one head, to `shared`; the bytes count on `barrier`. By one thread.
template <typename Tile>
__device__ __forceinline__ void tma_load_tile(u32 shared, const TensorMap& map, u32 barrier,
                                              int row, int head, int batch) {
  mbarrier_expect(barrier, Tile::BYTES);
#pragma unroll
  for (int panel = 0; panel < Tile::PANELS; ++panel)
    tma_load(shared + panel * Tile::PANEL_BYTES, map, barrier, panel * Tile::PANEL_COLUMNS, row,
             head, batch);
}

// Rows of a tile, as many as the map's boxes have, to `row` on of one head: a group of its own.
template <typename Tile>
__device__ __forceinline__ void tma_store_tile(const TensorMap& map, u32 shared, int row, int head,
                                               int batch) {
#pragma unroll
  for (int panel = 0; panel < Tile::PANELS; ++panel)
    tma_store(map, shared + panel * Tile::PANEL_BYTES, panel * Tile::PANEL_COLUMNS, row, head,
              batch);
  bulk_commit();
}
