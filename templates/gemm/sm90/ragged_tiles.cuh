// Tiles whose rows of x are columns of wgmma: as many as an expert has, shared out evenly, and not
// always the same number (gemm/ragged.cu).
//
//   PARTS 2, 304 rows at most       expert of 272 rows     expert of 336 rows            of 16
//                                   272 = 2 x 136          176 = 2 x 88, 160 = 2 x 80     32 = 2 x 16
//
//   columns   of one product: 16, 32, 48, 64, and by eights up to MOST_COLUMNS
#pragma once
#include "gemm/groups.cuh"

constexpr int MOST_COLUMNS = 160, MOST_OF_HALF = 152;  // of half a tile, beside four stages

// The least number of columns there are products for, that is not less.
__device__ __forceinline__ int ragged_columns(int wanted) {
  return wanted > 64 ? round_up(wanted, 8) : max(round_up(wanted, 16), 16);
}

// `rows` from `row` on are the tile's, of which those before `end` are the expert's.
struct RaggedTile {
  int row, rows, end, column, expert;
};

// A tile has the columns of PARTS products.
template <int PARTS>
struct RaggedOrder {
  static constexpr int MOST = PARTS == 1 ? MOST_COLUMNS : PARTS * MOST_OF_HALF;
  GroupedOrder<Groups::ROWS, MOST> order;

  // Whether there is a tile of this number. By whole warps.
  __device__ __forceinline__ bool take(int number, RaggedTile& tile) {
    const GroupedTile whole = order(number);
    if (order.is_beyond(whole)) return false;
    const int begin = order.offsets[whole.expert], rows = whole.end - begin;
    const int each = columns_for(ceil_div(rows, ceil_div(rows, MOST)));
    tile.row = begin + (whole.row - begin) / MOST * each;
    tile.rows = min(columns_for(whole.end - tile.row), each);
    tile.end = min(tile.row + each, whole.end);
    tile.column = whole.column, tile.expert = whole.expert;
    return true;
  }

 private:
  // Of all parts.
  __device__ __forceinline__ static int columns_for(int rows) {
    return PARTS * ragged_columns(ceil_div(rows, PARTS));
  }
};
