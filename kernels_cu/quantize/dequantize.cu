/* Numbers of codes: code * scale in fp32, rounded once. A thread has eight neighbours of a row.

   Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "quantize/codes.cuh"

enum class Span { TENSOR, ROW, GROUP, BLOCK };

using elem_t = ${dtype};
using scale_t = ${scale_dtype};
using Codes = ${codes};
constexpr Span SPAN = Span::${span};
constexpr bool WIDE = ${wide};  // rows are whole eights, data and out on 16-byte boundaries
constexpr int THREADS = ${threads};

constexpr int WIDTH = 128;  // columns of a group, rows and columns of a block

__device__ __forceinline__ i64 scale_place(int row, int column, int groups) {
  if (SPAN == Span::TENSOR) return 0;
  if (SPAN == Span::ROW) return row;
  return static_cast<i64>(SPAN == Span::BLOCK ? row / WIDTH : row) * groups + column / WIDTH;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize(const u8* __restrict__ data,         // [rows, columns] of codes, no gaps
               const scale_t* __restrict__ scales,  // one a span, rows of `groups`
               elem_t* __restrict__ out,            // [rows, columns]
               const int rows, const int columns,
               const int eights,    // of a row
               const int groups) {  // spans beside each other
  after_previous_kernel();
  const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  const int row = index / eights,
            column = static_cast<int>(index - static_cast<i64>(row) * eights) * 8;
  if (row >= rows) return;
  const u8* const source = data + row * (static_cast<i64>(columns) * Codes::BITS / 8);
  const auto codes = load_codes<Codes, WIDE>(source, column, columns);
  Eight x = Codes::decode(codes, static_cast<float>(scales[scale_place(row, column, groups)]));
  elem_t* const target = out + static_cast<i64>(row) * columns + column;
  if constexpr (WIDE) {
    constexpr int SIZE = 16 / sizeof(elem_t);
#pragma unroll
    for (int first = 0; first < 8; first += SIZE) {
      Elements<elem_t, SIZE> some;
#pragma unroll
      for (int i = 0; i < SIZE; ++i) some[i] = static_cast<elem_t>(x[first + i]);
      store_elements(target + first, some);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < columns) target[i] = static_cast<elem_t>(x[i]);
  }
}
