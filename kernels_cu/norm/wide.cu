/* LayerNorm (CENTERED) or RMSNorm of rows too wide for registers (norm/rows.cu says what of): a block
   looks at a row twice, the second time in cache if it fits there. The first look adds residual and
   writes sum, which the second one reads. out may be x or residual, and sum may be residual or x:
   each element is one thread's alone. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "norm/moments.cuh"

using elem_t = ${dtype};
using weight_t = ${weight_dtype};
constexpr bool CENTERED = ${centered};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int THREADS = ${threads};
constexpr int VECTORS = 2;  // 16-byte vectors of a thread at a time
constexpr int SIZE = 16 / sizeof(elem_t);

using Elements = Row<elem_t, THREADS, VECTORS, SIZE, VECTOR>;
using Weights = Row<weight_t, THREADS, VECTORS, SIZE, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    norm_wide(const elem_t* x,                      // [rows, columns]
              const elem_t* residual,               // [rows, columns] or null: 0
              const weight_t* __restrict__ weight,  // [columns] or null: 1
              const weight_t* __restrict__ bias,    // [columns] or null: 0; null where not CENTERED
              elem_t* out,                          // [rows, columns]
              elem_t* sum,                          // [rows, columns], null where residual is
              float* __restrict__ mean,             // [rows] or null
              float* __restrict__ rstd,             // [rows] or null
              const i64 x_stride, const i64 residual_stride, const i64 out_stride,
              const i64 sum_stride, const int rows, const int columns, const float eps) {
  after_previous_kernel();
  __shared__ CrossBlockReduction<THREADS / WARP_SIZE, 1, CENTERED> reduction;
  const int thread = threadIdx.x;
  const i64 row = blockIdx.x;
  const elem_t* seen = residual == nullptr ? x + row * x_stride : sum + row * sum_stride;

  Elements s, added;
  s.load(x + row * x_stride, thread, columns);
  if (residual != nullptr) {  // the pilot is that of the sum
    added.load(residual + row * residual_stride, thread, columns);
    s.add(added);
  }
  MomentSums<CENTERED> sums(s);
  float n = 0.f;
#pragma unroll 1
  for (int skip = 0; skip < columns; skip += Elements::CAPACITY) {
    const int here = columns - skip;
    if (skip > 0) s.load(x + row * x_stride + skip, thread, here);
    if (residual != nullptr) {
      if (skip > 0) {
        added.load(residual + row * residual_stride + skip, thread, here);
        s.add(added);
      }
      s.store(sum + row * sum_stride + skip, thread, here);
    }
    sums.add(s, thread, here);
    if (CENTERED) n += elements_of_warp<Elements>(thread, here);
  }

  // The barrier where the warps meet.
  const Moments all = reduction.join(sums.of_warp(n), n, columns, 0);
  const float factor = rsqrtf(all.squares / columns + eps);
  if (thread == 0) {
    if (mean != nullptr) mean[row] = all.mean;
    if (rstd != nullptr) rstd[row] = factor;
  }
#pragma unroll 1
  for (int skip = 0; skip < columns; skip += Elements::CAPACITY) {
    const int here = columns - skip;
    Weights scale, shift;
    scale.fill(1.f), shift.fill(0.f);
    s.load(seen + skip, thread, here);
    if (weight != nullptr) scale.load(weight + skip, thread, here);
    if (CENTERED && bias != nullptr) shift.load(bias + skip, thread, here);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      normalise_vector<CENTERED>(s, i, scale, shift, i, all.mean, factor);
    s.store(out + row * out_stride + skip, thread, here);
  }
}
