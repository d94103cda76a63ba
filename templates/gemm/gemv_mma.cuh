// A warp's part of a product with up to eight rows of x, on tensor cores: mma.m16n8k16 with the
// weight as the 16-row operand, x as the 8-column one, both straight from global memory.
//
// The sum over k has no order of its own, so lane (g, t) = (lane / 4, lane % 4) takes eight
// neighbouring k, one 16-byte load, for what two mma of k = 16 want of it:
//
//   k of a span   0 1 2 3 | 4 5 6 7     8 ... 15     16 ... 23     24 ... 31
//   lane t            0                    1             2             3
//   first mma     b0  b1                b0  b1       ...                         the same in A:
//   second mma              b0  b1            b0 b1                              a[0] and a[2]
//
// A span is 32 k. With the weight as [n, k] a lane loads rows g, g + 8, ...; as [k, n] it loads its
// eight k of eight neighbouring outputs and pairs them by byte permutes (ptx/mma.cuh: A, B, D).
#pragma once
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

constexpr int TOKENS = 8;  // rows of x, at most

// Chunk `span` of a row of x, which lane (g, t) has for token g.
template <typename T>
struct TokenRows {
  const T* row;
  bool exists;
  __device__ __forceinline__ TokenRows(const T* x, i64 stride, int m, int lane)
      : row(x + min(lane / 4, m - 1) * stride + lane % 4 * 8), exists(lane / 4 < m) {}
  __device__ __forceinline__ uint4 load(int span, int k) const {
    uint4 chunk = make_uint4(0, 0, 0, 0);
    load_chunk_if(chunk, row + span * 32, exists && span * 32 + threadIdx.x % 4 * 8 < k);
    return chunk;
  }
};

// The weight as [HALVES * n, k]: ROWS outputs, 8 or a multiple of 16; and, with two HALVES, those n
// further on.
template <typename T, int ROWS, int HALVES>
struct RowsMma {
  static constexpr int OUTPUTS = ROWS, SPAN = 32;
  static constexpr int CHUNKS = HALVES * ROWS / 8;  // of a lane and span
  static constexpr int PRODUCTS = ROWS == 8 ? HALVES : CHUNKS / 2;
  static_assert(ROWS == 8 || ROWS % 16 == 0, "one half of a 16-row operand, or whole ones");
  struct Step {
    uint4 w[CHUNKS], x;
  };
  TokenRows<T> tokens;
  const T* rows[CHUNKS];
  int k;
  float d[PRODUCTS][4];

  __device__ __forceinline__ RowsMma(const T* x, i64 x_stride, const T* weight, i64 weight_stride,
                                     int first, int m, int n, int k, int lane)
      : tokens(x, x_stride, m, lane), k(k), d{} {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int row = min(first + i % (ROWS / 8) * 8 + lane / 4, n - 1) + i / (ROWS / 8) * n;
      rows[i] = weight + row * weight_stride + lane % 4 * 8;
    }
  }
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
    const bool there = span * SPAN + static_cast<int>(threadIdx.x % 4) * 8 < k;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      step.w[i] = load_streamed_chunk_if(rows[i] + span * SPAN, there);
  }
  __device__ __forceinline__ void load_x(Step& step, int span) const {
    step.x = tokens.load(span, k);
  }
  __device__ __forceinline__ void multiply(const Step& step) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      const uint4 low = step.w[ROWS == 8 ? i : 2 * i];
      const uint4 high = ROWS == 8 ? make_uint4(0, 0, 0, 0) : step.w[2 * i + 1];
      mma_m16n8k16<T>(d[i], {low.x, high.x, low.y, high.y}, step.x.x, step.x.y);
      mma_m16n8k16<T>(d[i], {low.z, high.z, low.w, high.w}, step.x.z, step.x.w);
    }
  }
  // To [HALVES][TOKENS][ROWS].
  __device__ __forceinline__ void store(float* sums, int lane) const {
    const int g = lane / 4, token = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      constexpr int OF_HALF = PRODUCTS / HALVES;
      float* const at = sums + ((i / OF_HALF) * TOKENS + token) * ROWS + i % OF_HALF * 16 + g;
      at[0] = d[i][0], at[ROWS] = d[i][1];
      if (ROWS != 8) at[8] = d[i][2], at[ROWS + 8] = d[i][3];
    }
  }
};

