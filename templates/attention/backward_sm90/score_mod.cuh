// The caller's expression of a score (attention/score_mod.cuh) in attention's backward on sm_90. One
// that only adds is applied to the scores; a CURVED one brings its derivative along, which dS is
// made with a step later. For want of registers P times it, in 16 bits, waits in shared memory: where
// this dS^T will be, in the warp's own 16 rows, as words that a lane writes and reads itself.
//
//   rows 16w .. 16w + 15 of a panel of dS^T    [16 words of a lane][32 lanes]
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/special_registers.cuh"
#include "attention/backward_sm90/bias_gradient.cuh"
#include "attention/backward_sm90/features.cuh"
#include "attention/backward_sm90/tile.cuh"

// Where the lane's first scores are: query, and key of the first half.
struct ModPlace {
  int row, key;

  template <typename Place>
  __device__ __forceinline__ explicit ModPlace(const Place& at) {
    const int lane = thread_index_again() % WARP_SIZE;
    row = at.row + lane % 4 * 2;
    key = at.key + thread_index_again() / WARP_SIZE * 16 + lane / 4;
  }
};

// Raw products of a warp become what the caller's expression makes of scores, times log2(e).
template <int N, typename Mod, typename Place>
__device__ __forceinline__ void modify_scores(float (&s)[1][N][4], const Mod& mod, const Place& at,
                                              float softmax_scale) {
  const ModPlace own(at);
  const int last_q = mod.seqlen_q - 1, last_k = mod.seqlen_k - 1;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = s[0][n][i];
      x = LOG2E * mod(x * softmax_scale, min(own.row + n * 8 + i % 2, last_q),
                      min(own.key + i / 2 * 8, last_k));
    }
}

// The lane's words in a tile of dS^T.
template <typename DSTile>
struct DerivativeWords {
  u32 base;

  __device__ __forceinline__ explicit DerivativeWords(u32 tile)
      : base(tile + thread_index_again() / WARP_SIZE * 16 * DSTile::ROW_BYTES +
             thread_index_again() % WARP_SIZE * 4) {}
  // Of scores n, `half` (see tile.cuh).
  __device__ __forceinline__ u32 at(int n, int half) const {
    return base + n / 8 * DSTile::PANEL_BYTES + (n % 8 * 2 + half) * WARP_SIZE * 4;
  }
};

// Raw products -> P^T in 16 bits, and P^T times the derivative to `words`, if they are there: 0 where
// a key is hidden, whatever the derivative is.
template <typename T, typename Tile, int STEPS, int AHEAD, typename Mod, typename Place,
          typename Words>
__device__ __forceinline__ void curved_probabilities(u32 (&p)[STEPS][4],
                                                     const float (&s)[1][2 * STEPS][4],
                                                     const Mod& mod, const Place& at,
                                                     const Tile& tile, const Words& words,
                                                     bool there, const RowPairs<AHEAD>& ahead,
                                                     u32 lane_lse, float softmax_scale) {
  const ModPlace own(at);
  const int last_q = mod.seqlen_q - 1, last_k = mod.seqlen_k - 1;
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n) {
    const float2 lse = ahead.pair(n, lane_lse);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = own.key + half * 8 - at.key, column = own.row + n * 8 - at.row;
      float probability[2], product[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float score = s[0][n][2 * half + i] * softmax_scale;
        const int q_idx = min(own.row + n * 8 + i, last_q), k_idx = min(own.key + half * 8, last_k);
        const float x = mod(score, q_idx, k_idx);
        const bool seen = x != NEG_INFINITY && tile.sees(column + i, key);
        probability[i] = seen ? exp2_fast(fmaf(x, LOG2E, -(i == 0 ? lse.x : lse.y))) : 0.f;
        product[i] = seen ? probability[i] * mod.derivative(score, q_idx, k_idx) : 0.f;
      }
      p[n / 2][n % 2 * 2 + half] = pack2<T>(probability[0], probability[1]);
      if (there)
        store_shared_word(words.at(n, half), static_cast<int>(pack2<T>(product[0], product[1])));
    }
    compiler_fence();  // so many loads at a time
  }
}

// The same of tile `step`; once its dS^T has room. there: no other tile's scores once more.
template <typename T, typename Layout, int STEPS, int AHEAD, typename Mod, typename Barriers>
__device__ __forceinline__ void curved_scores(u32 (&p)[STEPS][4], const float (&s)[1][2 * STEPS][4],
                                              const Mod& mod, const Barriers& barriers, u32 shared,
                                              int step, bool there, const RowPairs<AHEAD>& ahead,
                                              u32 lane_lse, const AttentionForm& form) {
  const RingPlace<Layout::DS_STAGES> ring = ring_place<Layout::DS_STAGES>(step);
  const u32 about = barriers.tile(step);
  const FormTile<Layout::BLOCK_Q, Layout::BLOCK_K> tile(about,
                                                        form.window_left + form.window_right + 1);
  if (there) mbarrier_wait(barriers.ds_empty(ring.stage), ring.parity ^ 1);
  const u32 own = shared + Layout::DS + ring.stage * Layout::DS_STAGE;
  curved_probabilities<T>(p, s, mod, ScoreTilePlace(about), tile,
                          DerivativeWords<typename Layout::DSTile>(own), there, ahead, lane_lse,
                          form.softmax_scale);
}

// dP^T - delta -> dS^T in 16 bits, which may then be where the words were.
template <typename T, typename Layout, int STEPS>
__device__ __forceinline__ void curved_differentials(u32 (&ds)[STEPS][4],
                                                     const float (&dp)[1][2 * STEPS][4], u32 shared,
                                                     int stage) {
  const DerivativeWords<typename Layout::DSTile> words(shared + Layout::DS +
                                                       stage * Layout::DS_STAGE);
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ds[n / 2][n % 2 * 2 + half] = differential<T>(load_shared_word(words.at(n, half)),
                                                    dp[0][n][2 * half], dp[0][n][2 * half + 1]);
  __syncwarp();
}
