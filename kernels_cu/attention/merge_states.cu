/* Attention of the same queries over different keys, put together: with parts o_i and lse_i, the log of
   their sums of exponentials, and m the greatest lse_i,

     w_i = exp(lse_i - m),   o = sum of w_i o_i / sum of w_i,   lse = m + log(sum of w_i).

   Parts are added in their order. An infinite lse_i is a part that saw no key: what its o_i holds is
   not looked at. Where no part saw any, o = 0 and lse = -inf.

   A row lies in a few neighbouring lanes, PIECES accesses of each part in a lane, so that what is
   worked out once a row (its place in each array, what its parts weigh) does not cost more than the
   memory it moves. UNDERWAY parts are under way at a time. out may be o, or other: a thread reads
   before it writes, and nobody else touches its elements. Every architecture. */
#include "prelude.cuh"
#include "device/math.cuh"
#include "device/piece.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr bool PAIR = ${pair};      // two parts, in o and in other; else all of them in o
constexpr int THREADS = ${threads};

constexpr int UNDERWAY = 2;
constexpr int PIECES = 4;                               // accesses of a lane to each part
constexpr int BLOCKS = (PAIR ? 6 : 4) * 128 / THREADS;  // of an SM, at least
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

using Part = Piece<elem_t, VECTOR>;

// Sums of exponentials of some parts: exp(lse) of all of them is sum * exp(top).
struct Sums {
  float top = NEG_INFINITY, sum = 0.f;

  // exp(lse - top); 0 where nothing was seen.
  static __device__ __forceinline__ float weight(float lse, float top) {
    return lse == NEG_INFINITY ? 0.f : exp2_fast((lse - top) * LOG2E);
  }
  __device__ __forceinline__ void add(float lse) {
    const float higher = fmaxf(top, lse);
    sum = sum * weight(top, higher) + weight(lse, higher), top = higher;
  }
};

// Where a row is in an array: `at` has its index in each of three dimensions.
__device__ __forceinline__ i64 place(const uint3& at, const Strides& strides) {
  return at.x * strides.batch + at.y * strides.head + at.z * strides.row;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    merge_states(const elem_t* o,              // [parts, rows, columns]  strides in elements
                 const float* lse,             // [parts, rows]
                 const elem_t* other,          // [rows, columns]  where PAIR
                 const float* other_lse,       // [rows]
                 elem_t* out,                  // [rows, columns]
                 float* __restrict__ out_lse,  // [rows]
                 const Strides o_strides, const Strides lse_strides,  // of rows
                 const Strides other_strides, const Strides other_lse_strides,
                 const Strides out_strides, const Strides out_lse_strides, const i64 part_stride,
                 const i64 lse_part_stride, const int parts, const u32 rows, const u32 batches,
                 const u32 rows_1, const u32 rows_2,         // batches * rows_1 * rows_2
                 const int columns, const int lanes_log2) {  // lanes of a row
  const int lanes = 1 << lanes_log2;
  const u32 row = blockIdx.x * (THREADS >> lanes_log2) + (threadIdx.x >> lanes_log2);
  if (row >= rows) return;
  const u32 outer = rows_2 < rows ? row / rows_2 : 0, batch = batches > 1 ? outer / rows_1 : 0;
  const uint3 at = {batch, outer - batch * rows_1, row - outer * rows_2};
  o += place(at, o_strides), lse += place(at, lse_strides);
  if (PAIR) other += place(at, other_strides), other_lse += place(at, other_lse_strides);
  out += place(at, out_strides), out_lse += place(at, out_lse_strides);

  const auto seen = [&](int part) {
    const float x = *(PAIR && part == 1 ? other_lse : lse + part * lse_part_stride);
    return isinf(x) ? NEG_INFINITY : x;
  };
  const int count = PAIR ? 2 : parts;
  Sums sums;
  for (int part = 0; part < count; ++part) sums.add(seen(part));
  const float scale = sums.sum == 0.f ? 0.f : 1.f / sums.sum;

  const int pieces = columns / Part::SIZE, lane = threadIdx.x & (lanes - 1);
  for (int first = lane; first < pieces; first += PIECES * lanes) {
    float value[PIECES][Part::SIZE] = {};
    for (int part = 0; part < count; part += UNDERWAY) {
      Part read[UNDERWAY][PIECES] = {};
#pragma unroll
      for (int k = 0; k < UNDERWAY; ++k) {
        if (part + k >= count) continue;
        const elem_t* const from = PAIR && k == 1 ? other : o + (part + k) * part_stride;
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
          if (first + p * lanes < pieces) read[k][p] = Part::load(from, first + p * lanes);
      }
#pragma unroll
      for (int k = 0; k < UNDERWAY; ++k) {
        const float x = part + k < count ? seen(part + k) : NEG_INFINITY;
        const float by = Sums::weight(x, sums.top) * scale;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
          if (x == NEG_INFINITY) read[k][p] = {};  // whatever it holds: NaN times 0 is no 0
#pragma unroll
          for (int j = 0; j < Part::SIZE; ++j)
            value[p][j] = fmaf(by, read[k][p].get(j), value[p][j]);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      if (first + p * lanes >= pieces) continue;
      Part made = {};
#pragma unroll
      for (int j = 0; j < Part::SIZE; ++j) made.set(j, value[p][j]);
      made.store(out, first + p * lanes);
    }
  }
  if (lane == 0) *out_lse = sums.sum == 0.f ? NEG_INFINITY : sums.top + logf(sums.sum);
}
