// A bias in attention's backward on sm_90, which has keys as rows of scores: TMA brings a tile of it
// as it lies in device memory, queries as rows, and ldmatrix turns it over.
//
//   tile in shared memory    [panels of 64 keys][BLOCK_Q queries][64], swizzled (tile/swizzle.cuh)
//   a warp's scores          16 keys, two chunks of a row; eight queries at a time
//
// There is one tile: between its reading, before P^T is made, and the next one's lies all of a step.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "tile/swizzle.cuh"

// Of tile `step_number` of a thread block, whose first key and query these are. By one thread.
template <typename Loads>
__device__ __forceinline__ void load_bias(const Loads& loads, int step_number, int key, int row,
                                          int head, int batch) {
  using Rings = decltype(loads.rings);
  using Tile = SwizzledTile<Rings::BLOCK_Q, Rings::BLOCK_K>;
  const u32 full = loads.barriers.bias_full();
  mbarrier_wait(loads.barriers.bias_empty(), step_number & 1 ^ 1);
  mbarrier_expect(full, Tile::BYTES);
#pragma unroll
  for (int panel = 0; panel < Tile::PANELS; ++panel)
    tma_load(loads.rings.shared + Rings::BIAS_TILE + panel * Tile::PANEL_BYTES, *loads.bias_map,
             full, key + panel * Tile::PANEL_COLUMNS, row, head, batch);
}

// Scores of a warp become score * scale_log2 + bias * log2(e). `key`: the first of the warp's.
template <typename T, int BLOCK_Q, int BLOCK_K>
__device__ __forceinline__ void add_bias(float (&s)[1][BLOCK_Q / 8][4], u32 tile, int key,
                                         float scale_log2) {
  using Tile = SwizzledTile<BLOCK_Q, BLOCK_K>;
  const int lane = thread_index_again() % WARP_SIZE;
  // A lane's matrix of four: keys 8 .. 15 if it is odd, the next eight queries from the third on.
  const int row = lane % 8 + lane / 16 * 8, chunk = key % 64 / 8 + lane / 8 % 2;
  const u32 place = tile + key / 64 * Tile::PANEL_BYTES + Tile::offset(row, chunk);
#pragma unroll
  for (int n = 0; n < BLOCK_Q / 8; n += 2) {
    u32 pairs[4];
    ldmatrix_x4_trans(pairs, place + n * 8 * Tile::ROW_BYTES);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = unpack2<T>(pairs[i]);
      float* x = &s[0][n + i / 2][i % 2 * 2];
      x[0] = fmaf(x[0], scale_log2, bias.x * LOG2E);
      x[1] = fmaf(x[1], scale_log2, bias.y * LOG2E);
    }
  }
}
