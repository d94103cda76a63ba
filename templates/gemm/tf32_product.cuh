// A warp's part of a block's product of fp32 operands that are rounded to tf32 (8 bits of exponent, 10
// of fraction) on their way into mma.sync.m16n8k8. Fragments are those of 16-bit types with one
// float in place of two halves (see ptx/mma.cuh), eight k a step:
//
//   operand in shared memory     [outer][k]                [k][outer]
//   fragments by                 ldmatrix: a row of a      a word at a time: rows of the tile are
//                                matrix is four floats     eight floats longer than a multiple of
//                                                          32, so that 8 outers of 4 k lie in 32 banks
#pragma once
#include "ptx/memory.cuh"
#include "gemm/float_tile.cuh"
#include "gemm/warp_product.cuh"

template <int OUTER, int BLOCK_K>
struct OperandTile<fp32, true, OUTER, BLOCK_K> {
  using Type = SwizzledFloats<OUTER, BLOCK_K>;
};
template <int OUTER, int BLOCK_K>
struct OperandTile<fp32, false, OUTER, BLOCK_K> {
  using Type = FloatTile<OUTER, BLOCK_K, 8>;
};

// Reads 16 outers by 8 k of an operand's tile, from a warp's first outer on.
template <typename Tile, bool K_MAJOR, BlockOrder ORDER>
struct FloatFragments {
  OperandReader<typename Tile::Halves, true, ORDER> reader;

  __device__ __forceinline__ FloatFragments(int lane, int first) : reader(lane, first) {}
  __device__ __forceinline__ void load(u32 (&r)[4], u32 tile, int block, int step) const {
    reader.load(r, tile, block, step);
  }
};
template <typename Tile, BlockOrder ORDER>
struct FloatFragments<Tile, false, ORDER> {
  u32 lane_offset;  // of outer lane / 4 and k lane % 4

  __device__ __forceinline__ FloatFragments(int lane, int first)
      : lane_offset(Tile::offset(lane % 4, 0) + 4 * (first + lane / 4)) {}
  __device__ __forceinline__ void load(u32 (&r)[4], u32 tile, int block, int step) const {
    constexpr int OUTER = ORDER == BlockOrder::ROW_MAJOR ? 1 : 2;  // the register 8 outers on
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int outer = 16 * block + (i & OUTER ? 8 : 0), k = 8 * step + (i & (3 - OUTER) ? 4 : 0);
      r[i] = load_shared_word(tile + lane_offset + Tile::offset(k, 0) + 4 * outer);
    }
  }
};

template <int MMA_K, int M, int N, typename XTile, bool X_K_MAJOR, typename WTile, bool W_K_MAJOR>
struct WarpProduct<fp32, MMA_K, M, N, XTile, X_K_MAJOR, WTile, W_K_MAJOR> {
  static constexpr int STEP_K = 8;
  using Fragments = ProductFragments<M, N>;
  FloatFragments<XTile, X_K_MAJOR, BlockOrder::ROW_MAJOR> x;
  FloatFragments<WTile, W_K_MAJOR, BlockOrder::COL_MAJOR> weight;

  __device__ __forceinline__ WarpProduct(int lane, int first_row, int first_output)
      : x(lane, first_row), weight(lane, first_output) {}

  // Eight of k, the step-th in a stage.
  __device__ __forceinline__ void load(Fragments& f, u32 x_tile, u32 weight_tile, int step) const {
#pragma unroll
    for (int m = 0; m < M; ++m) x.load(f.x[m], x_tile, m, step);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) weight.load(f.weight[n], weight_tile, n, step);
  }

  __device__ __forceinline__ static void multiply(float (&acc)[M][N][4], const Fragments& f) {
    u32 x[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) round(x[m], f.x[m]);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      u32 weight[4];
      round(weight, f.weight[n]);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k8_tf32(acc[m][2 * n], x[m], weight[0], weight[1]);
        mma_m16n8k8_tf32(acc[m][2 * n + 1], x[m], weight[2], weight[3]);
      }
    }
  }

 private:
  __device__ __forceinline__ static void round(u32 (&rounded)[4], const u32 (&floats)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i] = nearest_tf32(floats[i]);
  }
};
