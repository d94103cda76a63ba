// Rows of a warp's tokens on their way through shared memory: all of them are asked for at once, in
// whole lines, and two lanes have a token, which saves most of the shuffles of the four or more
// that whole lines would take straight from memory. Sixteen bytes of a row are a chunk; chunk c of
// row r is where c ^ (r % 4 * 2) would be, so that eight lanes, which read together, meet in no
// bank:
//
//   row 0   0  1  2  3  4  5  6  7 ...      lanes  0, 1 read chunks 0, 1
//   row 1   2  3  0  1  6  7  4  5 ...             2, 3              2, 3
//   row 2   4  5  6  7  0  1  2  3 ...             4, 5              4, 5
//   row 3   6  7  4  5  2  3  0  1 ...             6, 7              6, 7
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "moe/route.cuh"

template <typename T, int VALUES>
struct StagedRows {
  static constexpr int LANES = 2, SIZE = 16 / sizeof(T), CHUNKS = LANES * VALUES / SIZE;
  static constexpr int ROWS = WARP_SIZE / LANES, STEP = WARP_SIZE / CHUNKS;
  static constexpr int WORDS = ROWS * CHUNKS;  // of 16 bytes
  static_assert(STEP == 2 || STEP == 4, "rows of 256 or 128 bytes");
  uint4* rows;  // [ROWS][CHUNKS], of this warp

  static __device__ __forceinline__ int place(int row, int chunk) {
    return row * CHUNKS + (chunk ^ (row & 3) * 2);
  }

  // Asks for the rows from `at` on; the last one stands in for those behind it. A lane has the same
  // chunk of every STEP-th row.
  __device__ __forceinline__ void ask(const T* logits, i64 row_stride, int at, int last,
                                      int experts) const {
    const int lane = threadIdx.x % WARP_SIZE, row = lane / CHUNKS, chunk = lane % CHUNKS;
    const u32 base = static_cast<u32>(__cvta_generic_to_shared(rows));
    const u32 even = base + place(row, chunk) * 16, odd = base + place(row + STEP, chunk) * 16;
    const T* source = logits + (at + row) * row_stride + chunk * SIZE;
    if (chunk * SIZE < experts && at + ROWS - 1 <= last) {
#pragma unroll
      for (int i = 0; i < ROWS / STEP; ++i)
        cp_async_16(i % 2 ? odd + (i - 1) * STEP * CHUNKS * 16 : even + i * STEP * CHUNKS * 16,
                    source + i * STEP * row_stride);
    } else if (chunk * SIZE < experts) {
#pragma unroll 1
      for (int i = row; i < ROWS; i += STEP)
        cp_async_16(base + place(i, chunk) * 16,
                    logits + min(at + i, last) * row_stride + chunk * SIZE);
    }
    cp_async_commit();
  }

  // A lane's chunks of a row of `experts`, -inf where there are none.
  __device__ __forceinline__ void read(float (&x)[VALUES], int row, int lane, int experts) const {
    Vector<T> chunk[CHUNKS / LANES];
#pragma unroll
    for (int j = 0; j < CHUNKS / LANES; ++j) {
      const int c = j * LANES + lane;
      if (experts == LANES * VALUES || c * SIZE < experts)
        chunk[j] = {rows[place(row, c)]};
      else
        chunk[j].bits = {MINUS_INFINITY<T>, MINUS_INFINITY<T>, MINUS_INFINITY<T>,
                         MINUS_INFINITY<T>};
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) x[i] = chunk[i / SIZE].get(i % SIZE);
  }

  // Four logits, from a multiple of four on.
  __device__ __forceinline__ float4 four(int row, int expert) const {
    const T* x = reinterpret_cast<const T*>(rows + place(row, expert / SIZE)) + expert % SIZE;
    if constexpr (sizeof(T) == 4) {
      return *reinterpret_cast<const float4*>(x);
    } else {
      const uint2 bits = *reinterpret_cast<const uint2*>(x);
      const float2 low = unpack2<T>(bits.x), high = unpack2<T>(bits.y);
      return {low.x, low.y, high.x, high.y};
    }
  }
};

// Of four logits, of which those of `best` up to number `skip` are gone: the first that is `best`.
__device__ __forceinline__ int first_of_four(float4 x, float best, int skip) {
  int found = 4;
  if (x.w == best && skip < 3) found = 3;
  if (x.z == best && skip < 2) found = 2;
  if (x.y == best && skip < 1) found = 1;
  if (x.x == best && skip < 0) found = 0;
  return found;
}

// The greatest of four that is left when those of `best` up to number `taken` are gone.
__device__ __forceinline__ float rest_of_four(float4 x, float best, int taken) {
  const float a = x.x < best ? x.x : NEG_INFINITY;
  const float b = x.y < best || (x.y == best && taken < 1) ? x.y : NEG_INFINITY;
  const float c = x.z < best || (x.z == best && taken < 2) ? x.z : NEG_INFINITY;
  const float d = x.w < best || (x.w == best && taken < 3) ? x.w : NEG_INFINITY;
  return fmaxf(fmaxf(a, b), fmaxf(c, d));
}

// As Experts::choose_by_fours, but a lane sees all of the four: they are in shared memory.
template <typename T, int VALUES>
__device__ __forceinline__ float choose_staged(const StagedRows<T, VALUES>& staged, int row,
                                               const Experts<T, 2, VALUES>& all, int lane,
                                               int top_k, float best, float (&head)[VALUES / 4],
                                               int experts, int& id, float& value) {
  float above = INFINITE;
  int taken = -1;
  for (int k = 0;; ++k) {
    int at = VALUES / 4;
#pragma unroll
    for (int i = VALUES / 4 - 1; i >= 0; --i)
      if (head[i] == best) at = i;
    const int mine = at < VALUES / 4 ? all.first + all.ahead(at * 4) : 1 << 28;
    const int four = min(lanes_min<2>(mine), experts - 4);
    const float4 x = staged.four(row, four);
    const int number = first_of_four(x, best, best == above ? taken - four : -1);
    taken = four + number;
    if (lane == k) id = taken, value = best;
    if (k + 1 == top_k) return best;
    const float rest = rest_of_four(x, best, number);
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i)
      if (mine == four && at == i) head[i] = rest;
    above = best;
    best = lanes_greatest<2>(greatest_of<VALUES / 4>(head));
  }
}

// route_finite() of a token whose row is staged.
template <typename T, int VALUES>
__device__ __forceinline__ Choice route_staged(const StagedRows<T, VALUES>& staged, int slot,
                                               const T* row, int lane, const Routing& routing) {
  const Routing how = plain<2>(routing);
  Experts<T, 2, VALUES> all(lane, how);
  staged.read(all.x, slot, lane, how.group_size);
  float head[VALUES / 4];
#pragma unroll
  for (int i = 0; i < VALUES / 4; ++i) head[i] = greatest_of<4>(all.x + i * 4);
  const float peak = lanes_greatest<2>(greatest_of<VALUES / 4>(head)), base = peak * LOG2E;
  const float sum = how.renormalize ? 1.f : all.exp2_sum(base);
  Choice found = {0, 0.f};  // and its logit
  const float last = choose_staged(staged, slot, all, lane, how.top_k, peak, head, how.group_size,
                                   found.id, found.weight);
  return weighted<T, 2, VALUES>(found, base, sum, last, row, lane, how);
}
