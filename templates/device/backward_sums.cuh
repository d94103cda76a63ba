// dQ of 16 rows a warp, N blocks of 8 columns as wgmma leaves them, on its way to the sums of all
// blocks of keys in device memory (sum_fragments.cuh): from registers, or by way of shared memory,
// where one thread hands a part of dQ, of four warps, to the copy engine.
//
//   first     the first one to come stores instead of adding: nobody has to set sums to 0
//   last      where there is an order, the copy engine brings the sums to shared memory before; the
//             warps add them to their registers and leave dQ in their place, in 16 bits
#pragma once
#include "device/backward_tile.cuh"
#include "device/bulk.cuh"
#include "device/sum_fragments.cuh"
#include "device/tile_copy.cuh"
#include "device/tma.cuh"

// What a tile of queries is to the block of keys that is at it: words in shared memory.
struct BackwardTurn {
  u32 address;
  // So many come before, so many in all.
  __device__ __forceinline__ int rank() const { return load_shared_word(address); }
  __device__ __forceinline__ int others() const { return load_shared_word(address + 4); }
  __device__ __forceinline__ bool last() const { return rank() + 1 == others(); }
  // Of dq.
  __device__ __forceinline__ int row() const { return load_shared_word(address + 8); }
  __device__ __forceinline__ int head() const { return load_shared_word(address + 12); }
  __device__ __forceinline__ int batch() const { return load_shared_word(address + 16); }
};

// A warp's fragments to its part of `staging`.
template <int N>
__device__ __forceinline__ void stage_fragments(u32 staging, const float (&d)[1][N][4], int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) store_shared_floats(staging + (n * WARP_SIZE + lane) * 16, d[0][n]);
}

// Adds the fragments that lie there.
template <int N>
__device__ __forceinline__ void add_staged(float (&d)[1][N][4], u32 staging, int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const uint4 x = load_shared_chunk(staging + (n * WARP_SIZE + lane) * 16);
    d[0][n][0] += __uint_as_float(x.x), d[0][n][1] += __uint_as_float(x.y);
    d[0][n][2] += __uint_as_float(x.z), d[0][n][3] += __uint_as_float(x.w);
  }
}

// A warp's fragments to `sums` from registers, which are 0 before.
template <int N>
__device__ __forceinline__ void give_sums(float* sums, const float (&d)[1][N][4], int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) add_fragment(sums + (n * WARP_SIZE + lane) * 4, d[0][n]);
}

// One thread's copies of a part of dQ: 64 rows of which each warp has 16, `columns` of HEAD_DIM.
template <int HEAD_DIM, int COLUMNS>
struct DQCopies {
  static constexpr int WARP_BYTES = 16 * COLUMNS * 4, ROW_BLOCK = 16 * HEAD_DIM;
  float* sums;  // of the part
  u32 staging;

  __device__ __forceinline__ void load(u32 barrier) const {
    mbarrier_expect(barrier, 4 * WARP_BYTES);
#pragma unroll
    for (int warp = 0; warp < 4; ++warp)
      bulk_load(staging + warp * WARP_BYTES, sums + warp * ROW_BLOCK, WARP_BYTES, barrier);
  }
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int warp = 0; warp < 4; ++warp)
      bulk_store(sums + warp * ROW_BLOCK, staging + warp * WARP_BYTES, WARP_BYTES);
  }
  __device__ __forceinline__ void add() const {
#pragma unroll
    for (int warp = 0; warp < 4; ++warp)
      bulk_add(sums + warp * ROW_BLOCK, staging + warp * WARP_BYTES, WARP_BYTES);
  }
  // dQ in 16 bits, to rows from `row` of the tile on and columns from `column` on.
  __device__ __forceinline__ void finish(const TensorMap& map, BackwardTurn turn, int row,
                                         int column) const {
#pragma unroll
    for (int warp = 0; warp < 4; ++warp)
      tma_store(map, staging + warp * WARP_BYTES, column, turn.row() + row + warp * 16, turn.head(),
                turn.batch());
    tma_commit();
  }
};
