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
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/vector.cuh"

constexpr float LEAST = -3.402823466e38f;  // finite

// fmaxf(NaN, y) is y.
__device__ __forceinline__ float at_least(float x) { return fmaxf(x, LEAST); }

// How all tokens of a launch choose.
struct Routing {
  int top_k;
  int sigmoid;      // else softmax
  int renormalize;  // weights of a token are divided by their sum
  int group_size, num_groups, topk_groups;
  int group_lanes;  // a power of two; num_groups * group_lanes <= LANES
  int vector;       // rows and groups start on 16-byte boundaries and are whole chunks
  float scale;      // what weights are multiplied with at last
};

template <int LANES>
__device__ __forceinline__ int lanes_min(int x) {
#if __CUDA_ARCH__ >= 800
  if (LANES == WARP_SIZE) return __reduce_min_sync(FULL_MASK, x);  // PTX ISA: redux.sync.min.s32
#endif
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    x = min(x, __shfl_xor_sync(FULL_MASK, x, distance));
  return x;
}

// 1 for the greatest, even where that is +inf.
__device__ __forceinline__ float softmax_term(float x, float peak) {
  return x == peak ? 1.f : expf(x - peak);
}
__device__ __forceinline__ float sigmoid_of(float x) { return 1.f / (1.f + expf(-x)); }

template <typename T, int LANES, int VALUES>
struct Experts {
  static constexpr int SIZE = 16 / sizeof(T), CHUNKS = VALUES / SIZE;
  static_assert(VALUES % SIZE == 0, "whole chunks");
  float x[VALUES];  // -inf: not there, or not to be chosen
  int first;        // the expert of x[0]
  int step;         // from a chunk's first expert to the next one's
  int inside;       // experts of the group from `first` on; may be negative

  __device__ __forceinline__ Experts(int lane, const Routing& how) {
    const int group = lane / how.group_lanes, skip = lane % how.group_lanes * SIZE;
    first = group * how.group_size + skip;
    step = how.group_lanes * SIZE;
    inside = group < how.num_groups ? how.group_size - skip : 0;
  }
  // How far the expert of x[i] is from the first one.
  __device__ __forceinline__ int ahead(int i) const { return i / SIZE * step + i % SIZE; }

  __device__ __forceinline__ void load(const T* row, bool vector) {
    if (vector) {
      Vector<T> chunk[CHUNKS] = {};
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j)
        if (j * step < inside) chunk[j] = load_vector(row + first + j * step);
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        x[i] = i / SIZE * step < inside ? at_least(chunk[i / SIZE].get(i % SIZE)) : NEG_INFINITY;
    } else {
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        x[i] =
            ahead(i) < inside ? at_least(static_cast<float>(row[first + ahead(i)])) : NEG_INFINITY;
    }
  }

  // Over the token: the greatest value, and the sum of exp(value - peak).
  __device__ __forceinline__ float greatest() const {
    float most = x[0];
#pragma unroll
    for (int i = 1; i < VALUES; ++i) most = fmaxf(most, x[i]);
    return lanes_max<LANES>(most);
  }
  __device__ __forceinline__ float exp_sum(float peak) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sum += x[i] == peak ? 1.f : exp2_fast((x[i] - peak) * LOG2E);
    return lanes_sum<LANES>(sum);
  }

  // Logits become scores plus the experts' bias. Division is approximate here, 2 ulp: the exact one
  // has a slow path, which there would be VALUES times.
  __device__ __forceinline__ void add_bias(const float* bias, bool sigmoid, float peak, float sum) {
    const float share = 1.f / sum;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      if (ahead(i) >= inside) continue;
      const float score =
          sigmoid ? __fdividef(1.f, 1.f + expf(-x[i])) : softmax_term(x[i], peak) * share;
      x[i] = at_least(score + bias[first + ahead(i)]);
    }
  }

  // Leave the best `topk_groups` groups: by their greatest value, or by the sum of their greatest two.
  __device__ __forceinline__ void limit_groups(int lane, const Routing& how, bool two) {
    float a = NEG_INFINITY, b = NEG_INFINITY;  // the greatest and the second
#pragma unroll
    for (int i = 0; i < VALUES; ++i) b = fmaxf(b, fminf(a, x[i])), a = fmaxf(a, x[i]);
    for (int distance = how.group_lanes / 2; distance > 0; distance /= 2) {
      const float c = __shfl_xor_sync(FULL_MASK, a, distance);
      const float d = __shfl_xor_sync(FULL_MASK, b, distance);
      b = fmaxf(fminf(a, c), fmaxf(b, d)), a = fmaxf(a, c);
    }
    const float score = two && b > NEG_INFINITY ? at_least(a + b) : a;
    const int mine = lane / how.group_lanes;
    int better = 0;
    for (int group = 0; group < how.num_groups; ++group) {
      const float other = __shfl_sync(FULL_MASK, score, group * how.group_lanes, LANES);
      better += other > score || (other == score && group < mine);
    }
    if (better < how.topk_groups) return;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) x[i] = NEG_INFINITY;
  }

  // Lane k of the token gets its k-th best expert and that one's value. `best`: the greatest value.
  // There are at least `top_k` values to choose from, and top_k <= LANES.
  __device__ __forceinline__ void choose(int lane, int top_k, float best, int& id, float& value) {
    for (int k = 0;; ++k) {
      int at = 1 << 30;
#pragma unroll
      for (int i = VALUES - 1; i >= 0; --i)
        if (x[i] == best) at = ahead(i);
      const int winner = lanes_min<LANES>(first + at);
      if (lane == k) id = winner, value = best;
      if (k + 1 == top_k) return;
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        if (ahead(i) == winner - first) x[i] = NEG_INFINITY;
      best = greatest();
    }
  }
};

struct Choice {
  int id;
  float weight;
};

// What lane k < top_k of the LANES lanes on a token has chosen for it. All lanes of the warp call it.
template <typename T, int LANES, int VALUES>
__device__ __forceinline__ Choice route(const T* row, const float* bias, int lane,
                                        const Routing& how) {
  Experts<T, LANES, VALUES> all(lane, how);
  all.load(row, how.vector);
  const float peak = all.greatest();
  // The sum cancels where weights are renormalised.
  const bool needed = !how.sigmoid && (!how.renormalize || bias != nullptr);
  const float sum = needed ? all.exp_sum(peak) : 1.f;
  if (bias != nullptr) all.add_bias(bias, how.sigmoid, peak, sum);
  if (how.num_groups > 1) all.limit_groups(lane, how, bias != nullptr);

  Choice found = {0, 0.f};
  float logit = 0.f;
  const bool as_loaded = bias == nullptr && how.num_groups == 1;
  all.choose(lane, how.top_k, as_loaded ? peak : all.greatest(), found.id, logit);
  if (lane < how.top_k) {
    if (bias != nullptr) logit = at_least(static_cast<float>(row[found.id]));
    found.weight = how.sigmoid ? sigmoid_of(logit) : softmax_term(logit, peak) / sum;
  }
  if (how.renormalize) {
    const float total = lanes_sum<LANES>(found.weight);
    if (total > 0.f) found.weight /= total;
  }
  found.weight *= how.scale;
  return found;
}
