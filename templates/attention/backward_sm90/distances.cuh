// What rows add to the gradient of an ALiBi slope, of a tile of scores that wgmma leaves with queries
// as rows: sums of attention/backward/features.cuh.
#pragma once
#include "ptx/math.cuh"
#include "attention/backward/features.cuh"

// s: final scores, dp: dP of the same pairs, as D fragments. `row`, `column`: of the first ones, the
// query in keys' counting.
template <int N>
__device__ __forceinline__ void add_distances(DistanceSum (&sums)[1][2], const float (&s)[1][N][4],
                                              const float (&dp)[1][N][4],
                                              const RowStatistics<1>& rows, int lane, int row,
                                              int column) {
  const int apart = row + lane / 4 - column - lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float p = exp2_fast(fmaf(s[0][n][i], LOG2E, -rows.lse[0][i / 2]));
      const float ds = p * (dp[0][n][i] - rows.delta[0][i / 2]);
      sums[0][i / 2].add(ds, p, apart + i / 2 * 8 - n * 8 - i % 2);
    }
}
