// mma fragments out of swizzled tiles. A reader keeps one offset a lane; every address is
// that register, one XOR and a constant.
#pragma once
#include "tile/swizzle.cuh"

// Which 16x16 block of which operand the four 8x8 matrices of one ldmatrix.x4 are:
//
//   ROW_MAJOR  rows 0-7 | 8-15 of columns 0-7, then of columns 8-15: an A fragment (Q), or, with
//              .trans, the B fragments of two n8 blocks from a [k][n] tile (V)
//   COL_MAJOR  columns 0-7 | 8-15 of rows 0-7, then of rows 8-15: the B fragments of two n8 blocks
//              from an [n][k] tile (K)
enum class BlockOrder { ROW_MAJOR, COL_MAJOR };

template <typename Tile, BlockOrder ORDER>
struct FragmentReader {
  static constexpr int PAIRS = Tile::CHUNKS / 2;  // 16-column steps in a panel
  u32 lane_offset;                                // of this lane's chunk in the tile's first block

  __device__ __forceinline__ explicit FragmentReader(int lane) {
    const int row = ORDER == BlockOrder::ROW_MAJOR ? lane % 16 : lane % 8 + (lane / 16) * 8;
    lane_offset = Tile::offset(row, ORDER == BlockOrder::ROW_MAJOR ? lane / 16 : (lane / 8) % 2);
  }

  // The 16x16 block at rows 16 * row_block, columns 16 * column_block of the tile at `base` (a
  // multiple of 128). Two chunks to the right is one XOR: (chunk + 2p) ^ turn = (chunk ^ turn) ^ 2p
  // for chunk < 2.
  __device__ __forceinline__ u32 address(u32 base, int row_block, int column_block) const {
    return ((base + lane_offset) ^ (column_block % PAIRS << 5)) +
           column_block / PAIRS * Tile::PANEL_BYTES + row_block * 16 * Tile::ROW_BYTES;
  }
};

template <typename Tile>
using RowReader = FragmentReader<Tile, BlockOrder::ROW_MAJOR>;
template <typename Tile>
using ColumnReader = FragmentReader<Tile, BlockOrder::COL_MAJOR>;
