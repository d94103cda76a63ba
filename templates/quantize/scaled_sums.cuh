// Sums of codes in fragments (D of ptx/mma.cuh: M blocks of 16 rows by N of 8 columns), and the scales
// that make numbers of them.
//
//   rows and columns   sum * x_scale[row] * scale[column], when all of k is summed
//   blocks             for each 128 of k, sum * x_scale[row][k / 128] * scale[column / 128][k / 128]
//
// With GATE the second half of the N blocks holds up, whose outputs of the weight come `n` further on.
#pragma once
#include "prelude.cuh"
#include "gemm/pairs.cuh"

// Scales of a tensor (step 0: one) or of its rows (step 1).
struct RowScales {
  const float* scales;
  int step, rows;
  __device__ __forceinline__ float operator()(int row) const {
    return __ldg(scales + min(row, rows - 1) * step);
  }
};

// The epilogue Pairs of sums that still want their scales, unless these were of BLOCKS. BITS: a sum
// is the bits of an int.
template <typename Pairs, bool BITS, bool BLOCKS>
struct ScaledPairs : Pairs {
  RowScales of_x, of_weight;

  float2 operator()(float2, float2, float2, float2, i64, int) const = delete;  // knows no scales

  __device__ __forceinline__ ScaledPairs(const Pairs& pairs, const RowScales& x,
                                         const RowScales& weight)
      : Pairs(pairs), of_x(x), of_weight(weight) {}

  __device__ __forceinline__ float2 activated(float2 sums, float2 bias, float2 up, float2 bias_up,
                                              i64 row, int column) const {
    const int last = Pairs::n - 1;
    if (Pairs::GATE) up = scaled(up, row, Pairs::n + min(column, last), Pairs::n + last);
    return Pairs::activated(scaled(sums, row, min(column, last), last), bias, up, bias_up, row,
                            column);
  }

 private:
  __device__ __forceinline__ float2 scaled(float2 sums, int row, int output, int last) const {
    if (BITS)
      sums = {static_cast<float>(__float_as_int(sums.x)),
              static_cast<float>(__float_as_int(sums.y))};
    if (BLOCKS) return sums;
    const float by = of_x(row);
    return {sums.x * (by * of_weight(output)), sums.y * (by * of_weight(min(output + 1, last)))};
  }
};

// A lane's scales of 128 of k: its rows', and that of its outputs, or of gate and of up.
template <int M, bool GATE>
struct BlockScales {
  static constexpr int COUNT = GATE ? 2 : 1;
  float of_rows[2 * M], of_outputs[COUNT];

  // x_scales: [m, groups], of the lane's first row; scales: [ceil(outputs / 128), groups].
  __device__ __forceinline__ void load(const float* x_scales, const float* scales, int row, int m,
                                       int column, int n, int group, int groups) {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i)
      of_rows[i] = __ldg(x_scales + static_cast<i64>(min(row + i * 8, m - 1)) * groups + group);
    of_outputs[0] = __ldg(scales + min(column, n - 1) / 128 * groups + group);
    if (GATE)
      of_outputs[COUNT - 1] = __ldg(scales + (n + min(column, n - 1)) / 128 * groups + group);
  }
};

// total += sums, with the scales of their 128 of k.
template <bool GATE, int M, int N>
__device__ __forceinline__ void add_scaled(float (&total)[M][N][4], const float (&sums)[M][N][4],
                                           const BlockScales<M, GATE>& by) {
#pragma unroll
  for (int j = 0; j < M * 4; ++j) {
    const float low = by.of_rows[j / 2] * by.of_outputs[0];
    const float high = GATE ? by.of_rows[j / 2] * by.of_outputs[GATE ? 1 : 0] : low;
#pragma unroll
    for (int i = 0; i < N; ++i)
      total[j / 4][i][j % 4] += (i < N / 2 ? low : high) * sums[j / 4][i][j % 4];
  }
}

template <int N, bool GATE>
__device__ __forceinline__ void add_scaled(float (&total)[N][4], const float (&sums)[N][4],
                                           const BlockScales<1, GATE>& by) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float low = by.of_rows[j / 2] * by.of_outputs[0];
    const float high = GATE ? by.of_rows[j / 2] * by.of_outputs[GATE ? 1 : 0] : low;
#pragma unroll
    for (int i = 0; i < N; ++i) total[i][j] += (i < N / 2 ? low : high) * sums[i][j];
  }
}

template <int M, int N>
__device__ __forceinline__ void add_sums(float (&total)[M][N][4], const float (&sums)[M][N][4]) {
#pragma unroll
  for (int j = 0; j < M * 4; ++j)
#pragma unroll
    for (int i = 0; i < N; ++i) total[j / 4][i][j % 4] += sums[j / 4][i][j % 4];
}
