// What the blocks of a product with few rows of each expert work on, on the layout of moe_regroup:
// tiles of `block_size` places have one expert, and its rows stand first in them.
//
//   expert_ids        2                 0                -1 (behind the last one)
//   places       | a b c . . . . . | d . . . . . . . | . . . . . . . . |
//   parts          abc x each tile   d x each tile                        each block takes every so
//                  of its columns    of its columns                       manieth
//
// A tile with more than ROWS rows is as many parts as it takes, and its weight is read again.
#pragma once
#include "prelude.cuh"

// `rows` places from `place` on, all of one expert; `column` counts tiles of out's columns.
struct ExpertPart {
  int expert, place, rows, column;
};

template <int ROWS>
struct ExpertWalk {
  const int *expert_ids, *offsets, *counts;  // see moe_regroup
  int block_size, columns;                   // places of a tile; tiles beside each other
  int end;                                   // columns * tiles of places
  int number, row = 0;                       // the tile, and the next of its rows

  // The next part of this block, or false.
  __device__ __forceinline__ bool take(ExpertPart& part) {
    for (; number < end; number += gridDim.x, row = 0) {
      const int tile = number / columns, expert = expert_ids[tile], place = tile * block_size + row;
      if (expert < 0 || row >= block_size) continue;
      const int left = min(offsets[expert] + counts[expert] - place, block_size - row);
      if (left <= 0) continue;
      part = {expert, place, min(left, ROWS), number - tile * columns};
      row += ROWS;
      return true;
    }
    return false;
  }
};
