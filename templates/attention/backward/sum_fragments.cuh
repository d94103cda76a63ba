// Sums of D fragments (see ptx/mma.cuh) that many blocks add to, in device memory, in fp32. A 16x8
// block is 128 neighbouring floats, four to a lane, so that a warp adds 512 neighbouring bytes at
// once:
//
//   sums   [rows / 16][columns / 8][lane][4]
//
// The order in which blocks come is not fixed, and so the last bits are not either.
#pragma once
#include "ptx/atomic.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"
#include "attention/backward/mma.cuh"

// The place of this lane's four floats of the block at 16 * row_block, 8 * column_block.
__device__ __forceinline__ i64 fragment_place(i64 row_block, int column_block, int column_blocks,
                                              int lane) {
  return ((row_block * column_blocks + column_block) * WARP_SIZE + lane) * 4;
}

// This warp's part of dQ += dS K of a tile of queries. `sums` are those of the tile. dS lies
// transposed, keys as rows, in ds_tile. WARPS_Q warps share the queries, 32 to each, TURNS the
// columns, 16 in turns; they are made 32 at a time, which takes few registers. first_one: nothing
// is there yet to add to.
template <typename T, typename KTile, typename PTile, int NUM_WARPS>
__device__ __forceinline__ void add_dq(float* sums, u32 ds_tile, u32 k_tile,
                                       bool first_one = false) {
  constexpr int WARPS_Q = PTile::COLUMNS / 32, TURNS = NUM_WARPS / WARPS_Q;
  constexpr int COLUMNS = KTile::COLUMNS / 8 / TURNS, PART = COLUMNS % 4 == 0 ? 4 : 2;
  static_assert(TURNS <= 4 && COLUMNS % 2 == 0, "16 columns of a panel at a time");
  const int lane = thread_index_again() % WARP_SIZE, warp = thread_index_again() / WARP_SIZE;
  const int turn = warp / WARPS_Q, row_block = warp % WARPS_Q * 2;
  const auto k_reader = my_turn<FragmentReader<KTile, BlockOrder::ROW_MAJOR>>(lane, turn);
  const auto ds_reader = my_turn<FragmentReader<PTile, BlockOrder::COL_MAJOR>>(lane, row_block);
#pragma unroll
  for (int first = 0; first < COLUMNS; first += PART) {
    float acc[2][PART][4] = {};
#pragma unroll
    for (int step = 0; step < KTile::ROWS / 16; ++step) {
      u32 a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) ldmatrix_x4_trans(a[m], ds_reader.address(ds_tile, step, m));
#pragma unroll
      for (int n = 0; n < PART / 2; ++n) {
        u32 b[4];
        ldmatrix_x4_trans(b, k_reader.address(k_tile, step, (first / 2 + n) * TURNS));
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_16x16x16<T, 16>(acc[m][2 * n], acc[m][2 * n + 1], a[m], b);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < PART; ++n) {
        const int column_block = (first + n) / 2 * 2 * TURNS + 2 * turn + n % 2;
        float* const at =
            sums + fragment_place(row_block + m, column_block, KTile::COLUMNS / 8, lane);
        if (first_one)
          *reinterpret_cast<float4*>(at) =
              make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
        else
          red_add_floats(at, acc[m][n]);
      }
  }
}
