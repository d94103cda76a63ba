// The residual of a product on sm_90: while the products run, `cp.async` brings it to where out will
// be staged; there its sum with what the activation gave takes its place.
//
//   k           0 ................................ K     epilogue
//   residual    asked for, comes ....                    box 0: read, add, write, TMA   box 1 ...
//
// So no load waits for another, and whole rows are read, 16 bytes a lane.
#pragma once
#include "ptx/cp_async.cuh"
#include "tile/swizzle.cuh"

// [rows][16 columns]: the chunks of eight rows lie in different banks.
struct NarrowBox {
  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * 32 + ((chunk ^ (row >> 2 & 1)) << 4);
  }
};

// Lanes wait for their own copies (cp_async_wait). Zeros for what is not there.
template <typename Out>
struct Residual {
  const Out* array;  // [m, n], rows `stride` elements apart
  i64 stride;
  int rows, columns;  // that there are

  // Elements `row`, `column` and the seven behind it, of which those before `end` are wanted.
  __device__ __forceinline__ void copy(u32 to, int row, int column, int end) const {
    const int there = row < rows ? min(max(min(end, columns) - column, 0), 8) : 0;
    cp_async_16(to, there > 0 ? array + row * stride + column : array, there * sizeof(Out));
  }

  // 16 rows and COLUMNS columns from `row` and `column` on, to boxes the first of which is at `box`.
  template <typename Staged, int COLUMNS>
  __device__ __forceinline__ void fetch(u32 box, int lane, int row, int column) const {
    constexpr int CHUNKS = Staged::CHUNKS, AT_ONCE = WARP_SIZE / CHUNKS;
    const int own_row = lane / CHUNKS, chunk = lane % CHUNKS;
#pragma unroll
    for (int first = 0; first < COLUMNS; first += Staged::COLUMNS, box += Staged::BYTES)
#pragma unroll
      for (int i = 0; i < Staged::ROWS; i += AT_ONCE)
        copy(box + Staged::offset(own_row + i, chunk), row + own_row + i,
             column + first + chunk * 8, column + COLUMNS);
  }

  // ROWS rows and 16 columns, to a NarrowBox.
  template <int ROWS>
  __device__ __forceinline__ void fetch_narrow(u32 box, int lane, int row, int column) const {
    const int own_row = lane / 2, chunk = lane % 2;
#pragma unroll
    for (int i = 0; i < ROWS; i += WARP_SIZE / 2)
      copy(box + NarrowBox::offset(own_row + i, chunk), row + own_row + i, column + chunk * 8,
           column + 16);
  }
};
