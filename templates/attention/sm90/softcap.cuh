// A soft cap, cap * tanh(x / cap), of all scores of a warp's fragments at once (see
// attention/score.cuh).
//
// One by one a score takes two of the special-function unit's turns, which the exponentials need as
// well. Scores are mostly small beside the cap: where |x| <= 0.7 cap for all of a warp's, tanh is a
// polynomial, as exact (1.3e-7 of the cap):
//
//   x * (1 + u (C1 + u (C2 + u (C3 + u C4)))),  u = (x / cap)^2       the least greatest error
#pragma once
#include "ptx/register_fence.cuh"
#include "attention/score.cuh"

struct SoftCapOfWarp : SoftCap<false> {
  static constexpr float SMALL = 0.7f;    // beside 1
  static constexpr float LARGEST = 1e4f;  // 1 / cap, whose powers fp32 has to hold
  static constexpr float C1 = -0.33330065f, C2 = 0.13276916f, C3 = -0.05067464f, C4 = 0.01359966f;

  // Of scores that `scale` is still to multiply.
  using SoftCap<false>::SoftCap;

  template <int N>
  __device__ __forceinline__ void on_fragments(float (&s)[1][N][4]) const {
    float top[4] = {};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) top[i] = fmaxf(top[i], fabsf(s[0][n][i]));
    const float most = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
    float rate = inverse;
    register_fence(rate);  // what follows from it stays in no register from tile to tile
    if (__any_sync(FULL_MASK, most * rate > (rate < LARGEST ? SMALL : -1.f))) {
#pragma unroll
      for (int n = 0; n < N; ++n) apply(s[0][n], 0, 0);
      return;
    }
    const float square = rate * rate, c0 = cap * rate, c1 = C1 * c0 * square;
    const float c2 = C2 / C1 * c1 * square, c3 = C3 / C2 * c2 * square, c4 = C4 / C3 * c3 * square;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s[0][n][i], u = x * x;
        s[0][n][i] = x * fmaf(fmaf(fmaf(fmaf(c4, u, c3), u, c2), u, c1), u, c0);
      }
  }
};
