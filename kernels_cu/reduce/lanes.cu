/* The sum or the maximum of each of many short rows, by `lanes` neighbouring lanes each; in fp32.

   A lane has up to UNROLL accesses of WIDTH elements under way; the lanes of a row are joined by
   shuffles, and nothing else is shared. `lanes` is a power of two up to 32.

     VECTOR   16-byte accesses. Rows start `shift` elements after a 16-byte boundary: access i holds
              columns i * WIDTH - shift and on; where it sticks out of the row it is made element by
              element.

   Every architecture. */
#include "prelude.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Op = ${operation};  // Sum or MaxOrNaN
constexpr bool VECTOR = ${vector};
constexpr int THREADS = ${threads};
constexpr int UNROLL = ${unroll};  // accesses of a lane that are under way

constexpr int WIDTH = VECTOR ? 16 / sizeof(elem_t) : 1;
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_lanes(const elem_t* __restrict__ x,  // [rows, columns]
                 out_t* __restrict__ out,       // [rows]
                 const i64 row_stride,          // elements from a row to the next
                 const i64 column_stride,       // 1 where VECTOR
                 const i64 rows, const int columns, const int shift,
                 const int lanes,        // of a row
                 const float divisor) {  // of the sum
  const int lane = threadIdx.x & (lanes - 1);
  const i64 row = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) / static_cast<u32>(lanes);
  const bool exists = row < rows;  // every lane takes part in the shuffles
  x += row * row_stride;

  float total = Op::identity();
  const int accesses = exists ? (columns + shift + WIDTH - 1) / WIDTH : 0;
  for (int start = lane; start < accesses; start += UNROLL * lanes) {
    Vector<elem_t> values[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int first = (start + i * lanes) * WIDTH - shift;
      if (VECTOR && first >= 0 && first + WIDTH <= columns) values[i] = load_vector(x + first);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int first = (start + i * lanes) * WIDTH - shift;
      if (VECTOR && first >= 0 && first + WIDTH <= columns) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) total = Op()(total, values[i].get(k));
        continue;
      }
      for (int k = 0; k < WIDTH; ++k)
        if (first + k >= 0 && first + k < columns)
          total = Op()(total, static_cast<float>(x[(first + k) * column_stride]));
    }
  }
  total = lanes_reduce(total, lanes, Op());
  if (exists && lane == 0) out[row] = static_cast<out_t>(total / divisor);
}
