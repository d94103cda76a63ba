// Attention's backward on a tile of scores that is transposed: a warpgroup has 64 keys, a warp 16
// of them, s[1][queries / 8][4] as wgmma leaves it (see wgmma.cuh): lane (g, t) has keys g, g + 8
// and queries 2t, 2t + 1 of every eight. What a query brings along, its lse and its delta, lies in
// shared memory, one float after the other.
#pragma once
#include "device/math.cuh"
#include "device/swizzle.cuh"
#include "device/tile_copy.cuh"

// What a tile of queries is to the keys of a block.
template <int BLOCK_Q, int BLOCK_K>
struct BackwardTile {
  int shift, keys;  // key i is seen by queries from i + shift on, if it is one of `keys`
  bool last;        // of the piece of work
  int index;        // among those of all heads

  __device__ __forceinline__ explicit BackwardTile(u32 address) {
    const uint4 words = load_shared_chunk(address);
    shift = words.x, keys = words.y, last = words.z, index = words.w;
  }
  __device__ __forceinline__ bool masked() const { return shift > 1 - BLOCK_K || keys < BLOCK_K; }
  __device__ __forceinline__ int first_visible(int key) const {
    return key < keys ? key + shift : BLOCK_Q;
  }
};

// Scores of hidden pairs become -inf: columns of row i before first_visible(i).
template <int N, typename FirstVisible>
__device__ __forceinline__ void mask_columns(float (&s)[1][N][4], int lane,
                                             const FirstVisible& first_visible) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = first_visible(lane / 4 + half * 8) - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 8 < first) s[0][n][2 * half] = NEG_INFINITY;
      if (n * 8 + 1 < first) s[0][n][2 * half + 1] = NEG_INFINITY;
    }
  }
}

// S^T -> P^T in 16 bits. `lane_lse`: of this lane's columns.
template <typename T, int STEPS>
__device__ __forceinline__ void probabilities(u32 (&p)[STEPS][4], const float (&s)[1][2 * STEPS][4],
                                              float scale_log2, u32 lane_lse) {
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n) {
    const float2 lse = load_shared_pair(lane_lse + n * 32);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      p[n / 2][n % 2 * 2 + half] =
          pack2<T>(exp2_fast(fmaf(s[0][n][2 * half], scale_log2, -lse.x)),
                   exp2_fast(fmaf(s[0][n][2 * half + 1], scale_log2, -lse.y)));
  }
}

// P^T, dP^T -> dS^T in 16 bits.
template <typename T, int STEPS>
__device__ __forceinline__ void differentials(u32 (&ds)[STEPS][4], const u32 (&p)[STEPS][4],
                                              const float (&dp)[1][2 * STEPS][4], u32 lane_delta) {
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n) {
    const float2 delta = load_shared_pair(lane_delta + n * 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = unpack2<T>(p[n / 2][n % 2 * 2 + half]);
      ds[n / 2][n % 2 * 2 + half] = pack2<T>(pair.x * (dp[0][n][2 * half] - delta.x),
                                             pair.y * (dp[0][n][2 * half + 1] - delta.y));
    }
  }
}

// An accumulator times `scale`, in 16 bits, to the warp's 16 rows of a tile.
template <typename T, typename Tile, int N>
__device__ __forceinline__ void stage_rows(const float (&acc)[1][N][4], float scale, int lane,
                                           u32 warp_tile) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_shared_word(warp_tile + n / Tile::CHUNKS * Tile::PANEL_BYTES +
                            Tile::offset(lane / 4 + half * 8, n % Tile::CHUNKS) + lane % 4 * 4,
                        pack2<T>(acc[0][n][2 * half] * scale, acc[0][n][2 * half + 1] * scale));
}
