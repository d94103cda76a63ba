// Exponentials of a tile of scores whose maximum nobody has looked for.
//
// The maximum that is subtracted need not be the true one (attention/online_softmax.cuh), and after
// a row's first tile it hardly ever grows. So a tile that needs no mask takes its exponentials with
// the maximum there is, and their sums, which are needed anyway, say whether some score was too far
// above it. Then, and almost never else, the scores, which are overwritten by now, are multiplied
// once more, and the maximum is looked for. A row that has seen no key yet has a maximum so far
// down that any score is above it. Where maxima are far (see there) it is always looked for.
//
// What is saved is a comparison a score, on a pipe of half the rate, and the wait for the last one
// before the first exponential can be taken.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"
#include "attention/mma.cuh"

constexpr float LOWEST_MAX = -1e38f;  // so that nothing is subtracted from -inf

// S -> P in place; adds up this lane's part of the row sums. Returns true (for the whole warp) when
// accumulators must be multiplied by `correction`. No lane's sum, and so no P, may exceed `most`.
// Where the tile is not whole, mask() hides what has to be hidden, and the maximum is looked for
// first. scores_again() is for the rare case.
template <int N, bool FRAMED, typename Mask, typename Again>
__device__ __forceinline__ bool speculative_exponentials(float (&s)[1][N][4],
                                                         OnlineSoftmax<1, FRAMED>& softmax,
                                                         float scale_log2,
                                                         float (&correction)[1][2], float most,
                                                         bool whole, const Mask& mask,
                                                         const Again& scores_again) {
  static_assert(!FRAMED, "no tile has a frame of its own");
  bool rescale = false;
  float offset[2], sums[2], limit = softmax.growth < 0.f ? -1.f : most;
  const auto raise_max = [&] {
    rescale = softmax.raise_max(s, scale_log2, correction);
    limit = -NEG_INFINITY;
#pragma unroll
    for (int half = 0; half < 2; ++half) offset[half] = softmax.offset(0, half, scale_log2);
  };
#pragma unroll
  for (int half = 0; half < 2; ++half)
    offset[half] = fmaxf(softmax.row_max[0][half] * scale_log2, LOWEST_MAX);
  if (!whole) {
    mask();
    raise_max();
  }
#pragma unroll 1
  while (true) {
    exponentials_below(s, offset, scale_log2, sums);
    if (!__any_sync(FULL_MASK, sums[0] + sums[1] > limit)) break;
    scores_again();
    raise_max();
  }
  softmax.row_sum[0][0] += sums[0];
  softmax.row_sum[0][1] += sums[1];
  return rescale;
}

// S = Q K^T once more, by mma.sync, for the 16 rows of a warp from `row` of the tile of Q on.
template <typename T, typename Rings, int N>
__device__ __forceinline__ void multiply_again(float (&s)[1][N][4], u32 q_tile, int row,
                                               u32 k_tile) {
  using QTile = typename Rings::QTile;
  const int lane = lane_index_again();  // no register is kept for what almost never runs
  const FragmentReader<QTile, BlockOrder::ROW_MAJOR> q_reader(lane);
  const FragmentReader<typename Rings::KTile, BlockOrder::COL_MAJOR> k_reader(lane);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][n][i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < QTile::COLUMNS / 16; ++step) {
    u32 a[4];
    ldmatrix_x4(a, q_reader.address(q_tile + row * QTile::ROW_BYTES, 0, step));
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      u32 b[4];
      ldmatrix_x4(b, k_reader.address(k_tile, n, step));
      mma_16x16x16<T, 16>(s[0][2 * n], s[0][2 * n + 1], a, b);
    }
  }
  __syncwarp();  // before one lane gives the tile of K back
}
