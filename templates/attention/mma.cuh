// The steps of attention on mma fragments, for a warp that owns M 16-row blocks of queries: scores,
// mask, output and the way out. Scores s[M][keys / 8][4] and output acc[M][head_dim_v / 8][4] are D
// fragments (see ptx/mma.cuh): lane (g, t) holds rows g, g + 8 of a block, columns 2t, 2t + 1 of
// every eight. MMA_K is 16 (sm_80+) or 8 (sm_75).
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "tile/fragment.cuh"
#include "tile/tile_copy.cuh"
#include "attention/online_softmax.cuh"

// S = Q K^T for this warp's rows and one tile of keys. Q's fragments are the caller's when
// Q_IN_REGISTERS, else read again from `q_tile`.
template <typename T, int MMA_K, bool Q_IN_REGISTERS, int M, int N, int STEPS, typename QReader,
          typename KReader>
__device__ __forceinline__ void multiply_qk(float (&s)[M][N][4], u32 (&q_fragments)[STEPS][M][4],
                                            u32 q_tile, const QReader& q_reader, u32 k_tile,
                                            const KReader& k_reader) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (!Q_IN_REGISTERS) {
#pragma unroll
      for (int m = 0; m < M; ++m)
        ldmatrix_x4(q_fragments[step][m], q_reader.address(q_tile, m, step));
    }
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      u32 b[4];
      ldmatrix_x4(b, k_reader.address(k_tile, n, step));
#pragma unroll
      for (int m = 0; m < M; ++m)
        mma_16x16x16<T, MMA_K>(s[m][2 * n], s[m][2 * n + 1], q_fragments[step][m], b);
    }
  }
}

// O += exp2(S * scale_log2 - max) V, sixteen keys at a time; adds the row sums on the way. SPARING:
// little of V is fetched ahead, where there are no registers for it.
template <typename T, int MMA_K, bool SPARING = false, int M, int N, int COLUMNS, typename VReader>
__device__ __forceinline__ void multiply_pv(float (&acc)[M][COLUMNS][4], const float (&s)[M][N][4],
                                            OnlineSoftmax<M>& softmax, float scale_log2, u32 v_tile,
                                            const VReader& v_reader) {
#pragma unroll
  for (int step = 0; step < N / 2; ++step) {
    u32 p[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // register i of the A fragment: rows g + 8 * (i % 2)
        const float* pair = &s[m][2 * step + i / 2][2 * (i % 2)];
        const float offset = softmax.offset(m, i % 2, scale_log2);
        const float low = exp2_fast(fmaf(pair[0], scale_log2, -offset));
        const float high = exp2_fast(fmaf(pair[1], scale_log2, -offset));
        softmax.row_sum[m][i % 2] += low + high;
        p[m][i] = pack2<T>(low, high);
      }
#pragma unroll
    for (int n = 0; n < COLUMNS / 2; ++n) {
      u32 b[4];
      if (SPARING && n % 2 == 0) __syncwarp();
      ldmatrix_x4_trans(b, v_reader.address(v_tile, step, n));
#pragma unroll
      for (int m = 0; m < M; ++m) mma_16x16x16<T, MMA_K>(acc[m][2 * n], acc[m][2 * n + 1], p[m], b);
    }
  }
}

// Scores -> 2^(score * scale_log2 - offset) in place; what a lane's parts of the rows add up to.
template <int N>
__device__ __forceinline__ void exponentials_below(float (&s)[1][N][4], const float (&offset)[2],
                                                   float scale_log2, float (&sums)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float* pair = &s[0][n][2 * half];
      pair[0] = exp2_fast(fmaf(pair[0], scale_log2, -offset[half]));
      pair[1] = exp2_fast(fmaf(pair[1], scale_log2, -offset[half]));
      even += pair[0], odd += pair[1];
    }
    sums[half] = even + odd;
  }
}

// Scores -> probabilities in place; adds up this lane's part of the row sums.
template <int N, bool FRAMED>
__device__ __forceinline__ void exponentials(float (&s)[1][N][4], OnlineSoftmax<1, FRAMED>& softmax,
                                             float scale_log2) {
  const float offset[2] = {softmax.offset(0, 0, scale_log2), softmax.offset(0, 1, scale_log2)};
  float sums[2];
  exponentials_below(s, offset, scale_log2, sums);
  softmax.row_sum[0][0] += sums[0];
  softmax.row_sum[0][1] += sums[1];
}

// An accumulator in 16 bits, as A fragments of the next product: 16 columns each.
template <typename T, int STEPS>
__device__ __forceinline__ void round_to(u32 (&p)[STEPS][4], const float (&s)[1][2 * STEPS][4]) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &s[0][2 * step + i / 2][2 * (i % 2)];
      p[step][i] = pack2<T>(pair[0], pair[1]);
    }
}

// Scores of keys a row may not see become `hidden`. visible_keys(row) counts the keys of this tile
// that row `row` of the warp sees; below 0 and beyond the tile are fine.
template <int M, int N, typename VisibleKeys>
__device__ __forceinline__ void mask_scores(float (&s)[M][N][4], int lane,
                                            const VisibleKeys& visible_keys,
                                            float hidden = NEG_INFINITY) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = visible_keys(m * 16 + lane / 4 + half * 8) - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (n * 8 >= visible) s[m][n][2 * half] = hidden;
        if (n * 8 + 1 >= visible) s[m][n][2 * half + 1] = hidden;
      }
    }
}

template <int M, int COLUMNS>
__device__ __forceinline__ void scale_rows(float (&acc)[M][COLUMNS][4], const float (&by)[M][2]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] *= by[m][i / 2];
}

template <int M, int COLUMNS>
__device__ __forceinline__ void scale_all(float (&acc)[M][COLUMNS][4], float by) {
  float rows[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m) rows[m][0] = rows[m][1] = by;
  scale_rows(acc, rows);
}

// After the last tile: o = O / row sum, rounded, to the warp's rows of a tile at `warp_o_tile`; and
// the lse of its first `rows_left` rows to `lse` (of the warp's first row, or null).
template <typename T, typename OTile, int M, int COLUMNS, typename Softmax>
__device__ __forceinline__ void finish_rows(const float (&acc)[M][COLUMNS][4],
                                            const Softmax& softmax, float scale_log2, int lane,
                                            u32 warp_o_tile, float* lse, int rows_left) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + lane / 4 + half * 8;
      const float sum = softmax.total(m, half);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const u32 address = warp_o_tile + n / OTile::CHUNKS * OTile::PANEL_BYTES +
                            OTile::offset(row, n % OTile::CHUNKS) + lane % 4 * 4;
        store_shared_word(
            address, pack2<T>(acc[m][n][2 * half] * inverse, acc[m][n][2 * half + 1] * inverse));
      }
      if (lse != nullptr && lane % 4 == 0 && row < rows_left)
        lse[row] = softmax.lse(m, half, sum, scale_log2);
    }
}
