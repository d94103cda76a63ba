// Forms of attention (device/attention_form.cuh) in its backward: final scores in natural units, and
// their slopes d(final) / d(scaled) where a rule is curved.
#pragma once
#include "device/attention_form.cuh"

// The rules of one head. A user's score has no derivative; sinks are in lse alone.
template <bool SOFTCAP, bool EXACT, bool ALIBI, bool BIAS, bool MASK, typename T>
__device__ __forceinline__ auto backward_rules(const AttentionForm& form, const float* alibi_slopes,
                                               const T* bias, const u8* mask, int batch, int head,
                                               int seqlen_q, int seqlen_k) {
  return score_rules(
      RuleIf<SOFTCAP, SoftCap<EXACT>>(form.softcap),
      RuleIf<ALIBI, Alibi>(alibi_slopes, form.alibi_batch_stride, batch, head, seqlen_q, seqlen_k),
      RuleIf<BIAS, Bias<T, false>>(bias, form.bias, batch, head, seqlen_q, seqlen_k),
      RuleIf<MASK, Where<u8, false>>(mask, form.mask, batch, head, seqlen_q, seqlen_k));
}

// A raw product q . k -> the final score; returns its slope.
template <bool CURVED, typename Rules>
__device__ __forceinline__ float final_score(float& score, const Rules& rules, const KeyBand& band,
                                             float softmax_scale, int q_idx, int k_idx) {
  float x[1] = {score * softmax_scale}, slope[1] = {1.f};
  if constexpr (CURVED) {
    rules.apply(x, slope, q_idx, k_idx);
  } else {
    rules.apply(x, q_idx, k_idx);
  }
  band.apply(x, q_idx, k_idx);
  score = x[0];
  return slope[0];
}

// The same of D fragments (see mma.cuh) whose first row and column are `row` and `column`: keys and
// queries if KEYS_ARE_ROWS, else queries and keys. Slopes are written where a rule is curved.
template <bool KEYS_ARE_ROWS, bool CURVED, int M, int N, typename Rules>
__device__ __forceinline__ void final_scores(float (&s)[M][N][4], float (&slopes)[M][N][4],
                                             int lane, const Rules& rules, const KeyBand& band,
                                             float softmax_scale, int row, int column) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + m * 16 + lane / 4 + i / 2 * 8;
        const int c = column + n * 8 + lane % 4 * 2 + i % 2;
        const float slope = final_score<CURVED>(s[m][n][i], rules, band, softmax_scale,
                                                KEYS_ARE_ROWS ? c : r, KEYS_ARE_ROWS ? r : c);
        if constexpr (CURVED) slopes[m][n][i] = slope;
      }
      asm volatile("" ::: "memory");  // so many loads at a time
    }
}

template <int M, int N>
__device__ __forceinline__ void scale_by(float (&ds)[M][N][4], const float (&slopes)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[m][n][i] *= slopes[m][n][i];
}
