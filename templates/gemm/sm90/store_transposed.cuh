// The way out of a product on sm_90 whose operands are swapped: a warp has the sums of 16 columns of
// out, from `column` on, and of a tile's rows of out, from `row` on; a lane has neighbouring rows.
//
//   sums, by lanes                        transposed 8 by 8, and exchanged between neighbours
//               rows  0 0 1 1 2 2 ...                  columns  0-1 2-3 4-5 6-7 8-9 10-  12-  14-
//     column  0       0 0 1 1 2 2 3 3        row 0              0   0   2   2   1   1    3    3
//     column  1       4 4 5 5 6 6 7 7        row 1              4   4   6   6   5   5    7    7
//
// So four lanes store 32 bytes of a row, which is what L2 writes at once.
#pragma once
#include "ptx/movmatrix.cuh"
#include "ptx/register_fence.cuh"
#include "gemm/pairs.cuh"

// Four columns of a row: two of `low`, then two of `high`, of which `left` are there.
template <typename Out>
__device__ __forceinline__ void store_quad(Out* target, u32 low, u32 high, int left) {
  if (left >= 4) {
    *reinterpret_cast<uint2*>(target) = make_uint2(low, high);
    return;
  }
  if (left > 0) store_pair(target, unpack2<Out>(low), true, left);
  if (left > 2) store_pair(target + 2, unpack2<Out>(high), true, left - 2);
}

// The bias of one column, twice.
template <typename T>
__device__ __forceinline__ float2 bias_of_column(const T* bias, int column, int columns) {
  const float b = bias != nullptr && column < columns ? static_cast<float>(bias[column]) : 0.f;
  return {b, b};
}

// `columns`: of out; its rows, which the epilogue counts, lie on 16-byte boundaries.
template <int N, typename T, typename Pairs, typename Out>
__device__ __forceinline__ void store_transposed(const float (&acc)[N][4], const Pairs& epilogue,
                                                 const T* bias, Out* out, i64 out_stride, int lane,
                                                 int column, int columns, int row) {
  const float2 none = {0.f, 0.f};
  const float2 bias_low = bias_of_column(bias, column + lane / 4, columns);
  const float2 bias_high = bias_of_column(bias, column + 8 + lane / 4, columns);
  const bool odd = lane % 2;
  const int first = column + lane % 4 / 2 * 4 + (odd ? 8 : 0), rows = epilogue.n;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 low = epilogue({acc[n][0], acc[n][1]}, bias_low, none, none, 0, 0);
    const float2 high = epilogue({acc[n][2], acc[n][3]}, bias_high, none, none, 0, 0);
    const u32 own_low = transposed_8x8(pack2<Out>(low.x, low.y));
    const u32 own_high = transposed_8x8(pack2<Out>(high.x, high.y));
    const u32 other = __shfl_xor_sync(FULL_MASK, odd ? own_low : own_high, 1);
    const int at = row + n * 8 + lane / 4;
    if (at < rows)
      store_quad(out + at * out_stride + first, odd ? other : own_low, odd ? own_high : other,
                 columns - first);
    compiler_fence();  // else it begins with more rows than it has registers for
  }
}