// The low (or the high) halves of two words.                                    PTX ISA: prmt
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// The weight as [k, HALVES * n], n a multiple of 8: 64 outputs. Lane (g, t) loads outputs 8g to
// 8g + 7 of its eight k; product j has outputs 8g + 2j as its row g, 8g + 2j + 1 as row g + 8.
template <typename T, int COLUMNS, int HALVES>
struct ColumnsMma {
  static constexpr int OUTPUTS = COLUMNS, SPAN = 32, CHUNKS = HALVES * 8;
  static_assert(COLUMNS == 64, "eight lanes with eight outputs each");
  struct Step {
    uint4 w[CHUNKS], x;
  };
  TokenRows<T> tokens;
  const T* columns;
  i64 stride;
  int k, n;
  float d[HALVES * 4][4];

  __device__ __forceinline__ ColumnsMma(const T* x, i64 x_stride, const T* weight,
                                        i64 weight_stride, int first, int m, int n, int k, int lane)
      : tokens(x, x_stride, m, lane),
        columns(weight + min(first + lane / 4 * 8, n - 8)),
        stride(weight_stride),
        k(k),
        n(n),
        d{} {}
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
    const int row = span * SPAN + threadIdx.x % 4 * 8;
    const T* source = columns + row * stride;
#pragma unroll
    for (int i = 0; i < 8; ++i, source += stride)
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
        step.w[half * 8 + i] = load_streamed_chunk_if(source + half * n, row < k);
  }
  __device__ __forceinline__ void load_x(Step& step, int span) const {
    step.x = tokens.load(span, k);
  }
  template <int J>
  static __device__ __forceinline__ u32 word(uint4 chunk) {
    return J == 0 ? chunk.x : J == 1 ? chunk.y : J == 2 ? chunk.z : chunk.w;
  }
  template <int J>
  __device__ __forceinline__ void multiply(float (&sum)[4], const uint4* w, u32 b0, u32 b1) {
    const u32 w0 = word<J>(w[0]), w1 = word<J>(w[1]), w2 = word<J>(w[2]), w3 = word<J>(w[3]);
    mma_m16n8k16<T>(
        sum, {low_halves(w0, w1), high_halves(w0, w1), low_halves(w2, w3), high_halves(w2, w3)}, b0,
        b1);
  }
  __device__ __forceinline__ void multiply(const Step& step) {
#pragma unroll
    for (int i = 0; i < 2 * HALVES; ++i) {  // four k of eight, of each half
      const u32 b0 = i % 2 ? step.x.z : step.x.x, b1 = i % 2 ? step.x.w : step.x.y;
      const uint4* const w = step.w + i * 4;
      float (*const sum)[4] = d + i / 2 * 4;
      multiply<0>(sum[0], w, b0, b1), multiply<1>(sum[1], w, b0, b1);
      multiply<2>(sum[2], w, b0, b1), multiply<3>(sum[3], w, b0, b1);
    }
  }
  // To [HALVES][TOKENS][COLUMNS].
  __device__ __forceinline__ void store(float* sums, int lane) const {
    const int g = lane / 4, token = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < HALVES * 4; ++i) {
      float* const at = sums + (i / 4 * TOKENS + token) * COLUMNS + g * 8 + i % 4 * 2;
      at[0] = d[i][0], at[COLUMNS] = d[i][1];
      at[1] = d[i][2], at[COLUMNS + 1] = d[i][3];
    }
  }
};
