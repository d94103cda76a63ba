/* Attention of the same queries over different keys, put together: with parts o_i and lse_i, the log of
   their sums of exponentials, and m the greatest lse_i,

     w_i = exp(lse_i - m),   o = sum of w_i o_i / sum of w_i,   lse = m + log(sum of w_i).

   Parts are added in their order. An infinite lse_i is a part that saw no key: what its o_i holds is
   not looked at. Where no part saw any, o = 0 and lse = -inf.

   A row belongs to a few neighbouring lanes, which work out where it lies in each array and what its
   parts weigh: the more pieces a lane has, the less that costs. But a warp moves its rows side by
   side, 32 pieces of them at an access, and lanes are told what they need of other lanes' rows:

     rows of 16 pieces    belong to lanes     are moved by lanes 0-15, 16-31
       0, 1                 0-7, 8-15           in access 0: row 0, row 1
       2, 3                 16-23, 24-31        in access 1: row 2, row 3

   Rows of the first UNDERWAY parts are asked for before any sum is looked at; each makes room for one
   of a later part. Where the count of parts is known when this is compiled (PARTS), each lane reads
   the sums of its row, and nothing branches. Else a row's lanes share them out and put them in a
   table; they are read once: between two readings rows would have driven them out of the cache.
   out may be o, or other: a thread reads before it writes, and nobody else touches its
   elements. Every architecture. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "ptx/pdl.cuh"
#include "tile/chunk.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int PARTS = ${parts};     // how many; 0: not known here
constexpr bool PAIR = ${pair};      // two parts, in o and in other; else all of them in o
constexpr int THREADS = ${threads};

constexpr bool KNOWN = PARTS > 0;
constexpr int PIECES_LOG2 = 1, PIECES = 1 << PIECES_LOG2;  // accesses of a lane to each part
constexpr int UNDERWAY = KNOWN ? min_of(PARTS, 8) : 2;     // parts
constexpr int BLOCKS = (PARTS > 8 ? 4 : PARTS > 2 ? 5 : 7) * 128 / THREADS;  // of an SM, at least
constexpr int TABLE = 256;               // weights that a warp has at hand
constexpr int HELD = KNOWN ? PARTS : 1;  // sums that a lane holds
static_assert(THREADS % WARP_SIZE == 0, "whole warps");
static_assert(KNOWN || TABLE / WARP_SIZE % UNDERWAY == 0, "parts at hand are whole rounds");
static_assert(!PAIR || PARTS == 2, "a pair is two parts");

using Part = Chunk<elem_t, VECTOR>;

// Sums of exponentials of some parts: exp(lse) of all of them is sum * exp(top).
struct Sums {
  float top = NEG_INFINITY, sum = 0.f;

  // exp(lse - top); 0 where nothing was seen.
  static __device__ __forceinline__ float weight(float lse, float top) {
    return lse == NEG_INFINITY ? 0.f : exp2_fast((lse - top) * LOG2E);
  }
  // `times` exp(lse).
  __device__ __forceinline__ void add(float lse, float times = 1.f) {
    const float higher = fmaxf(top, lse);
    sum = sum * weight(top, higher) + times * weight(lse, higher), top = higher;
  }
  // Those of `lanes` neighbouring lanes, a power of two of them.
  __device__ __forceinline__ void add_lanes(int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) {
      const float lse = __shfl_xor_sync(FULL_MASK, top, step);
      add(lse, __shfl_xor_sync(FULL_MASK, sum, step));
    }
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
  after_previous_kernel();

  // 1. The row of this lane, and its sums in all parts, or the first one of its share of them.
  const int lane = threadIdx.x % WARP_SIZE, lanes = 1 << lanes_log2;
  const u32 row0 = blockIdx.x * (THREADS >> lanes_log2);
  const u32 own = row0 + (threadIdx.x >> lanes_log2), row = min(own, rows - 1);
  const u32 outer = rows_2 < rows ? row / rows_2 : 0, batch = batches > 1 ? outer / rows_1 : 0;
  const uint3 at = {batch, outer - batch * rows_1, row - outer * rows_2};
  lse += place(at, lse_strides);
  if (PAIR) other_lse += place(at, other_lse_strides);
  const auto sum_of = [&](int part) {
    return *(PAIR && part == 1 ? other_lse : lse + part * lse_part_stride);
  };
  const auto seen = [&](float x) { return isinf(x) ? NEG_INFINITY : x; };
  const int count = KNOWN ? PARTS : parts;
  const int sharing = min(lanes, WARP_SIZE), mine = lane & (sharing - 1);
  float held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i)
    held[i] = KNOWN || mine < count ? sum_of(KNOWN ? i : mine) : NEG_INFINITY;

  // 2. The pieces that it moves: access p is to piece index[p] of the row of lane from[p]. Rows too
  //    wide for a block are cut.
  const int pieces = columns / Part::SIZE, first = blockIdx.y << (lanes_log2 + PIECES_LOG2);
  int index[PIECES], from[PIECES];
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    const int warp0 = threadIdx.x - lane, i = p * WARP_SIZE + lane;
    const int number = i >> (lanes_log2 + PIECES_LOG2);  // of the warp's rows
    from[p] = number << lanes_log2;
    index[p] = first + (warp0 & (lanes - 1)) * PIECES + (i & (PIECES * lanes - 1));
    if (row0 + (warp0 >> lanes_log2) + number >= rows) index[p] = pieces;
  }
  const auto told = [&](auto x, int p) { return __shfl_sync(FULL_MASK, x, from[p]); };
  const i64 o_place = place(at, o_strides), other_place = PAIR ? place(at, other_strides) : 0;
  i64 of_row[PIECES];
#pragma unroll
  for (int p = 0; p < PIECES; ++p) of_row[p] = told(o_place, p);
  Part read[UNDERWAY][PIECES] = {};
  const auto fetch = [&](int k, int part) {
    const bool second = PAIR && part == 1;
    const elem_t* const source = second ? other : o + part * part_stride;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      const elem_t* const at_row = source + (second ? told(other_place, p) : of_row[p]);
      if (index[p] < pieces) read[k][p] = Part::load(at_row, index[p]);
    }
  };
#pragma unroll
  for (int k = 0; k < UNDERWAY; ++k)
    if (k < count) fetch(k, k);
  __syncwarp();  // the compiler must not wait for sums before it has asked for rows

  // 3. The sum of exponentials of this lane's row. The table is of some parts and the warp's rows:
  //    what they saw first, then what they weigh.
  __shared__ float tables[THREADS / WARP_SIZE][TABLE];
  const int rows_log2 = max(5 - lanes_log2, 0), at_hand = TABLE >> rows_log2;
  float* const table = tables[threadIdx.x / WARP_SIZE];
  const auto entry = [&](int part, int of_lane) -> float& {
    return table[(part << rows_log2) + (of_lane >> lanes_log2)];
  };
  Sums sums;
  if (KNOWN) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      held[part] = seen(held[part]), sums.top = fmaxf(sums.top, held[part]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) sums.sum += Sums::weight(held[part], sums.top);
  } else {
    held[0] = seen(held[0]);
    sums.add(held[0]);
    entry(mine, lane) = held[0];
#pragma unroll 4
    for (int part = mine + sharing; part < count; part += sharing) {
      const float x = seen(sum_of(part));
      sums.add(x);
      if (part < at_hand) entry(part, lane) = x;
    }
    sums.add_lanes(sharing);
  }
  const float scale = sums.sum == 0.f ? 0.f : 1.f / sums.sum;
  const auto weight = [&](float x) {  // -1: nothing was seen
    return x == NEG_INFINITY ? -1.f : Sums::weight(x, sums.top) * scale;
  };

  // 4. Part after part; of a table as many as there are weights at hand.
  float value[PIECES][Part::SIZE] = {};
  const auto add = [&](int k, const auto& weight_of) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      const float by = weight_of(p);
      Part& x = read[k][p];
      if (by < 0.f) x = {};  // whatever it holds: NaN times 0 is no 0
#pragma unroll
      for (int j = 0; j < Part::SIZE; ++j) value[p][j] = fmaf(by, x.get(j), value[p][j]);
    }
  };
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const float own_weight = weight(held[part]);
    add(part % UNDERWAY, [&](int p) { return told(own_weight, p); });
    if (part + UNDERWAY < PARTS) fetch(part % UNDERWAY, part + UNDERWAY);
  }
  for (int part0 = 0; !KNOWN && part0 < count; part0 += at_hand) {
    const int end = min(count, part0 + at_hand);
    __syncwarp();
    for (int part = part0 + mine; part < end; part += sharing)
      entry(part - part0, lane) = weight(part0 == 0 ? entry(part, lane) : seen(sum_of(part)));
    __syncwarp();
    for (int part = part0; part < end; part += UNDERWAY) {
#pragma unroll
      for (int k = 0; k < UNDERWAY; ++k) {
        if (part + k >= end) continue;
        add(k, [&](int p) { return entry(part + k - part0, from[p]); });
        if (part + k + UNDERWAY < count) fetch(k, part + k + UNDERWAY);
      }
    }
  }
  const i64 out_place = place(at, out_strides);
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    const i64 of_row = told(out_place, p);
    Part made = {};
#pragma unroll
    for (int j = 0; j < Part::SIZE; ++j) made.set(j, value[p][j]);
    if (index[p] < pieces) made.store(out + of_row, index[p]);
  }
  if ((threadIdx.x & (lanes - 1)) == 0 && own < rows && first == 0)
    out_lse[place(at, out_lse_strides)] =
        sums.sum == 0.f ? NEG_INFINITY : sums.top + logf(sums.sum);
}
