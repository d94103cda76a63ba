/* Gradients of combine.cu: dy[inverse[t, k]] = weights[t, k] * dout[t], zeros where nobody is, and
   dweights[t, k] = the sum over the columns of dout[t] * y[inverse[t, k]], in fp32, always in the same
   order.

   A block has a token, and its choices one after the other; the token's row stays in the caches. The
   blocks behind the tokens clear as those of permute.cu do. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "moe/rows.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int THREADS = ${threads};

using Part = Chunk<elem_t, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS)
    moe_combine_backward(const elem_t* __restrict__ dout,    // [tokens, columns]
                         const elem_t* __restrict__ y,       // [places, columns]
                         const int* __restrict__ inverse,    // [tokens, top_k], -1: nowhere
                         const float* __restrict__ weights,  // [tokens, top_k] or null: 1
                         const int* __restrict__ offsets,    // [groups + 1] or null: dy is cleared
                         const int* __restrict__ counts,     // [groups] or null
                         elem_t* __restrict__ dy,            // [places, columns] or null
                         float* __restrict__ dweights,       // [tokens, top_k] or null
                         const i64 y_stride, const int tokens, const int top_k, const int groups,
                         const int places, const int columns) {
  after_previous_kernel(false);
  __shared__ float warps[2][THREADS / WARP_SIZE];
  const int pieces = columns / Part::SIZE;
  if (blockIdx.x >= tokens) {
    if (dy != nullptr)
      clear_rows<elem_t, VECTOR>(dy, columns, pieces, offsets, counts, blockIdx.x - tokens, groups,
                                 places);
    return;
  }
  const i64 token = blockIdx.x;
  const Choices choices(inverse, weights, token, top_k);
  for (int k = 0; k < top_k; ++k) {
    const i64 place = choices.place_of(k);
    const float weight = choices.weight_of(k);
    float sum = 0.f;
    for (int i = threadIdx.x; place >= 0 && i < pieces; i += THREADS) {
      const Part given = Part::load(dout + token * columns, i);
      Part made = {};
#pragma unroll
      for (int j = 0; j < Part::SIZE; ++j) made.set(j, weight * given.get(j));
      if (dy != nullptr) made.store(dy + place * columns, i);
      if (dweights == nullptr) continue;
      const Part seen = Part::load(y + place * y_stride, i);
#pragma unroll
      for (int j = 0; j < Part::SIZE; ++j) sum = fmaf(given.get(j), seen.get(j), sum);
    }
    if (dweights == nullptr) continue;
    sum = block_reduce<THREADS>(sum, warps[k % 2], Sum());
    if (threadIdx.x == 0) dweights[token * top_k + k] = sum;
  }
}
