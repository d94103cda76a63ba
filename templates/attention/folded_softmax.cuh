// Online softmax of a warp's rows of sums of codes, by mma.sync (attention/online_softmax.cuh says more):
// what a sum is multiplied by depends on its row and on the tile, and is in the FMA before an
// exponential. Maxima are in powers of two.
#pragma once
#include "attention/online_softmax.cuh"

// ZERO: what sums begin with, so that a score is (sum - ZERO) * by. It is taken off in the same FMA, at
// the cost of half a unit in the last place of ZERO * by: less than a unit of a whole sum's, alike for
// all scores that a row has in a tile. RAISED: powers of two of probabilities (OnlineSoftmax).
template <int M, int RAISED>
struct FoldedSoftmax {
  static constexpr float GROWTH = 8 - RAISED, FAR = 67108864.f;
  static constexpr float LEAST = 0x1p-120f;  // of `by`: masked, -infinity by 0 would be NaN
  float by[M][2], zero[M][2];                // of this tile: above 0; ZERO * by
  float row_max[M][2];                       // may lag behind the true maximum
  float row_sum[M][2];                       // this lane's part of the row
  bool far = false;  // scores lose their maximum before anything is made of them

  __device__ __forceinline__ FoldedSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i)
      row_max[i / 2][i % 2] = NEG_INFINITY, row_sum[i / 2][i % 2] = 0.f;
  }

  // Takes in a tile. True (for the whole warp) when accumulators must be multiplied by `correction`.
  template <int N>
  __device__ __forceinline__ bool raise_max(float (&s)[M][N][4], float (&correction)[M][2]) {
    float top[M][2];
    bool grew = far;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = s[m][0][2 * half], y = s[m][0][2 * half + 1];  // two chains: half the latency
#pragma unroll
        for (int n = 1; n < N; ++n) {
          x = fmaxf(x, s[m][n][2 * half]);
          y = fmaxf(y, s[m][n][2 * half + 1]);
        }
        top[m][half] = fmaf(fmaxf(x, y), by[m][half], -zero[m][half]);
        grew |= top[m][half] - row_max[m][half] > GROWTH;
      }
    if (!__any_sync(FULL_MASK, grew)) return false;
    far = false;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float new_max = fmaxf(row_max[m][half], fminf(quad_max(top[m][half]), LARGEST));
        const bool empty = new_max == NEG_INFINITY;  // every key so far is masked
        correction[m][half] = empty ? 1.f : exp2_fast(row_max[m][half] - new_max);
        row_max[m][half] = new_max;
        row_sum[m][half] *= correction[m][half];
        far |= !empty && fabsf(new_max) > FAR;
      }
    far = __any_sync(FULL_MASK, far);
    if (far) subtract_max(s);
    return true;
  }

  template <int N>
  __device__ __forceinline__ void subtract_max(float (&s)[M][N][4]) {
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
      const int m = i / (4 * N), half = i / 2 % 2;
      const float most = row_max[m][half];
      const float x = fmaf(s[m][i / 4 % N][i % 4], by[m][half], -zero[m][half]);
      s[m][i / 4 % N][i % 4] = (x > LARGEST ? LARGEST : x) - (most == NEG_INFINITY ? 0.f : most);
    }
#pragma unroll
    for (int i = 0; i < 2 * M; ++i) by[i / 2][i % 2] = 1.f, zero[i / 2][i % 2] = 0.f;
  }

  // What to subtract from sum * by.
  __device__ __forceinline__ float offset(int m, int half) const {
    const bool none = far || row_max[m][half] == NEG_INFINITY;
    return (none ? 0.f : row_max[m][half]) - RAISED + zero[m][half];
  }

  // After the last tile: adds up the quad's parts of the row sum.
  __device__ __forceinline__ float total(int m, int half) const {
    return quad_sum(row_sum[m][half]);
  }

  // Natural log of the sum of exp(score); -inf for a row without keys.
  __device__ __forceinline__ float lse(int m, int half, float sum, float) const {
    const float top = fminf(fmaxf(row_max[m][half], -LARGEST), LARGEST);
    return sum == 0.f ? NEG_INFINITY : (top + log2f(sum) - RAISED) * LN2;
  }
};
