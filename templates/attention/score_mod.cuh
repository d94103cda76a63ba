// The caller's expression of one score, as a function object for PerScore (score.cuh).
//
// A kernel says what the caller wrote, and includes this:
//
//   #define SCORE_FIELDS int b, h, seqlen_q, seqlen_k; float slope; const float* table;
//   #define SCORE_EXPRESSION (score + slope * table[h])
//   #define SCORE_DERIVATIVE (1.f)
//   #include "score_mod.cuh"
//   ...
//   PerScore<ScoreMod>({b, h, seqlen_q, seqlen_k, slope, table}, seqlen_q, seqlen_k)
//
// In a class of its own the expression sees its fields and the score's place, no names of the
// kernel's.
#pragma once

struct ScoreMod {
  SCORE_FIELDS

  __device__ __forceinline__ float operator()(float score, int q_idx, int k_idx) const {
    return SCORE_EXPRESSION;
  }
  __device__ __forceinline__ float derivative(float score, int q_idx, int k_idx) const {
    return SCORE_DERIVATIVE;
  }
};

#undef SCORE_FIELDS
#undef SCORE_EXPRESSION
#undef SCORE_DERIVATIVE
