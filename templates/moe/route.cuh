// One token's experts in the registers of LANES neighbouring lanes, VALUES of them in each, and the
// choice of the best. Experts come in chunks of 16 bytes of logits; each of `num_groups` groups of
// experts has `group_lanes` lanes of its own, whose chunks take turns. 64 experts of fp32 in two
// groups on LANES = 8 lanes, VALUES = 8 (two chunks of four):
//
//   lane         0      1      2       3       4       5       6       7
//   chunk 0     0-3    4-7    8-11   12-15   32-35   36-39   40-43   44-47
//   chunk 1   16-19  20-23   24-27   28-31   48-51   52-55   56-59   60-63
//               ------- group 0 --------     ------- group 1 ---------
//
// What is compared is finite or +inf: NaN and -inf count as the least finite float, so that -inf is
// free to stand for what cannot be chosen. Of equals the lower expert comes first.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"
#include "moe/scores.cuh"

constexpr float LEAST = -3.402823466e38f;  // finite
constexpr float INFINITE = -NEG_INFINITY;

// fmaxf(NaN, y) is y.
__device__ __forceinline__ float at_least(float x) { return fmaxf(x, LEAST); }

// How all tokens of a launch choose.
struct Routing {
  int top_k;
  int scoring;      // 0: softmax, else one of each logit alone (score_of)
  int renormalize;  // weights of a token are divided by their sum
  int group_size, num_groups, topk_groups;
  int group_topk;  // of a group's best experts, whose scores' sum is its own
  int lanes_log2;  // of a group's lanes; num_groups << lanes_log2 is at most LANES
  int vector;      // rows and groups start on 16-byte boundaries and are whole chunks
  float scale;     // what weights are multiplied with at last
};

// The same where it is softmax of one group, in whole chunks: constants, of which code is made.
template <int LANES>
__device__ __forceinline__ Routing plain(const Routing& how) {
  constexpr int LOG2 = LANES == 32 ? 5 : LANES == 16 ? 4 : LANES == 8 ? 3 : LANES == 4 ? 2 : 1;
  static_assert(1 << LOG2 == LANES, "2 to 32 lanes");
  return {how.top_k, 0, how.renormalize, how.group_size, 1, 1, 1, LOG2, 1, how.scale};
}

// Two of them, or one.
template <typename T>
constexpr u32 MINUS_INFINITY = 0xff80ff80u;
template <>
constexpr u32 MINUS_INFINITY<fp16> = 0xfc00fc00u;
template <>
constexpr u32 MINUS_INFINITY<fp32> = 0xff800000u;

// Sixteen bytes of logits, or -inf.
template <typename T>
__device__ __forceinline__ Vector<T> load_or_least(const T* source, bool there) {
  constexpr u32 LEAST_BITS = MINUS_INFINITY<T>;
  uint4 bits = {LEAST_BITS, LEAST_BITS, LEAST_BITS, LEAST_BITS};
  load_constant_chunk_if(bits, source, there);
  return {bits};
}

template <typename T, int LANES, int VALUES>
struct Experts {
  static constexpr int SIZE = 16 / sizeof(T), CHUNKS = VALUES / SIZE;
  static_assert(VALUES % SIZE == 0, "whole chunks");
  float x[VALUES];  // -inf: not there, or not to be chosen
  int first;        // the expert of x[0]
  int step;         // from a chunk's first expert to the next one's
  int inside;       // experts of the group from `first` on; may be negative

  __device__ __forceinline__ Experts(int lane, const Routing& how) {
    const int group = lane >> how.lanes_log2, skip = (lane - (group << how.lanes_log2)) * SIZE;
    first = group * how.group_size + skip;
    step = SIZE << how.lanes_log2;
    inside = group < how.num_groups ? how.group_size - skip : 0;
  }
  // How far the expert of x[i] is from the first one.
  __device__ __forceinline__ int ahead(int i) const { return i / SIZE * step + i % SIZE; }

