// A warp's part of a product with up to eight rows of x, on tensor cores: mma.m16n8k16 with the
// weight as the 16-row operand, x as the 8-column one, both straight from global memory.
//
// The sum over k has no order of its own, so lane (g, t) = (lane / 4, lane % 4) takes eight
// neighbouring k, one 16-byte load, for what two mma of k = 16 want of it:
//
//   k             0 1 2 3 | 4 5 6 7     8 ... 15     16 ... 23     24 ... 31
//   lane t            0                    1             2             3
//   first mma     b0  b1                b0  b1       ...                         the same in A:
//   second mma              b0  b1            b0 b1                              a[0] and a[2]
//
// A span is 32 k. With the weight as [n, k] a lane loads rows g, g + 8, ... of a tile; as [k, n] it
// loads its eight k of eight neighbouring outputs, and pairs them by byte permutes (ptx/mma.cuh: A,
// B, D).
//
// k that are not there are zeros.
#pragma once
#include "gemm/gemv.cuh"
#include "ptx/mma.cuh"

// A row of x, which lane (g, t) has for token g.
template <typename T>
struct TokenRow {
  const T* row;
  bool exists;
  __device__ __forceinline__ TokenRow(const T* x, i64 stride, int m)
      : row(x + min(static_cast<int>(threadIdx.x) % WARP_SIZE / 4, m - 1) * stride +
            threadIdx.x % 4 * 8),
        exists(threadIdx.x % WARP_SIZE / 4 < m) {}
  // The lane's eight k of the 32 from `first` on.
  __device__ __forceinline__ uint4 load(int first, int k) const {
    uint4 chunk = make_uint4(0, 0, 0, 0);
    load_chunk_if(chunk, row + first, exists && first + static_cast<int>(threadIdx.x % 4) * 8 < k);
    return chunk;
  }
};

// Chunks of 16 bytes as two products of k = 16: `low` is A's rows g, `high` its rows g + 8.
template <typename T>
__device__ __forceinline__ void multiply_chunks(float (&d)[4], uint4 low, uint4 high, uint4 x) {
  mma_m16n8k16<T>(d, {low.x, high.x, low.y, high.y}, x.x, x.y);
  mma_m16n8k16<T>(d, {low.z, high.z, low.w, high.w}, x.z, x.w);
}

// The weight as [HALVES * n, k]. Where a tile has an odd number of eights, rows 8 to 15 of the last A
// are zeros.
template <typename T, int TILE, int HALVES>
struct RowsWeight {
  static constexpr int SPAN = 32, CHUNKS = TILE / 8, PRODUCTS = ceil_div(TILE, 16);
  static_assert(TILE % 8 == 0, "halves of a 16-row operand");
  const T* rows[CHUNKS];
  int k;

  RowsWeight() = default;
  __device__ __forceinline__ RowsWeight(const T* weight, i64 stride, int first, int n, int k)
      : k(k) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int row = weight_output<TILE, HALVES>(first, i * 8 + lane / 4, n);
      rows[i] = weight + row * stride + lane % 4 * 8;
    }
  }
  __device__ __forceinline__ void load(uint4 (&w)[CHUNKS], int span) const {
    const bool there = span * SPAN + static_cast<int>(threadIdx.x % 4) * 8 < k;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) w[i] = load_streamed_chunk_if(rows[i] + span * SPAN, there);
  }
  // d += w x of eight rows of x.
  __device__ __forceinline__ static void multiply(float (&d)[PRODUCTS][4], const uint4 (&w)[CHUNKS],
                                                  uint4 x) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      const bool half = 2 * i + 1 == CHUNKS;
      const uint4 high = half ? make_uint4(0, 0, 0, 0) : w[min_of(2 * i + 1, CHUNKS - 1)];
      multiply_chunks<T>(d[i], w[2 * i], high, x);
    }
  }
  // To [TOKENS][TILE].
  __device__ __forceinline__ static void store(const float (&d)[PRODUCTS][4], float* sums) {
    const int lane = threadIdx.x % WARP_SIZE;
    float* const at = sums + lane % 4 * 2 * TILE + lane / 4;
#pragma unroll
    for (int i = 0; i < PRODUCTS * 4; ++i)
      if (i / 2 < CHUNKS) at[i % 2 * TILE + i / 2 * 8] = d[i / 4][i % 4];
  }
};

