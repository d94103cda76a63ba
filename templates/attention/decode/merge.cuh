// Putting a softmax together from parts that saw different keys: those of the warps of a block, by
// way of shared memory, then those of several blocks, by way of device memory. A part is a row's
// output, its maximum and its sum of exponentials beside that: of a large maximum the log2 of the
// sum would lose the sum. Parts are added in one order, always.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/reduce.cuh"
#include "attention/mma.cuh"
#include "kv/place.cuh"

constexpr int WARP_ROWS = 16;

// Where a warp leaves its rows, fp32, neighbouring ones in different banks: columns are moved by the
// row, or, where that takes registers that wide rows do not leave, rows are padded.
template <int HEAD_DIM>
struct WarpRows {
  static constexpr bool MOVED = HEAD_DIM <= 128;
  static constexpr int STRIDE = MOVED ? HEAD_DIM : HEAD_DIM + 8;  // floats
  static constexpr int BYTES = WARP_ROWS * STRIDE * 4;

  __device__ static __forceinline__ int at(int row, int column) {
    return row * STRIDE + (MOVED ? column ^ ((row & 1) << 4 | (row & 2) << 2) : column);
  }
};

// What is said of a row: the maximum of the scores in log2 units, and the sum beside it.
struct RowState {
  float top, sum;

  __device__ __forceinline__ float lse() const {
    return sum == 0.f ? NEG_INFINITY : (top + log2f(sum)) * LN2;
  }
};

// The first `count` of this warp's rows, not yet divided by their sums. QUANTIZED: columns as
// quantized.cuh leaves them.
template <int HEAD_DIM, bool QUANTIZED, int COLUMNS>
__device__ __forceinline__ void leave_rows(unsigned char* area, RowState* states,
                                           const float (&acc)[1][COLUMNS][4],
                                           const OnlineSoftmax<1>& softmax, float scale_log2,
                                           int lane, int count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * 8 >= count) return;
    const int row = lane / 4 + half * 8, t = lane % 4;
    float* const target = reinterpret_cast<float*>(area);
    const auto at = [&](int column) { return target + WarpRows<HEAD_DIM>::at(row, column); };
    const float sum = softmax.total(0, half);
    if (t == 0) states[row] = {softmax.top(0, half, scale_log2), sum};
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      const float* const x = &acc[0][n][2 * half];
      const float* const y = &acc[0][n + 1][2 * half];
      if (QUANTIZED) {
        *reinterpret_cast<float4*>(at(n * 8 + 4 * t)) = make_float4(x[0], y[0], x[1], y[1]);
      } else {
        *reinterpret_cast<float2*>(at(n * 8 + 2 * t)) = make_float2(x[0], x[1]);
        *reinterpret_cast<float2*>(at(n * 8 + 8 + 2 * t)) = make_float2(y[0], y[1]);
      }
    }
  }
}

// Four neighbouring columns of a row, divided by its sum of exponentials.
struct Quad {
  float4 value;
  RowState state;
};

__device__ __forceinline__ void add_scaled(float4& to, float by, const float4& x) {
  to.x = fmaf(by, x.x, to.x), to.y = fmaf(by, x.y, to.y);
  to.z = fmaf(by, x.z, to.z), to.w = fmaf(by, x.w, to.w);
}

// Divided by the sum of exponentials relative to 2^top.
__device__ __forceinline__ Quad scaled(const float4& value, float sum, float top, float scale) {
  const float by = sum == 0.f ? 0.f : scale / sum;
  return {make_float4(value.x * by, value.y * by, value.z * by, value.w * by), {top, sum}};
}

// 2^(x - top); 0 where x is -inf, even if nothing else was seen.
__device__ __forceinline__ float weight(float x, float top) {
  return x == NEG_INFINITY ? 0.f : exp2_fast(x - top);
}

// Of GROUPS warps that saw the same row: warp i left it at area(i), states lie `state_step` apart.
template <int HEAD_DIM, int GROUPS, typename Area>
__device__ __forceinline__ Quad merge_warps(const Area& area, const RowState* states,
                                            int state_step, int row, int column, float scale) {
  float top = NEG_INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) top = fmaxf(top, states[i * state_step + row].top);
  float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const RowState state = states[i * state_step + row];
    const float by = weight(state.top, top);
    sum = fmaf(by, state.sum, sum);
    const float* const x = reinterpret_cast<const float*>(area(i));
    add_scaled(value, by,
               *reinterpret_cast<const float4*>(x + WarpRows<HEAD_DIM>::at(row, column)));
  }
  return scaled(value, sum, top, scale);
}

// Parts of heads that several blocks share. Slot s has `rows` rows of HEAD_DIM floats.
template <int HEAD_DIM>
struct Parts {
  float* values;   // [slots, rows, HEAD_DIM]
  float2* states;  // [slots, rows]: top and sum
  int rows;

  __device__ __forceinline__ Parts(float* workspace, int slots, int rows)
      : values(workspace),
        states(reinterpret_cast<float2*>(workspace + wide(slots, rows) * HEAD_DIM)),
        rows(rows) {}

  __device__ __forceinline__ void leave(int slot, int row, int column, const Quad& quad) const {
    const i64 at = wide(slot, rows) + row;
    *reinterpret_cast<float4*>(values + at * HEAD_DIM + column) = quad.value;
    if (column == 0) states[at] = make_float2(quad.state.top, quad.state.sum);
  }

  // Four columns of all parts of a row; slot(i) is where part i lies. By whole warps, LANES lanes
  // of which have the same row: each weighs a part, and all parts come together, by way of a queue
  // in shared memory that is this thread's own, with places for CHUNK parts `queue_step` bytes
  // apart.
  template <int LANES, int CHUNK, typename Slot>
  __device__ __forceinline__ Quad merge(u32 queue, int queue_step, int count, int row, int column,
                                        const Slot& slot) const {
    static_assert(CHUNK <= LANES && LANES <= WARP_SIZE, "a lane for each part");
    const int lane = threadIdx.x % LANES;
    float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
    float top = NEG_INFINITY, sum = 0.f;
#pragma unroll 1
    for (int first = 0; first < count; first += CHUNK) {
      const int here = min(CHUNK, count - first);
#pragma unroll 4
      for (int i = 0; i < here; ++i)
        cp_async_16(queue + i * queue_step,
                    values + (wide(slot(first + i), rows) + row) * HEAD_DIM + column);
      cp_async_commit();
      const float2 mine = lane < here ? __ldcg(states + wide(slot(first + lane), rows) + row)
                                      : make_float2(NEG_INFINITY, 0.f);
      const float higher = fmaxf(top, lanes_max<LANES>(mine.x)), shrink = weight(top, higher);
      const float by = weight(mine.x, higher) * mine.y;
      sum = sum * shrink + lanes_sum<LANES>(by), top = higher;
      value = make_float4(value.x * shrink, value.y * shrink, value.z * shrink, value.w * shrink);
      cp_async_wait<0>();
#pragma unroll 4
      for (int i = 0; i < here; ++i) {
        const uint4 x = load_shared_chunk(queue + i * queue_step);
        add_scaled(value, __shfl_sync(FULL_MASK, by, i, LANES),
                   make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                               __uint_as_float(x.w)));
      }
    }
    return scaled(value, sum, top, 1.f);
  }
};