  __device__ __forceinline__ void load(const T* row, bool vector) {
    if (vector) {
      Vector<T> chunk[CHUNKS];
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j)
        chunk[j] = load_or_least(row + first + j * step, j * step < inside);
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const float least = j * step < inside ? LEAST : NEG_INFINITY;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) x[j * SIZE + i] = fmaxf(chunk[j].get(i), least);
      }
    } else {
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        x[i] =
            ahead(i) < inside ? at_least(static_cast<float>(row[first + ahead(i)])) : NEG_INFINITY;
    }
  }

  // As they are, of rows in whole chunks; `all`: every lane has all of its chunks.
  __device__ __forceinline__ void load_raw(const T* row, bool all) {
    Vector<T> chunk[CHUNKS];
    if (all) {
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) chunk[j] = load_or_least(row + first + j * step, true);
    } else {
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j)
        chunk[j] = load_or_least(row + first + j * step, j * step < inside);
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) x[i] = chunk[i / SIZE].get(i % SIZE);
  }

  // Over the token: the greatest value, and the sum of exp(value - peak).
  __device__ __forceinline__ float greatest() const {
    return lanes_greatest<LANES>(greatest_of<VALUES>(x));
  }
  __device__ __forceinline__ float exp_sum(float peak) const {
    float term[VALUES], chunk[CHUNKS];
    if (peak < INFINITE) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) term[i] = exp2_fast((x[i] - peak) * LOG2E);
    } else {  // shared by those that are infinite
#pragma unroll
      for (int i = 0; i < VALUES; ++i) term[i] = x[i] == peak ? 1.f : 0.f;
    }
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) chunk[j] = sum_of<SIZE>(term + j * SIZE);
    return lanes_sum<LANES>(sum_of<CHUNKS>(chunk));
  }

  // The same of finite numbers, `peak` times log2(e) being `base`. What rounding leaves out of that
  // is a factor of each term.
  __device__ __forceinline__ float exp2_sum(float base) const {
    float chunk[CHUNKS];
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
      float term[SIZE];
#pragma unroll
      for (int i = 0; i < SIZE; ++i) term[i] = exp2_fast(fmaf(x[j * SIZE + i], LOG2E, -base));
      chunk[j] = sum_of<SIZE>(term);
    }
    return lanes_sum<LANES>(sum_of<CHUNKS>(chunk));
  }

  // Logits become scores plus the experts' bias. Division is approximate here, 2 ulp: the exact one
  // has a slow path, which there would be VALUES times.
  __device__ __forceinline__ void add_bias(const float* bias, int scoring, float peak, float sum) {
    const float share = 1.f / sum;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      if (ahead(i) >= inside) continue;
      float score = softmax_term(x[i], peak) * share;
      if (scoring > 0)
        score =
            scoring == SQRTSOFTPLUS ? sqrtsoftplus_of(x[i]) : __fdividef(1.f, 1.f + expf(-x[i]));
      x[i] = at_least(score + bias[first + ahead(i)]);
    }
  }

  // A group's score: the sum of its greatest two values' scores; its greatest value where there is no
  // other, or one is all that counts.
  template <typename Score>
  __device__ __forceinline__ float best_of_group(const Routing& how, bool two,
                                                 const Score& score) const {
    float a = NEG_INFINITY, b = NEG_INFINITY;  // the greatest and the second
#pragma unroll
    for (int i = 0; i < VALUES; ++i) b = fmaxf(b, fminf(a, x[i])), a = fmaxf(a, x[i]);
    for (int distance = (1 << how.lanes_log2) / 2; distance > 0; distance /= 2) {
      const float c = __shfl_xor_sync(FULL_MASK, a, distance);
      const float d = __shfl_xor_sync(FULL_MASK, b, distance);
      b = fmaxf(fminf(a, c), fmaxf(b, d)), a = fmaxf(a, c);
    }
    return two && b > NEG_INFINITY ? at_least(score(a) + score(b)) : a;
  }

  // The sum of more. Equals are taken together: a round finds the greatest value below the last one
  // and how many have it.
  template <typename Score>
  __device__ __forceinline__ float many_of_group(const Routing& how, const Score& score) const {
    float sum = 0.f, last = INFINITE;
    int left = how.group_topk;
#pragma unroll 1
    for (int round = 0; round < how.group_topk; ++round) {
      float most = NEG_INFINITY, count = 0.f;
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        if (round == 0 || x[i] < last) most = fmaxf(most, x[i]);
      for (int distance = (1 << how.lanes_log2) / 2; distance > 0; distance /= 2)
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, distance));
#pragma unroll
      for (int i = 0; i < VALUES; ++i) count += x[i] == most ? 1.f : 0.f;
      for (int distance = (1 << how.lanes_log2) / 2; distance > 0; distance /= 2)
        count += __shfl_xor_sync(FULL_MASK, count, distance);
      const int taken = most > NEG_INFINITY ? min(static_cast<int>(count), left) : 0;
      if (taken > 0) sum = at_least(sum + score(most) * taken), last = most, left -= taken;
    }
    return sum;
  }

  // Leave the best `topk_groups` groups; score(x): of a value, up to a factor, in the same order.
  template <typename Score>
  __device__ __forceinline__ void limit_groups(int lane, const Routing& how,
                                               const Score& score_of) {
    const float score = how.group_topk > 2 ? many_of_group(how, score_of)
                                           : best_of_group(how, how.group_topk == 2, score_of);
    const int mine = lane >> how.lanes_log2;
    int better = 0;
    for (int group = 0; group < how.num_groups; ++group) {
      const float other = __shfl_sync(FULL_MASK, score, group << how.lanes_log2, LANES);
      better += other > score || (other == score && group < mine);
    }
    if (better < how.topk_groups) return;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) x[i] = NEG_INFINITY;
  }

  // Which of x[0] to x[VALUES - 1] is the first to equal `best`; VALUES: none. A comparison is
  // worth 1 or 0, and numbers are added up on a pipe of their own, unlike selections: of powers of
  // two that go down the first one is the sum's exponent.
  __device__ __forceinline__ int find(float best) const {
    constexpr int PART = VALUES < 16 ? VALUES : 16;  // the sum of so many is exact
    int at = VALUES;
#pragma unroll
    for (int begin = VALUES - PART; begin >= 0; begin -= PART) {
      float marks[4] = {};
#pragma unroll
      for (int i = 0; i < PART; ++i)
        marks[i % 4] = fmaf(x[begin + i] == best ? 1.f : 0.f,
                            static_cast<float>(1 << (PART - 1 - i)), marks[i % 4]);
      const float all = marks[0] + marks[1] + (marks[2] + marks[3]);
      const int exponent = static_cast<int>(__float_as_uint(all) >> 23) - 127;
      if (all > 0.f) at = begin + PART - 1 - exponent;
    }
    return at;
  }

  // Lane k of the token gets its k-th best expert and that one's value. `best`: the greatest value.
  // There are at least `top_k` values to choose from, and top_k <= LANES. The last one's value.
  __device__ __forceinline__ float choose(int lane, int top_k, float best, int& id, float& value) {
    for (int k = 0;; ++k) {
      const int at = find(best), mine = at < VALUES ? first + ahead(at) : 1 << 30;
      const int winner = lanes_min<LANES>(mine);
      if (lane == k) id = winner, value = best;
      if (k + 1 == top_k) return best;
      const u32 gone = mine == winner ? 1u << at : 0;
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        if (gone >> i & 1) x[i] = NEG_INFINITY;
      best = greatest();
    }
  }

  // The same of logits that are as they were loaded, by the greatest of each four of a lane,
  // `head`. Which of four it is, and what is left of them, is asked of memory, where they have just
  // been: four lanes look at one each. Logits are taken in order, so that those of `best` or more
  // are gone that come before the last one taken.
  __device__ __forceinline__ float choose_by_fours(const T* row, int lane, int top_k, int experts,
                                                   float best, float (&head)[VALUES / 4], int& id,
                                                   float& value) const {
    const int self = threadIdx.x % WARP_SIZE;
    float above = best;
    int taken = -1;
    for (int k = 0;; ++k) {
      int at = VALUES / 4;
#pragma unroll
      for (int i = VALUES / 4 - 1; i >= 0; --i)
        if (head[i] == best) at = i;
      const int mine = at < VALUES / 4 ? first + ahead(at * 4) : 1 << 28;
      const int four = lanes_min<LANES>(mine), expert = min(four + self % 4, experts - 1);
      const float x = static_cast<float>(row[expert]);
      const bool equal = x == best && (expert > taken || best != above);
      taken = four + __ffs(__ballot_sync(FULL_MASK, equal) >> (self & ~3) & 15) - 1;
      if (lane == k) id = taken, value = best;
      if (k + 1 == top_k) return best;
      const bool left = x < best || (x == best && expert > taken);
      const float rest = lanes_max<4>(left ? x : NEG_INFINITY);
#pragma unroll
      for (int i = 0; i < VALUES / 4; ++i)
        if (mine == four && at == i) head[i] = rest;
      above = best;
      best = lanes_greatest<LANES>(greatest_of<VALUES / 4>(head));
    }
  }
};

