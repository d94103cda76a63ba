// ALiBi on all scores of a warp's fragments at once (see attention/score.cuh).
//
// Where a tile lies on one side of the diagonal the distances of its keys have one sign: a row's
// score is s + slope * (its column in the tile), up to a number that all columns share. That is
// left to the softmax, which subtracts a number of each row anyhow: one instruction a score, not
// two.
#pragma once
#include "attention/score.cuh"

struct AlibiOfWarp : Alibi {
  using Alibi::Alibi;

  // s + frame of a row are its final scores. q_idx, k_idx: of the fragments' first row and column.
  template <int N>
  __device__ __forceinline__ void on_fragments(float (&s)[1][N][4], float (&frame)[2], int lane,
                                               int q_idx, int k_idx) const {
    const int distance = q_idx + shift - k_idx;  // of the first row and key
    const bool before = distance >= 8 * N - 1;   // every key
    if (before || distance + 15 <= 0) {
      const float step = before ? slope : -slope;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = lane % 4 * 2 - half * 8 - lane / 4;
        frame[half] = step * static_cast<float>(column - distance);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            s[0][n][2 * half + i] =
                fmaf(step, static_cast<float>(8 * n + i), s[0][n][2 * half + i]);
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      frame[half] = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float pair[2] = {s[0][n][2 * half], s[0][n][2 * half + 1]};
        apply(pair, q_idx + lane / 4 + half * 8, k_idx + lane % 4 * 2, n * 8);
        s[0][n][2 * half] = pair[0], s[0][n][2 * half + 1] = pair[1];
      }
    }
  }
};
