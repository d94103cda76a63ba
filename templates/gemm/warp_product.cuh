// A warp's part of a block's product on mma.sync: M blocks of 16 rows of x by N blocks of 8
// outputs. Sums acc[M][N][4] are D fragments (see ptx/mma.cuh).
//
//   operand in shared memory     [outer][k]                    [k][outer]
//   fragments of x by            ldmatrix, rows first          ldmatrix.trans, columns first
//   fragments of weight by       ldmatrix, columns first       ldmatrix.trans, rows first
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "tile/fragment.cuh"

// Reads 16x16 blocks (outer, k) of an operand's tile, from a warp's first outer on.
template <typename Tile, bool K_MAJOR, BlockOrder ORDER>
struct OperandReader {
  FragmentReader<Tile, ORDER> reader;

  // first: a multiple of 16 that, unless K_MAJOR, divides or is divided by the panel's width.
  __device__ __forceinline__ OperandReader(int lane, int first) : reader(lane) {
    constexpr int PAIRS = FragmentReader<Tile, ORDER>::PAIRS;
    if (K_MAJOR) {
      reader.lane_offset += first * Tile::ROW_BYTES;
    } else {
      reader.lane_offset ^= first / 16 % PAIRS << 5;
      reader.lane_offset += first / 16 / PAIRS * Tile::PANEL_BYTES;
    }
  }

  __device__ __forceinline__ void load(u32 (&r)[4], u32 tile, int block, int step) const {
    if (K_MAJOR) {
      ldmatrix_x4(r, reader.address(tile, block, step));
    } else {
      ldmatrix_x4_trans(r, reader.address(tile, step, block));
    }
  }
};

// An operand's tile of 16-bit elements.
template <typename T, bool K_MAJOR, int OUTER, int BLOCK_K>
struct OperandTile {
  using Type = SwizzledTile<K_MAJOR ? OUTER : BLOCK_K, K_MAJOR ? BLOCK_K : OUTER>;
};

template <int M, int N>
struct ProductFragments {
  u32 x[M][4], weight[N / 2][4];
};

template <typename T, int MMA_K, int M, int N, typename XTile, bool X_K_MAJOR, typename WTile,
          bool W_K_MAJOR>
struct WarpProduct {
  static constexpr int STEP_K = 16;
  using Fragments = ProductFragments<M, N>;
  OperandReader<XTile, X_K_MAJOR, X_K_MAJOR ? BlockOrder::ROW_MAJOR : BlockOrder::COL_MAJOR> x;
  OperandReader<WTile, W_K_MAJOR, W_K_MAJOR ? BlockOrder::COL_MAJOR : BlockOrder::ROW_MAJOR> weight;

  __device__ __forceinline__ WarpProduct(int lane, int first_row, int first_output)
      : x(lane, first_row), weight(lane, first_output) {}

  // Sixteen of k, the step-th in a stage.
  __device__ __forceinline__ void load(Fragments& f, u32 x_tile, u32 weight_tile, int step) const {
#pragma unroll
    for (int m = 0; m < M; ++m) x.load(f.x[m], x_tile, m, step);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) weight.load(f.weight[n], weight_tile, n, step);
  }

  __device__ __forceinline__ static void multiply(float (&acc)[M][N][4], const Fragments& f) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n)
#pragma unroll
      for (int m = 0; m < M; ++m)
        mma_16x16x16<T, MMA_K>(acc[m][2 * n], acc[m][2 * n + 1], f.x[m], f.weight[n]);
  }
};
