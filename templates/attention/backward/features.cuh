// Forms of attention (attention/features.cuh) in its backward: final scores in natural units, and
// their slopes d(final) / d(scaled) where a rule is curved.
#pragma once
#include "ptx/math.cuh"
#include "ptx/register_fence.cuh"
#include "tile/reduce.cuh"
#include "attention/backward/mma.cuh"
#include "attention/backward/padded_rows.cuh"
#include "attention/features.cuh"

// The rules of one head; Mod is the user's score with its derivative. Sinks are in lse alone.
template <bool SOFTCAP, bool EXACT, bool SCORE_MOD, bool ALIBI, typename Mod>
__device__ __forceinline__ auto backward_rules(const AttentionForm& form, const Mod& mod,
                                               const float* alibi_slopes, int batch, int head,
                                               int seqlen_q, int seqlen_k) {
  return score_rules(
      RuleIf<SOFTCAP, SoftCap<EXACT>>(form.softcap),
      RuleIf<SCORE_MOD, PerScore<Mod>>(mod, seqlen_q, seqlen_k),
      RuleIf<ALIBI, Alibi>(alibi_slopes, form.alibi_batch_stride, batch, head, seqlen_q, seqlen_k));
}

// The bias and mask of one head, which come after these.
template <bool BIAS, bool BIAS_PAIRED, bool MASK, bool MASK_PAIRED, typename T>
__device__ __forceinline__ auto backward_arrays(const AttentionForm& form, const T* bias,
                                                const u8* mask, int batch, int head, int seqlen_q,
                                                int seqlen_k) {
  return score_rules(
      RuleIf<BIAS, Bias<T, BIAS_PAIRED>>(bias, form.bias, batch, head, seqlen_q, seqlen_k),
      RuleIf<MASK, Where<u8, MASK_PAIRED>>(mask, form.mask, batch, head, seqlen_q, seqlen_k));
}

// A raw product q . k -> the final score; returns its slope, 0 where the key is hidden: a user's
// derivative may be anything there.
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
  return x[0] == NEG_INFINITY ? 0.f : slope[0];
}

// The same with a bias and a mask.
template <bool CURVED, typename Rules, typename Arrays>
__device__ __forceinline__ float final_score(float& score, const Rules& rules, const Arrays& arrays,
                                             const KeyBand& band, float softmax_scale, int q_idx,
                                             int k_idx) {
  const float slope = final_score<CURVED>(score, rules, band, softmax_scale, q_idx, k_idx);
  float x[1] = {score};
  arrays.apply(x, q_idx, k_idx);
  score = x[0];
  return x[0] == NEG_INFINITY ? 0.f : slope;
}

// What a bias and a mask add to the scores of fragments, -inf where a key is hidden. They are asked
// for before the scores are multiplied, and arrive meanwhile. D fragments (see ptx/mma.cuh) whose
// first row and column are `row` and `column`: keys and queries if KEYS_ARE_ROWS, else queries and
// keys.
template <bool KEYS_ARE_ROWS, int M, int N, typename Arrays>
__device__ __forceinline__ void load_added(float (&added)[M][N][4], int lane, const Arrays& arrays,
                                           int row, int column) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + m * 16 + lane / 4 + half * 8, c = column + n * 8 + lane % 4 * 2;
        float (&pair)[4] = added[m][n];
        if constexpr (KEYS_ARE_ROWS) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float x[1] = {0.f};
            arrays.apply(x, c + i, r);
            pair[2 * half + i] = x[0];
          }
        } else {
          float x[2] = {0.f, 0.f};
          arrays.apply(x, r, c);
          pair[2 * half] = x[0], pair[2 * half + 1] = x[1];
        }
      }
}

// `final_score` of the fragments, with what was added if ADDED. Slopes are written if CURVED.
template <bool KEYS_ARE_ROWS, bool CURVED, bool ADDED, int M, int N, typename Rules>
__device__ __forceinline__ void final_scores(float (&s)[M][N][4], float (&slopes)[M][N][4],
                                             const float (&added)[M][N][4], int lane,
                                             const Rules& rules, const KeyBand& band,
                                             float softmax_scale, int row, int column) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + m * 16 + lane / 4 + i / 2 * 8;
        const int c = column + n * 8 + lane % 4 * 2 + i % 2;
        float& x = s[m][n][i];
        const float slope = final_score<CURVED>(x, rules, band, softmax_scale,
                                                KEYS_ARE_ROWS ? c : r, KEYS_ARE_ROWS ? r : c);
        // Whatever a hidden score is, and its slope, they stay hidden.
        const bool hidden = ADDED && added[m][n][i] == NEG_INFINITY;
        if constexpr (ADDED) x = hidden ? NEG_INFINITY : x + added[m][n][i];
        if constexpr (CURVED) slopes[m][n][i] = hidden ? 0.f : slope;
      }
      compiler_fence();  // so many loads at a time
    }
}

