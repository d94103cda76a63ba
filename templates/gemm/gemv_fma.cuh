// A warp's part of a product with up to eight rows of x, in fp32 arithmetic: what gemv_mma.cuh does
// on tensor cores, for types that these have not.
#pragma once
#include "ptx/memory.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

// The weight as [HALVES * n, k]: eight lanes share a row, lane / 8 = 0..3 has rows 0..3, 4..7, ...
template <typename T, int ROWS, int HALVES>
struct RowsFma {
  static constexpr int SIZE = 16 / sizeof(T), OUTPUTS = ROWS, SPAN = 8 * SIZE;
  static constexpr int OF_HALF = ROWS / 4, CHUNKS = HALVES * OF_HALF;
  struct Step {
    uint4 w[CHUNKS];
    int span;
  };
  const T *x, *rows[CHUNKS];
  i64 x_stride;
  int m, k;
  float sum[CHUNKS][TOKENS];

  __device__ __forceinline__ RowsFma(const T* x, i64 x_stride, const T* weight, i64 weight_stride,
                                     int first, int m, int n, int k, int lane)
      : x(x + lane % 8 * SIZE), x_stride(x_stride), m(m), k(k), sum{} {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int row = min(first + i % OF_HALF * 4 + lane / 8, n - 1) + i / OF_HALF * n;
      rows[i] = weight + row * weight_stride + lane % 8 * SIZE;
    }
  }
  __device__ __forceinline__ bool there(int span) const {
    return span * SPAN + static_cast<int>(threadIdx.x % 8) * SIZE < k;
  }
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      step.w[i] = load_streamed_chunk_if(rows[i] + span * SPAN, there(span));
  }
  // x comes again in each block and stays in L1: it is loaded where it is wanted.
  __device__ __forceinline__ void load_x(Step& step, int span) const { step.span = span; }
  __device__ __forceinline__ void multiply(const Step& step) {
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
      if (token >= m) break;
      Vector<T> of_x = {make_uint4(0, 0, 0, 0)};
      load_chunk_if(of_x.bits, x + token * x_stride + step.span * SPAN, there(step.span));
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        const Vector<T> w = {step.w[i]};
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sum[i][token] += w.get(j) * of_x.get(j);
      }
    }
  }
  // To [HALVES][TOKENS][ROWS].
  __device__ __forceinline__ void store(float* sums, int lane) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        const float all = lanes_sum<8>(sum[i][token]);
        if (lane % 8 == 0)
          sums[(i / OF_HALF * TOKENS + token) * ROWS + i % OF_HALF * 4 + lane / 8] = all;
      }
  }
};

// The weight as [k, HALVES * n], n a multiple of SIZE: a lane has SIZE neighbouring outputs.
template <typename T, int COLUMNS, int HALVES>
struct ColumnsFma {
  static constexpr int SIZE = 16 / sizeof(T), OUTPUTS = COLUMNS, SPAN = SIZE;
  static constexpr int CHUNKS = HALVES * SPAN;
  static_assert(COLUMNS == 32 * SIZE, "a chunk a lane");
  struct Step {
    uint4 w[CHUNKS];
    int span;
  };
  const T *x, *columns;
  i64 x_stride, stride;
  int m, n, k;
  float sum[HALVES][TOKENS][SIZE];

  __device__ __forceinline__ ColumnsFma(const T* x, i64 x_stride, const T* weight,
                                        i64 weight_stride, int first, int m, int n, int k, int lane)
      : x(x),
        columns(weight + min(first + lane * SIZE, n - SIZE)),
        x_stride(x_stride),
        stride(weight_stride),
        m(m),
        n(n),
        k(k),
        sum{} {}
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
    const T* source = columns + span * SPAN * stride;
#pragma unroll
    for (int i = 0; i < SPAN; ++i, source += stride)
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
        step.w[half * SPAN + i] = load_streamed_chunk_if(source + half * n, span * SPAN < k);
  }
  __device__ __forceinline__ void load_x(Step& step, int span) const { step.span = span; }
  __device__ __forceinline__ void multiply(const Step& step) {
    if (step.span * SPAN >= k) return;
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
      if (token >= m) break;
      const Vector<T> of_x = load_vector(x + token * x_stride + step.span * SPAN);
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        const Vector<T> w = {step.w[i]};
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sum[i / SPAN][token][j] += w.get(j) * of_x.get(i % SPAN);
      }
    }
  }
  // To [HALVES][TOKENS][COLUMNS].
  __device__ __forceinline__ void store(float* sums, int lane) const {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int token = 0; token < TOKENS; ++token)
#pragma unroll
        for (int j = 0; j < SIZE; ++j)
          sums[(half * TOKENS + token) * COLUMNS + lane * SIZE + j] = sum[half][token][j];
  }
};
