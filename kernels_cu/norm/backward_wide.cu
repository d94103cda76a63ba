/* dx of LayerNorm (CENTERED) or RMSNorm for rows too wide for registers (norm/backward.cu says what it
   is): a block looks at a row twice. norm/weight_partials.cu has the gradients of weight and bias.
   dx may be dy or dsum: each element is one thread's alone. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "tile/row.cuh"
#include "tile/warp_sums.cuh"

using elem_t = ${dtype};
using weight_t = ${weight_dtype};
constexpr bool CENTERED = ${centered};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int THREADS = ${threads};
constexpr int SIZE = 16 / sizeof(elem_t), PAIRS = SIZE / 2;

using Elements = Row<elem_t, THREADS, 1, SIZE, VECTOR>;
using Weights = Row<weight_t, THREADS, 1, SIZE, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    norm_backward_wide(const elem_t* dy,                     // [rows, columns]
                       const elem_t* dsum,                   // [rows, columns] or null: 0
                       const elem_t* __restrict__ x,         // [rows, columns]
                       const weight_t* __restrict__ weight,  // [columns] or null: 1
                       const float* __restrict__ mean,       // [rows] where CENTERED
                       const float* __restrict__ rstd,       // [rows]
                       elem_t* dx,                           // [rows, columns]
                       const i64 dy_stride, const i64 dsum_stride, const i64 x_stride,
                       const i64 dx_stride, const int columns) {
  after_previous_kernel();
  __shared__ WarpSums<THREADS / WARP_SIZE, 2> reduction;
  const int thread = threadIdx.x;
  const i64 row = blockIdx.x;
  const float center = CENTERED ? mean[row] : 0.f, factor = rstd[row];
  Elements given, seen, stream;
  Weights scale;
  scale.fill(1.f), stream.fill(0.f);

  float sums[2] = {0.f, 0.f};  // of g and of g h
#pragma unroll 1
  for (int skip = 0; skip < columns; skip += Elements::CAPACITY) {
    const int here = columns - skip;
    given.load(dy + row * dy_stride + skip, thread, here);
    seen.load(x + row * x_stride + skip, thread, here);
    if (weight != nullptr) scale.load(weight + skip, thread, here);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const float2 d = given.get(0, pair), v = seen.get(0, pair), w = scale.get(0, pair);
      const float g0 = d.x * w.x, g1 = d.y * w.y;
      sums[0] += g0, sums[0] += g1;
      sums[1] += g0 * ((v.x - center) * factor), sums[1] += g1 * ((v.y - center) * factor);
    }
  }

  // The barrier where the warps meet.
  reduction.join(sums, 0);
  const float average = CENTERED ? sums[0] / columns : 0.f, slope = sums[1] / columns;
#pragma unroll 1
  for (int skip = 0; skip < columns; skip += Elements::CAPACITY) {
    const int here = columns - skip;
    given.load(dy + row * dy_stride + skip, thread, here);
    seen.load(x + row * x_stride + skip, thread, here);
    if (weight != nullptr) scale.load(weight + skip, thread, here);
    if (dsum != nullptr) stream.load(dsum + row * dsum_stride + skip, thread, here);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const float2 d = given.get(0, pair), v = seen.get(0, pair), w = scale.get(0, pair);
      const float h0 = (v.x - center) * factor, h1 = (v.y - center) * factor;
      const float2 r = stream.get(0, pair);
      given.set(0, pair, (d.x * w.x - average - h0 * slope) * factor + r.x,
                (d.y * w.y - average - h1 * slope) * factor + r.y);
    }
    given.store(dx + row * dx_stride + skip, thread, here);
  }
}
