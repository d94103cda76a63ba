// Attention that goes on where it stopped, with other keys: of a row are kept o, in fp32, and lse.
//
//   before    max = lse, sum = 1, acc = o      exp(lse) is the sum of all exponentials so far
//   after     o = acc / sum, lse = max + log(sum)
//
// A row with an lse of -inf has seen no key, and what its o holds is not looked at. Rows that are
// done have their o rounded, in another array; those that are not keep it where it was.
#pragma once
#include "attention/online_softmax.cuh"
#include "attention/store_sums.cuh"

// Rows of a warp, from its first one on.
template <typename T>
struct RowState {
  float* sums;  // o so far
  i64 sums_stride;
  T* o;  // of rows done_first .. done_end - 1
  i64 o_stride;
  int columns, rows;  // that there are; of columns a multiple of eight
  int done_first, done_end;
  int batch, head, row;  // of the first one

  __device__ __forceinline__ RowState(float* sums, const Strides& sums_strides, T* o,
                                      const Strides& o_strides, int columns, int batch, int head,
                                      int row, int all_rows, int done_first, int done_end)
      : sums(sums + batch * sums_strides.batch + head * sums_strides.head + row * sums_strides.row),
        sums_stride(sums_strides.row),
        o(o + batch * o_strides.batch + head * o_strides.head + row * o_strides.row),
        o_stride(o_strides.row),
        columns(columns),
        rows(all_rows - row),
        done_first(done_first - row),
        done_end(min(done_end, all_rows) - row),
        batch(batch),
        head(head),
        row(row) {}

  // Of the first row, in lse [batch, heads, lse_length].
  __device__ __forceinline__ i64 place(int heads, int lse_length) const {
    return static_cast<i64>(batch * heads + head) * lse_length + row;
  }

  // Accumulators and the softmax of 16-row block m begin where the rows are.
  template <int COLUMNS, typename Softmax>
  __device__ __forceinline__ void begin(float (&acc)[COLUMNS][4], Softmax& softmax, int m,
                                        const float* lse, int heads, int lse_length,
                                        float scale_log2, int lane) const {
    lse += place(heads, lse_length);
    bool far = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = m * 16 + lane / 4 + half * 8;
      const float before = i < rows ? lse[i] : NEG_INFINITY;
      const bool seen = before != NEG_INFINITY;  // a NaN, too, which stays one
      softmax.row_max[m][half] = seen ? before * LOG2E / scale_log2 : NEG_INFINITY;
      softmax.row_sum[m][half] = seen && lane % 4 == 0 ? 1 << Softmax::RAISED : 0.f;
      far |= seen && fabsf(before * LOG2E) > Softmax::FAR;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        if (!seen || n * 8 >= columns) continue;
        const float2 pair =
            *reinterpret_cast<const float2*>(sums + i * sums_stride + n * 8 + lane % 4 * 2);
        acc[n][2 * half] = pair.x, acc[n][2 * half + 1] = pair.y;
      }
    }
    __syncwarp();  // lanes of a quad have read the lse that one of them will write
    if (__any_sync(FULL_MASK, far)) softmax.growth = NEG_INFINITY;
  }

  // Block m of acc times `inverse`, to where each row belongs.
  template <int COLUMNS>
  __device__ __forceinline__ void end(const float (&acc)[COLUMNS][4], const float (&inverse)[2],
                                      int m, int lane) const {
    const int row0 = m * 16;
    const auto is_done = [&](int i) { return row0 + i >= done_first && row0 + i < done_end; };
    if (done_first < row0 + 16 && done_end > row0)
      store_block(o + row0 * o_stride, o_stride, acc, inverse, lane, columns, is_done);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = lane / 4 + half * 8;
      if (row0 + i >= rows || is_done(i)) continue;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        if (n * 8 >= columns) continue;
        float* const to = sums + (row0 + i) * sums_stride + n * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) =
            make_float2(acc[n][2 * half] * inverse[half], acc[n][2 * half + 1] * inverse[half]);
      }
    }
  }

  // After the last tile: lse, and block m to where each row belongs.
  template <int COLUMNS, typename Softmax>
  __device__ __forceinline__ void finish(const float (&acc)[COLUMNS][4], const Softmax& softmax,
                                         int m, float* lse, int heads, int lse_length,
                                         float scale_log2, int lane) const {
    lse += place(heads, lse_length);
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = m * 16 + lane / 4 + half * 8;
      const float sum = softmax.total(m, half);
      inverse[half] = sum == 0.f ? 0.f : 1.f / sum;
      if (lane % 4 == 0 && i < rows) lse[i] = softmax.lse(m, half, sum, scale_log2);
    }
    end(acc, inverse, m, lane);
  }
};
