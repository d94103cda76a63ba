// Attention's backward on a tile of scores that is transposed: a warpgroup has 64 keys, a warp 16
// of them, s[1][queries / 8][4] as wgmma leaves it (see ptx/wgmma.cuh): lane (g, t) has keys g, g +
// 8 and queries 2t, 2t + 1 of every eight. What a query brings along, its lse and its delta, lies
// in shared memory, one float after the other.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/swizzle.cuh"
#include "tile/tile_copy.cuh"
#include "attention/store_sums.cuh"

// What a tile of queries is to the keys of a block.
template <int BLOCK_Q, int BLOCK_K>
struct BackwardTile {
  int shift, keys;  // key i is seen by queries from i + shift on, if it is one of `keys`
  bool last;        // of the work item
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

// Of a tile of scores, where the warp's own begin: its 16 keys, and the queries of its warpgroup.
template <typename Layout>
__device__ __forceinline__ int own_key() {
  const int row = thread_index_again() / WARP_SIZE * 16;
  return Layout::SHARED_KEYS ? row % Layout::BLOCK_K : row;
}
template <typename Layout>
__device__ __forceinline__ int own_query() {
  return Layout::SHARED_KEYS ? thread_index_again() / 128 * (Layout::BLOCK_Q / 2) : 0;
}

// Where these keys are in K, V and their gradients: noted with the tile.
template <bool PACKED>
struct BackwardKeys {
  int batch, row, head;

  __device__ __forceinline__ explicit BackwardKeys(u32 address)
      : batch(PACKED ? 0 : load_shared_word(address + 32)),
        row(load_shared_word(address + 36)),
        head(load_shared_word(address + 40)) {}
};

// dK or dV of a warp, whose first key of the block is `warp_key`. `about`: notes of a tile beside it.
template <bool PACKED, typename Tile, typename T, int N>
__device__ __forceinline__ void store_key_sums(T* target, const Strides& strides, int columns,
                                               const float (&sum)[1][N][4], float scale, int lane,
                                               int warp_key, u32 about) {
  const BackwardKeys<PACKED> keys(about);
  target +=
      keys.batch * strides.batch + keys.head * strides.head + (keys.row + warp_key) * strides.row;
  const float both[2] = {scale, scale};
  store_sums(target, strides.row, sum, both, lane, Tile(about).keys - warp_key, columns);
}

// Scores of hidden pairs become -inf: columns of a key before tile.first_visible(key).
template <int N, typename Tile>
__device__ __forceinline__ void mask_columns(float (&s)[1][N][4], int lane, const Tile& tile,
                                             int warp_key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = tile.first_visible(warp_key + lane / 4 + half * 8) - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 8 < first) s[0][n][2 * half] = NEG_INFINITY;
      if (n * 8 + 1 < first) s[0][n][2 * half + 1] = NEG_INFINITY;
    }
  }
}

// The first COUNT pairs of what a lane's queries bring along.
template <int COUNT>
struct RowPairs {
  float2 pairs[COUNT > 0 ? COUNT : 1];
  __device__ __forceinline__ float2 pair(int n, u32 lane_rows) const {
    return n < COUNT ? pairs[n] : load_shared_pair(lane_rows + n * 32);
  }
  __device__ __forceinline__ void load(u32 lane_rows) {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) pairs[n] = load_shared_pair(lane_rows + n * 32);
  }
};

// S^T -> P^T in 16 bits. `lane_lse`: of this lane's columns, the first ones are `ahead`.
template <typename T, int STEPS, int AHEAD>
__device__ __forceinline__ void probabilities(u32 (&p)[STEPS][4], const float (&s)[1][2 * STEPS][4],
                                              float scale_log2, const RowPairs<AHEAD>& ahead,
                                              u32 lane_lse) {
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n) {
    const float2 lse = ahead.pair(n, lane_lse);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      p[n / 2][n % 2 * 2 + half] =
          pack2<T>(exp2_fast(fmaf(s[0][n][2 * half], scale_log2, -lse.x)),
                   exp2_fast(fmaf(s[0][n][2 * half + 1], scale_log2, -lse.y)));
  }
}

// What dP^T is added to: -delta.
template <int N, int AHEAD>
__device__ __forceinline__ void start_differentials(float (&dp)[1][N][4],
                                                    const RowPairs<AHEAD>& ahead, u32 lane_delta) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 delta = ahead.pair(n, lane_delta);
    dp[0][n][0] = dp[0][n][2] = -delta.x;
    dp[0][n][1] = dp[0][n][3] = -delta.y;
  }
}

// P^T, dP^T - delta -> dS^T in 16 bits. In bf16 the difference is rounded, too: two products at a
// time. (In fp16 it might be too large for that where dS is not.)
template <typename T>
__device__ __forceinline__ u32 differential(u32 p, float x, float y) {
  const float2 pair = unpack2<T>(p);
  return pack2<T>(pair.x * x, pair.y * y);
}
template <>
__device__ __forceinline__ u32 differential<bf16>(u32 p, float x, float y) {
  const u32 dp = pack2<bf16>(x, y);
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&p),
                                         *reinterpret_cast<const __nv_bfloat162*>(&dp));
  return *reinterpret_cast<const u32*>(&product);
}
template <typename T, int STEPS>
__device__ __forceinline__ void differentials(u32 (&ds)[STEPS][4], const u32 (&p)[STEPS][4],
                                              const float (&dp)[1][2 * STEPS][4]) {
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ds[n / 2][n % 2 * 2 + half] =
          differential<T>(p[n / 2][n % 2 * 2 + half], dp[0][n][2 * half], dp[0][n][2 * half + 1]);
}
