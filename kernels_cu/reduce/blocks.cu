/* The sum or the maximum of each row, by one block or by `split` of them; in fp32.

   A block takes a piece of a row: every thread has UNROLL accesses of WIDTH elements under way and
   one accumulator for each place in an access; they are joined in the thread, in the warp by
   shuffles, in the block through shared memory. Where a row has several blocks, each leaves its
   result in `workspace`, and the last one to finish joins them in their order: the result does not
   depend on which one that is.

     VECTOR   16-byte accesses. The row starts `shift` elements after a 16-byte boundary: access i
              holds columns i * WIDTH - shift and on. Where the first and the last one stick out of
              the row, one thread makes them element by element.
     GAPS     the row is `segments` pieces of memory, `row_stride` elements apart, that are reduced
              to one number.

   Every architecture. */
#include "prelude.cuh"
#include "tile/last_block.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Op = ${operation};  // Sum or MaxOrNaN
constexpr bool VECTOR = ${vector};
constexpr bool GAPS = ${gaps};
constexpr int THREADS = ${threads};
constexpr int UNROLL = ${unroll};  // accesses of a thread that are under way

constexpr int WIDTH = VECTOR ? 16 / sizeof(elem_t) : 1;
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

// Columns begin ... begin + WIDTH - 1 of a row, as far as there are such.
__device__ __forceinline__ void join_columns(float (&acc)[WIDTH], const elem_t* row, i64 begin,
                                             i64 columns, i64 column_stride) {
#pragma unroll
  for (int k = 0; k < WIDTH; ++k)
    if (begin + k >= 0 && begin + k < columns)
      acc[k] = Op()(acc[k], static_cast<float>(row[(begin + k) * column_stride]));
}

__device__ __forceinline__ void join_access(float (&acc)[WIDTH], const elem_t* source) {
  if (VECTOR) {
    const Vector<elem_t> x = load_vector(source);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) acc[k] = Op()(acc[k], x.get(k));
  } else {
    acc[0] = Op()(acc[0], static_cast<float>(*source));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    reduce_blocks(const elem_t* __restrict__ x,   // [rows, columns], or [rows, segments, columns]
                  out_t* __restrict__ out,        // [rows]
                  float* __restrict__ workspace,  // [rows, split], not read where split = 1
                  u32* __restrict__ counters,     // [rows], 0 before and after
                  const i64 row_stride,     // elements from a row, or from a segment, to the next
                  const i64 column_stride,  // 1 where VECTOR
                  const i64 columns, const int shift, const i64 segments,
                  const i64 accesses,     // of a row in all
                  const i64 piece,        // of a block
                  const int split,        // blocks of a row
                  const float divisor) {  // of the sum
  __shared__ float warps[THREADS / WARP_SIZE];
  const i64 row = blockIdx.x / split;
  const i64 begin = static_cast<i64>(blockIdx.x % split) * piece;
  const i64 end = min(begin + piece, accesses);
  x += GAPS ? 0 : row * row_stride;

  // 1. This block's piece, in registers.
  float acc[WIDTH];
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) acc[k] = Op::identity();
  if (GAPS) {
    const i64 each = accesses / segments;  // accesses of a segment
    for (i64 access = begin + threadIdx.x; access < end; access += THREADS) {
      const i64 segment = access / each, first = (access - segment * each) * WIDTH - shift;
      const elem_t* source = x + segment * row_stride;
      if (VECTOR && first >= 0 && first + WIDTH <= columns)
        join_access(acc, source + first);
      else
        join_columns(acc, source, first, columns, column_stride);
    }
  } else {
    const i64 step = VECTOR ? WIDTH : column_stride;  // elements from an access to the next
    const i64 whole = (columns + shift) / WIDTH;      // accesses up to the one that sticks out
    const i64 low = max(begin, static_cast<i64>(shift > 0)), high = min(end, whole);
    const elem_t* source = x - shift;
    i64 access = low + threadIdx.x;
    for (; access + (UNROLL - 1) * THREADS < high; access += UNROLL * THREADS) {
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) join_access(acc, source + (access + i * THREADS) * step);
    }
    for (; access < high; access += THREADS) join_access(acc, source + access * step);
    if (VECTOR && threadIdx.x == 0) {
      if (begin == 0 && shift > 0) join_columns(acc, x, -shift, columns, 1);
      if (end == accesses && whole < accesses && (whole > 0 || shift == 0))
        join_columns(acc, x, whole * WIDTH - shift, columns, 1);
    }
  }

  // 2. The block.
  float total = acc[0];
#pragma unroll
  for (int k = 1; k < WIDTH; ++k) total = Op()(total, acc[k]);
  total = block_reduce<THREADS>(total, warps, Op());
  if (split == 1) {
    if (threadIdx.x == 0) out[row] = static_cast<out_t>(total / divisor);
    return;
  }

  // 3. The blocks of the row.
  if (threadIdx.x == 0) workspace[blockIdx.x] = total;
  if (!last_block(counters + row, split)) return;
  total = Op::identity();
  for (int i = threadIdx.x; i < split; i += THREADS)
    total = Op()(total, __ldcg(workspace + row * split + i));
  total = block_reduce<THREADS>(total, warps, Op());
  if (threadIdx.x == 0) out[row] = static_cast<out_t>(total / divisor);
}
