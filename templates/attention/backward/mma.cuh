// The steps of attention's backward on mma fragments (see ptx/mma.cuh): lane (g, t) of a D fragment
// holds rows g, g + 8 of a 16-row block, columns 2t, 2t + 1 of every eight.
//
// What a query row brings along lies in two arrays of our own, [batch, heads_q, rows] in fp32,
// rows = seqlen_q rounded up to ROW_STEP (kernels_cu/attention/backward_preprocess.cu makes them):
//
//   lse_log2   log2 of the sum of 2^scores; +inf for rows that see no key and past the end, so
//              that their probabilities are 2^-inf = 0
//   delta      sum over the row of dout * o, less the gradient of lse; 0 past the end
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "attention/backward/padded_rows.cuh"
#include "attention/mma.cuh"

// Two neighbouring D fragments in 16 bits: an A fragment of the next product.
template <typename T>
__device__ __forceinline__ void pack_fragment(u32 (&a)[4], const float (*pair)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = pack2<T>(pair[i / 2][2 * (i % 2)], pair[i / 2][2 * (i % 2) + 1]);
}

// acc += A B for 16 * STEPS rows of B, a [k][n] tile. fragment(step, m, a) gives A's. Of B's
// columns, 16 at a time, every TURNS-th belongs to this warp: TURNS warps share them out in turns,
// and which one it is stands in the reader (see `my_turn`).
template <typename T, int STEPS, int TURNS, int M, int COLUMNS, typename Reader, typename Fragment>
__device__ __forceinline__ void accumulate(float (&acc)[M][COLUMNS][4], u32 b_tile,
                                           const Reader& reader, const Fragment& fragment) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    u32 a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) fragment(step, m, a[m]);
#pragma unroll
    for (int n = 0; n < COLUMNS / 2; ++n) {
      u32 b[4];
      ldmatrix_x4_trans(b, reader.address(b_tile, step, n * TURNS));
#pragma unroll
      for (int m = 0; m < M; ++m) mma_16x16x16<T, 16>(acc[m][2 * n], acc[m][2 * n + 1], a[m], b);
    }
  }
}

// acc += A B, A from D fragments, rounded.
template <typename T, int M, int N, int COLUMNS, typename Reader>
__device__ __forceinline__ void accumulate_packed(float (&acc)[M][COLUMNS][4],
                                                  const float (&a)[M][N][4], u32 b_tile,
                                                  const Reader& b_reader) {
  accumulate<T, N / 2, 1>(acc, b_tile, b_reader, [&](int step, int m, u32(&fragment)[4]) {
    pack_fragment<T>(fragment, a[m] + 2 * step);
  });
}

// acc += A B, A from rows of a tile.
template <typename T, int STEPS, int TURNS, int M, int COLUMNS, typename AReader, typename Reader>
__device__ __forceinline__ void accumulate_shared(float (&acc)[M][COLUMNS][4], u32 a_tile,
                                                  const AReader& a_reader, u32 b_tile,
                                                  const Reader& b_reader) {
  accumulate<T, STEPS, TURNS>(acc, b_tile, b_reader, [&](int step, int m, u32(&fragment)[4]) {
    ldmatrix_x4(fragment, a_reader.address(a_tile, m, step));
  });
}

// A reader whose blocks of 16 columns begin at number `turn`, less than those of a panel.
template <typename Reader>
__device__ __forceinline__ Reader my_turn(int lane, int turn) {
  Reader reader(lane);
  reader.lane_offset ^= turn << 5;
  return reader;
}

// D fragments times `factor`, rounded, to rows of a tile at `warp_tile`; columns as in
// `accumulate`.
template <typename T, typename Tile, int TURNS, int M, int COLUMNS>
__device__ __forceinline__ void stage_rows(const float (&acc)[M][COLUMNS][4], float factor,
                                           int lane, int turn, u32 warp_tile) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const int row = m * 16 + lane / 4 + half * 8;
        const int chunk = n / 2 * 2 * TURNS + 2 * turn + n % 2;  // of eight columns
        const u32 address = warp_tile + chunk / Tile::CHUNKS * Tile::PANEL_BYTES +
                            Tile::offset(row, chunk % Tile::CHUNKS) + lane % 4 * 4;
        const float* pair = &acc[m][n][2 * half];
        store_shared_word(address, pack2<T>(pair[0] * factor, pair[1] * factor));
      }
}

