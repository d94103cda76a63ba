// Tiles of a product's operands in shared memory, as TMA brings them and wgmma reads them (sm_90a):
// 64 of k, in panels of 64 elements (128 bytes) with the 128-byte swizzle.
//
//   K-major (k contiguous in memory)     one panel [rows][64 k]         16 k further on: 32 bytes
//   other   (rows contiguous)            panels [64 k][64 rows]         16 k further on: 2048 bytes
//
// Of the last panel a tile may have a part only; all of it is loaded: a box of fewer rows would be
// swizzled in another way.
//
// A tile may be two halves of rows, which come from two places (gate and up) or are fetched by two
// blocks of a cluster.
//
// Rows that the array has not are not asked for: TMA would fill them with zeros, more slowly than it
// copies rows. Where fewer than a tile's are left, a box of its own map brings them, as many as
// there are; where rows are contiguous, fewer panels. What stands in the others' place is of no
// account, since no sum that is stored depends on it.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"
#include "ptx/proxy_fence.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int BLOCK_K = 64, PANEL = 64;

// Of an array: boxes of as many rows as a tile (or half of one) has, and of those that the last one
// has, rounded up to 8.
struct OperandMaps {
  const TensorMap &whole, &last;

  __device__ __forceinline__ void prefetch() const { tma_prefetch(whole), tma_prefetch(last); }
};

template <int ROWS_, bool K_MAJOR_>
struct OperandTile {
  static constexpr int ROWS = ROWS_;
  static constexpr bool K_MAJOR = K_MAJOR_;
  static constexpr int GROUP = K_MAJOR ? 8 : PANEL;  // of rows, that are loaded together
  static constexpr int BYTES = round_up(ROWS, GROUP) * BLOCK_K * 2;
  static constexpr int PANEL_BYTES = BLOCK_K * PANEL * 2;  // where not K-major
  static constexpr int STEP = (K_MAJOR ? 32 : 2048) >> 4;  // of 16 k, in a descriptor's units
  static_assert(ROWS % 16 == 0, "whole rows of the swizzle");

  // Descriptor of the rows from `row` on: a multiple of 8, or of 64 where not K-major.
  __device__ __forceinline__ static u64 operand(u32 tile, int row) {
    return wgmma_tile(tile + row * (BLOCK_K * 2), PANEL_BYTES);
  }

  // How many of COUNT rows are asked for where the array has `left`: groups of 8, or panels.
  template <int COUNT>
  __device__ __forceinline__ static int asked(int left) {
    return min(max(ceil_div(left, GROUP), 0), ceil_div(COUNT, GROUP)) * GROUP;
  }

  // `asked` of COUNT rows of the tile, from FIRST on, out of row `row` of matrix `matrix` and `k` on.
  // `mask` 0: to this block; else to the same place in all blocks of the cluster that it names.
  template <int FIRST, int COUNT>
  __device__ __forceinline__ static void load(u32 tile, const OperandMaps& maps, u32 barrier,
                                              int row, int asked, int k, int matrix, u16 mask) {
    const u32 to = tile + FIRST * (BLOCK_K * 2);
    if constexpr (K_MAJOR) {
      if (asked == COUNT) {
        box(to, maps.whole, barrier, k, row, matrix, mask);
      } else if (asked > 0) {
        box(to, maps.last, barrier, k, row, matrix, mask);
      }
    } else {
#pragma unroll
      for (int panel = 0; panel < ceil_div(COUNT, PANEL); ++panel)
        if (panel * PANEL < asked)
          box(to + panel * PANEL_BYTES, maps.whole, barrier, row + panel * PANEL, k, matrix, mask);
    }
  }

  // NaN in rows `first` to `end` of a tile, by a block's threads: where memory is checked, what
  // nothing is loaded into must not be what nobody wrote.
  __device__ __forceinline__ static void mark(u32 tile, int first, int end) {
    for (int i = first * 8 + threadIdx.x; i < round_up(end, GROUP) * 8; i += blockDim.x)
      store_shared_chunk(tile + i * 16, make_uint4(~0u, ~0u, ~0u, ~0u));
    proxy_fence();
  }

 private:
  __device__ __forceinline__ static void box(u32 to, const TensorMap& map, u32 barrier, int x,
                                             int y, int z, u16 mask) {
    if (mask == 0) {
      tma_load(to, map, barrier, x, y, z, 0);
    } else {
      tma_load_multicast(to, map, barrier, x, y, z, 0, mask);
    }
  }
};
