// Online softmax over mma accumulators: running row maxima and sums of a warp's score tile.
//
// The scores come in D fragments, s[m][n][4] (see ptx/mma.cuh): rows g and g + 8 of 16-row block m
// are shared by the four lanes of a quad. Exponentials are taken as 2^(score * scale_log2 - max),
// one FMA and one ex2 each. The maximum that is subtracted need not be the true one: any value near
// it gives the same quotient. So accumulators are rescaled only when some row's maximum has grown
// by more than a factor 2^8, which after the first tiles is almost never; until then probabilities
// may reach 256, far inside the range of fp16. (The lagging maximum is FlashAttention-4's idea.)
//
// max is rounded to fp32 before the FMA subtracts it from the exact product, so even the largest
// score's exponent is off by up to half a unit in max's last place. A row shares that error and the
// quotient cancels it, but from about 2^28 on (16 and more) P leaves the range of fp16. So from FAR
// on a warp looks for the maximum of every tile and subtracts it from the scores themselves, which
// is exact where it matters, at the price of an instruction a score. Scores that fp32 holds give
// finite results then; those above count as the largest that it does.
#pragma once
#include "ptx/math.cuh"

constexpr float LARGEST = 3.4028234664e38f;  // of fp32's finite numbers

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(FULL_MASK, x, 1);
  return x + __shfl_xor_sync(FULL_MASK, x, 2);
}

// FRAMED: each lane's scores are short of the true ones by a number of its own for each row, which
// may be another one in each tile.
// GROWTH: of maxima, in powers of two, that is let pass. What is short of 8 probabilities are raised
// by, so that they reach 256 in any case: e4m3 has little room below 1, and 448 above.
template <int M_BLOCKS, bool FRAMED = false, int GROWTH = 8>
struct OnlineSoftmax {
  static constexpr float MAX_GROWTH = GROWTH;
  static constexpr int RAISED = 8 - GROWTH;  // powers of two
  static constexpr float FAR = 67108864.f;   // 2^26
  float growth = MAX_GROWTH;   // that is let pass; where a maximum of the warp is far, -infinity
  float row_max[M_BLOCKS][2];  // of the raw scores; may lag behind the true maximum
  float row_sum[M_BLOCKS][2];  // this lane's part of the row
  float frame[M_BLOCKS][2];    // to be added to the scores, where FRAMED

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < M_BLOCKS; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = NEG_INFINITY;
        row_sum[m][half] = 0.f;
      }
  }

  // Every row begins with a logit that has no value: an attention sink. In the scores' units.
  __device__ __forceinline__ void begin_with(float logit, int lane) {
#pragma unroll
    for (int m = 0; m < M_BLOCKS; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) begin_row_with(m, half, logit, lane);
  }
  // One row of this lane's does.
  __device__ __forceinline__ void begin_row_with(int m, int half, float logit, int lane) {
    row_max[m][half] = logit;
    row_sum[m][half] = lane % 4 == 0 && logit > NEG_INFINITY ? 1 << RAISED : 0.f;
  }

  // Takes in a score tile. Returns true (for the whole warp) when accumulators must be multiplied
  // by `correction`; row sums have been already. Where maxima are far, scores have lost theirs.
  template <int N_BLOCKS>
  __device__ __forceinline__ bool raise_max(float (&s)[M_BLOCKS][N_BLOCKS][4], float scale_log2,
                                            float (&correction)[M_BLOCKS][2]) {
    float top[M_BLOCKS][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < M_BLOCKS; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = s[m][0][2 * half], y = s[m][0][2 * half + 1];  // two chains: half the latency
#pragma unroll
        for (int n = 1; n < N_BLOCKS; ++n) {
          x = fmaxf(x, s[m][n][2 * half]);
          y = fmaxf(y, s[m][n][2 * half + 1]);
        }
        top[m][half] = fmaxf(x, y);
        if (FRAMED) top[m][half] += frame[m][half];
        grew |= (top[m][half] - row_max[m][half]) * scale_log2 > growth;
      }
    // Lanes of a quad learn of each other's maxima only now: most tiles end here.
    if (!__any_sync(FULL_MASK, grew)) return false;
    bool far = false;
#pragma unroll
    for (int m = 0; m < M_BLOCKS; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float new_max = fmaxf(row_max[m][half], fminf(quad_max(top[m][half]), LARGEST));
        const bool empty = new_max == NEG_INFINITY;  // every key so far is masked
        correction[m][half] = empty ? 1.f : exp2_fast((row_max[m][half] - new_max) * scale_log2);
        row_max[m][half] = new_max;
        row_sum[m][half] *= correction[m][half];
        far |= !empty && fabsf(new_max * scale_log2) > FAR;
      }
    growth = __any_sync(FULL_MASK, far) ? NEG_INFINITY : MAX_GROWTH;
    if (growth < 0.f) subtract_max(s);
    return true;
  }

  template <int N_BLOCKS>
  __device__ __forceinline__ void subtract_max(float (&s)[M_BLOCKS][N_BLOCKS][4]) {
#pragma unroll
    for (int m = 0; m < M_BLOCKS; ++m)
#pragma unroll
      for (int n = 0; n < N_BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float most = row_max[m][i / 2], x = s[m][n][i] + (FRAMED ? frame[m][i / 2] : 0.f);
          s[m][n][i] = (x > LARGEST ? LARGEST : x) - (most == NEG_INFINITY ? 0.f : most);
        }
  }

  // What to subtract from score * scale_log2.
  __device__ __forceinline__ float offset(int m, int half, float scale_log2) const {
    const float most = FRAMED ? row_max[m][half] - frame[m][half] : row_max[m][half];
    return (row_max[m][half] == NEG_INFINITY || growth < 0.f ? 0.f : most * scale_log2) - RAISED;
  }

  // After the last tile: adds up the quad's parts of the row sum.
  __device__ __forceinline__ float total(int m, int half) const {
    return quad_sum(row_sum[m][half]);
  }

  // The maximum in powers of two, a finite number.
  __device__ __forceinline__ float top(int m, int half, float scale_log2) const {
    return fminf(fmaxf(row_max[m][half] * scale_log2, -LARGEST), LARGEST);
  }

  // Natural log of the sum of exp(score * scale); -inf for a row without keys.
  __device__ __forceinline__ float lse(int m, int half, float sum, float scale_log2) const {
    return sum == 0.f ? NEG_INFINITY : (top(m, half, scale_log2) + log2f(sum) - RAISED) * LN2;
  }
};
