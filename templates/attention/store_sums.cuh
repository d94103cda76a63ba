// Accumulators to device memory from registers, by way of no shared memory.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/quad_transpose.cuh"

// An accumulator times `scale` (of the upper and the lower eight rows), in 16 bits, to the warp's 16
// rows in device memory, as many as there are of rows and columns.
template <typename T, int N>
__device__ __forceinline__ void store_sums(T* target, i64 row_stride, const float (&sum)[1][N][4],
                                           const float (&scale)[2], int lane, int rows_left,
                                           int columns_left) {
  target += lane / 4 * row_stride + lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack2<T>(sum[0][n + i][2 * half] * scale[half],
                            sum[0][n + i][2 * half + 1] * scale[half]);
      const uint4 chunk = quad_transpose(words, lane);
      if (lane / 4 + half * 8 < rows_left && (n + lane % 4) * 8 < columns_left)
        store_global_chunk(target + half * 8 * row_stride + n * 8, chunk);
    }
}