struct Choice {
  int id;
  float weight;
};

// What lane k < top_k of the LANES lanes on a token has chosen for it. All lanes of the warp call
// it.
template <typename T, int LANES, int VALUES>
__device__ __forceinline__ Choice route(const T* row, const float* bias, int lane,
                                        const Routing& how) {
  Experts<T, LANES, VALUES> all(lane, how);
  all.load(row, how.vector);
  const float peak = all.greatest();
  // The sum cancels where weights are renormalised.
  const bool needed = how.scoring == 0 && (!how.renormalize || bias != nullptr);
  const float sum = needed ? all.exp_sum(peak) : 1.f;
  if (bias != nullptr) all.add_bias(bias, how.scoring, peak, sum);
  if (how.num_groups > 1)
    all.limit_groups(lane, how, [&](float x) {
      if (bias != nullptr) return x;  // is one
      return how.scoring > 0 ? score_of(x, how.scoring) : softmax_term(x, peak);
    });

  Choice found = {0, 0.f};
  float logit = 0.f;
  const bool as_loaded = bias == nullptr && how.num_groups == 1;
  all.choose(lane, how.top_k, as_loaded ? peak : all.greatest(), found.id, logit);
  if (lane < how.top_k) {
    if (bias != nullptr) logit = at_least(static_cast<float>(row[found.id]));
    found.weight = how.scoring > 0 ? score_of(logit, how.scoring) : softmax_term(logit, peak) / sum;
  }
  if (how.renormalize) {
    const float total = lanes_sum<LANES>(found.weight);
    if (total > 0.f) found.weight /= total;
  }
  found.weight *= how.scale;
  return found;
}

