// Keys or values of a paged sequence -> a swizzled tile, by all threads of the block: copy_tile
// (tile/tile_copy.cuh) where each row has an address of its own.
#pragma once
#include "tile/tile_copy.cuh"
#include "attention/pages.cuh"
#include "kv/storage.cuh"

// Eight neighbours on their way to shared memory, of which `elements` there are. Numbers are copied
// asynchronously where they are ALIGNED; codes (kv/storage.cuh) become T on the way, without their
// scale: each is a number of fp16 and of bf16.
template <typename T, bool ALIGNED, typename S>
__device__ __forceinline__ void copy_eight(u32 target, const S* from, int elements) {
  if constexpr (sizeof(S) == 1) {
    Elements<S, 8> codes{};
    if (ALIGNED) {
      if (elements > 0) codes = load_elements<8>(from);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i < elements) codes[i] = from[i];
    }
    Elements<T, 8> x = Quantized<S>::template decode<T>(codes, 1.f);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i >= elements) x[i] = T(0.f);
    store_shared_chunk(target, x.word);
  } else if constexpr (ALIGNED) {
    cp_async_16(target, from, elements * 2);
  } else {
    store_shared_chunk(target, gather_chunk(from, elements));
  }
}

// Keys from `first` on. Rows that there are not and columns at or past `columns` become zero. `head`:
// the head's elements of page 0, token 0; strides of a page, (a head) and a token.
template <typename T, typename Tile, int THREADS, bool ALIGNED, typename S>
__device__ __forceinline__ void copy_paged_tile(u32 shared, const S* __restrict__ head,
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
    const S* const source =
        head + page[pass] * strides.batch + pages.place(first + row) * strides.row + chunk * 8;
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel) {
      const int column = panel * Tile::PANEL_COLUMNS;
      const int elements = exists ? min(max(columns - column - chunk * 8, 0), 8) : 0;
      const u32 target = shared + panel * Tile::PANEL_BYTES + Tile::offset(row, chunk);
      copy_eight<T, ALIGNED>(target, elements > 0 ? source + column : head, elements);
    }
  }
}
