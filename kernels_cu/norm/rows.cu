/* LayerNorm (CENTERED) or RMSNorm of rows that fit into registers: one pass over memory.

     s = x + residual, rounded to x's type (s = x without a residual)
     LayerNorm   out = (s - mean) * rstd * weight + bias,   rstd = 1 / sqrt(variance + eps)
     RMSNorm     out = s * rstd * weight,                   rstd = 1 / sqrt(mean of s^2 + eps)

   Statistics are fp32. What is normalised is the rounded s that is stored, so that out is the norm
   of the residual stream that the next layer sees. LANES threads have a row: a warp, a block, or a
   cluster of blocks (sm_90+) that meet in distributed shared memory. Blocks take rows in turns, all
   of them at once or, PIPELINED, with the next row's loads under way while this one is reduced. out
   may be x or residual, and sum may be residual or x: a thread reads its elements of a row before it
   writes them. Every architecture. */
#include "prelude.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"
#include "norm/moments.cuh"

using elem_t = ${dtype};
using weight_t = ${weight_dtype};
constexpr bool CENTERED = ${centered};
constexpr bool VECTOR = ${vector};   // 16-byte accesses
constexpr int LANES = ${lanes};      // threads of a block on one row
constexpr int VECTORS = ${vectors};  // 16-byte vectors of a thread
constexpr int CLUSTER = ${cluster};  // blocks of a row
constexpr bool PIPELINED = ${pipelined};
// Blocks that share a multiprocessor, at least; Blackwell's code does not fit into as few
// registers.
constexpr int RESIDENT = __CUDA_ARCH__ < 1000 ? ${resident} : 1;

constexpr int THREADS = LANES < 128 ? 128 : LANES;
constexpr int ROWS = THREADS / LANES;  // of a block at a time
constexpr int SIZE = 16 / sizeof(elem_t);
constexpr bool HELD = VECTORS <= 2;  // weights stay in registers
static_assert(ROWS == 1 || LANES == WARP_SIZE, "several rows of a block meet in no barrier");

using Elements = Row<elem_t, LANES, VECTORS, SIZE, VECTOR>;
using Weights = Row<weight_t, LANES, HELD ? VECTORS : 1, SIZE, VECTOR>;

//% if cluster > 1
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, RESIDENT) norm_rows(
//% else
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) norm_rows(
//% endif
    const elem_t* x,                      // [rows, columns]
    const elem_t* residual,               // [rows, columns] or null: 0
    const weight_t* __restrict__ weight,  // [columns] or null: 1
    const weight_t* __restrict__ bias,    // [columns] or null: 0; null where not CENTERED
    elem_t* out,                          // [rows, columns]
    elem_t* sum,                          // [rows, columns], null where residual is
    float* __restrict__ mean,             // [rows] or null
    float* __restrict__ rstd,             // [rows] or null
    const i64 x_stride, const i64 residual_stride, const i64 out_stride, const i64 sum_stride,
    const int rows, const int columns, const float eps) {
  after_previous_kernel();
  __shared__ CrossBlockReduction<LANES / WARP_SIZE, CLUSTER, CENTERED> reduction;
  const int thread = threadIdx.x % LANES;
  const int rank = CLUSTER == 1 ? 0 : cluster_rank(), skip = rank * Elements::CAPACITY;
  const int here = max(columns - skip, 0);  // columns from this block's first one on
  const int step = gridDim.x / CLUSTER * ROWS;
  const int first = blockIdx.x / CLUSTER * ROWS + threadIdx.x / LANES;

  Elements s, added;
  if (PIPELINED && first < rows) {
    s.load(x + first * x_stride + skip, thread, here);
    if (residual != nullptr) added.load(residual + first * residual_stride + skip, thread, here);
  }
  Weights scale, shift;
  scale.fill(1.f), shift.fill(0.f);
  if (HELD && weight != nullptr) scale.load(weight + skip, thread, here);
  if (HELD && CENTERED && bias != nullptr) shift.load(bias + skip, thread, here);
  const float inverse = 1.f / columns;
  const float n = CENTERED ? elements_of_warp<Elements>(thread, here) : 0.f;
  if (CLUSTER > 1) cluster_arrive(), cluster_wait();  // all blocks' shared memory is there

  Elements next;
  int turn = 0;
  for (int row = first; row < rows; row += step, turn ^= 1) {
    if (!PIPELINED) {
      s.load(x + row * x_stride + skip, thread, here);
      if (residual != nullptr) added.load(residual + row * residual_stride + skip, thread, here);
    }
    if (residual != nullptr) {
      s.add(added);
      s.store(sum + row * sum_stride + skip, thread, here);
      s.stay_packed();
    }
    if (PIPELINED && row + step < rows) {
      next.load(x + (row + step) * x_stride + skip, thread, here);
      if (residual != nullptr)
        added.load(residual + (row + step) * residual_stride + skip, thread, here);
    }

    // One barrier where several warps have the row.
    MomentSums<CENTERED> sums(s);
    sums.add(s, thread, here);
    s.stay_packed();
    const Moments mine = sums.of_warp(n);
    const Moments all = reduction.join(mine, n, columns, turn);
    const float factor = rsqrtf(all.squares * inverse + eps);
    if (thread == 0 && rank == 0) {
      if (mean != nullptr) mean[row] = all.mean;
      if (rstd != nullptr) rstd[row] = factor;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!HELD && weight != nullptr) scale.load_one(weight + skip, thread, here, i, 0);
      if (!HELD && CENTERED && bias != nullptr) shift.load_one(bias + skip, thread, here, i, 0);
      normalise_vector<CENTERED>(s, i, scale, shift, HELD ? i : 0, all.mean, factor);
    }
    s.store(out + row * out_stride + skip, thread, here);
    if (PIPELINED) s = next;
  }
}
