// A thread's part of a block's product in fp32 FMAs: 4 GM rows of x by 4 GN outputs. Of a warp's
// lanes 8 share its rows and 4 its outputs, four neighbours at a time:
//
//   lane = 4y + x     rows 4y .. 4y + 3 of every 32     outputs 4x .. 4x + 3 of every 16
//
// Both operands' tiles are [k][outer] in shared memory, however they lie in device memory, and a
// lane reads four neighbours of one k at a time: eight lanes read 128 bytes in a row, no two of
// them a bank's. This order is for the sake of registers. An SM reads a register of each parity in
// a cycle, and an FMA wants three: one factor comes from the cache of the instruction before
// (SASS: .reuse), the other one and the sum have to be of unlike parity. Neighbours of one k are in
// registers of both parities; k in a row (four k of one row at a time) would put both factors of a
// product into registers of k's parity, and the sum, of one parity, would collide at every other k.
#pragma once
#include "ptx/memory.cuh"
#include "gemm/float_tile.cuh"

// Reads an operand's floats of one k.
template <typename Tile, int LANES>
struct FloatReader {
  u32 lane_offset;  // of the lane's first chunk in a row of the tile

  // first: of the warp, a multiple of 32; place: of the lane among LANES.
  __device__ __forceinline__ FloatReader(int first, int place)
      : lane_offset((first / 4 + place) * 16) {}

  // x[g][i]: outer 4 (LANES * g + place) + i.
  template <int GROUPS>
  __device__ __forceinline__ void load(float (&x)[GROUPS][4], u32 tile, int k) const {
    const int turn = Tile::turn(k), of_lane = turn % LANES;
    const u32 from = tile + (lane_offset ^ of_lane * 16) + k * Tile::ROW_BYTES;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
      load_shared_floats(x[g], from + (LANES * g ^ (turn - of_lane)) * 16);
  }
};

template <int GM, int GN, typename XReader, typename WeightReader, int BLOCK_K>
struct ThreadProduct {
  XReader x;
  WeightReader weight;

  // acc[GM][GN][row][output] += one stage. The floats of a k are read under the products of the k
  // before. Neighbouring products share a factor, also where the order turns.
  __device__ __forceinline__ void multiply(float (&acc)[GM][GN][4][4], u32 x_tile,
                                           u32 weight_tile) const {
    float rows[2][GM][4], outputs[2][GN][4];
    x.load(rows[0], x_tile, 0), weight.load(outputs[0], weight_tile, 0);
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      if (k + 1 < BLOCK_K) {
        x.load(rows[(k + 1) % 2], x_tile, k + 1);
        weight.load(outputs[(k + 1) % 2], weight_tile, k + 1);
      }
#pragma unroll
      for (int n = 0; n < 4 * GN; ++n)
#pragma unroll
        for (int i = 0; i < 4 * GM; ++i) {
          const int m = n % 2 ? 4 * GM - 1 - i : i;
          float& sum = acc[m / 4][n / 4][m % 4][n % 4];
          sum = fmaf(rows[k % 2][m / 4][m % 4], outputs[k % 2][n / 4][n % 4], sum);
        }
    }
  }
};
