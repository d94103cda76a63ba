// A [rows, columns] piece of a strided 16-bit tensor -> a swizzled tile, by all threads of the
// block.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/row_order.cuh"
#include "tile/swizzle.cuh"

// Eight elements, of which the first `elements` exist, packed as they lie in memory.
template <typename T>
__device__ __forceinline__ uint4 gather_chunk(const T* source, int elements) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(source) + 2 * i;
    const u32 low = 2 * i < elements ? bits[0] : 0, high = 2 * i + 1 < elements ? bits[1] : 0;
    words[i] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__device__ __forceinline__ void scatter_chunk(T* target, uint4 value, int elements) {
  const u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < elements)
      reinterpret_cast<unsigned short*>(target)[i] =
          static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
}

// Rows at or past `rows_left` and columns at or past `columns_left` become zero.
// ALIGNED: every row of the tensor starts on a 16-byte boundary, and the copy is asynchronous
// (commit and wait are the caller's). Otherwise elements are fetched one by one and stored at once.
//
// Thread t copies chunk t % CHUNKS of rows t / CHUNKS, t / CHUNKS + ROWS_A_PASS, ...: consecutive
// threads read consecutive bytes. A whole tile costs one pointer step and one copy instruction a
// panel and pass; only ragged tiles pay for bounds. Row `Order::row(i)` comes to place i of the
// tile. ANEW: places are computed at each call rather than kept in registers through a loop.
template <typename Tile, int THREADS, bool ALIGNED, typename Order = InOrder, bool ANEW = false,
          typename T>
__device__ __forceinline__ void copy_tile(u32 shared, const T* __restrict__ global, i64 row_stride,
                                          int rows_left, int columns_left) {
  constexpr int ROWS_A_PASS = THREADS / Tile::CHUNKS;
  constexpr bool WHOLE_PASSES = Tile::ROWS % ROWS_A_PASS == 0;
  const u32 thread = ANEW ? thread_index_again() : threadIdx.x;
  const int row0 = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS;
  const auto step = [](int row) { return Order::row(row + ROWS_A_PASS) - Order::row(row); };
  const T* source = global + Order::row(row0) * row_stride + chunk * 8;
  if (ALIGNED && WHOLE_PASSES && rows_left >= Tile::ROWS && columns_left >= Tile::COLUMNS) {
#pragma unroll
    for (int pass = 0; pass * ROWS_A_PASS < Tile::ROWS; ++pass) {
#pragma unroll
      for (int panel = 0; panel < Tile::PANELS; ++panel)
        cp_async_16(
            shared + panel * Tile::PANEL_BYTES + Tile::offset(row0 + pass * ROWS_A_PASS, chunk),
            source + panel * Tile::PANEL_COLUMNS);
      source += step(pass * ROWS_A_PASS) * row_stride;
    }
    return;
  }
#pragma unroll 1
  for (int row = row0; row < Tile::ROWS; row += ROWS_A_PASS) {
#pragma unroll 1
    for (int panel = 0; panel < Tile::PANELS; ++panel) {
      const int column = panel * Tile::PANEL_COLUMNS;
      const int elements =
          Order::row(row) < rows_left ? min(max(columns_left - column - chunk * 8, 0), 8) : 0;
      const u32 target = shared + panel * Tile::PANEL_BYTES + Tile::offset(row, chunk);
      const T* chunk_source = elements > 0 ? source + column : global;
      if constexpr (ALIGNED) {
        cp_async_16(target, chunk_source, elements * 2);
      } else {
        store_shared_chunk(target, gather_chunk(chunk_source, elements));
      }
    }
    source += step(row) * row_stride;
  }
}

// The way back for one warp: ROWS rows of a tile at `shared` (the address of its first row in the
// first panel) -> a strided tensor, whole 16-byte chunks where ALIGNED, else single elements.
template <typename Tile, int ROWS, bool ALIGNED, typename Order = InOrder, typename T>
__device__ __forceinline__ void store_tile(T* __restrict__ global, i64 row_stride, u32 shared,
                                           int lane, int rows_left, int columns_left) {
#pragma unroll
  for (int i = lane; i < ROWS * Tile::PANELS * Tile::CHUNKS; i += WARP_SIZE) {
    const int place = i / (Tile::PANELS * Tile::CHUNKS), row = Order::row(place);
    const int column = i % (Tile::PANELS * Tile::CHUNKS);
    const int panel = column / Tile::CHUNKS, chunk = column % Tile::CHUNKS;
    const int elements = min(columns_left - column * 8, 8);
    if (row >= rows_left || elements <= 0) continue;
    const uint4 value =
        load_shared_chunk(shared + panel * Tile::PANEL_BYTES + Tile::offset(place, chunk));
    T* target = global + row * row_stride + column * 8;
    if (ALIGNED && elements == 8) {
      store_global_chunk(target, value);
    } else {
      scatter_chunk(target, value, elements);
    }
  }
}
