// A few rows of x, normalised by a block into its shared memory, where a product reads them.
//
//   LayerNorm (CENTERED)   (x - mean) * rstd * weight + bias     rstd = 1 / sqrt(variance + eps)
//   RMSNorm                 x * rstd * weight                    rstd = 1 / sqrt(mean of x^2 + eps)
//
// A team of warps has a row: all of the block's one row, half of them each of two rows, and so on.
// Statistics are fp32, the variance of distances from the mean; results are rounded to T once. A
// thread keeps its first piece of a row, which is its only one where rows are not long.
#pragma once
#include "ptx/memory.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

constexpr int ROW_GAP = 32;  // elements between rows: lanes of a fragment then meet other banks

template <typename T, int WARPS, bool CENTERED>
struct RowNorm {
  static constexpr int SIZE = Vector<T>::SIZE;
  const T *weight, *bias;        // [k]; a multiple of a vector
  const int k;                   // columns
  int row, warps, first, step;   // of a thread's team; its first element, and from piece to piece
  Vector<T> factor, shift = {};  // of the first piece

  // Reads weight and bias alone, so it may come before the previous kernel is over.
  __device__ __forceinline__ RowNorm(const T* weight, const T* bias, int rows, int k)
      : weight(weight), bias(bias), k(k) {
    static_assert(WARPS >= 8, "a warp for each of eight rows");
    const int log2 = rows > 4 ? 3 : rows > 2 ? 2 : rows > 1 ? 1 : 0;
    warps = WARPS >> log2;
    row = threadIdx.x / WARP_SIZE / warps;
    first = (threadIdx.x - row * warps * WARP_SIZE) * SIZE;
    step = warps * WARP_SIZE * SIZE;
    load_weights(factor, shift, first);
  }

  // Rows 0 to m - 1 (at most eight) of x to `target`, k + ROW_GAP elements from each other. By the
  // whole block, which meets before anyone may read them.
  __device__ __forceinline__ void normalise(u32 target, const T* x, i64 x_stride, int m,
                                            float eps) const {
    __shared__ float of_warps[WARPS];
    const T* const source = x + min(row, m - 1) * x_stride;
    Vector<T> held = {};
    if (first < k) held = load_vector(source + first);
    float mean = 0.f, sum = 0.f, squares = 0.f;
    if (CENTERED) {
      each(held, source, [&](const Vector<T>& piece, int) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sum += piece.get(j);
      });
      mean = of_team(sum, of_warps) / k;
    }
    each(held, source, [&](const Vector<T>& piece, int) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) squares += (piece.get(j) - mean) * (piece.get(j) - mean);
    });
    const float rstd = 1.f / sqrtf(of_team(squares, of_warps) / k + eps);
    if (row >= m) return;
    const u32 own = target + row * (k + ROW_GAP) * sizeof(T);
    each(held, source, [&](const Vector<T>& piece, int i) {
      Vector<T> scale = factor, offset = shift, made;
      if (i != first) load_weights(scale, offset, i);
#pragma unroll
      for (int j = 0; j < SIZE; ++j)
        made.set(j, (piece.get(j) - mean) * rstd * scale.get(j) + offset.get(j));
      store_shared_chunk(own + i * sizeof(T), made.bits);
    });
  }

 private:
  __device__ __forceinline__ void load_weights(Vector<T>& scale, Vector<T>& offset, int i) const {
    load_constant_chunk_if(scale.bits, weight + i, i < k);
    if (CENTERED) load_constant_chunk_if(offset.bits, bias + i, i < k);
  }

  // act(piece, its first column) for the thread's pieces of a row.
  template <typename Act>
  __device__ __forceinline__ void each(const Vector<T>& held, const T* source,
                                       const Act& act) const {
    if (first < k) act(held, first);
    for (int i = first + step; i < k; i += step) act(load_vector(source + i), i);
  }

  // Over the team, in one order, to the same bits in each thread. By the whole block.
  __device__ __forceinline__ float of_team(float x, float (&of_warps)[WARPS]) const {
    x = lanes_sum<WARP_SIZE>(x);
    __syncthreads();  // everyone is done with what stood there
    if (threadIdx.x % WARP_SIZE == 0) of_warps[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    float total = 0.f;
    for (int i = 0; i < warps; ++i) total += of_warps[row * warps + i];
    return total;
  }
};

// A row there, which lane (g, t) of a product has for token g (gemm/gemv_mma.cuh).
template <typename T>
struct SharedRow {
  u32 row;
  bool exists;

  __device__ __forceinline__ SharedRow(u32 rows, int m, int k)
      : row(rows + (min(static_cast<int>(threadIdx.x) % WARP_SIZE / 4, m - 1) * (k + ROW_GAP) +
                    threadIdx.x % 4 * 8) *
                       sizeof(T)),
        exists(threadIdx.x % WARP_SIZE / 4 < m) {}

  // The lane's eight k of the 32 from `first` on.
  __device__ __forceinline__ uint4 load(int first, int k) const {
    const bool there = exists && first + static_cast<int>(threadIdx.x % 4) * 8 < k;
    return there ? load_shared_chunk(row + first * sizeof(T)) : make_uint4(0, 0, 0, 0);
  }
};
