// The way out of a product on sm_90: a warp's 16 rows of sums go through the epilogue, then to
// memory by TMA, 64 columns at a time, or pair by pair where rows have no 16-byte boundaries.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/proxy_fence.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/fragment.cuh"
#include "tile/tma_tile.cuh"
#include "gemm/pairs.cuh"

// out of columns 8 n + 2 (lane % 4) and the next one, of both rows of a lane: [0] of row lane / 4,
// [1] of that + 8. With GATE the second half of `acc` holds up.
template <bool GATE, int N, typename Pairs>
__device__ __forceinline__ void finish_fragment(float2 (&out)[2], const float (&acc)[N][4], int n,
                                                const Pairs& epilogue, i64 row, int rows_left,
                                                int column) {
  const ColumnPair columns = epilogue.columns(column + n * 8);
  const int up = GATE ? n + N / 2 : n;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    out[half] = {0.f, 0.f};
    if (half * 8 < rows_left)
      out[half] = epilogue(columns, {acc[n][2 * half], acc[n][2 * half + 1]},
                           {acc[up][2 * half], acc[up][2 * half + 1]}, row + half * 8);
  }
}

// Through shared memory: `staged` has room for two boxes of 16 rows and 64 columns, of which one,
// `box_number`, is filled while TMA reads the other. `column`: of the tile, OUT: how many it has.
template <typename Staged, bool GATE, int OUT, typename T, int N, typename Pairs>
__device__ __forceinline__ void store_by_tma(const float (&acc)[N][4], const Pairs& epilogue,
                                             const TensorMap& out_map, u32 staged, int& box_number,
                                             int lane, int row, int rows, int column) {
  const FragmentReader<Staged, BlockOrder::ROW_MAJOR> place(lane);
  const int lane_row = row + lane / 4, rows_left = rows - lane_row;
#pragma unroll
  for (int panel = 0; panel < OUT / 64; ++panel) {
    const u32 box = staged + box_number * Staged::BYTES;
    box_number ^= 1;
    if (lane == 0) bulk_wait_read<1>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      float2 low[2], high[2];
      const int at = panel * 8 + n, first = column + lane % 4 * 2;
      finish_fragment<GATE>(low, acc, at, epilogue, lane_row, rows_left, first);
      finish_fragment<GATE>(high, acc, at + 1, epilogue, lane_row, rows_left, first);
      const u32 r[4] = {pack2<T>(low[0].x, low[0].y), pack2<T>(low[1].x, low[1].y),
                        pack2<T>(high[0].x, high[0].y), pack2<T>(high[1].x, high[1].y)};
      stmatrix_x4(place.address(box, 0, n / 2), r);
    }
    proxy_fence();
    __syncwarp();
    if (lane == 0) {
      tma_store(out_map, box, column + panel * 64, row, 0, 0);
      bulk_commit();
    }
  }
}

// Straight from registers.
template <bool GATE, int OUT, int N, typename Pairs, typename Out>
__device__ __forceinline__ void store_pairs(const float (&acc)[N][4], const Pairs& epilogue,
                                            Out* out, i64 out_stride, int lane, int row, int rows,
                                            int column) {
  const bool whole = has_whole_pairs(out, out_stride);
  const int lane_row = row + lane / 4, rows_left = rows - lane_row;
#pragma unroll
  for (int n = 0; n < OUT / 8; ++n) {
    float2 found[2];
    const int first = column + lane % 4 * 2, left = epilogue.each.n - (first + n * 8);
    finish_fragment<GATE>(found, acc, n, epilogue, lane_row, rows_left, first);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (half * 8 < rows_left)
        store_pair(out + (lane_row + half * 8) * out_stride + first + n * 8, found[half], whole,
                   left);
  }
}
