/* The cross-entropy of rows of logits, and its gradient, for rows that fit into the registers of a
   cluster: logits are read once (reduce/cross_entropy.cu has the formulas, and reads them twice).

   A row has CLUSTER blocks, whose threads have VECTORS accesses of four columns each:

     access 0             access 1             ...
     block 0 | block 1 |  block 0 | block 1 |

   A block finds its maximum, and exp(x - that) in place of x; then all blocks tell each other maximum
   and sum, in distributed shared memory. What remains is a factor for each. A row has `wide` columns
   of which `columns` are logits: the gradient of those behind them is 0. A target that is none of
   them makes the loss NaN. Sums are fp32, in the same order at every call. sm_90 and newer. */
#include "prelude.cuh"
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/pdl.cuh"
#include "tile/logits.cuh"
#include "tile/reduce.cuh"

using elem_t = ${dtype};
constexpr int THREADS = ${threads};
constexpr int CLUSTER = ${cluster};  // blocks of a row
constexpr int VECTORS = ${vectors};  // accesses of a thread
// Blocks that registers have to suffice for; Blackwell's code does not fit into as few.
constexpr int RESIDENT = __CUDA_ARCH__ < 1000 ? 1024 / THREADS : 1;
static_assert(THREADS % WARP_SIZE == 0 && THREADS <= 1024, "whole warps");

// A block's maximum and its sum of exp(x - that).
struct Found {
  float top, sum;
};

// Of all blocks, whose results `all` has: the sum for the largest maximum, in one order.
__device__ __forceinline__ Found joined(const float (&all)[CLUSTER][2]) {
  Found made = {NEG_INFINITY, 0.f};
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) made.top = max_or_nan(made.top, all[rank][0]);
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank)
    if (all[rank][0] != NEG_INFINITY)
      made.sum += all[rank][1] * exp2_fast((all[rank][0] - made.top) * LOG2E);
  return made;
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, RESIDENT)
    cross_entropy_held(const float* __restrict__ logits,  // [rows, wide]
                       const i64* __restrict__ target,    // [rows], from 0 up to columns
                       const float* __restrict__ factor,  // [rows]
                       float* __restrict__ loss,          // [rows]
                       elem_t* __restrict__ gradient,     // [rows, wide] or null
                       const int columns, const int wide) {
  after_previous_kernel();
  __shared__ float tops[THREADS / WARP_SIZE], sums[THREADS / WARP_SIZE];
  __shared__ float all[CLUSTER][2];
  const int rank = cluster_rank(), first = (rank * THREADS + threadIdx.x) * LOGITS;
  constexpr int STEP = CLUSTER * THREADS * LOGITS;
  const i64 number = blockIdx.x / CLUSTER;
  const float* row = logits + number * wide;

  Vector<float> x[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) x[i] = four_logits(row, first + i * STEP, columns);
  cluster_arrive();  // all blocks' shared memory is there
  float top = NEG_INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
#pragma unroll
    for (int k = 0; k < LOGITS; ++k) top = fmaxf(top, x[i].get(k));
  top = block_reduce<THREADS>(top, tops, MaxOrNaN());

  // 1. The block's maximum is known.
  const float level = top == NEG_INFINITY ? 0.f : top;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
#pragma unroll
    for (int k = 0; k < LOGITS; ++k) {
      x[i].set(k, exp2_fast((x[i].get(k) - level) * LOG2E));
      sum += x[i].get(k);
    }
  sum = block_reduce<THREADS>(sum, sums, Sum());
  cluster_wait();
  if (threadIdx.x < CLUSTER) {
    cluster_store(&all[rank][0], threadIdx.x, top);
    cluster_store(&all[rank][1], threadIdx.x, sum);
  }
  meet_cluster();

  // 2. All blocks' are.
  const Found whole = joined(all);
  const i64 place = target[number];
  if (rank == 0 && threadIdx.x == 0) {
    const bool exists = place >= 0 && place < columns;
    const float own = exists ? whole.top - row[place] : __uint_as_float(0x7fc00000u);
    loss[number] = own + log2f(whole.sum) / LOG2E;
  }
  if (gradient == nullptr) return;
  gradient += number * wide;
  const float scale = factor[number];
  const float share = scale * exp2_fast((level - whole.top) * LOG2E) / whole.sum;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = first + i * STEP;
    if (column >= wide) break;
    float made[LOGITS];
#pragma unroll
    for (int k = 0; k < LOGITS; ++k)
      made[k] = share * x[i].get(k) - (column + k == place ? scale : 0.f);
    store_four(gradient + column, made);
  }
}