// D fragments, rounded, to columns `first` (a multiple of 8 * N), ... of rows of a tile at
// `warp_tile`, from where other warps read them as A fragments. N is a power of two: the chunk of
// eight columns is one XOR.
template <typename T, typename Tile, int M, int N>
__device__ __forceinline__ void exchange_rows(const float (&s)[M][N][4], int lane, int first,
                                              u32 warp_tile) {
  static_assert((N & (N - 1)) == 0 && N <= Tile::CHUNKS && Tile::PANELS == 1, "one panel");
  const u32 base = warp_tile + Tile::offset(lane / 4, first / 8) + lane % 4 * 4;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared_word((base ^ n << 4) + (m * 16 + half * 8) * Tile::ROW_BYTES,
                          pack2<T>(s[m][n][2 * half], s[m][n][2 * half + 1]));
}

// This lane's columns of eight, two neighbours, of a row of floats in shared memory.
__device__ __forceinline__ float2 load_pair(const float* row, int n, int lane) {
  return *reinterpret_cast<const float2*>(row + n * 8 + lane % 4 * 2);
}

// Where keys are rows and queries columns: scores -> probabilities 2^(score * scale - lse).
template <int M, int N>
__device__ __forceinline__ void probabilities(float (&s)[M][N][4], float scale_log2,
                                              const float* lse, int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 offset = load_pair(lse, n, lane);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[m][n][i] = exp2_fast(fmaf(s[m][n][i], scale_log2, -(i % 2 ? offset.y : offset.x)));
  }
}

// There: dP -> dS = P (dP - delta).
template <int M, int N>
__device__ __forceinline__ void score_gradients(float (&dp)[M][N][4], const float (&p)[M][N][4],
                                                const float* delta, int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 offset = load_pair(delta, n, lane);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        dp[m][n][i] = p[m][n][i] * (dp[m][n][i] - (i % 2 ? offset.y : offset.x));
  }
}

// What a hidden score becomes, so that times the scale it is -inf.
__device__ __forceinline__ float hidden_score(float scale_log2) {
  return scale_log2 < 0.f ? -NEG_INFINITY : NEG_INFINITY;
}

// There: hides queries that do not see a key. first_seeing(row) counts the queries from the left
// that do not see key `row` of the warp; below 0 and beyond the tile are fine.
template <int M, int N, typename FirstSeeing>
__device__ __forceinline__ void mask_queries(float (&s)[M][N][4], int lane, float hidden,
                                             const FirstSeeing& first_seeing) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = first_seeing(m * 16 + lane / 4 + half * 8) - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (n * 8 < first) s[m][n][2 * half] = hidden;
        if (n * 8 + 1 < first) s[m][n][2 * half + 1] = hidden;
      }
    }
}

// All A fragments of a warp's rows of a tile.
template <int STEPS, int M, typename Reader>
__device__ __forceinline__ void load_fragments(u32 (&fragments)[STEPS][M][4], u32 warp_tile,
                                               const Reader& reader) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(fragments[step][m], reader.address(warp_tile, m, step));
}

// Where queries are rows: lse and delta of this lane's rows g, g + 8 of each 16-row block.
template <int M>
struct RowStatistics {
  float lse[M][2], delta[M][2];

  __device__ __forceinline__ RowStatistics(const float* lse_log2, const float* deltas, i64 row,
                                           int lane) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i64 place = row + m * 16 + half * 8 + lane / 4;
        lse[m][half] = lse_log2[place];
        delta[m][half] = deltas[place];
      }
  }

  // dP -> dS = P (dP - delta) with P = 2^(score * scale - lse).
  template <int N>
  __device__ __forceinline__ void score_gradients(float (&dp)[M][N][4], const float (&s)[M][N][4],
                                                  float scale_log2) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = exp2_fast(fmaf(s[m][n][i], scale_log2, -lse[m][i / 2]));
          dp[m][n][i] = p * (dp[m][n][i] - delta[m][i / 2]);
        }
  }
};
