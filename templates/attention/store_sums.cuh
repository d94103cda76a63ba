// Accumulators to device memory from registers, by way of no shared memory.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/quad_transpose.cuh"

// A block of an accumulator times `scale` (of the upper and the lower eight rows), in 16 bits, to 16
// rows in device memory: those that `is_wanted` has, as many columns as there are. By whole warps.
template <typename T, int N, typename Wanted>
__device__ __forceinline__ void store_block(T* target, i64 row_stride, const float (&sum)[N][4],
                                            const float (&scale)[2], int lane, int columns_left,
                                            const Wanted& is_wanted) {
  target += lane / 4 * row_stride + lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] =
            pack2<T>(sum[n + i][2 * half] * scale[half], sum[n + i][2 * half + 1] * scale[half]);
      const uint4 chunk = quad_transpose(words, lane);
      if (is_wanted(lane / 4 + half * 8) && (n + lane % 4) * 8 < columns_left)
        store_global_chunk(target + half * 8 * row_stride + n * 8, chunk);
    }
}

// An accumulator to the warp's 16 rows, as many as there are.
template <typename T, int N>
__device__ __forceinline__ void store_sums(T* target, i64 row_stride, const float (&sum)[1][N][4],
                                           const float (&scale)[2], int lane, int rows_left,
                                           int columns_left) {
  store_block(target, row_stride, sum[0], scale, lane, columns_left,
              [&](int row) { return row < rows_left; });
}
