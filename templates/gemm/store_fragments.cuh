// The way out of a product on mma.sync: sums in D fragments (see ptx/mma.cuh) go through the
// epilogue and straight to memory, 16 bytes a lane where rows start on such boundaries.
#pragma once
#include "tile/quad_transpose.cuh"
#include "tile/tile_copy.cuh"
#include "gemm/pairs.cuh"

// A row of four blocks of 8 columns, of which a lane of four has columns 2t, 2t + 1 each. By whole
// warps; `there` is a lane's: its row exists. `columns_left`: from the first of the 32 on.
// `aligned`: rows of 16-bit elements start on boundaries of 16 bytes, of fp32 on those of pairs.
template <typename Out>
__device__ __forceinline__ void store_quad_row(Out* row, const float2 (&y)[4], int lane, bool there,
                                               int columns_left, bool aligned) {
  if constexpr (sizeof(Out) == 2) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack2<Out>(y[i].x, y[i].y);
    const uint4 chunk = quad_transpose(words, lane);
    const int first = lane % 4 * 8, left = columns_left - first;
    if (there && aligned && left >= 8) {
      store_global_chunk(row + first, chunk);
    } else if (there && left > 0) {
      scatter_chunk(row + first, chunk, left);
    }
  } else {
    const int first = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (there) store_pair(row + i * 8 + first, y[i], aligned, columns_left - i * 8 - first);
  }
}

// All of a warp's sums. row, column: of its first element in out. With GATE the second half of the
// blocks holds up. bias may be null.
template <int M, int N, typename Pairs, typename T, typename Out>
__device__ __forceinline__ void store_fragments(const float (&acc)[M][N][4], const Pairs& epilogue,
                                                const T* __restrict__ bias, Out* __restrict__ out,
                                                i64 out_stride, int lane, int row, int rows,
                                                int column) {
  constexpr int BLOCKS = Pairs::GATE ? N / 2 : N, UP = Pairs::GATE ? N / 2 : 0;
  static_assert(BLOCKS % 4 == 0, "four blocks of 8 columns at a time");
  const BiasPairs<T> bias_of(bias, epilogue.n, Pairs::GATE);
  const bool aligned =
      sizeof(Out) == 2 ? has_whole_chunks(out, out_stride) : has_whole_pairs(out, out_stride);
  const int lane_row = row + lane / 4, lane_column = column + lane % 4 * 2;
#pragma unroll
  for (int group = 0; group < BLOCKS; group += 4) {
    float2 own[4], own_up[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own[i] = bias_of(lane_column + (group + i) * 8);
      if (Pairs::GATE) own_up[i] = bias_of.up(lane_column + (group + i) * 8);
    }
#pragma unroll
    for (int half = 0; half < 2 * M; ++half) {
      const int m = half / 2, at = half % 2 * 2, r = lane_row + half * 8;
      Pair<Out> residual[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (Pairs::RESIDUAL && r < rows)
          residual[i] = epilogue.residual_pair(r, lane_column + (group + i) * 8);
      float2 y[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* sums = &acc[m][group + i][at];
        const float* up = &acc[m][group + i + UP][at];
        if (!Pairs::TOUCHES_ROWS || r < rows)
          y[i] = epilogue.activated({sums[0], sums[1]}, own[i], {up[0], up[1]}, own_up[i], r,
                                    lane_column + (group + i) * 8);
        if (Pairs::RESIDUAL && r < rows) y[i] = added(y[i], residual[i].get());
      }
      store_quad_row(out + r * out_stride + column + group * 8, y, lane, r < rows,
                     epilogue.n - column - group * 8, aligned);
    }
  }
}
