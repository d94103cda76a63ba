// A thread's part of a block's product in fp32 FMAs: 4 GM rows of x by 4 GN outputs. Of a warp's
// lanes 8 share its rows and 4 its outputs, four neighbours at a time:
//
//   lane = 4y + x     rows 4y .. 4y + 3 of every 32     outputs 4x .. 4x + 3 of every 16
//
// An operand's tile is in shared memory as it lies in device memory, and a lane reads 16 bytes of
// it at a time, without bank conflicts:
//
//   K_MAJOR   [outer][k]: four k of one row. Rows whose numbers are alike modulo 4 stand together
//             (QuadOrder), so that eight lanes read eight neighbouring rows, and a swizzle spreads
//             their chunks over the banks.
//   else      [k][outer]: four neighbours of one k; eight lanes read 128 bytes in a row
#pragma once
#include "ptx/memory.cuh"
#include "tile/swizzle.cuh"

// [ROWS][COLUMNS] floats, swizzled as 16-bit tiles of twice the width are.
template <int ROWS, int COLUMNS_>
struct SwizzledFloats : SwizzledTile<ROWS, 2 * COLUMNS_> {
  using Base = SwizzledTile<ROWS, 2 * COLUMNS_>;
  static constexpr int COLUMNS = COLUMNS_, PANEL_COLUMNS = Base::PANEL_COLUMNS / 2;
  static_assert(Base::PANELS == 1, "a row is one panel's");
};

// The same as it comes.
template <int ROWS_, int COLUMNS_>
struct PlainFloats {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, PANEL_COLUMNS = COLUMNS, PANELS = 1;
  static constexpr int CHUNKS = COLUMNS / 4, ROW_BYTES = 4 * COLUMNS, BYTES = ROWS * ROW_BYTES;
  static constexpr int PANEL_BYTES = BYTES;
  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * ROW_BYTES + chunk * 16;
  }
};

// Place i of a tile of ROWS rows holds row 4 (i % (ROWS / 4)) + i / (ROWS / 4), in Order.
template <int ROWS, typename Order>
struct QuadOrder {
  __device__ __forceinline__ static constexpr int row(int i) {
    return i % (ROWS / 4) * 4 + i / (ROWS / 4);
  }
  __device__ __forceinline__ static constexpr int output(int i) { return Order::output(row(i)); }
  __device__ __forceinline__ static constexpr bool is_up(int i) { return Order::is_up(row(i)); }
};

template <bool K_MAJOR, int OUTER, int BLOCK_K>
struct FloatTileIf : SwizzledFloats<OUTER, BLOCK_K> {};
template <int OUTER, int BLOCK_K>
struct FloatTileIf<false, OUTER, BLOCK_K> : PlainFloats<BLOCK_K, OUTER> {};
template <bool K_MAJOR, int OUTER, typename Order>
struct FloatOrderIf : QuadOrder<OUTER, Order> {};
template <int OUTER, typename Order>
struct FloatOrderIf<false, OUTER, Order> : Order {};

// Reads an operand's floats: four outer ones by four of k at a time.
template <typename Tile, bool K_MAJOR, int LANES>
struct FloatReader {
  u32 lane_offset;  // of the lane's first chunk in the tile

  // first: of the warp, a multiple of 32; place: of the lane among LANES.
  __device__ __forceinline__ FloatReader(int first, int place)
      : lane_offset(K_MAJOR ? Tile::offset(first / 4 + place, 0)
                            : Tile::offset(0, first / 4 + place)) {}

  // Outers 4 (LANES * group + place) + 0 .. 3, k 4 step + 0 .. 3, by outer (K_MAJOR) or by k.
  __device__ __forceinline__ void load(float (&x)[4][4], u32 tile, int group, int step) const {
    const int row = group * LANES;  // K_MAJOR: the swizzle of both rows and the step is one XOR
    const u32 from =
        K_MAJOR ? ((tile + lane_offset) ^ (Tile::offset(row, step) - row * Tile::ROW_BYTES)) +
                      row * Tile::ROW_BYTES
                : tile + lane_offset + row * 16 + 4 * step * Tile::ROW_BYTES;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_shared_floats(x[i], from + i * (K_MAJOR ? Tile::ROWS / 4 : 1) * Tile::ROW_BYTES);
  }

  // The float of outer i and k j of what was loaded.
  __device__ __forceinline__ static float at(const float (&x)[4][4], int i, int j) {
    return x[K_MAJOR ? i : j][K_MAJOR ? j : i];
  }
};

template <int GM, int GN, typename XReader, typename WeightReader, int STEPS>
struct ThreadProduct {
  XReader x;
  WeightReader weight;

  // acc[GM][GN][row][output] += one stage. Chunks of the weight are read one group ahead; those of
  // x as soon as their last product is made, a group of products before their next one.
  __device__ __forceinline__ void multiply(float (&acc)[GM][GN][4][4], u32 x_tile,
                                           u32 weight_tile) const {
    float rows[GM][4][4], outputs[2][4][4];
#pragma unroll
    for (int m = 0; m < GM; ++m) x.load(rows[m], x_tile, m, 0);
    weight.load(outputs[0], weight_tile, 0, 0);
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      const bool more = step + 1 < STEPS;
#pragma unroll
      for (int n = 0; n < GN; ++n) {
        if (n + 1 < GN) weight.load(outputs[(n + 1) % 2], weight_tile, n + 1, step);
        if (n + 1 == GN && more) weight.load(outputs[0], weight_tile, 0, step + 1);
#pragma unroll
        for (int m = 0; m < GM; ++m) {
          multiply_group(acc[m][n], rows[m], outputs[n % 2]);
          if (n + 1 == GN && more) x.load(rows[m], x_tile, m, step + 1);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static void multiply_group(float (&acc)[4][4],
                                                        const float (&rows)[4][4],
                                                        const float (&outputs)[4][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          acc[i][j] = fmaf(XReader::at(rows, i, k), WeightReader::at(outputs, j, k), acc[i][j]);
  }
};
