/* Rows of tokens to the places of their choices: out[inverse[t, k]] = x[t], and zeros where nobody is.

   A block has a token, whose row is read once and written top_k times; the blocks behind the tokens
   have a group of experts each, and clear what stands between its last row and the next group's first.
   Every architecture. */
#include "prelude.cuh"
#include "device/moe_rows.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int THREADS = ${threads};

using Part = Piece<elem_t, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS)
    moe_permute(const elem_t* __restrict__ x,     // [tokens, columns]
                const int* __restrict__ inverse,  // [tokens, top_k], -1: nowhere
                const int* __restrict__ offsets,  // [groups + 1]
                const int* __restrict__ counts,   // [groups]
                elem_t* __restrict__ out,         // [places, columns]
                const i64 x_stride, const int tokens, const int top_k, const int groups,
                const int places, const int columns) {
  __shared__ Choices choices;
  const int pieces = columns / Part::SIZE;
  if (blockIdx.x >= tokens) {
    clear_rows<elem_t, VECTOR>(out, columns, pieces, offsets, counts, blockIdx.x - tokens, groups,
                               places);
    return;
  }
  choices.load(inverse, nullptr, blockIdx.x, top_k);
  const elem_t* row = x + blockIdx.x * x_stride;
  for (int i = threadIdx.x; i < pieces; i += THREADS) {
    const Part part = Part::load(row, i);
    for (int k = 0; k < top_k; ++k) {
      const int place = choices.place[k];
      if (place >= 0) part.store(out + static_cast<i64>(place) * columns, i);
    }
  }
}
