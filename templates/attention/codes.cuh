// Attention on codes: what differs from attention/mma.cuh where Q and K are int8 or e4m3, and V is
// e4m3 or e5m2. Two bytes are an element of 16 bits (ptx/mma_8bit.cuh), so tiles and readers are the same.
//
// Keys of V^T. Lane (g, t) has the scores of keys 2t and 2t + 1 of every eight, and needs, as A of the
// next product, bytes 4t ... 4t + 3 of every sixteen. Which key a byte means is free, if V^T has the
// same order: so V^T lies in memory with its keys in an order in which no score changes its lane.
//
//   byte of sixteen    0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15
//   key                0  1  8  9 |  2  3 10 11 |  4  5 12 13 |  6  7 14 15
#pragma once
#include "kv/e4m3.cuh"
#include "ptx/mma_8bit.cuh"
#include "attention/folded_softmax.cuh"
#include "attention/mma.cuh"

// What sums of products begin with. The bits of an int that began with ROUNDER_BITS are those of the
// float ROUNDER + int, up to 2^22: 260 products of int8. So no int is converted, which has a sixteenth
// of an FMA's rate.
template <typename Pair>
constexpr float SUM_START = 0.f;
template <>
constexpr float SUM_START<i8_pair> = ROUNDER;

template <typename Pair, int M, int N>
__device__ __forceinline__ void begin_scores(float (&s)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M * N * 4; ++i) s[i / (N * 4)][i / 4 % N][i % 4] = SUM_START<Pair>;
}

// Sums of codes -> scores. Scales of rows are in shared memory, this lane's first one at `q_scales`:
// there are no registers for them. With two bits less in the scale ROUNDER * scale is exact, and what
// one FMA makes of ROUNDER + int is int * scale, rounded once.
template <typename Pair, int M, int N>
__device__ __forceinline__ void scale_scores(float (&s)[M][N][4], u32 q_scales, float k_scale) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float by = __uint_as_float(load_shared_word(q_scales + (m * 16 + half * 8) * 4)) * k_scale;
      if (SUM_START<Pair> != 0.f) by = __uint_as_float(__float_as_uint(by) & ~3u);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i)
          s[m][n][i] = SUM_START<Pair> != 0.f ? fmaf(s[m][n][i], by, -SUM_START<Pair> * by)
                                              : s[m][n][i] * by;
    }
}

// What a tile's sums are multiplied by. Scales of rows are in shared memory, this lane's first one at
// `q_scales`: there are no registers for them. With two bits less in the scale ROUNDER * scale is exact.
template <typename Pair, int M, int RAISED>
__device__ __forceinline__ void take_scales(FoldedSoftmax<M, RAISED>& softmax, u32 q_scales,
                                            float k_scale) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float by = __uint_as_float(load_shared_word(q_scales + (m * 16 + half * 8) * 4)) * k_scale;
      by = by < softmax.LEAST ? softmax.LEAST : by;
      if (SUM_START<Pair> != 0.f) by = __uint_as_float(__float_as_uint(by) & ~3u);
      softmax.by[m][half] = by, softmax.zero[m][half] = SUM_START<Pair> * by;
    }
}

// Sums of the other sign, as a negative scale makes scores: the greatest is the greatest then.
template <typename Pair, int M, int N>
__device__ __forceinline__ void negate_sums(float (&s)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M * N * 4; ++i) {
    float& x = s[i / (N * 4)][i / 4 % N][i % 4];
    x = 2.f * SUM_START<Pair> - x;
  }
}

// S += Q K^T, nothing of which is fetched ahead: registers are all in use.
template <typename Pair, int STEPS, int M, int N, typename QReader, typename KReader>
__device__ __forceinline__ void multiply_qk_step_by_step(float (&s)[M][N][4], u32 q_tile,
                                                         const QReader& q_reader, u32 k_tile,
                                                         const KReader& k_reader) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    u32 q[M][4];
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(q[m], q_reader.address(q_tile, m, step));
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      u32 b[4];
      ldmatrix_x4(b, k_reader.address(k_tile, n, step));