// The low (or the high) halves of two words.                                    PTX ISA: prmt
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// The weight as [k, HALVES * n], n a multiple of 8. Lane (g, t) loads places 8g to 8g + 7 of the
// tile at its eight k; product j has place 8g + 2j as its row g, 8g + 2j + 1 as row g + 8.
template <typename T, int TILE, int HALVES>
struct ColumnsWeight {
  static constexpr int SPAN = 32, CHUNKS = 8, PRODUCTS = 4;
  static_assert(TILE == 64, "eight lanes with eight places each");
  const T* columns;
  i64 stride;
  int k;

  ColumnsWeight() = default;
  __device__ __forceinline__ ColumnsWeight(const T* weight, i64 stride, int first, int n, int k)
      : columns(weight + weight_output<TILE, HALVES, 8>(first, threadIdx.x % WARP_SIZE / 4 * 8, n)),
        stride(stride),
        k(k) {}
  __device__ __forceinline__ void load(uint4 (&w)[CHUNKS], int span) const {
    const int row = span * SPAN + threadIdx.x % 4 * 8;
    const T* source = columns + row * stride;
#pragma unroll
    for (int i = 0; i < 8; ++i, source += stride) w[i] = load_streamed_chunk_if(source, row < k);
  }
  // Four k: one word of each, which has two outputs.
  static __device__ __forceinline__ void multiply(float (&sum)[4], u32 w0, u32 w1, u32 w2, u32 w3,
                                                  u32 b0, u32 b1) {
    mma_m16n8k16<T>(
        sum, {low_halves(w0, w1), high_halves(w0, w1), low_halves(w2, w3), high_halves(w2, w3)}, b0,
        b1);
  }
  // d += w x of eight rows of x.
  __device__ __forceinline__ static void multiply(float (&d)[PRODUCTS][4],
                                                  const uint4 (&all)[CHUNKS], uint4 x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4* const w = all + i * 4;
      const u32 b0 = i == 0 ? x.x : x.z, b1 = i == 0 ? x.y : x.w;
      multiply(d[0], w[0].x, w[1].x, w[2].x, w[3].x, b0, b1);
      multiply(d[1], w[0].y, w[1].y, w[2].y, w[3].y, b0, b1);
      multiply(d[2], w[0].z, w[1].z, w[2].z, w[3].z, b0, b1);
      multiply(d[3], w[0].w, w[1].w, w[2].w, w[3].w, b0, b1);
    }
  }
  // To [TOKENS][TILE].
  __device__ __forceinline__ static void store(const float (&d)[PRODUCTS][4], float* sums) {
    const int lane = threadIdx.x % WARP_SIZE;
    float* const at = sums + lane % 4 * 2 * TILE + lane / 4 * 8;
#pragma unroll
    for (int i = 0; i < 16; ++i) at[i % 2 * TILE + i / 4 * 2 + i / 2 % 2] = d[i / 4][i % 4];
  }
};

// The product of either with up to eight rows of x. Token: where those are.
template <typename T, typename Weight, typename Token = TokenRow<T>>
struct ProductMma {
  static constexpr int SPAN = Weight::SPAN;
  struct Step {
    uint4 w[Weight::CHUNKS], x;
  };
  const Token token;
  const Weight weight;
  const int k;
  float d[Weight::PRODUCTS][4] = {};

  __device__ __forceinline__ ProductMma(const T* x, i64 x_stride, const T* weight, i64 stride,
                                        int first, int m, int n, int k)
      : ProductMma(Token(x, x_stride, m), weight, stride, first, n, k) {}
  __device__ __forceinline__ ProductMma(const Token& token, const T* weight, i64 stride, int first,
                                        int n, int k)
      : token(token), weight(weight, stride, first, n, k), k(k) {}
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
    weight.load(step.w, span);
  }
  __device__ __forceinline__ void load_x(Step& step, int span) const {
    step.x = token.load(span * SPAN, k);
  }
  __device__ __forceinline__ void multiply(const Step& step) {
    Weight::multiply(d, step.w, step.x);
  }
  __device__ __forceinline__ void store(float* sums) const { Weight::store(d, sums); }
};
template <typename T, int TILE, int HALVES, typename Token = TokenRow<T>>
using RowsMma = ProductMma<T, RowsWeight<T, TILE, HALVES>, Token>;
template <typename T, int TILE, int HALVES>
using ColumnsMma = ProductMma<T, ColumnsWeight<T, TILE, HALVES>>;
