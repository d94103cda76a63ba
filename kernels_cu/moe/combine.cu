/* What the experts made of a token, put together: out[t] = sum of weights[t, k] * y[inverse[t, k]], in
   fp32 and in the order of k, rounded once. Without weights: the gradient of permute.cu.

   A thread has PIECES pieces of a token's row, and UNDERWAY of its choices under way at a time; the
   blocks of a row follow one another. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "moe/rows.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int THREADS = ${threads};
constexpr int UNDERWAY = ${underway};
constexpr int PIECES = ${pieces};

using Part = Chunk<elem_t, VECTOR>;
constexpr int BLOCKS = 1024 / THREADS;  // of a multiprocessor: 64 registers, for what is under way

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    moe_combine(const elem_t* __restrict__ y,       // [places, columns]
                const int* __restrict__ inverse,    // [tokens, top_k], -1: nowhere
                const float* __restrict__ weights,  // [tokens, top_k] or null: 1
                elem_t* __restrict__ out,           // [tokens, columns]
                const i64 y_stride, const int top_k, const int columns) {
  after_previous_kernel();
  const int pieces = columns / Part::SIZE, blocks = ceil_div(pieces, THREADS * PIECES);
  const i64 token = blockIdx.x / blocks;
  const Choices choices(inverse, weights, token, top_k);
  const int i = (blockIdx.x % blocks) * THREADS * PIECES + threadIdx.x;
  float sum[PIECES][Part::SIZE] = {};
  for (int first = 0; first < top_k; first += UNDERWAY) {
    Part part[UNDERWAY][PIECES];
#pragma unroll
    for (int k = 0; k < UNDERWAY; ++k) {
      const i64 place = choices.place_of(first + k);
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
        part[k][p] = load_or_zero<Part>(y + place * y_stride, i + p * THREADS,
                                        place >= 0 && i + p * THREADS < pieces);
    }
#pragma unroll
    for (int k = 0; k < UNDERWAY; ++k) {
      const float weight = choices.weight_of(first + k);
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int j = 0; j < Part::SIZE; ++j) sum[p][j] = fmaf(weight, part[k][p].get(j), sum[p][j]);
    }
  }
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    Part made = {};
#pragma unroll
    for (int j = 0; j < Part::SIZE; ++j) made.set(j, sum[p][j]);
    if (i + p * THREADS < pieces) made.store(out + token * columns, i + p * THREADS);
  }
}
