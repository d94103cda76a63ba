// Whose the tiles of a product are. Grouped products have a weight for each expert of a mixture, or
// an output; how many rows are whose is read from memory when the kernel runs.
//
//   NONE    one weight: every tile is expert 0's
//   ROWS    x's rows are sorted by expert, each expert's in whole tiles   out = x weight[expert]^T
//   DEPTH   k is sorted by expert                       out[expert] = the product of expert's k alone
//
//   DEPTH is the gradient of the weights: dweight[expert] = dout^T x over expert's rows.
#pragma once
#include "gemm/tile_order.cuh"

enum class Groups { NONE, ROWS, DEPTH };

struct GroupedTile : TilePlace {
  int expert;
};

// A run of k, in elements.
struct Depth {
  int first, count;
};

template <Groups HOW>
struct GroupedOrder {
  static constexpr bool GROUPED = HOW != Groups::NONE;
  static constexpr bool OF_K = HOW == Groups::DEPTH;  // rows of operands as they lie are of k
  TileOrder tiles;                                    // DEPTH: of one expert's output
  // ROWS: the expert of every `each` rows of tiles; DEPTH: where experts' k begin, and the last ends.
  const int* owners = nullptr;
  int each = 1, experts = 1;

  __device__ __forceinline__ int count() const { return tiles.count() * (OF_K ? experts : 1); }

  __device__ __forceinline__ GroupedTile operator()(int number) const {
    if (OF_K) return {tiles(number % tiles.count()), number / tiles.count()};
    const TilePlace tile = tiles(number);
    return {tile, HOW == Groups::ROWS ? owners[tile.row / each] : 0};
  }

  // An expert's part of an array that has `size` elements for each.
  template <typename T>
  __device__ __forceinline__ static T* own(T* array, int expert, i64 size) {
    return HOW != Groups::ROWS || array == nullptr ? array : array + expert * size;
  }

  // What a tile is summed over.
  __device__ __forceinline__ Depth depth(int number, int k) const {
    if (!OF_K) return {0, k};
    const int expert = number / tiles.count(), first = owners[expert];
    return {first, owners[expert + 1] - first};
  }
};
