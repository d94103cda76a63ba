// A [rows, columns] piece of a strided 16-bit tensor -> a swizzled tile by way of registers, for
// GPUs without cp.async (sm_75): fetch() asks for the bytes, the loads travel while the warp
// computes, and store() waits for them and puts them into shared memory.
//
//     next.fetch(global, ...);     // loads issued, nothing waits
//     multiply(this tile);         // hides their way
//     next.store(shared);          // every warp must be done with what was there
#pragma once
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/tile_copy.cuh"

// Eight elements, of which the first `elements` (any number) exist; the others are zero.
// ALIGNED: `source` is on a 16-byte boundary.
template <bool ALIGNED, typename T>
__device__ __forceinline__ uint4 load_global_chunk(const T* __restrict__ source, int elements) {
  if (ALIGNED && elements >= 8) return *reinterpret_cast<const uint4*>(source);
  return gather_chunk(source, elements);
}

// Rows at or past `rows_left` and columns at or past `columns_left` become zero.
// ALIGNED: every row of the tensor starts on a 16-byte boundary.
template <typename Tile, int THREADS, bool ALIGNED>
struct RegisterTile {
  static constexpr int ROWS_A_PASS = THREADS / Tile::CHUNKS;
  static constexpr int PASSES = ceil_div(Tile::ROWS, ROWS_A_PASS);
  static constexpr bool WHOLE_PASSES = Tile::ROWS % ROWS_A_PASS == 0;
  static constexpr int REGISTERS = PASSES * Tile::PANELS * 4;
  uint4 chunks[PASSES][Tile::PANELS];  // this thread's: the tile is divided as by copy_tile

  template <typename T>
  __device__ __forceinline__ void fetch(const T* __restrict__ global, i64 row_stride, int rows_left,
                                        int columns_left) {
    const int thread = thread_index_again();
    const int row0 = thread / Tile::CHUNKS, column0 = thread % Tile::CHUNKS * 8;
    const T* source = global + row0 * row_stride + column0;
    if (ALIGNED && WHOLE_PASSES && rows_left >= Tile::ROWS && columns_left >= Tile::COLUMNS) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass, source += ROWS_A_PASS * row_stride)
#pragma unroll
        for (int panel = 0; panel < Tile::PANELS; ++panel)
          chunks[pass][panel] = load_global_chunk<true>(source + panel * Tile::PANEL_COLUMNS, 8);
      return;
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass, source += ROWS_A_PASS * row_stride) {
      const bool exists = row0 + pass * ROWS_A_PASS < min(rows_left, Tile::ROWS);
#pragma unroll
      for (int panel = 0; panel < Tile::PANELS; ++panel) {
        const int column = panel * Tile::PANEL_COLUMNS;
        chunks[pass][panel] = load_global_chunk<ALIGNED>(
            source + column, exists ? columns_left - column - column0 : 0);
      }
    }
  }

  __device__ __forceinline__ void store(u32 shared) const {
    const int thread = thread_index_again(), row0 = thread / Tile::CHUNKS,
              chunk = thread % Tile::CHUNKS;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int row = row0 + pass * ROWS_A_PASS;
      if (!WHOLE_PASSES && row >= Tile::ROWS) return;
#pragma unroll
      for (int panel = 0; panel < Tile::PANELS; ++panel)
        store_shared_chunk(shared + panel * Tile::PANEL_BYTES + Tile::offset(row, chunk),
                           chunks[pass][panel]);
    }
  }

  // Both at once, a few registers at a time. `flip` is XORed into every word: 0x80008000 changes
  // the signs of two fp16 or bf16.
  template <typename T>
  __device__ static __forceinline__ void copy(u32 shared, const T* __restrict__ global,
                                              i64 row_stride, int rows_left, int columns_left,
                                              u32 flip = 0) {
    const int thread = thread_index_again(), row0 = thread / Tile::CHUNKS,
              chunk = thread % Tile::CHUNKS;
    const T* source = global + row0 * row_stride + chunk * 8;
#pragma unroll 1
    for (int row = row0; row < Tile::ROWS; row += ROWS_A_PASS, source += ROWS_A_PASS * row_stride)
#pragma unroll 1
      for (int panel = 0; panel < Tile::PANELS; ++panel) {
        const int column = panel * Tile::PANEL_COLUMNS;
        const uint4 x = load_global_chunk<ALIGNED>(
            source + column, row < rows_left ? columns_left - column - chunk * 8 : 0);
        store_shared_chunk(shared + panel * Tile::PANEL_BYTES + Tile::offset(row, chunk),
                           make_uint4(x.x ^ flip, x.y ^ flip, x.z ^ flip, x.w ^ flip));
      }
  }
};
