// What happens to a score between q . k and the softmax: rules, one after the other, in fp32.
//
//   x = softmax_scale * (q . k)                                   the kernel's own
//   1. SoftCap    x = cap * tanh(x / cap)                         derivative 1 - tanh^2
//   2. PerScore   x = expression(x, q_idx, k_idx)                 the user's, if he gives one
//   3. Alibi      x = x - slope * |q_idx + seqlen_k - seqlen_q - k_idx|                      1
//   4. Bias       x = x + bias[q_idx][k_idx]                                                 1
//   5. Where      x = mask[q_idx][k_idx] ? x : -inf                                          1
//   6. KeyBand    x = first(q_idx) <= k_idx < end(q_idx) ? x : -inf     causal and window    1
//
// q_idx and k_idx count rows of one head (with varlen: of one sequence); rows and keys past the end
// may be asked for, as padded tiles do, and are never read. x after the last rule is the final
// score, in natural units: p = exp(x - lse). An attention sink is no rule but a logit of its own,
// without a value: a row's sum gains exp(sink).
//
// A kernel lists its rules in this order (RuleIf of features.cuh leaves some out):
//
//   auto rules = score_rules(
//       SoftCap<EXACT>(softcap),
//       Alibi(alibi_slopes, alibi_batch_stride, batch, head, seqlen_q, seqlen_k));
//
//   float x[N];             // N neighbouring keys k_idx, k_idx + 1, ... of one row: 1, 2, ...
//   rules.apply(x, q_idx, k_idx);                // scaled -> final
//   float slope[N];
//   rules.apply(x, slope, q_idx, k_idx);         // and d(final) / d(scaled): softmax_scale is not
//                                                // in it. It is finite wherever x is -inf.
//   rules.apply(x, q_idx, k_idx, offset);        // of keys k_idx + offset, ...: with a constant,
//                                                // what depends on the row is worked out once
//   rules_on_fragments(s, lane, rules, softmax_scale, q_idx, k_idx);    // D fragments of a warp
//
// Pointers are those of a kernel's arguments: Bias and Where take the strides of
// [batch, heads_q, seqlen_q, seqlen_k], 0 where a dimension is broadcast; columns are contiguous.
// PAIRED: rows start at multiples of two elements and seqlen_k is even, so two keys are one load.
//
// What a rule reads arrives late. A Held rule has the numbers of a whole tile of fragments in
// registers: rules.fetch(lane, q_idx, k_idx) asks for those of the next tile, which travel while
// this one is multiplied.
#pragma once
#include "ptx/math.cuh"

struct ScoreRule {
  // Its derivative is not 1: differentiate(x, slope, q_idx, k_idx) applies it, slopes on the way.
  static constexpr bool CURVED = false;
  static constexpr bool HELD = false;  // it reads its numbers a tile ahead
};

// EXACT: to fp32's last places, at several times the cost. Else within 3e-7 of the cap, by
// tanh(x) = 1 - 2 / (e^2x + 1), which saturates; NaN stays NaN.
template <bool EXACT>
struct SoftCap : ScoreRule {
  static constexpr bool CURVED = true;
  float cap, inverse;

  // Of scores that `scale` is still to multiply.
  __device__ __forceinline__ explicit SoftCap(float softcap, float scale = 1.f)
      : cap(softcap), inverse(scale / softcap) {}

  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N], int, int, int = 0) const {
#pragma unroll
    for (int i = 0; i < N; ++i)
      x[i] = EXACT ? cap * tanhf(x[i] * inverse)
                   : fmaf(-2.f * cap, inverse_fast(exp2_fast(x[i] * (2.f * LOG2E * inverse)) + 1.f),
                          cap);
  }

  template <int N>
  __device__ __forceinline__ void differentiate(float (&x)[N], float (&slope)[N], int q_idx,
                                                int k_idx) const {
    apply(x, q_idx, k_idx);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float t = x[i] * inverse;
      slope[i] *= fmaf(-t, t, 1.f);
    }
  }
};

// A function object of one score, (score, q_idx, k_idx) -> score, that may read arrays at q_idx and
// k_idx: it is asked for rows and keys that exist only. Where slopes are asked for it has the same
// arguments' `derivative`.
template <typename Function>
struct PerScore : ScoreRule {
  static constexpr bool CURVED = true;
  Function function;
  int last_q, last_k;

  __device__ __forceinline__ PerScore(const Function& f, int seqlen_q, int seqlen_k)
      : function(f), last_q(seqlen_q - 1), last_k(seqlen_k - 1) {}

  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N], int q_idx, int k_idx, int offset = 0) const {
#pragma unroll
    for (int i = 0; i < N; ++i)
      x[i] = function(x[i], min(q_idx, last_q), min(k_idx + offset + i, last_k));
  }

  template <int N>
  __device__ __forceinline__ void differentiate(float (&x)[N], float (&slope)[N], int q_idx,
                                                int k_idx) const {
#pragma unroll
    for (int i = 0; i < N; ++i)
      slope[i] *= function.derivative(x[i], min(q_idx, last_q), min(k_idx + i, last_k));
    apply(x, q_idx, k_idx);
  }
};

