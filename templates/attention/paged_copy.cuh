// Keys or values of a paged sequence -> a swizzled tile, by all threads of the block: copy_tile
// (tile/tile_copy.cuh) where each row has an address of its own.
#pragma once
#include "tile/tile_copy.cuh"
#include "attention/pages.cuh"

// Keys from `first` on. Rows that there are not and columns at or past `columns` become zero. `head`:
// the head's elements of page 0, token 0; strides of a page, (a head) and a token.
template <typename Tile, int THREADS, bool ALIGNED, typename T>
__device__ __forceinline__ void copy_paged_tile(u32 shared, const T* __restrict__ head,
                                                const Strides& strides, const SequencePages& pages,
                                                int first, int columns) {
  constexpr int ROWS_A_PASS = THREADS / Tile::CHUNKS, PASSES = ceil_div(Tile::ROWS, ROWS_A_PASS);
  const int row0 = threadIdx.x / Tile::CHUNKS, chunk = threadIdx.x % Tile::CHUNKS;
  int page[PASSES];  // all asked for before the first is waited for
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
    page[pass] = pages.page(first + row0 + pass * ROWS_A_PASS);
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = row0 + pass * ROWS_A_PASS;
    if (Tile::ROWS % ROWS_A_PASS != 0 && row >= Tile::ROWS) break;
    const bool exists = pages.has(page[pass]);
    const T* const source =
        head + page[pass] * strides.batch + pages.place(first + row) * strides.row + chunk * 8;
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel) {
      const int column = panel * Tile::PANEL_COLUMNS;
      const int elements = exists ? min(max(columns - column - chunk * 8, 0), 8) : 0;
      const u32 target = shared + panel * Tile::PANEL_BYTES + Tile::offset(row, chunk);
      const T* const from = elements > 0 ? source + column : head;
      if constexpr (ALIGNED) {
        cp_async_16(target, from, elements * 2);
      } else {
        store_shared_chunk(target, gather_chunk(from, elements));
      }
    }
  }
}