#pragma unroll
      for (int m = 0; m < M; ++m) mma_16x16x16<Pair, 16>(s[m][2 * n], s[m][2 * n + 1], q[m], b);
    }
  }
}

// Two probabilities as e4m3; `low` takes bits 0..7.                 PTX ISA: cvt.rn.satfinite.e4m3x2
__device__ __forceinline__ u32 pack2_e4m3(float low, float high) {
  return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
}

// The two e4m3 in bits 0..15 as fp16.                              PTX ISA: cvt.rn.f16x2.e4m3x2
__device__ __forceinline__ u32 fp16_of_e4m3(u32 codes) {
  const __half2_raw x = __nv_cvt_fp8x2_to_halfraw2(static_cast<u16>(codes & 0xffff), __NV_E4M3);
  return x.x | static_cast<u32>(x.y) << 16;
}

// The same of e5m2, whose bits are the upper ones of fp16.
__device__ __forceinline__ u32 fp16_of_e5m2(u32 codes) { return __byte_perm(codes, 0, 0x1404); }

// Scores -> probabilities of e4m3, as A fragments of 32 keys each; adds to the row sums on the way.
template <int M, int N, typename Softmax>
__device__ __forceinline__ void probabilities_e4m3(u32 (&p)[N / 4][M][4], const float (&s)[M][N][4],
                                                   Softmax& softmax, float scale_log2) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = softmax.offset(m, half, scale_log2);
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = exp2_fast(fmaf(s[m][n + i / 2][2 * half + i % 2], scale_log2, -offset));
          softmax.row_sum[m][half] += x[i];
        }
        p[n / 4][m][n % 4 + half] = pack2_e4m3(x[0], x[1]) | pack2_e4m3(x[2], x[3]) << 16;
      }
    }
}

// O += P V of e4m3, or V of e5m2 (Pair). PROMOTE: sums of so many keys are made apart and added in fp32, as tensor cores
// add e4m3 products with fewer bits than fp32 has. 0: none are.
template <typename Pair, int PROMOTE, int M, int STEPS, int COLUMNS, typename VReader>
__device__ __forceinline__ void multiply_pv_e4m3(float (&acc)[M][COLUMNS][4],
                                                 const u32 (&p)[STEPS][M][4], u32 v_tile,
                                                 const VReader& v_reader) {
#pragma unroll
  for (int n = 0; n < COLUMNS / 2; ++n) {
    float part[M][2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 b[4];
      ldmatrix_x4(b, v_reader.address(v_tile, n, step));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        if (PROMOTE > 0)
          mma_16x16x16<Pair, 16>(part[m][0], part[m][1], p[step][m], b);
        else
          mma_16x16x16<Pair, 16>(acc[m][2 * n], acc[m][2 * n + 1], p[step][m], b);
      }
      if (PROMOTE == 0 || (step + 1) * 32 % PROMOTE != 0) continue;
#pragma unroll
      for (int i = 0; i < M * 8; ++i) {
        acc[i / 8][2 * n + i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
        part[i / 8][i / 4 % 2][i % 4] = 0.f;
      }
    }
  }
}

