/* out = a + b, element by element, added in fp32: what memory bandwidth allows, and no more.

   Arrays are rows of `columns` elements; one without gaps is a single row. A block is a grid of
   lanes x (THREADS / lanes) threads over columns and rows, so that many short rows fill it as well
   as a piece of a long one does. A thread makes one access of WIDTH elements to each array: with
   several the blocks under way write to more places at once, and device memory is slower for it.

     VECTOR   16-byte accesses. The row starts `shift` elements after a 16-byte boundary, the same
              in a, b and out: access i holds columns i * WIDTH - shift and on, and the first and
              the last one of a row are made element by element where they stick out.
     else     one element an access, with a stride between columns.

   Rows lie in up to three dimensions of any strides. out may be a or b: a thread reads before it
   writes, and nobody else touches its elements. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "tile/vector.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};
constexpr int DIMENSIONS = ${dimensions};  // of the rows: 0 (a single one), 1 or 3
constexpr int THREADS = ${threads};

constexpr int WIDTH = VECTOR ? 16 / sizeof(elem_t) : 1;
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS)
    vector_add(const elem_t* a,  // [rows, columns]    strides in elements
               const elem_t* b,  // [rows, columns]
               elem_t* out,      // [rows, columns], may be a or b
               const Strides a_strides, const Strides b_strides,
               const Strides out_strides,                                     // of the rows
               const i64 a_column, const i64 b_column, const i64 out_column,  // 1 where VECTOR
               const i64 rows, const int rows_1,
               const int rows_2,  // of which the inner two dimensions have
               const i64 columns, const int shift,
               const int lanes_log2,  // threads of a block beside each other in one row
               const int pieces) {    // blocks of a row
  after_previous_kernel();
  i64 access = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;  // of this row
  if (DIMENSIONS > 0) {
    const int lanes = 1 << lanes_log2;
    const i64 row = static_cast<i64>(blockIdx.x / pieces) * (THREADS >> lanes_log2) +
                    (threadIdx.x >> lanes_log2);
    if (row >= rows) return;
    access = static_cast<i64>(blockIdx.x % pieces) * lanes + (threadIdx.x & (lanes - 1));
    if (DIMENSIONS == 1) {
      a += row * a_strides.row, b += row * b_strides.row, out += row * out_strides.row;
    } else {
      const int outer = row / rows_2, i2 = row - static_cast<i64>(outer) * rows_2;
      const int i0 = outer / rows_1, i1 = outer - i0 * rows_1;
      a += i0 * a_strides.batch + i1 * a_strides.head + i2 * a_strides.row;
      b += i0 * b_strides.batch + i1 * b_strides.head + i2 * b_strides.row;
      out += i0 * out_strides.batch + i1 * out_strides.head + i2 * out_strides.row;
    }
  }

  const i64 first = access * WIDTH - shift;
  if (VECTOR && first >= 0 && first + WIDTH <= columns) {
    Vector<elem_t> x = load_vector(a + first);
    const Vector<elem_t> y = load_vector(b + first);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) x.set(k, x.get(k) + y.get(k));
    store_vector(out + first, x);
    return;
  }
  for (i64 column = max(first, 0ll); column < min(first + WIDTH, columns); ++column) {
    const float sum =
        static_cast<float>(a[column * a_column]) + static_cast<float>(b[column * b_column]);
    out[column * out_column] = static_cast<elem_t>(sum);
  }
}
