// A warp's part of a product with up to eight rows of x, in fp32 arithmetic: what gemv_mma.cuh does
// on tensor cores, for types that these have not.
//
// x comes again in each block and stays in L1: it is loaded where it is wanted.
#pragma once
#include "gemm/gemv.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

constexpr int GROUP = 4;  // rows of x whose loads are under way together

// The chunk at `x` of rows first ... first + 3 of x, zeros for those from m on.
template <typename T>
__device__ __forceinline__ void load_tokens(Vector<T> (&to)[GROUP], const T* x, i64 stride,
                                            int first, int m) {
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    to[i].bits = make_uint4(0, 0, 0, 0);
    load_chunk_if(to[i].bits, x + (first + i) * stride, first + i < m);
  }
}

// The weight as [HALVES * n, k]: eight lanes share a row, and a load is of four rows.
template <typename T, int TILE, int HALVES>
struct RowsFma {
  static constexpr int SIZE = 16 / sizeof(T), SPAN = 8 * SIZE, CHUNKS = TILE / 4;
  struct Step {
    uint4 w[CHUNKS];
    int k;  // the lane's first
  };
  const T *const x, *rows[CHUNKS];
  const i64 x_stride;
  const int m, k;
  float sum[CHUNKS][TOKENS] = {};

  __device__ __forceinline__ RowsFma(const T* x, i64 x_stride, const T* weight, i64 stride,
                                     int first, int m, int n, int k)
      : x(x), x_stride(x_stride), m(m), k(k) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int place = i * 4 + threadIdx.x % WARP_SIZE / 8;
      rows[i] = weight + weight_output<TILE, HALVES>(first, place, n) * stride;
    }
  }
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
    const int at = span * SPAN + static_cast<int>(threadIdx.x % 8) * SIZE;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) step.w[i] = load_streamed_chunk_if(rows[i] + at, at < k);
  }
  __device__ __forceinline__ void load_x(Step& step, int span) const {
    step.k = span * SPAN + static_cast<int>(threadIdx.x % 8) * SIZE;
  }
  __device__ __forceinline__ void multiply(const Step& step) {
#pragma unroll
    for (int first = 0; first < TOKENS; first += GROUP) {
      if (first >= m) break;
      Vector<T> of_x[GROUP];
      load_tokens(of_x, x + step.k, x_stride, first, step.k < k ? m : 0);
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        const Vector<T> w = {step.w[i]};
#pragma unroll
        for (int j = 0; j < GROUP * SIZE; ++j)
          sum[i][first + j / SIZE] += w.get(j % SIZE) * of_x[j / SIZE].get(j % SIZE);
      }
    }
  }
  // To [TOKENS][TILE].
  __device__ __forceinline__ void store(float* sums) const {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        const float all = lanes_sum<8>(sum[i][token]);
        if (lane % 8 == 0) sums[token * TILE + i * 4 + lane / 8] = all;
      }
  }
};

// The weight as [k, HALVES * n], n a multiple of SIZE: a lane has SIZE neighbouring places.
template <typename T, int TILE, int HALVES>
struct ColumnsFma {
  static constexpr int SIZE = 16 / sizeof(T), SPAN = SIZE;
  static_assert(TILE == 32 * SIZE, "a chunk a lane");
  struct Step {
    uint4 w[SPAN];
    int k;
  };
  const T *const x, *const columns;
  const i64 x_stride, stride;
  const int m, k;
  float sum[TOKENS][SIZE] = {};

  __device__ __forceinline__ ColumnsFma(const T* x, i64 x_stride, const T* weight, i64 stride,
                                        int first, int m, int n, int k)
      : x(x),
        columns(weight +
                weight_output<TILE, HALVES, SIZE>(first, threadIdx.x % WARP_SIZE * SIZE, n)),
        x_stride(x_stride),
        stride(stride),
        m(m),
        k(k) {}
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
    const T* source = columns + span * SPAN * stride;
#pragma unroll
    for (int i = 0; i < SPAN; ++i, source += stride)
      step.w[i] = load_streamed_chunk_if(source, span * SPAN < k);
  }
  __device__ __forceinline__ void load_x(Step& step, int span) const { step.k = span * SPAN; }
  __device__ __forceinline__ void multiply(const Step& step) {
#pragma unroll
    for (int first = 0; first < TOKENS; first += GROUP) {
      if (first >= m) break;
      Vector<T> of_x[GROUP];
      load_tokens(of_x, x + step.k, x_stride, first, step.k < k ? m : 0);
#pragma unroll
      for (int i = 0; i < SPAN; ++i) {
        const Vector<T> w = {step.w[i]};
#pragma unroll
        for (int j = 0; j < GROUP * SIZE; ++j)
          sum[first + j / SIZE][j % SIZE] += w.get(j % SIZE) * of_x[j / SIZE].get(i);
      }
    }
  }
  // To [TOKENS][TILE].
  __device__ __forceinline__ void store(float* sums) const {
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
#pragma unroll
      for (int j = 0; j < SIZE; ++j)
        sums[token * TILE + threadIdx.x % WARP_SIZE * SIZE + j] = sum[token][j];
  }
};