// Aligned to the bottom right, as the causal mask is: the last query is at the last key.
struct Alibi : ScoreRule {
  float slope;
  int shift;

  // alibi_slopes: [batch or 1, heads_q]; a stride of 0 where all batches share theirs. `unit`: of
  // the scores, 1 / softmax_scale where that is still to multiply them.
  __device__ __forceinline__ Alibi(const float* alibi_slopes, int batch_stride, int batch, int head,
                                   int seqlen_q, int seqlen_k, float unit = 1.f)
      : slope(alibi_slopes[batch * batch_stride + head] * unit), shift(seqlen_k - seqlen_q) {}

  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N], int q_idx, int k_idx, int offset = 0) const {
    const float distance = static_cast<float>(q_idx + shift - k_idx);
#pragma unroll
    for (int i = 0; i < N; ++i)
      x[i] = fmaf(-slope, fabsf(distance - static_cast<float>(offset + i)), x[i]);
  }
};

// As many bytes in one register or two.
template <int BYTES>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = u16;
};
template <>
struct WordOf<4> {
  using Type = u32;
};
template <>
struct WordOf<8> {
  using Type = u64;
};

// The [seqlen_q, seqlen_k] of one batch and head in an array that is broadcast to four dimensions.
template <typename T, bool PAIRED>
struct ScoreArray : ScoreRule {
  using Word = typename WordOf<2 * sizeof(T)>::Type;  // two neighbouring keys
  using Element = T;
  const T* rows;
  i64 row_stride;
  int last_q, seqlen_k;

  __device__ __forceinline__ ScoreArray(const T* array, const Strides& strides, int batch, int head,
                                        int seqlen_q, int seqlen_k_)
      : rows(array + batch * strides.batch + head * strides.head),
        row_stride(strides.row),
        last_q(seqlen_q - 1),
        seqlen_k(seqlen_k_) {}

  // Keys k_idx + offset and the one behind it; where PAIRED. Zeros past the end.
  __device__ __forceinline__ Word two(int q_idx, int k_idx, int offset) const {
    const T* row = rows + min(q_idx, last_q) * row_stride + k_idx;
    return offset < seqlen_k - k_idx ? *reinterpret_cast<const Word*>(row + offset) : Word(0);
  }

  // The same of N neighbours, one by one where they are not PAIRED.
  template <int N>
  __device__ __forceinline__ void load(T (&x)[N], int q_idx, int k_idx, int offset) const {
    if constexpr (PAIRED && N == 2) {
      const Word word = two(q_idx, k_idx, offset);
      x[0] = reinterpret_cast<const T*>(&word)[0], x[1] = reinterpret_cast<const T*>(&word)[1];
    } else {
      const T* row = rows + min(q_idx, last_q) * row_stride + k_idx;
      const int keys = seqlen_k - k_idx;
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = offset + i < keys ? row[offset + i] : T(0);
    }
  }
};

template <typename T, bool PAIRED>
struct Bias : ScoreArray<T, PAIRED> {
  using ScoreArray<T, PAIRED>::ScoreArray;

  __device__ __forceinline__ static float changed(float x, T added) {
    return x + static_cast<float>(added);
  }

  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N], int q_idx, int k_idx, int offset = 0) const {
    T added[N];
    this->load(added, q_idx, k_idx, offset);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = changed(x[i], added[i]);
  }
};

// A mask of bytes: 0 hides the key.
template <typename T, bool PAIRED>
struct Where : ScoreArray<T, PAIRED> {
  using ScoreArray<T, PAIRED>::ScoreArray;

  __device__ __forceinline__ static float changed(float x, T visible) {
    return visible ? x : NEG_INFINITY;
  }

  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N], int q_idx, int k_idx, int offset = 0) const {
    T visible[N];
    this->load(visible, q_idx, k_idx, offset);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = changed(x[i], visible[i]);
  }
};

// Bias or Where with the numbers of a warp's fragments s[M][N][4] in registers, PAIRED only.
template <typename Array, int M, int N>
struct Held : Array {
  static constexpr bool HELD = true;
  using T = typename Array::Element;
  typename Array::Word words[2 * M][N];
  int row;  // of a lane's: 2 * m + half

  using Array::Array;

  __device__ __forceinline__ void fetch(int lane, int q_idx, int k_idx) {
#pragma unroll
    for (int r = 0; r < 2 * M; ++r)
#pragma unroll
      for (int n = 0; n < N; ++n)
        words[r][n] = this->two(q_idx + r * 8 + lane / 4, k_idx + lane % 4 * 2, n * 8);
  }

  __device__ __forceinline__ void apply(float (&x)[2], int, int, int offset = 0) const {
    const typename Array::Word word = words[row][offset / 8];
    x[0] = Array::changed(x[0], reinterpret_cast<const T*>(&word)[0]);
    x[1] = Array::changed(x[1], reinterpret_cast<const T*>(&word)[1]);
  }
};

