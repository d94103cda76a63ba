// The way out of a product whose operands are swapped (gemm/ragged.cu): a warp has the sums of 16 rows
// of the weight, which are columns of out, and of a tile's rows of x. Blocks of 8 by 8 are transposed,
// and words of four of them traded among four lanes, so that a lane has 8 columns of a row:
//
//   without GATE   sums 0 and 1 of a block: columns 0 to 7 of out       2, 3: columns 8 to 15
//   with GATE      sums 0 and 1: gate of columns 0 to 7                 2, 3: up
#pragma once
#include "ptx/movmatrix.cuh"
#include "ptx/register_fence.cuh"
#include "tile/quad_transpose.cuh"
#include "tile/vector.cuh"
#include "gemm/pairs.cuh"
#include "gemm/sm90/ragged_products.cuh"

// What sums are multiplied with: scales of x [rows] and of the expert's outputs, or 1.
template <bool CODES>
struct RaggedScales {
  const float* of_x;
  float2 of_outputs;  // of sums 0 and 1, and of 2 and 3
  int rows;           // of of_x

  __device__ __forceinline__ float2 of_rows(int row) const {
    if (!CODES) return {1.f, 1.f};
    return {__ldg(of_x + min(row, rows - 1)), __ldg(of_x + min(row + 1, rows - 1))};
  }
};

__device__ __forceinline__ float2 scaled_pair(const float* sums, float2 by_row, float by) {
  return {sums[0] * (by_row.x * by), sums[1] * (by_row.y * by)};
}

// `out`: of the warp's first column, of which `columns` are there, by eights; `bias`: of both halves'
// columns. Rows `row` to `end`.
template <bool CODES, typename Pairs, typename Out>
__device__ __forceinline__ void store_ragged(const float (&acc)[BLOCKS_OF_8][4],
                                             const Pairs& epilogue,
                                             const RaggedScales<CODES>& scales, float2 bias,
                                             Out* out, i64 out_stride, int lane, int row, int end,
                                             int columns) {
  constexpr bool GATE = Pairs::GATE;
  const float2 none = {0.f, 0.f}, first = {bias.x, bias.x}, second = {bias.y, bias.y};
#pragma unroll
  for (int i = 0; i < BLOCKS_OF_8; i += 4) {
    if (row + i * 8 >= end) break;
    u32 low[4], high[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 by = scales.of_rows(row + (i + j) * 8 + lane % 4 * 2);
      float2 a = {acc[i + j][0], acc[i + j][1]}, b = {acc[i + j][2], acc[i + j][3]};
      if (CODES) {
        a = scaled_pair(acc[i + j], by, scales.of_outputs.x);
        b = scaled_pair(acc[i + j] + 2, by, scales.of_outputs.y);
      }
      const float2 y = epilogue.activated(a, first, b, second, 0, 0);
      low[j] = transposed_8x8(pack2<Out>(y.x, y.y));
      if (!GATE) {
        const float2 z = epilogue.activated(b, second, none, none, 0, 0);
        high[j] = transposed_8x8(pack2<Out>(z.x, z.y));
      }
    }
    const int at = row + i * 8 + lane % 4 * 8 + lane / 4;
    Out* const target = out + at * out_stride;
    const uint4 chunk = quad_transpose(low, lane);
    if (at < end) store_global_chunk(target, chunk);
    if (!GATE) {
      const uint4 next = quad_transpose(high, lane);
      if (at < end && columns > 8) store_global_chunk(target + 8, next);
    }
    compiler_fence();  // else it begins with more rows than it has registers for
  }
}
