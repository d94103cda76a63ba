// Tiles of fp32 operands in shared memory.
#pragma once
#include "tile/swizzle.cuh"

// [k][outer]. PAD: floats between rows that nobody reads.
template <int OUTER, int BLOCK_K, int PAD = 0>
struct FloatTile {
  static constexpr int ROWS = BLOCK_K, COLUMNS = OUTER, PANEL_COLUMNS = COLUMNS, PANELS = 1;
  static constexpr int CHUNKS = COLUMNS / 4, ROW_BYTES = 4 * (COLUMNS + PAD);
  static constexpr int BYTES = ROWS * ROW_BYTES, PANEL_BYTES = BYTES;
  // What is XORed to the number of a chunk.
  __device__ __forceinline__ static constexpr int turn(int row) { return 0; }
  __device__ __forceinline__ static constexpr int offset(int row, int chunk) {
    return row * ROW_BYTES + chunk * 16;
  }
};

// The same, for those who write four k of two chunks at a time.
template <int OUTER, int BLOCK_K>
struct TransposedFloats : FloatTile<OUTER, BLOCK_K> {
  using Base = FloatTile<OUTER, BLOCK_K>;
  __device__ __forceinline__ static constexpr int turn(int row) { return row / 4 % 4 * 2; }
  __device__ __forceinline__ static constexpr int offset(int row, int chunk) {
    return Base::offset(row, chunk ^ turn(row));
  }
};

// [outer][k], swizzled as a tile of 16-bit elements of twice the width is.
template <int OUTER, int BLOCK_K>
struct SwizzledFloats : SwizzledTile<OUTER, 2 * BLOCK_K> {
  using Halves = SwizzledTile<OUTER, 2 * BLOCK_K>;
  static constexpr int COLUMNS = BLOCK_K, PANEL_COLUMNS = Halves::PANEL_COLUMNS / 2;
};