// What comes of a choice and its logit where a token's logits are taken for finite numbers, the
// greatest of which is `base` times ln(2) and the last one chosen `last`: the same once more, with
// care, where they are not.
template <typename T, int LANES, int VALUES>
__device__ __forceinline__ Choice weighted(Choice found, float base, float sum, float last,
                                           const T* row, int lane, const Routing& how) {
  found.weight = lane < how.top_k ? exp2_fast(fmaf(found.weight, LOG2E, -base)) / sum : 0.f;
  if (how.renormalize) found.weight /= lanes_sum<LANES>(found.weight);
  found.weight *= how.scale;
  const bool odd = !(sum < INFINITE && fabsf(base) < INFINITE && last > LEAST);
  if (__any_sync(FULL_MASK, odd)) {
    const Choice careful = route<T, LANES, VALUES>(row, nullptr, lane, how);
    if (odd) found = careful;
  }
  return found;
}

// The same where it is softmax of one group, in whole chunks.
template <typename T, int LANES, int VALUES>
__device__ __forceinline__ Choice route_finite(const T* row, int lane, const Routing& routing) {
  constexpr bool FOURS = LANES >= 4 && LANES < WARP_SIZE && VALUES >= 8;
  const Routing how = plain<LANES>(routing);
  Experts<T, LANES, VALUES> all(lane, how);
  all.load_raw(row, how.group_size == LANES * VALUES);
  float head[VALUES / 4];
#pragma unroll
  for (int i = 0; i < VALUES / 4; ++i) head[i] = greatest_of<4>(all.x + i * 4);
  const float peak = lanes_greatest<LANES>(greatest_of<VALUES / 4>(head)), base = peak * LOG2E;
  const float sum = how.renormalize ? 1.f : all.exp2_sum(base);

  Choice found = {0, 0.f};  // and its logit
  float last;
  if constexpr (FOURS)
    last = all.choose_by_fours(row, lane, how.top_k, how.group_size, peak, head, found.id,
                               found.weight);
  else
    last = all.choose(lane, how.top_k, peak, found.id, found.weight);
  return weighted<T, LANES, VALUES>(found, base, sum, last, row, lane, how);
}

// `PLAIN`: softmax of one group, in whole chunks.
template <bool PLAIN, typename T, int LANES, int VALUES>
__device__ __forceinline__ Choice route_token(const T* row, const float* bias, int lane,
                                              const Routing& how) {
  if constexpr (PLAIN)
    return route_finite<T, LANES, VALUES>(row, lane, how);
  else
    return route<T, LANES, VALUES>(row, bias, lane, how);
}