// Tiles of queries that see some key of a block from k0 on: first .. end - 1.
template <int BLOCK_Q, int BLOCK_K>
struct BandRows {
  int first, end;

  __device__ __forceinline__ BandRows(const KeyBand& band, int k0, int seqlen_q, int seqlen_k) {
    first = band.first_row(k0) / BLOCK_Q;
    const int end_row = min(band.end_row(min(k0 + BLOCK_K, seqlen_k) - 1), seqlen_q);
    end = ceil_div(max(end_row, 0), BLOCK_Q);
  }
};

// Whether each query of a tile from q0 on sees each key of a block from k0 on. WHOLE: of one that
// is cut by the end of the sequence none does.
template <int BLOCK_Q, int BLOCK_K, bool WHOLE>
__device__ __forceinline__ bool band_sees_all(const KeyBand& band, int q0, int k0, int seqlen_k) {
  if (WHOLE && k0 + BLOCK_K > seqlen_k) return false;
  return q0 >= band.first_row(k0 + BLOCK_K - 1) && q0 + BLOCK_Q <= band.end_row(k0);
}

// Raw products of fragments that the band cuts: `hidden` where a key is not seen. Where a form has
// no rules the others stay as they are. KEYS_IN_RUNS: see accumulator_init.cuh.
template <bool KEYS_ARE_ROWS, bool KEYS_IN_RUNS = false, int M, int N>
__device__ __forceinline__ void hide_outside(float (&s)[M][N][4], int lane, const KeyBand& band,
                                             float hidden, int row, int column) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + (KEYS_IN_RUNS && KEYS_ARE_ROWS ? lane / 4 * 2 * M + m * 2 + half
                                                         : m * 16 + half * 8 + lane / 4);
      const int from = KEYS_ARE_ROWS ? band.first_row(r) : band.first(r);
      const int past = KEYS_ARE_ROWS && r >= band.seqlen_k ? 0
                       : KEYS_ARE_ROWS                     ? band.end_row(r)
                                                           : band.end(r);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = column + (KEYS_IN_RUNS && !KEYS_ARE_ROWS ? lane % 4 * 2 * N + n * 2 + i
                                                                 : n * 8 + lane % 4 * 2 + i);
          if (c < from || c >= past) s[m][n][2 * half + i] = hidden;
        }
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

// What a row of queries adds to the gradient of its head's ALiBi slope: minus the sum of dS times
// the distances of its keys. delta comes from an o that was rounded, so a row's dS are P e off, e
// alike for all of its keys; distances are large and of one sign, and would make much of that. But
// what dS must add up to is known, `expected` below, and so e is found out and taken off.
struct DistanceSum {
  float weighted = 0.f, plain = 0.f;  // sums of dS distance, dS
  float mean = 0.f, total = 0.f;      // sums of P distance, P

  __device__ __forceinline__ void add(float ds, float p, int apart) {
    const float distance = fabsf(static_cast<float>(apart));
    weighted = fmaf(ds, distance, weighted), plain += ds;
    mean = fmaf(p, distance, mean), total += p;
  }

  // LANES neighbours have parts of a row: all of it, in the order of a butterfly.
  template <int LANES>
  __device__ __forceinline__ void join() {
    weighted = lanes_sum<LANES>(weighted), plain = lanes_sum<LANES>(plain);
    mean = lanes_sum<LANES>(mean), total = lanes_sum<LANES>(total);
  }

  // dlse: of the row, or null. A sink has what P lacks to 1.
  __device__ __forceinline__ float value(float delta, const float* dlse) const {
    if (total == 0.f) return 0.f;
    const float expected = delta * (1.f - total) + (dlse == nullptr ? 0.f : *dlse);
    return (plain - expected) * (mean / total) - weighted;
  }
};

// dS and final scores of fragments where queries are rows. `row`, `column`: query and key of the
// first row and column, the query in keys' counting.
template <int M, int N>
__device__ __forceinline__ void add_distances(DistanceSum (&sums)[M][2], const float (&ds)[M][N][4],
                                              const float (&s)[M][N][4],
                                              const RowStatistics<M>& rows, int lane, int row,
                                              int column) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int apart =
            row - column + m * 16 + lane / 4 + i / 2 * 8 - n * 8 - lane % 4 * 2 - i % 2;
        const float p = exp2_fast(fmaf(s[m][n][i], LOG2E, -rows.lse[m][i / 2]));
        sums[m][i / 2].add(ds[m][n][i], p, apart);
      }
}

// A warp's to rows of its own, `count` of which exist; dlse is of the first one, or null.
template <int M>
__device__ __forceinline__ void store_distances(float* to, DistanceSum (&sums)[M][2],
                                                const RowStatistics<M>& rows, const float* dlse,
                                                int count) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + lane / 4;
      sums[m][half].template join<4>();
      if (lane % 4 == 0 && row < count)
        to[row] = sums[m][half].value(rows.delta[m][half], dlse == nullptr ? dlse : dlse + row);
    }
}
