// Keys and values of a step -> a stage of a ring, wherever they lie: in pages of 2^page_log2
// tokens, or a whole sequence in one page without a table.
#pragma once
#include "device/cp_async.cuh"
#include "device/kv_place.cuh"
#include "device/swizzle.cuh"

// The pages of one sequence.
struct PageList {
  const int* table;  // of its pages, or null: all keys are in page `row`
  int row, page_log2;

  __device__ __forceinline__ PageList(const int* page_table, int row, int width, int page_log2)
      : table(page_table == nullptr ? nullptr : page_table + wide(row, width)),
        row(row),
        page_log2(page_log2) {}
  // The page of a key.
  __device__ __forceinline__ int page(int key) const {
    return table == nullptr ? row : table[key >> page_log2];
  }
};

// Keys or values of one head, in bytes.
struct HeadPages {
  const char* base;  // of page 0, token 0
  i64 page_step;
  int token_step, columns;

  template <typename T>
  __device__ __forceinline__ HeadPages(const T* head, const Strides& strides, int columns)
      : base(reinterpret_cast<const char*>(head)),
        page_step(strides.batch * static_cast<int>(sizeof(T))),
        token_step(static_cast<int>(strides.row) * static_cast<int>(sizeof(T))),
        columns(columns * static_cast<int>(sizeof(T))) {}
  __device__ __forceinline__ const char* token(int page, int place) const {
    return base + page * page_step + wide(place, token_step);
  }
};

// ROWS keys, and as many values, from key `first` on, those before `end`; all others become zero,
// and their memory is not touched. `page_here` is the page of key first + lane % ROWS: a warp knows
// the pages of all its rows, and asked for them one step earlier. The copies are asynchronous.
//
// Thread t of the group copies 16-byte chunk t % CHUNKS of row t / CHUNKS, and of every
// ROWS_A_PASS-th row after it.
template <typename Tile, int THREADS>
__device__ __forceinline__ void copy_step(u32 k_tile, u32 v_tile, const HeadPages& k,
                                          const HeadPages& v, int thread, int page_here,
                                          int page_log2, u32 num_pages, int first, int end) {
  constexpr int CHUNKS = Tile::PANELS * Tile::CHUNKS, ROWS_A_PASS = THREADS / CHUNKS;
  static_assert(THREADS % CHUNKS == 0 && Tile::ROWS % ROWS_A_PASS == 0 && Tile::ROWS <= WARP_SIZE,
                "whole passes, and a lane for each row's page");
  const int row0 = thread / CHUNKS, chunk = thread % CHUNKS;
  const int panel = chunk / Tile::CHUNKS * Tile::PANEL_BYTES;
  const int in_page = (1u << page_log2) - 1;
  const bool has_k = chunk * 16 < k.columns, has_v = chunk * 16 < v.columns;
#pragma unroll
  for (int pass = 0; pass < Tile::ROWS / ROWS_A_PASS; ++pass) {
    const int row = row0 + pass * ROWS_A_PASS;
    const int page = __shfl_sync(FULL_MASK, page_here, row);
    const bool exists = first + row < end && static_cast<u32>(page) < num_pages;
    const int place = (first + row) & in_page;
    const int target = panel + Tile::offset(row, chunk % Tile::CHUNKS);
    const bool k_exists = exists && has_k, v_exists = exists && has_v;
    cp_async_16(k_tile + target, k_exists ? k.token(page, place) + chunk * 16 : k.base,
                k_exists ? 16 : 0);
    cp_async_16(v_tile + target, v_exists ? v.token(page, place) + chunk * 16 : v.base,
                v_exists ? 16 : 0);
  }
}
