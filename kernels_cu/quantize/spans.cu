/* Codes of x, and the scale of each span of numbers: number = code * scale.

     ROW      a block has a row; what its registers do not hold is read twice
     GROUP    128 neighbours of a row: sixteen lanes
     BLOCK    128 rows and 128 columns: a block of threads
     TENSOR   all of x, with the scale that quantize/amax.cu has found

   A thread has eight neighbours at a time (quantize/codes.cuh); but for long rows, numbers are read
   once, their greatest magnitude found and their codes written out of registers. A span that holds an
   infinity or a NaN has the scale NaN, and all of it is NaN again; one of zeros has the scale 1.

   Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "quantize/scale.cuh"

enum class Span { TENSOR, ROW, GROUP, BLOCK };

using elem_t = ${dtype};
using scale_t = ${scale_dtype};
using Codes = ${codes};
constexpr Span SPAN = Span::${span};
constexpr bool WIDE = ${wide};  // rows of x start on 16-byte boundaries, whole eights
constexpr int THREADS = ${threads};

constexpr int WIDTH = 128;  // columns of a group, rows and columns of a block
constexpr int TEAM = SPAN == Span::ROW || SPAN == Span::BLOCK ? THREADS : 16;  // threads of a span
constexpr int LANES = SPAN == Span::ROW ? THREADS : 16;                        // of one row
constexpr int ROWS = TEAM / LANES;                                             // at a time
// Eights of a thread that are kept in registers: a block's only if they come in whole accesses.
constexpr int OF_BLOCK = WIDE ? WIDTH / ROWS : 2;
constexpr int HELD = SPAN == Span::ROW ? 4 : SPAN == Span::BLOCK ? OF_BLOCK : 1;
constexpr int RESIDENT = SPAN == Span::BLOCK ? 2 : 1024 / THREADS;  // of an SM, at least
static_assert(LANES * 8 == WIDTH || SPAN == Span::ROW, "a group is as wide as its lanes");

// Where a thread's i-th eight of a span is.
struct Place {
  int row, column;
  __device__ __forceinline__ Place(int span, int i, int groups) {
    const int thread = threadIdx.x % TEAM;
    row = SPAN == Span::ROW ? span : span / groups;
    column =
        SPAN == Span::ROW ? (i * LANES + thread) * 8 : span % groups * WIDTH + thread % LANES * 8;
    if (SPAN == Span::BLOCK) row = row * WIDTH + i * ROWS + thread / LANES;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantize_spans(const elem_t* __restrict__ x,  // [rows, columns]
                   u8* __restrict__ data,         // [rows, columns] of codes, no gaps
                   scale_t* scales,               // one a span, rows of `groups`
                   const int rows, const int columns, const i64 x_stride,
                   const int groups,  // spans beside each other
                   const int spans) {
  after_previous_kernel();
  const int span = blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
  const i64 row_bytes = static_cast<i64>(columns) * Codes::BITS / 8;
  const int eights = SPAN == Span::ROW     ? ceil_div(columns, LANES * 8)
                     : SPAN == Span::BLOCK ? WIDTH / ROWS
                                           : 1;  // of a thread
  const auto load = [&](int i) {
    const Place at(span, i, groups);
    const bool exists = span < spans && at.row < rows;
    return load_eight<WIDE>(x + at.row * x_stride, at.column, exists ? columns : 0);
  };

  // 1. The numbers, and the greatest magnitude.
  Eight held[HELD];
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = load(i);
#pragma unroll
  for (int i = 0; i < HELD; ++i) most = max(most, magnitude(held[i]));
#pragma unroll 1
  for (int i = HELD; i < eights; ++i) most = max(most, magnitude(load(i)));

  // 2. The scale.
  __shared__ u32 warps[THREADS / WARP_SIZE];
  scale_t scale;
  if (SPAN == Span::TENSOR) {
    scale = scales[0];
  } else {
    most = TEAM == THREADS ? block_most<THREADS>(most, warps) : lanes_most<16>(most);
    scale = scale_of<scale_t, Codes>(most);
    if (threadIdx.x % TEAM == 0 && span < spans) scales[span] = scale;
  }

  // 3. The codes.
  const Divisor scaled(static_cast<float>(scale));
  const auto store = [&](const Eight& eight, int i) {
    const Place at(span, i, groups);
    if (span < spans && at.row < rows)
      store_codes<Codes, WIDE>(data + at.row * row_bytes, at.column, columns,
                               Codes::encode(eight, scaled));
  };
#pragma unroll
  for (int i = 0; i < HELD; ++i) store(held[i], i);
#pragma unroll 1
  for (int i = HELD; i < eights; ++i) store(load(i), i);
}
