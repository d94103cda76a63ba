/* Rows of tokens to the places of their choices: out[inverse[t, k]] = x[t], and zeros where nobody is.

   A thread has a piece of a token's row, which is read once and written top_k times; a block has
   THREADS neighbouring pieces, and the blocks of a row follow one another. The blocks behind all of
   them have a group of experts each, and clear what stands between its last row and the next group's
   first. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "moe/rows.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int THREADS = ${threads};

using Part = Chunk<elem_t, VECTOR>;
constexpr int FEW_BLOCKS = 160;  // so few let the next kernel in: more that scatter rows lose by it

extern "C" __global__ void __launch_bounds__(THREADS)
    moe_permute(const elem_t* __restrict__ x,     // [tokens, columns]
                const int* __restrict__ inverse,  // [tokens, top_k], -1: nowhere
                const int* __restrict__ offsets,  // [groups + 1]
                const int* __restrict__ counts,   // [groups]
                elem_t* __restrict__ out,  // [places, columns], places past them are left out
                const i64 x_stride, const int tokens, const int top_k, const int groups,
                const int places, const int columns) {
  after_previous_kernel(gridDim.x <= FEW_BLOCKS);
  const int pieces = columns / Part::SIZE, blocks = ceil_div(pieces, THREADS);  // of a row
  const int token = blockIdx.x / blocks;
  if (token >= tokens) {
    clear_rows<elem_t, VECTOR>(out, columns, pieces, offsets, counts, blockIdx.x - tokens * blocks,
                               groups, places);
    return;
  }
  const Choices choices(inverse, nullptr, token, top_k);
  const int i = (blockIdx.x - token * blocks) * THREADS + threadIdx.x;
  const bool there = i < pieces;
  const Part part = load_or_zero<Part>(x + token * x_stride, i, there);
#pragma unroll 8
  for (int k = 0; k < top_k; ++k) {
    const int place = choices.place_of(k);
    if (there && static_cast<u32>(place) < static_cast<u32>(places))
      part.store(out + static_cast<i64>(place) * columns, i);
  }
}