// The keys that a row sees: a band about the diagonal that ends in the bottom right corner, and no
// key past the end. Causal is right = 0; a side without a bound is as wide as the scores are.
//
//      k_idx  0 1 2 3 4 5 6 7            seqlen_q 5, seqlen_k 8, left 2, right 1
//   q_idx 0     x x x x                    first(0) = 1, end(0) = 5
//         1       x x x x
//         2         x x x x              kernels skip tiles wholly outside: keys before
//         3           x x x x            first(their first row) or from end(their last row) on
//         4             x x x
struct KeyBand : ScoreRule {
  int seqlen_k, shift, left, right;

  // left, right: at least 0. max(seqlen_q, seqlen_k) is without a bound.
  __device__ __forceinline__ KeyBand(int seqlen_q, int keys, int left_, int right_)
      : seqlen_k(keys), shift(keys - seqlen_q), left(left_), right(right_) {}

  __device__ __forceinline__ int first(int q_idx) const { return max(q_idx + shift - left, 0); }
  __device__ __forceinline__ int end(int q_idx) const {
    return min(q_idx + shift + right + 1, seqlen_k);
  }
  // The same by columns: rows first_row(k) .. end_row(k) - 1 see a key, none where it is empty.
  __device__ __forceinline__ int first_row(int k_idx) const {
    return max(k_idx - shift - right, 0);
  }
  __device__ __forceinline__ int end_row(int k_idx) const {
    return min(k_idx - shift + left + 1, seqlen_k - shift);  // seqlen_q
  }

  __device__ __forceinline__ void begin_row(int) {}

  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N], int q_idx, int k_idx, int offset = 0) const {
    const int from = first(q_idx) - k_idx, to = end(q_idx) - k_idx;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (offset + i < from || offset + i >= to) x[i] = NEG_INFINITY;
  }
};

// No rule.
struct Unchanged : ScoreRule {
  template <int N>
  __device__ __forceinline__ void apply(float (&)[N], int, int, int = 0) const {}
};

template <typename... Rules>
struct ScoreRules;

template <>
struct ScoreRules<> {
  template <int N>
  __device__ __forceinline__ void apply(float (&)[N], int, int, int = 0) const {}
  template <int N>
  __device__ __forceinline__ void differentiate(float (&)[N], float (&)[N], int, int) const {}
  __device__ __forceinline__ void fetch(int, int, int) {}
  __device__ __forceinline__ void begin_row(int) {}
};

template <typename First, typename... Rest>
struct ScoreRules<First, Rest...> {
  First rule;
  ScoreRules<Rest...> rest;

  __device__ __forceinline__ explicit ScoreRules(const First& first, const Rest&... others)
      : rule(first), rest(others...) {}

  // Scaled scores -> final scores.
  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N], int q_idx, int k_idx, int offset = 0) const {
    rule.apply(x, q_idx, k_idx, offset);
    rest.apply(x, q_idx, k_idx, offset);
  }

  // The same, and d(final) / d(scaled).
  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N], float (&slope)[N], int q_idx,
                                        int k_idx) const {
#pragma unroll
    for (int i = 0; i < N; ++i) slope[i] = 1.f;
    differentiate(x, slope, q_idx, k_idx);
  }

  template <int N>
  __device__ __forceinline__ void differentiate(float (&x)[N], float (&slope)[N], int q_idx,
                                                int k_idx) const {
    if constexpr (First::CURVED) {
      rule.differentiate(x, slope, q_idx, k_idx);
    } else {
      rule.apply(x, q_idx, k_idx);
    }
    rest.differentiate(x, slope, q_idx, k_idx);
  }

  // For Held rules: what the fragments whose first row and column are q_idx, k_idx will read; and
  // which of a lane's rows comes next.
  __device__ __forceinline__ void fetch(int lane, int q_idx, int k_idx) {
    if constexpr (First::HELD) rule.fetch(lane, q_idx, k_idx);
    rest.fetch(lane, q_idx, k_idx);
  }
  __device__ __forceinline__ void begin_row(int row) {
    if constexpr (First::HELD) rule.row = row;
    rest.begin_row(row);
  }
};

template <typename... Rules>
__device__ __forceinline__ ScoreRules<Rules...> score_rules(const Rules&... rules) {
  return ScoreRules<Rules...>(rules...);
}

// Raw products of a warp -> final scores. s[m][n][4] are D fragments (see ptx/mma.cuh): lane (g, t)
// has rows g and g + 8 of 16-row block m, keys 2t and 2t + 1 of every eight. q_idx, k_idx: those of
// the fragments' first row and column.
template <int M, int N, typename Rules>
__device__ __forceinline__ void rules_on_fragments(float (&s)[M][N][4], int lane, Rules& rules,
                                                   float softmax_scale, int q_idx, int k_idx) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rules.begin_row(2 * m + half);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float pair[2] = {s[m][n][2 * half] * softmax_scale, s[m][n][2 * half + 1] * softmax_scale};
        rules.apply(pair, q_idx + m * 16 + lane / 4 + half * 8, k_idx + lane % 4 * 2, n * 8);
        s[m][n][2 * half] = pair[0], s[m][n][2 * half + 1] = pair[1];
      }
    }
}
