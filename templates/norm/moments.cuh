// Mean and sum of squared distances from it, or the sum of squares alone, of a row that lies in
// registers (Row), in fp32, with one look at the elements and one barrier.
//
// Sums are of distances from a pilot: an element of the row for the elements of a warp, the first
// warp's mean for what the warps found. So a large mean costs no digits, and rows whose elements
// are alike have exactly that mean and a variance of 0.
//
//   warp     c = its first element, s = sum of x - c, q = sum of (x - c)^2
//            mean m = c + s / n, squares about it = q - s^2 / n
//   row      the same of the warps' m, n times each: every warp joins what all of them found, in one
//            order, to the same bits
#pragma once
#include "ptx/cluster.cuh"
#include "tile/reduce.cuh"
#include "tile/row.cuh"

struct Moments {
  float mean;     // 0 where only squares are wanted
  float squares;  // sum of squared distances from the mean
};

// Elements of a row of `columns` that this thread's warp has.
template <typename R>
__device__ __forceinline__ float elements_of_warp(int thread, int columns) {
  constexpr int STEP = R::WIDE ? R::SIZE : 1;  // elements beside each other in a thread
  const int first = thread / WARP_SIZE * WARP_SIZE * STEP;
  int count = 0;
#pragma unroll
  for (int part = 0; part < R::VECTORS * R::SIZE / STEP; ++part)
    count += min(max(columns - (part * R::LANES * STEP + first), 0), WARP_SIZE * STEP);
  return static_cast<float>(count);
}

// NaN stays NaN, which fmaxf would drop.
__device__ __forceinline__ float not_below_zero(float x) { return x < 0.f ? 0.f : x; }

// What a thread sums of its elements of a row, in one piece or in several.
template <bool CENTERED>
struct MomentSums {
  float pilot, sum = 0.f, squares = 0.f;

  // `row`: the first piece.
  template <typename R>
  __device__ __forceinline__ explicit MomentSums(R& row)
      : pilot(CENTERED ? __shfl_sync(FULL_MASK, row.get(0, 0).x, 0) : 0.f) {}

  template <typename R>
  __device__ __forceinline__ void add(R& row, int thread, int columns) {
#pragma unroll
    for (int i = 0; i < R::VECTORS; ++i) {
      if (CENTERED && R::WIDE && !R::has(thread, i, 0, columns)) continue;
#pragma unroll
      for (int pair = 0; pair < R::PAIRS; ++pair) {
        float2 x = row.get(i, pair);
        if (CENTERED) {
          x.x = R::WIDE || R::has(thread, i, 2 * pair, columns) ? x.x - pilot : 0.f;
          x.y = R::WIDE || R::has(thread, i, 2 * pair + 1, columns) ? x.y - pilot : 0.f;
          sum += x.x, sum += x.y;
        }
        squares += x.x * x.x, squares += x.y * x.y;
      }
    }
  }

  // Of the `n` elements that the warp has.
  __device__ __forceinline__ Moments of_warp(float n) const {
    const float all_squares = lanes_sum<WARP_SIZE>(squares);
    if (!CENTERED) return {0.f, all_squares};
    const float all = lanes_sum<WARP_SIZE>(sum), shift = n > 0.f ? all / n : 0.f;
    return {pilot + shift, not_below_zero(all_squares - all * shift)};
  }
};

// Where the warps of CLUSTER blocks meet, each with a part of one row. Two rows may be under way:
// the barrier of a row also says that everyone is done with the row before.
template <int WARPS, int CLUSTER, bool CENTERED>
struct CrossBlockReduction {
  static constexpr int PARTS = WARPS * CLUSTER, LANES = min_of(PARTS, WARP_SIZE);
  float squares[2][PARTS];
  float means[2][CENTERED ? PARTS : 1];
  float counts[2][CENTERED ? PARTS : 1];

  // Of the whole row, given those of this thread's warp. `turn`: 0 and 1 in turns.
  __device__ __forceinline__ Moments join(const Moments& mine, float n, float columns, int turn) {
    if (PARTS == 1) return mine;
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    if (CLUSTER > 1) {
      const int place = cluster_rank() * WARPS + warp;
      if (lane < CLUSTER) {
        cluster_store(&squares[turn][place], lane, mine.squares);
        if (CENTERED) cluster_store(&means[turn][place], lane, mine.mean);
        if (CENTERED) cluster_store(&counts[turn][place], lane, n);
      }
      cluster_arrive();
      cluster_wait();
    } else {
      if (lane == 0) {
        squares[turn][warp] = mine.squares;
        if (CENTERED) means[turn][warp] = mine.mean;
        if (CENTERED) counts[turn][warp] = n;
      }
      __syncthreads();
    }
    return total(lane % LANES, columns, turn);
  }

  __device__ __forceinline__ Moments total(int first, float columns, int turn) const {
    const float pilot = CENTERED ? means[turn][0] : 0.f;
    float sum = 0.f, square = 0.f;
#pragma unroll
    for (int part = first; part < PARTS; part += LANES) {
      square += squares[turn][part];
      if (CENTERED) {
        const float distance = means[turn][part] - pilot, n = counts[turn][part];
        sum += n * distance;
        square += n * distance * distance;
      }
    }
    square = lanes_sum<LANES>(square);
    if (!CENTERED) return {0.f, square};
    sum = lanes_sum<LANES>(sum);
    const float shift = sum / columns;
    return {pilot + shift, not_below_zero(square - sum * shift)};
  }
};

// Vector i of `row`: (x - mean) * rstd * scale + shift, with vector `held` of the weights.
template <bool CENTERED, typename R, typename W>
__device__ __forceinline__ void normalise_vector(R& row, int i, W& scale, W& shift, int held,
                                                 float mean, float rstd) {
#pragma unroll
  for (int pair = 0; pair < R::PAIRS; ++pair) {
    const float2 x = row.get(i, pair), w = scale.get(held, pair), b = shift.get(held, pair);
    const float y0 = (x.x - mean) * rstd * w.x, y1 = (x.y - mean) * rstd * w.y;
    row.set(i, pair, CENTERED ? y0 + b.x : y0, CENTERED ? y1 + b.y : y1);
  }
}
