/* Attention of the same queries over different keys, put together: with parts o_i and lse_i, the log of
   their sums of exponentials, and m the greatest lse_i,

     w_i = exp(lse_i - m),   o = sum of w_i o_i / sum of w_i,   lse = m + log(sum of w_i).

   Parts are added in their order. An infinite lse_i is a part that saw no key: what its o_i holds is
   not looked at. Where no part saw any, o = 0 and lse = -inf.

   A row lies in neighbouring lanes, 16 bytes of each part in a lane. UNDERWAY parts are under way at a
   time, their o_i fetched beside the lse_i that they are weighed by; the sum is rescaled when a greater
   one comes. out may be o, or other: a thread reads before it writes, and nobody else touches its
   elements. Every architecture. */
#include "prelude.cuh"
#include "device/math.cuh"
#include "device/piece.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr bool PAIR = ${pair};      // two parts, in o and in other; else all of them in o
constexpr int THREADS = ${threads};

constexpr int UNDERWAY = PAIR ? 2 : 4;
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

using Part = Piece<elem_t, VECTOR>;

// What some parts make: `value` is relative to 2^(top * LOG2E), and `sum` is, too.
struct Merged {
  float value[Part::SIZE];
  float top, sum;

  // exp(lse - top); 0 where nothing was seen.
  static __device__ __forceinline__ float weight(float lse, float top) {
    return lse == NEG_INFINITY ? 0.f : exp2_fast((lse - top) * LOG2E);
  }
  __device__ __forceinline__ void raise(float higher) {
    const float by = weight(top, higher);
    top = higher, sum *= by;
#pragma unroll
    for (int j = 0; j < Part::SIZE; ++j) value[j] *= by;
  }
  __device__ __forceinline__ void add(const Part& part, float lse) {
    if (lse == NEG_INFINITY) return;
    const float by = weight(lse, top);
    sum += by;
#pragma unroll
    for (int j = 0; j < Part::SIZE; ++j) value[j] = fmaf(by, part.get(j), value[j]);
  }
};

// Where a row is in an array: `at` has its index in each of three dimensions.
__device__ __forceinline__ i64 place(const int3& at, const Strides& strides) {
  return at.x * strides.batch + at.y * strides.head + at.z * strides.row;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    merge_states(const elem_t* o,              // [parts, rows, columns]  strides in elements
                 const float* lse,             // [parts, rows]
                 const elem_t* other,          // [rows, columns]  where PAIR
                 const float* other_lse,       // [rows]
                 elem_t* out,                  // [rows, columns]
                 float* __restrict__ out_lse,  // [rows]
                 const Strides o_strides, const Strides lse_strides,  // of rows
                 const Strides other_strides, const Strides other_lse_strides,
                 const Strides out_strides, const Strides out_lse_strides, const i64 part_stride,
                 const i64 lse_part_stride, const int parts, const int rows, const int rows_1,
                 const int rows_2,  // of which the inner two dimensions have
                 const int columns, const int lanes_log2) {  // lanes of a row
  const int lanes = 1 << lanes_log2;
  const i64 row =
      static_cast<i64>(blockIdx.x) * (THREADS >> lanes_log2) + (threadIdx.x >> lanes_log2);
  if (row >= rows) return;
  const int outer = static_cast<int>(row) / rows_2;
  const int3 at = {outer / rows_1, outer % rows_1, static_cast<int>(row) % rows_2};
  o += place(at, o_strides), lse += place(at, lse_strides);
  if (PAIR) other += place(at, other_strides), other_lse += place(at, other_lse_strides);
  out += place(at, out_strides), out_lse += place(at, out_lse_strides);

  for (int i = threadIdx.x & (lanes - 1); i < columns / Part::SIZE; i += lanes) {
    Merged merged = {{}, NEG_INFINITY, 0.f};
    for (int first = 0; first < (PAIR ? 2 : parts); first += UNDERWAY) {
      Part part[UNDERWAY] = {};
      float seen[UNDERWAY], top = merged.top;
#pragma unroll
      for (int k = 0; k < UNDERWAY; ++k) {
        const int number = first + k;
        seen[k] = NEG_INFINITY;
        if (!PAIR && number >= parts) continue;
        const bool second = PAIR && k == 1;
        part[k] = Part::load(second ? other : o + number * part_stride, i);
        seen[k] = *(second ? other_lse : lse + number * lse_part_stride);
      }
#pragma unroll
      for (int k = 0; k < UNDERWAY; ++k) {
        if (isinf(seen[k])) seen[k] = NEG_INFINITY;
        top = fmaxf(top, seen[k]);
      }
      merged.raise(top);
#pragma unroll
      for (int k = 0; k < UNDERWAY; ++k) merged.add(part[k], seen[k]);
    }
    const float by = merged.sum == 0.f ? 0.f : 1.f / merged.sum;
    Part made = {};
#pragma unroll
    for (int j = 0; j < Part::SIZE; ++j) made.set(j, by * merged.value[j]);
    made.store(out, i);
    if (i == 0) *out_lse = merged.sum == 0.f ? NEG_INFINITY : merged.top + logf(merged.sum);
  }
}
