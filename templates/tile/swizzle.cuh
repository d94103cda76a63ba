// A tile of 16-bit elements in shared memory that cp.async and ldmatrix both use without bank
// conflicts.
//
// The tile's columns are cut into panels of 64 elements (128 bytes, all 32 banks); a panel holds
// its rows one under another, and the 16-byte chunk c of row r lies at chunk position c ^ (r % 8):
//
//        chunk position   0  1  2  3  4  5  6  7         ldmatrix reads one column of chunks over
//   row 0                 0  1  2  3  4  5  6  7         eight rows: with the XOR they lie in eight
//   row 1                 1  0  3  2  5  4  7  6         different positions, so in 32 different
//   row 2                 2  3  0  1  6  7  4  5         banks. Without it all eight would share
//   row 3                 3  2  1  0  7  6  5  4         four banks and take eight turns.
//   ...
//
// Tiles whose width is no multiple of 64 use panels of 32 elements (64 bytes): two rows share one
// 128-byte line, and the XOR is with (r / 2) % 4.
#pragma once
#include "prelude.cuh"

template <int ROWS_, int COLUMNS_>
struct SwizzledTile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr int PANEL_COLUMNS = COLUMNS % 64 == 0 ? 64 : 32;
  static constexpr int PANELS = COLUMNS / PANEL_COLUMNS;
  static constexpr int CHUNKS = PANEL_COLUMNS / 8;  // 16-byte chunks in a panel's row
  static constexpr int ROW_BYTES = PANEL_COLUMNS * 2;
  static constexpr int PANEL_BYTES = ROWS * ROW_BYTES;
  static constexpr int BYTES = PANELS * PANEL_BYTES;
  static_assert(COLUMNS % PANEL_COLUMNS == 0, "the width is padded to whole panels");
  static_assert(ROWS % 8 == 0, "the XOR pattern repeats every eight rows");

  // Byte offset of chunk `chunk` of row `row` in the first panel; add panel * PANEL_BYTES.
  __device__ static __forceinline__ int offset(int row, int chunk) {
    const int turn = PANEL_COLUMNS == 64 ? row & 7 : (row >> 1) & 3;
    return row * ROW_BYTES + ((chunk ^ turn) << 4);
  }
};
