/* Gradients of LayerNorm (CENTERED) or RMSNorm for rows that fit into registers, in one pass.

     h = (x - mean) * rstd        g = dy * weight
     dx = rstd * (g - average of g - h * average of g h) + dsum      without the first average in RMSNorm
     parts of dweight = sum of dy h, parts of dbias = sum of dy, over the rows of LANES threads

   x is what was normalised; dsum is the gradient that reached it as the residual stream. Blocks take
   rows in turns with the next row's loads under way, and add up dweight and dbias in registers, row
   after row, so that the same grid always gives the same bits; norm/sum_partials.cu adds the parts.
   dx may be dy or dsum. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "tile/row.cuh"
#include "tile/warp_sums.cuh"

using elem_t = ${dtype};
using weight_t = ${weight_dtype};
constexpr bool CENTERED = ${centered};
constexpr bool VECTOR = ${vector};   // 16-byte accesses
constexpr int LANES = ${lanes};      // threads on one row
constexpr int VECTORS = ${vectors};  // 16-byte vectors of a thread

constexpr int THREADS = LANES < 128 ? 128 : LANES;
constexpr int ROWS = THREADS / LANES;  // of a block at a time
constexpr int SIZE = 16 / sizeof(elem_t), PAIRS = SIZE / 2;
static_assert(ROWS == 1 || LANES == WARP_SIZE, "several rows of a block meet in no barrier");

using Elements = Row<elem_t, LANES, VECTORS, SIZE, VECTOR>;
using Weights = Row<weight_t, LANES, VECTORS, SIZE, VECTOR>;
using Sums = Row<float, LANES, VECTORS, SIZE, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_backward(const elem_t* dy,                     // [rows, columns]
                  const elem_t* dsum,                   // [rows, columns] or null: 0
                  const elem_t* __restrict__ x,         // [rows, columns]
                  const weight_t* __restrict__ weight,  // [columns] or null: 1
                  const float* __restrict__ mean,       // [rows] where CENTERED
                  const float* __restrict__ rstd,       // [rows]
                  elem_t* dx,                           // [rows, columns]
                  float* __restrict__ dweight_parts,    // [gridDim.x * ROWS, columns] or null
                  float* __restrict__ dbias_parts,      // the same
                  const i64 dy_stride, const i64 dsum_stride, const i64 x_stride,
                  const i64 dx_stride, const i64 rows, const int columns) {
  after_previous_kernel();
  __shared__ WarpSums<LANES / WARP_SIZE, 2> reduction;
  const int thread = threadIdx.x % LANES;
  const int step = gridDim.x * ROWS, first = blockIdx.x * ROWS + threadIdx.x / LANES;
  const float inverse = 1.f / columns;

  Elements given, seen, next_given, next_seen, stream;
  if (first < rows) {
    given.load(dy + first * dy_stride, thread, columns);
    seen.load(x + first * x_stride, thread, columns);
  }
  Weights scale;
  scale.fill(1.f);
  if (weight != nullptr) scale.load(weight, thread, columns);
  Sums dweight, dbias;
  dweight.fill(0.f), dbias.fill(0.f), stream.fill(0.f);

  int turn = 0;
  for (int row = first; row < rows; row += step, turn ^= 1) {
    const float center = CENTERED ? mean[row] : 0.f, factor = rstd[row];
    if (dsum != nullptr) stream.load(dsum + row * dsum_stride, thread, columns);
    if (row + step < rows) {
      next_given.load(dy + (row + step) * dy_stride, thread, columns);
      next_seen.load(x + (row + step) * x_stride, thread, columns);
    }

    // One barrier where several warps have the row. Past its end dy is 0.
    float sums[2] = {0.f, 0.f};  // of g and of g h
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const float2 d = given.get(i, pair), v = seen.get(i, pair), w = scale.get(i, pair);
        const float h0 = (v.x - center) * factor, h1 = (v.y - center) * factor;
        const float2 dw = dweight.get(i, pair), db = dbias.get(i, pair);
        dweight.set(i, pair, dw.x + d.x * h0, dw.y + d.y * h1);
        if (CENTERED) dbias.set(i, pair, db.x + d.x, db.y + d.y);
        if (CENTERED) sums[0] += d.x * w.x, sums[0] += d.y * w.y;
        sums[1] += d.x * w.x * h0, sums[1] += d.y * w.y * h1;
      }
    given.stay_packed(), seen.stay_packed();
    reduction.join(sums, turn);
    const float average = CENTERED ? sums[0] * inverse : 0.f, slope = sums[1] * inverse;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const float2 d = given.get(i, pair), v = seen.get(i, pair), w = scale.get(i, pair);
        const float h0 = (v.x - center) * factor, h1 = (v.y - center) * factor;
        const float2 r = stream.get(i, pair);
        given.set(i, pair, (d.x * w.x - average - h0 * slope) * factor + r.x,
                  (d.y * w.y - average - h1 * slope) * factor + r.y);
      }
    given.store(dx + row * dx_stride, thread, columns);
    given = next_given, seen = next_seen;
  }
  const i64 part = static_cast<i64>(first) * columns;
  if (dweight_parts != nullptr) dweight.store(dweight_parts + part, thread, columns);
  if (CENTERED && dbias_parts != nullptr) dbias.store(dbias_parts + part, thread, columns);
}
