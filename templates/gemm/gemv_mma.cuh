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
// Memory likes longer runs than the 64 bytes that four lanes load of a row of the weight, and the
// rows g of A need not be rows of the weight: with SETS = 2 rows 2r and 2r + 1 are one, at two sets
// of 32 k. Each set is multiplied with its own x, and of each product every SETS-th row is of use:
//
//   A's row g   weight's row g / SETS, k of set g % SETS             8 / SETS rows a load, each a
//   D of set s  rows g with g % SETS = s                             run of SETS * 64 bytes
//
// With the weight as [k, n] a lane loads its eight k of eight neighbouring outputs, and pairs them
// by byte permutes (ptx/mma.cuh: A, B, D).
//
// A product reads the tile (gemm/gemv.cuh) that it was last told to `aim` at, if out has columns
// there; k that are not there are zeros.
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

// The weight as [HALVES * n, k].
template <typename T, int TILE, int HALVES, int SETS = 2>
struct RowsMma {
  static constexpr int SPAN = 32 * SETS, ROWS = 8 / SETS;  // k, and rows of a load
  static constexpr int CHUNKS = TILE / ROWS, PRODUCTS = CHUNKS / 2;
  static_assert(CHUNKS % 2 == 0, "two loads are an operand of 16 rows");
  struct Step {
    uint4 w[CHUNKS], x[SETS];
  };
  const TokenRow<T> token;
  const T *const weight, *rows[CHUNKS];
  const i64 stride;
  const int n, k;
  int end;  // of k
  float d[PRODUCTS][SETS][4];

  __device__ __forceinline__ RowsMma(const T* x, i64 x_stride, const T* weight, i64 stride, int m,
                                     int n, int k)
      : token(x, x_stride, m), weight(weight), stride(stride), n(n), k(k) {}
  template <int LINES>
  __device__ __forceinline__ void prefetch(int first) const {
    prefetch_rows<TILE, HALVES, LINES>(weight, stride, first, n, k);
  }
  __device__ __forceinline__ void aim(int first) {
    const int lane = threadIdx.x % WARP_SIZE;
    end = first < n ? k : 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int row = weight_output<TILE, HALVES>(first, i * ROWS + lane / (4 * SETS), n);
      rows[i] = weight + row * stride + lane % (4 * SETS) * 8;
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < PRODUCTS * SETS * 4; ++i) d[i / (SETS * 4)][i / 4 % SETS][i % 4] = 0.f;
  }
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
    const bool there = span * SPAN + static_cast<int>(threadIdx.x) % (4 * SETS) * 8 < end;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      step.w[i] = load_streamed_chunk_if(rows[i] + span * SPAN, there);
  }
  __device__ __forceinline__ void load_x(Step& step, int span) const {
#pragma unroll
    for (int set = 0; set < SETS; ++set) step.x[set] = token.load(span * SPAN + set * 32, end);
  }
  __device__ __forceinline__ void multiply(const Step& step) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
      for (int set = 0; set < SETS; ++set)
        multiply_chunks<T>(d[i][set], step.w[2 * i], step.w[2 * i + 1], step.x[set]);
  }
  // To [TOKENS][TILE].
  __device__ __forceinline__ void store(float* sums) const {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4;
    float* const at = sums + lane % 4 * 2 * TILE + g / SETS;
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float sum = d[i][0][j];
#pragma unroll
        for (int set = 1; set < SETS; ++set) sum = g % SETS == set ? d[i][set][j] : sum;
#pragma unroll
        for (int distance = 4; distance < 4 * SETS; distance *= 2)
          sum += __shfl_xor_sync(FULL_MASK, sum, distance);
        if (g % SETS == 0) at[j % 2 * TILE + (2 * i + j / 2) * ROWS] = sum;
      }
  }
};

// The low (or the high) halves of two words.                                    PTX ISA: prmt
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// The weight as [k, HALVES * n], n a multiple of 8. Lane (g, t) loads places 8g to 8g + 7 of the
// tile at its eight k; product j has place 8g + 2j as its row g, 8g + 2j + 1 as row g + 8.
template <typename T, int TILE, int HALVES>
struct ColumnsMma {
  static constexpr int SPAN = 32;
  static_assert(TILE == 64, "eight lanes with eight places each");
  struct Step {
    uint4 w[8], x;
  };
  const TokenRow<T> token;
  const T *const weight, *columns;
  const i64 stride;
  const int n, k;
  int end;  // of k
  float d[4][4];

  __device__ __forceinline__ ColumnsMma(const T* x, i64 x_stride, const T* weight, i64 stride,
                                        int m, int n, int k)
      : token(x, x_stride, m), weight(weight), stride(stride), n(n), k(k) {}
  template <int LINES>
  __device__ __forceinline__ void prefetch(int first) const {
    prefetch_columns<TILE, HALVES>(weight, stride, first, n, k);
  }
  __device__ __forceinline__ void aim(int first) {
    end = first < n ? k : 0;
    columns = weight + weight_output<TILE, HALVES, 8>(first, threadIdx.x % WARP_SIZE / 4 * 8, n);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 16; ++i) d[i / 4][i % 4] = 0.f;
  }
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
    const int row = span * SPAN + threadIdx.x % 4 * 8;
    const T* source = columns + row * stride;
#pragma unroll
    for (int i = 0; i < 8; ++i, source += stride)
      step.w[i] = load_streamed_chunk_if(source, row < end);
  }
  __device__ __forceinline__ void load_x(Step& step, int span) const {
    step.x = token.load(span * SPAN, end);
  }
  // Four k: one word of each, which has two outputs.
  static __device__ __forceinline__ void multiply(float (&sum)[4], u32 w0, u32 w1, u32 w2, u32 w3,
                                                  u32 b0, u32 b1) {
    mma_m16n8k16<T>(
        sum, {low_halves(w0, w1), high_halves(w0, w1), low_halves(w2, w3), high_halves(w2, w3)}, b0,
        b1);
  }
  __device__ __forceinline__ void multiply(const Step& step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4* const w = step.w + i * 4;
      const u32 b0 = i == 0 ? step.x.x : step.x.z, b1 = i == 0 ? step.x.y : step.x.w;
      multiply(d[0], w[0].x, w[1].x, w[2].x, w[3].x, b0, b1);
      multiply(d[1], w[0].y, w[1].y, w[2].y, w[3].y, b0, b1);
      multiply(d[2], w[0].z, w[1].z, w[2].z, w[3].z, b0, b1);
      multiply(d[3], w[0].w, w[1].w, w[2].w, w[3].w, b0, b1);
    }
  }
  // To [TOKENS][TILE].
  __device__ __forceinline__ void store(float* sums) const {
    const int lane = threadIdx.x % WARP_SIZE;
    float* const at = sums + lane % 4 * 2 * TILE + lane / 4 * 8;
#pragma unroll
    for (int i = 0; i < 16; ++i) at[i % 2 * TILE + i / 4 * 2 + i / 2 % 2] = d[i / 4][i % 4];
  }
};