// O += P V of e4m3 (or E5M2) as a product of fp16, where the tensor core has no other: P stays 16 bits, and V
// becomes 16 bits on the way, which loses nothing.
template <bool E5M2, int M, int N, int COLUMNS, typename Softmax, typename VReader>
__device__ __forceinline__ void multiply_pv_fp16(float (&acc)[M][COLUMNS][4],
                                                 const float (&s)[M][N][4], Softmax& softmax,
                                                 float scale_log2, u32 v_tile,
                                                 const VReader& v_reader) {
#pragma unroll
  for (int step = 0; step < N / 4; ++step) {
    u32 p[2][M][4];  // of sixteen keys each
#pragma unroll
    for (int i = 0; i < 8 * M; ++i) {
      const int part = i / (4 * M), m = i / 4 % M, half = i % 2;
      const float* pair = &s[m][4 * step + 2 * part + i / 2 % 2][2 * half];
      const float offset = softmax.offset(m, half, scale_log2);
      const float low = exp2_fast(fmaf(pair[0], scale_log2, -offset));
      const float high = exp2_fast(fmaf(pair[1], scale_log2, -offset));
      softmax.row_sum[m][half] += low + high;
      p[part][m][i % 4] = pack2<fp16>(low, high);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS / 2; ++n) {
      u32 b[4];
      if (COLUMNS > 16) __syncwarp();  // nothing is fetched ahead: registers are all in use
      ldmatrix_x4(b, v_reader.address(v_tile, n, step));
#pragma unroll
      for (int i = 0; i < 4 * M; ++i) {
        const u32 four = b[i % 4];
        const u32 low = E5M2 ? fp16_of_e5m2(four) : fp16_of_e4m3(four);
        const u32 high = E5M2 ? fp16_of_e5m2(four >> 16) : fp16_of_e4m3(four >> 16);
        mma_m16n8k16<fp16>(acc[i / 4][2 * n + i / 2 % 2], p[i % 2][i / 4], low, high);
      }
    }
  }
}

// O += P V of 16 bits (attention/mma.cuh). SPARING: little of V is fetched ahead.
template <typename T, bool SPARING, int M, int N, int COLUMNS, typename Softmax, typename VReader>
__device__ __forceinline__ void multiply_pv_half(float (&acc)[M][COLUMNS][4],
                                                 const float (&s)[M][N][4], Softmax& softmax,
                                                 u32 v_tile, const VReader& v_reader) {
#pragma unroll
  for (int step = 0; step < N / 2; ++step) {
    u32 p[M][4];
#pragma unroll
    for (int i = 0; i < 4 * M; ++i) {  // register i % 4 of the A fragment: rows g + 8 * (i % 2)
      const int m = i / 4, half = i % 2;
      const float* pair = &s[m][2 * step + i / 2 % 2][2 * half];
      const float by = softmax.by[m][half], offset = softmax.offset(m, half);
      const float low = exp2_fast(fmaf(pair[0], by, -offset));
      const float high = exp2_fast(fmaf(pair[1], by, -offset));
      softmax.row_sum[m][half] += low + high;
      p[m][i % 4] = pack2<T>(low, high);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS / 2; ++n) {
      u32 b[4];
      if (SPARING && n % 2 == 0) __syncwarp();
      ldmatrix_x4_trans(b, v_reader.address(v_tile, step, n));
#pragma unroll
      for (int m = 0; m < M; ++m) mma_16x16x16<T, 16>(acc[m][2 * n], acc[m][2 * n + 1], p[m], b);
    }
  }
}

// Columns of the output times scales of their own; those behind `columns` are nobody's.
template <int M, int COLUMNS>
__device__ __forceinline__ void scale_columns(float (&acc)[M][COLUMNS][4],
                                              const float* __restrict__ scales, int columns,
                                              int lane) {
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = n * 8 + lane % 4 * 2 + i;
      const float by = column < columns ? scales[column] : 0.f;
#pragma unroll
      for (int m = 0; m < M; ++m) acc[m][n][i] *= by, acc[m][n][i + 2] *= by;
    }
}

// The lse of a warp's rows, which their lanes have stored, as it is of keys with their mean:
// q . mean is in every score of a row.
template <int M>
__device__ __forceinline__ void shift_lse(float* lse, const float* __restrict__ shift,
                                          float softmax_scale, int lane, int rows_left) {
#pragma unroll
  for (int i = 0; i < 2 * M; ++i) {
    const int row = i * 8 + lane / 4;
    if (lane % 4 == 0 && row < rows_left) lse[row] += shift[row] * softmax_scale;
  }
}
