// In which order the tiles of a product are taken: down a few rows of tiles, then on to the next
// column, so that tiles that are worked on at the same time share rows and columns in L2.
//
//   group 2      columns  0  1  2  3
//     row 0               0  2  4  6
//     row 1               1  3  5  7
//     row 2               8  9 10 11      the last group may have fewer rows
#pragma once
#include "prelude.cuh"

struct TilePlace {
  int row, column;
};

struct TileOrder {
  int rows, columns, group;  // of tiles; rows that are taken together

  __device__ __forceinline__ int count() const { return rows * columns; }

  __device__ __forceinline__ TilePlace operator()(int number) const {
    const int first = number / (group * columns) * group;
    const int within = number - first * columns, height = min(group, rows - first);
    return {first + within % height, within / height};
  }
};
