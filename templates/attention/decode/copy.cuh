// Keys and values of a step -> a stage of a ring, wherever they lie: in pages of 2^page_log2
// tokens, or a whole sequence in one page without a table.
#pragma once
#include "ptx/cp_async.cuh"
#include "tile/swizzle.cuh"
#include "kv/place.cuh"

// The pages of one sequence.
struct PageList {
  const int* table;  // of its pages, or null: all keys are in page `row`
  int row, page_log2;

  __device__ __forceinline__ PageList() {}
  __device__ __forceinline__ PageList(const int* page_table, int row, int width, int page_log2)
      : table(page_table == nullptr ? nullptr : page_table + wide(row, width)),
        row(row),
        page_log2(page_log2) {}
  // The page of a key.
  __device__ __forceinline__ int page(int key) const {
    return table == nullptr ? row : table[key >> page_log2];
  }
};

// Keys or values of one head; steps in elements.
template <typename T>
struct HeadPages {
  const T* base;  // of page 0, token 0
  int page_step, token_step, columns;

  __device__ __forceinline__ HeadPages() {}
  __device__ __forceinline__ HeadPages(const T* pages, int head, const Strides& strides,
                                       int columns)
      : base(pages + head * strides.head),
        page_step(static_cast<int>(strides.batch)),
        token_step(static_cast<int>(strides.row)),
        columns(columns) {}
  __device__ __forceinline__ const T* token(int page, int place) const {
    return base + (wide(page, page_step) + wide(place, token_step));
  }
};

// Who copies what of a tile of keys or values: thread t of a group has 16-byte chunk t % CHUNKS of
// row t / CHUNKS, and of every ROWS_A_PASS-th row after it.
template <typename Tile, int THREADS, typename T>
struct StepCopy {
  static constexpr int CHUNKS = Tile::PANELS * Tile::CHUNKS, ROWS_A_PASS = THREADS / CHUNKS;
  static constexpr int PASSES = Tile::ROWS / ROWS_A_PASS, CHUNK_COLUMNS = 16 / sizeof(T);
  static_assert(THREADS % CHUNKS == 0 && Tile::ROWS % ROWS_A_PASS == 0 && Tile::ROWS <= WARP_SIZE,
                "whole passes, and a lane for each row's page");
  int row0, chunk;
  u64 policy;  // keys and values are read once

  __device__ __forceinline__ explicit StepCopy(int thread)
      : row0(thread / CHUNKS), chunk(thread % CHUNKS), policy(first_to_leave()) {}
  __device__ __forceinline__ int row(int pass) const { return row0 + pass * ROWS_A_PASS; }
  __device__ __forceinline__ int target(int pass) const {
    return chunk / Tile::CHUNKS * Tile::PANEL_BYTES + Tile::offset(row(pass), chunk % Tile::CHUNKS);
  }

  // All rows; those of each RUN are in one page, and follow one another from `source(run)` on.
  template <int RUN, typename Source>
  __device__ __forceinline__ void runs(u32 tile, const HeadPages<T>& pages,
                                       const Source& source) const {
    static_assert(RUN % ROWS_A_PASS == 0, "a pass is in one run");
    const int bytes = chunk * CHUNK_COLUMNS < pages.columns ? 16 : 0;
    const i64 first = bytes == 0 ? 0 : wide(row0, pages.token_step) + chunk * CHUNK_COLUMNS;
    const i64 step = bytes == 0 ? 0 : wide(ROWS_A_PASS, pages.token_step);
#pragma unroll
    for (int run = 0; run < Tile::ROWS / RUN; ++run) {
      const T* from = source(run) + first;
#pragma unroll
      for (int pass = 0; pass < RUN / ROWS_A_PASS; ++pass, from += step)
        cp_async_16(tile + target(run * (RUN / ROWS_A_PASS) + pass), from, bytes, policy);
    }
  }

  // One row, or zeros for it.
  __device__ __forceinline__ void row(u32 tile, const HeadPages<T>& pages, int pass, bool exists,
                                      int page, int place) const {
    exists = exists && chunk * CHUNK_COLUMNS < pages.columns;
    const T* const source = exists ? pages.token(page, place) + chunk * CHUNK_COLUMNS : pages.base;
    cp_async_16(tile + target(pass), source, exists ? 16 : 0, policy);
  }
};

// Keys and values from key `first` on, a multiple of ROWS, to two tiles. `page_here` is the page of
// key first + lane % ROWS: a warp knows the pages of all its rows, and asked for them one step
// earlier. Where there is no such page, as -1 says beyond the end, a row becomes zero, and nothing
// is read for it. The copies are asynchronous.
template <typename Tile, int THREADS, typename T>
__device__ __forceinline__ void copy_step(u32 k_tile, u32 v_tile, const HeadPages<T>& k,
                                          const HeadPages<T>& v, int thread, int page_here,
                                          int page_log2, u32 num_pages, int first) {
  using Copy = StepCopy<Tile, THREADS, T>;
  constexpr int RUN = Copy::ROWS_A_PASS > 16 ? Copy::ROWS_A_PASS : 16;  // rows, in one page
  const Copy copy(thread);
  const int in_page = (1u << page_log2) - 1;
  if (in_page >= RUN - 1 && __all_sync(FULL_MASK, static_cast<u32>(page_here) < num_pages)) {
    int page[Tile::ROWS / RUN], place[Tile::ROWS / RUN];
#pragma unroll
    for (int run = 0; run < Tile::ROWS / RUN; ++run) {
      page[run] = __shfl_sync(FULL_MASK, page_here, run * RUN);
      place[run] = (first + run * RUN) & in_page;
    }
    copy.template runs<RUN>(k_tile, k, [&](int i) { return k.token(page[i], place[i]); });
    copy.template runs<RUN>(v_tile, v, [&](int i) { return v.token(page[i], place[i]); });
    return;
  }
#pragma unroll 1
  for (int pass = 0; pass < copy.PASSES; ++pass) {
    const int row = copy.row(pass), page = __shfl_sync(FULL_MASK, page_here, row);
    const bool exists = static_cast<u32>(page) < num_pages;
    copy.row(k_tile, k, pass, exists, page, (first + row) & in_page);
    copy.row(v_tile, v, pass, exists, page, (first + row) & in_page);
  }
}
