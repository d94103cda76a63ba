// Forms of attention in decoding, where a lane's two rows of a tile are of two heads or tokens and
// have a set of rules (attention/score.cuh) each.
#pragma once
#include "attention/decode/rows.cuh"
#include "attention/features.cuh"

// Of rows `row` and `row` + 8 the new token and the query head; beyond the last row those of the
// last.
struct LaneRows {
  int token[2], head[2];

  __device__ __forceinline__ LaneRows(const QueryRows& rows, int kv_head, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = min(row + half * 8, rows.count() - 1);
      token[half] = rows.token(at), head[half] = rows.head(kv_head, at);
    }
  }
};

// Raw products of a warp's 16 rows -> final scores, as rules_on_fragments: s[1][N][4] are D
// fragments, of which this lane has rows of tokens q_idx, keys k_idx + 2t, k_idx + 2t + 1 of every
// eight.
template <int N, typename Rules>
__device__ __forceinline__ void rules_on_rows(float (&s)[1][N][4], int lane,
                                              const Rules (&rules)[2], float softmax_scale,
                                              const int (&q_idx)[2], int k_idx) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float pair[2] = {s[0][n][2 * half] * softmax_scale, s[0][n][2 * half + 1] * softmax_scale};
      rules[half].apply(pair, q_idx[half], k_idx + lane % 4 * 2, n * 8);
      s[0][n][2 * half] = pair[0], s[0][n][2 * half + 1] = pair[1];
    }
}
