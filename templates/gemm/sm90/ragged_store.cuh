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

// A warp's columns of an array of rows: 8 of them at `first`, and 8 more so many elements further on.
template <typename Out>
struct RaggedColumns {
  Out* first;           // of row 0
  int further, stride;  // further 0: none

  // Rows of four blocks of 8, `row` being this lane's; words are those of transposed blocks.
  __device__ __forceinline__ void store(const u32* low, const u32* high, int lane, int row,
                                        bool there) const {
    Out* const target = first + static_cast<i64>(row) * stride;
    const uint4 chunk = quad_transpose(low, lane);
    if (there) store_global_chunk(target, chunk);
    if (further == 0) return;
    const uint4 next = quad_transpose(high, lane);
    if (there) store_global_chunk(target + further, next);
  }
};

template <typename Out>
__device__ __forceinline__ u32 transposed_pair(float2 pair) {
  return transposed_8x8(pack2<Out>(pair.x, pair.y));
}

// Rows `row` to `end`; `bias`: of both halves' columns. PRE: what the activation is of is stored, too.
template <bool CODES, bool PRE, typename Pairs, typename Out>
__device__ __forceinline__ void store_ragged(const float (&acc)[BLOCKS_OF_8][4],
                                             const Pairs& epilogue,
                                             const RaggedScales<CODES>& scales, float2 bias,
                                             const RaggedColumns<Out>& out,
                                             const RaggedColumns<Out>& pre, int lane, int row,
                                             int end) {
  const float2 none = {0.f, 0.f}, first = {bias.x, bias.x}, second = {bias.y, bias.y};
#pragma unroll
  for (int i = 0; i < BLOCKS_OF_8; i += 4) {
    if (row + i * 8 >= end) break;
    const int at = row + i * 8 + lane % 4 * 8 + lane / 4;
    u32 low[4], high[4];
#pragma unroll
    for (int part = PRE ? 0 : 1; part < 2; ++part) {  // before and behind the activation
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 by = scales.of_rows(row + (i + j) * 8 + lane % 4 * 2);
        float2 a = {acc[i + j][0], acc[i + j][1]}, b = {acc[i + j][2], acc[i + j][3]};
        if (CODES) {
          a = scaled_pair(acc[i + j], by, scales.of_outputs.x);
          b = scaled_pair(acc[i + j] + 2, by, scales.of_outputs.y);
        }
        if (part == 0) {
          low[j] = transposed_pair<Out>(added(a, first));
          high[j] = transposed_pair<Out>(added(b, second));
        } else {
          low[j] = transposed_pair<Out>(epilogue.activated(a, first, b, second, 0, 0));
          if (!Pairs::GATE)
            high[j] = transposed_pair<Out>(epilogue.activated(b, second, none, none, 0, 0));
        }
      }
      (part == 0 ? pre : out).store(low, high, lane, at, at < end);
      compiler_fence();  // else it begins with more rows than it has registers for
    }
  }
}
