// Whose the tiles of a product are. Grouped products have a weight for each expert of a mixture, or
// an output; where experts' rows begin is read from memory when the kernel runs.
//
//   NONE    one weight: every tile is expert 0's
//   ROWS    rows of x are sorted by expert                            out = x weight[expert]^T
//   MASKED  so many rows are every expert's, of which its first ones are there
//   DEPTH   rows of both operands are of k, and sorted by expert      out[expert] = x^T weight
//
//   DEPTH is the gradient of the weights: dweight[expert] = dout^T x over expert's rows.
#pragma once
#include "gemm/tile_order.cuh"

enum class Groups { NONE, ROWS, MASKED, DEPTH };

constexpr int LEAST_ROWS = 64;  // of which experts' rows are a multiple, in tiles

// The first row of x and of out (DEPTH: of all outputs), the column of tiles, and where rows end that
// are stored: the expert's.
struct GroupedTile {
  int row, column, expert, end;
};

// A run of k, in elements.
struct Depth {
  int first, count;
};

// Tiles of BLOCK_M rows, by their numbers. AROUND: from `first_row` on, and then those before it; m
// and first_row are multiples of BLOCK_M. Of ROWS all tiles of an expert come before those of the
// next, so that its weight is read once; how many there are shows when `is_beyond` the last one. A
// number may not be less than the one before. By whole warps.
template <Groups HOW, int BLOCK_M, bool AROUND = false>
struct GroupedOrder {
  static constexpr bool GROUPED = HOW != Groups::NONE;
  static constexpr bool OF_K = HOW == Groups::DEPTH;
  // Where a piece of k begins: in steps of 64, or in slices of 16 of which experts have some.
  static constexpr int STEP_OF_FIRST = OF_K ? 16 : 64;
  static constexpr bool MASKED = HOW == Groups::MASKED, OF_ROWS = HOW == Groups::ROWS || MASKED;
  int m, columns, group;  // rows; tiles beside each other; rows of tiles taken together
  // [experts + 1]: where experts' rows begin, and the last ones end. MASKED: [experts], how many
  // of an expert's are there.
  const int* offsets = nullptr;
  int experts = 1;
  int first_row = 0;
  // Of ROWS a lane knows one of 32 experts: where its tiles begin and end, and its rows.
  int base = -WARP_SIZE, known = 0;  // the first of them; tiles of all experts so far
  int first = 0, next = 0, row = 0, row_end = 0;

  // ROWS: no end is known.
  __device__ __forceinline__ int count() const {
    if (OF_ROWS) return 0x7fffffff;
    return ceil_div(m, BLOCK_M) * columns * (OF_K ? experts : 1);
  }

  __device__ __forceinline__ GroupedTile operator()(int number) {
    if (OF_ROWS) return of_expert(number);
    const TileOrder order{ceil_div(m, BLOCK_M), columns, group};
    const int own = OF_K ? number / order.count() : 0;
    const TilePlace tile = order(number - own * order.count());
    const int row = tile.row * BLOCK_M + (AROUND ? first_row : 0);
    return {AROUND && row >= m ? row - m : row, tile.column, own, m};
  }

  __device__ __forceinline__ bool is_beyond(const GroupedTile& tile) const {
    return OF_ROWS && tile.expert == experts;
  }

  // What a tile is summed over.
  __device__ __forceinline__ Depth depth(int number, int k) const {
    if (!OF_K) return {0, k};
    const int own = number / (ceil_div(m, BLOCK_M) * columns);
    return {offsets[own], offsets[own + 1] - offsets[own]};
  }

  // Slices of 16 that the last 64 of its k have; 0: all.
  __device__ __forceinline__ int last_slices(int number) const {
    return OF_K ? depth(number, 0).count % 64 / 16 : 0;
  }

  // An expert's part of an array that has `size` elements for each.
  template <typename T>
  __device__ __forceinline__ static T* own(T* array, int expert, i64 size) {
    return !OF_ROWS || array == nullptr ? array : array + expert * size;
  }

 private:
  __device__ __forceinline__ GroupedTile of_expert(int number) {
    while (number >= known) {
      base += WARP_SIZE;
      if (base >= experts) return {0, 0, experts, 0};
      learn();
    }
    const int lane = __ffs(__ballot_sync(FULL_MASK, first <= number && number < next)) - 1;
    const int begin = __shfl_sync(FULL_MASK, row, lane),
              end = __shfl_sync(FULL_MASK, row_end, lane);
    const TileOrder order{ceil_div(end - begin, BLOCK_M), columns, group};
    const TilePlace tile = order(number - __shfl_sync(FULL_MASK, first, lane));
    return {begin + tile.row * BLOCK_M, tile.column, base + lane, end};
  }

  // What this lane knows: of `expert`, or of nobody.
  __device__ __forceinline__ void set_rows(int expert) {
    if (MASKED) {
      const int capacity = m / experts;
      row = min(expert, experts) * capacity, row_end = row;
      if (expert < experts) row_end += min(round_up(offsets[expert], LEAST_ROWS), capacity);
    } else {
      row = offsets[min(expert, experts)], row_end = offsets[min(expert + 1, experts)];
    }
  }

  // The 32 experts from `base` on.
  __device__ __forceinline__ void learn() {
    const int lane = threadIdx.x % WARP_SIZE;
    set_rows(base + lane);
    const int own = ceil_div(row_end - row, BLOCK_M) * columns;
    next = own;
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const int before = __shfl_up_sync(FULL_MASK, next, step);
      next += lane >= step ? before : 0;
    }
    next += known, first = next - own;
    known = __shfl_sync(FULL_MASK, next, WARP_SIZE - 1);
  }
};
