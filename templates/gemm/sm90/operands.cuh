// Tiles of a product's operands in shared memory, as TMA brings them and wgmma reads them (sm_90a):
// 64 of k, in panels of 64 elements (128 bytes) with the 128-byte swizzle.
//
//   K-major (k contiguous in memory)     one panel [rows][64 k]         16 k further on: 32 bytes
//   other   (rows contiguous)            panels [64 k][64 rows]         16 k further on: 2048 bytes
//
// A tile is two halves of rows, which may come from two places (gate and up) or be fetched by two
// blocks of a cluster.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int BLOCK_K = 64, PANEL = 64;

template <int ROWS_, bool K_MAJOR_>
struct OperandTile {
  static constexpr int ROWS = ROWS_;
  static constexpr bool K_MAJOR = K_MAJOR_;
  static constexpr int BYTES = ROWS * BLOCK_K * 2;
  static constexpr int PANEL_BYTES = BLOCK_K * PANEL * 2;  // where not K-major
  static constexpr int STEP = (K_MAJOR ? 32 : 2048) >> 4;  // of 16 k, in a descriptor's units
  static_assert(ROWS % (K_MAJOR ? 16 : PANEL) == 0, "whole rows of the swizzle, or whole panels");

  // Descriptor of the rows from `row` on: a multiple of 8, or of 64 where not K-major.
  __device__ __forceinline__ static u64 operand(u32 tile, int row) {
    return wgmma_tile(tile + row * (BLOCK_K * 2), PANEL_BYTES);
  }

  // COUNT rows of the tile, from FIRST on, out of row `row` of the array and `k` on. `mask` 0: to
  // this block; else to the same place in all blocks of the cluster that it names.
  template <int FIRST, int COUNT>
  __device__ __forceinline__ static void load(u32 tile, const TensorMap& map, u32 barrier, int row,
                                              int k, u16 mask) {
    const u32 to = tile + FIRST * (BLOCK_K * 2);
    if constexpr (K_MAJOR) {
      box(to, map, barrier, k, row, mask);
    } else {
#pragma unroll
      for (int panel = 0; panel < COUNT / PANEL; ++panel)
        box(to + panel * PANEL_BYTES, map, barrier, row + panel * PANEL, k, mask);
    }
  }

 private:
  __device__ __forceinline__ static void box(u32 to, const TensorMap& map, u32 barrier, int x,
                                             int y, u16 mask) {
    if (mask == 0) {
      tma_load(to, map, barrier, x, y, 0, 0);
    } else {
      tma_load_multicast(to, map, barrier, x, y, 0, 0, mask);
    }
  }
};
