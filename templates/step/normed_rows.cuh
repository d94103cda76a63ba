// A few rows of x, normalised by a block into its shared memory, where a product reads them.
//
//   LayerNorm (CENTERED)   (x - mean) * rstd * weight + bias     rstd = 1 / sqrt(variance + eps)
//   RMSNorm                 x * rstd * weight                    rstd = 1 / sqrt(mean of x^2 + eps)
//
// A team of warps has a row: all of the block's one row, half of them each of two rows, and so on.
// Statistics are fp32, the variance of distances from the mean; results are rounded to T once.
#pragma once
#include "ptx/memory.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

constexpr int ROW_GAP = 32;  // elements between rows: lanes of a fragment then meet other banks

// The warps of a row, and which of its vectors a thread has.
template <typename T, int WARPS>
struct RowTeam {
  static constexpr int SIZE = Vector<T>::SIZE;
  int row, warps, first, step;  // step: elements from one of the thread's vectors to the next

  __device__ __forceinline__ explicit RowTeam(int rows) {
    static_assert(WARPS >= 8, "a warp for each of eight rows");
    const int log2 = rows > 4 ? 3 : rows > 2 ? 2 : rows > 1 ? 1 : 0;
    warps = WARPS >> log2;
    row = threadIdx.x / WARP_SIZE / warps;
    first = (threadIdx.x - row * warps * WARP_SIZE) * SIZE;
    step = warps * WARP_SIZE * SIZE;
  }

  // Over the team, in one order, to the same bits in each thread. By the whole block.
  __device__ __forceinline__ float sum(float x, float (&of_warps)[WARPS]) const {
    x = lanes_sum<WARP_SIZE>(x);
    __syncthreads();  // everyone is done with what stood there
    if (threadIdx.x % WARP_SIZE == 0) of_warps[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    float total = 0.f;
    for (int i = 0; i < warps; ++i) total += of_warps[row * warps + i];
    return total;
  }
};

// Rows 0 to m - 1 (at most eight) of x to `target`, k + ROW_GAP elements from each other; k is a
// multiple of a vector. The block meets before anyone may read them.
template <typename T, int WARPS, bool CENTERED>
__device__ __forceinline__ void normalise_rows(u32 target, const T* x, i64 x_stride,
                                               const T* weight, const T* bias, int m, int k,
                                               float eps) {
  __shared__ float of_warps[WARPS];
  const RowTeam<T, WARPS> team(m);
  const T* const source = x + min(team.row, m - 1) * x_stride;
  float mean = 0.f, sum = 0.f, squares = 0.f;
  if (CENTERED) {
    for (int i = team.first; i < k; i += team.step) {
      const Vector<T> piece = load_vector(source + i);
#pragma unroll
      for (int j = 0; j < team.SIZE; ++j) sum += piece.get(j);
    }
    mean = team.sum(sum, of_warps) / k;
  }
  for (int i = team.first; i < k; i += team.step) {
    const Vector<T> piece = load_vector(source + i);
#pragma unroll
    for (int j = 0; j < team.SIZE; ++j) {
      const float distance = piece.get(j) - mean;
      squares += distance * distance;
    }
  }
  const float rstd = 1.f / sqrtf(team.sum(squares, of_warps) / k + eps);
  for (int i = team.first; i < k && team.row < m; i += team.step) {
    const Vector<T> piece = load_vector(source + i), factor = load_vector(weight + i);
    Vector<T> made, shift = {make_uint4(0, 0, 0, 0)};
    if (CENTERED) shift = load_vector(bias + i);
#pragma unroll
    for (int j = 0; j < team.SIZE; ++j)
      made.set(j, (piece.get(j) - mean) * rstd * factor.get(j) + shift.get(j));
    store_shared_chunk(target + (team.row * (k + ROW_GAP) + i) * sizeof(T), made.bits);
  }
}

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
