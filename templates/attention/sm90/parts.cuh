// Few queries of many keys on sm_90. Work for all SMs is made of both:
//
//   parts   a tile of queries sees its keys in parts, each by whoever draws it; what each finds is
//           put together by another kernel (attention/combine.cu), in the order of the keys.
//   heads   of one group read the same keys: HEADS of them share a tile of queries, each with
//           ROWS of its rows.
//
//     tile row   0 .. ROWS - 1     ROWS .. 2 ROWS - 1     ...
//     query      q0 .. of head h   q0 .. of head h + 1
#pragma once
#include "tile/tma_tile.cuh"
#include "attention/sm90/work.cuh"

// The tiles of keys that a part of them has. A part without any has the tile behind the last, of
// which nothing is seen.
template <int BLOCK_Q, int BLOCK_K>
struct PartSpan : CausalSpan<BLOCK_Q, BLOCK_K> {
  int first;

  __device__ __forceinline__ PartSpan(const CausalSpan<BLOCK_Q, BLOCK_K>& all, int part, int parts)
      : CausalSpan<BLOCK_Q, BLOCK_K>(all), first(share(all.end, part, parts)) {
    const int next = share(all.end, part + 1, parts);
    if (first == next) first = all.end;
    this->end = max(next, first + 1);
  }
  static __device__ __forceinline__ int share(int tiles, int part, int parts) {
    return static_cast<int>(static_cast<i64>(tiles) * part / parts);
  }
};

template <int BLOCK_Q, int BLOCK_K>
struct SpanOf<PartSpan<BLOCK_Q, BLOCK_K>> {
  static constexpr bool PAGED = false, PARTED = true;
  SpanOf<CausalSpan<BLOCK_Q, BLOCK_K>> all;
  int parts;

  __device__ __forceinline__ PartSpan<BLOCK_Q, BLOCK_K> operator()(
      const WorkItem<BLOCK_Q>& place) const {
    return {all(place), place.part, parts};
  }
};

// The rows from `row` on of HEADS heads; the bytes count on `barrier`. By one thread.
template <typename Tile, int HEADS>
__device__ __forceinline__ void tma_load_heads(u32 shared, const TensorMap& map, u32 barrier,
                                               int row, int tile_head, int batch) {
  constexpr int HEAD_BYTES = Tile::ROWS / HEADS * Tile::ROW_BYTES;
  mbarrier_expect(barrier, Tile::BYTES);
#pragma unroll 1  // a producer has few registers
  for (int i = 0; i < HEADS; ++i)
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel)
      tma_load(shared + panel * Tile::PANEL_BYTES + i * HEAD_BYTES, map, barrier,
               panel * Tile::PANEL_COLUMNS, row, tile_head * HEADS + i, batch);
}

// A warp's 16 rows of a part, times `inverse`, to rows of COLUMNS * 8 floats.
template <int COLUMNS>
__device__ __forceinline__ void store_part(float* o, const float (&acc)[1][COLUMNS][4],
                                           const float (&inverse)[2], int lane, int rows_left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    if (row >= rows_left) continue;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const float* pair = &acc[0][n][2 * half];
      float2* const to = reinterpret_cast<float2*>(o + row * COLUMNS * 8 + n * 8 + lane % 4 * 2);
      *to = make_float2(pair[0] * inverse[half], pair[1] * inverse[half]);
    }
  }
}
