/* The cross-entropy of rows of logits, and its gradient:

     loss[r]        = log(sum over v of exp(logits[r, v])) - logits[r, target[r]]
     gradient[r, v] = factor[r] * (exp(logits[r, v]) / that sum - (v == target[r])), rounded once

   A block has a row and goes over it twice: for its maximum and its sum, which each thread keeps of
   its own columns and raises once for UNROLL accesses; and, where there is a gradient, back from
   the end, where the row is still in L2. A row has `wide` columns of which `columns` are logits:
   the gradient of those behind them is 0. A target that is none of them makes the loss NaN. Sums
   are fp32, in the same order at every call. Every architecture. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "ptx/pdl.cuh"
#include "tile/logits.cuh"
#include "tile/reduce.cuh"

using elem_t = ${dtype};
constexpr int THREADS = ${threads};
constexpr int UNROLL = ${unroll};  // accesses of a thread that are under way
constexpr int SIZE = LOGITS;       // columns of an access
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

// sum over all of exp(x - top), for the largest x so far.
struct Running {
  float top = NEG_INFINITY, sum = 0.f;

  // What exponents are taken against: 0 while there is nothing but -inf.
  __device__ __forceinline__ float level() const { return top == NEG_INFINITY ? 0.f : top; }
  __device__ __forceinline__ void raise(float most) {
    if (!(most > top)) return;
    sum *= exp2_fast((top - most) * LOG2E);
    top = most;
  }
  __device__ __forceinline__ void add(const Vector<float> (&x)[UNROLL]) {
    float most = NEG_INFINITY;
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
#pragma unroll
      for (int k = 0; k < SIZE; ++k) most = fmaxf(most, x[i].get(k));
    raise(most);
    const float against = level();
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
#pragma unroll
      for (int k = 0; k < SIZE; ++k) sum += exp2_fast((x[i].get(k) - against) * LOG2E);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy(const float* __restrict__ logits,  // [rows, wide]
                  const i64* __restrict__ target,    // [rows], from 0 up to columns
                  const float* __restrict__ factor,  // [rows]
                  float* __restrict__ loss,          // [rows]
                  elem_t* __restrict__ gradient,     // [rows, wide] or null
                  const int columns, const int wide) {
  after_previous_kernel();
  __shared__ float warps[2][THREADS / WARP_SIZE];
  const float* row = logits + static_cast<i64>(blockIdx.x) * wide;

  Running found;
  for (int first = threadIdx.x * SIZE; first < columns; first += UNROLL * THREADS * SIZE) {
    Vector<float> x[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) x[i] = four_logits(row, first + i * THREADS * SIZE, columns);
    found.add(x);
  }
  Running all;
  all.top = block_reduce<THREADS>(found.top, warps[0], MaxOrNaN());
  if (found.top > NEG_INFINITY) found.raise(all.top);
  all.sum = block_reduce<THREADS>(found.sum, warps[1], Sum());

  // 1. Both are known: exp(x) / sum = 2^((x - top) log2 e - bits).
  const i64 place = target[blockIdx.x];
  const float against = all.level(), bits = log2f(all.sum);
  if (threadIdx.x == 0) {
    const bool exists = place >= 0 && place < columns;
    const float found = exists ? against - row[place] : __uint_as_float(0x7fc00000u);
    loss[blockIdx.x] = found + bits / LOG2E;
  }
  if (gradient == nullptr) return;
  gradient += static_cast<i64>(blockIdx.x) * wide;
  const float scale = factor[blockIdx.x];
  const int last = (wide / SIZE - 1 - threadIdx.x) * SIZE;
  for (int first = last; first >= 0; first -= UNROLL * THREADS * SIZE) {
    Vector<float> x[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      if (first >= i * THREADS * SIZE) x[i] = four_logits(row, first - i * THREADS * SIZE, columns);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int column = first - i * THREADS * SIZE;
      if (column < 0) break;
      float made[SIZE];
#pragma unroll
      for (int k = 0; k < SIZE; ++k)
        made[k] =
            scale * (exp2_fast(fmaf(x[i].get(k) - against, LOG2E, -bits)) - (column + k == place));
      store_four(gradient + column, made);
    }
  }
}
