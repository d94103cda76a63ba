/* Parts of dweight and dbias for rows too wide for norm/backward.cu to add them up beside dx:

     dweight_parts = sum of dy * (x - mean) * rstd, dbias_parts = sum of dy, over rows blockIdx.y,
     blockIdx.y + gridDim.y, ...; a thread has its columns in all of them.

   Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "tile/row.cuh"

using elem_t = ${dtype};
constexpr bool CENTERED = ${centered};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int THREADS = ${threads};
constexpr int SIZE = 16 / sizeof(elem_t), PAIRS = SIZE / 2;

using Elements = Row<elem_t, THREADS, 1, SIZE, VECTOR>;
using Sums = Row<float, THREADS, 1, SIZE, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_weight_parts(const elem_t* __restrict__ dy,      // [rows, columns]
                      const elem_t* __restrict__ x,       // [rows, columns]
                      const float* __restrict__ mean,     // [rows] where CENTERED
                      const float* __restrict__ rstd,     // [rows]
                      float* __restrict__ dweight_parts,  // [gridDim.y, columns] or null
                      float* __restrict__ dbias_parts,    // [gridDim.y, columns] or null
                      const i64 dy_stride, const i64 x_stride, const int rows, const int columns) {
  after_previous_kernel();
  const int thread = threadIdx.x, skip = blockIdx.x * Elements::CAPACITY, here = columns - skip;
  Sums dweight, dbias;
  dweight.fill(0.f), dbias.fill(0.f);
#pragma unroll 2
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    const float center = CENTERED ? mean[row] : 0.f, factor = rstd[row];
    Elements given, seen;
    given.load(dy + row * dy_stride + skip, thread, here);
    seen.load(x + row * x_stride + skip, thread, here);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const float2 d = given.get(0, pair), v = seen.get(0, pair);
      const float2 dw = dweight.get(0, pair), db = dbias.get(0, pair);
      dweight.set(0, pair, dw.x + d.x * ((v.x - center) * factor),
                  dw.y + d.y * ((v.y - center) * factor));
      dbias.set(0, pair, db.x + d.x, db.y + d.y);
    }
  }
  const i64 part = static_cast<i64>(blockIdx.y) * columns + skip;
  if (dweight_parts != nullptr) dweight.store(dweight_parts + part, thread, here);
  if (dbias_parts != nullptr) dbias.store(dbias_parts + part, thread, here);
}
