/* What the experts made of a token, put together: out[t] = sum of weights[t, k] * y[inverse[t, k]], in
   fp32 and in the order of k, rounded once. Without weights: the gradient of permute.cu.

   A block has a token; a thread has UNDERWAY of the token's rows under way at a time. Every
   architecture. */
#include "prelude.cuh"
#include "device/moe_rows.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int THREADS = ${threads};
constexpr int UNDERWAY = ${underway};

using Part = Piece<elem_t, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS)
    moe_combine(const elem_t* __restrict__ y,       // [places, columns]
                const int* __restrict__ inverse,    // [tokens, top_k], -1: nowhere
                const float* __restrict__ weights,  // [tokens, top_k] or null: 1
                elem_t* __restrict__ out,           // [tokens, columns]
                const i64 y_stride, const int top_k, const int columns) {
  __shared__ Choices choices;
  const i64 token = blockIdx.x;
  choices.load(inverse, weights, token, top_k);
  for (int i = threadIdx.x; i < columns / Part::SIZE; i += THREADS) {
    float sum[Part::SIZE] = {};
    for (int first = 0; first < top_k; first += UNDERWAY) {
      Part part[UNDERWAY] = {};
#pragma unroll
      for (int k = 0; k < UNDERWAY; ++k) {
        const int place = first + k < top_k ? choices.place[first + k] : -1;
        if (place >= 0) part[k] = Part::load(y + place * y_stride, i);
      }
#pragma unroll
      for (int k = 0; k < UNDERWAY; ++k) {
        if (first + k >= top_k || choices.place[first + k] < 0) continue;
#pragma unroll
        for (int j = 0; j < Part::SIZE; ++j)
          sum[j] = fmaf(choices.weight[first + k], part[k].get(j), sum[j]);
      }
    }
    Part made = {};
#pragma unroll
    for (int j = 0; j < Part::SIZE; ++j) made.set(j, sum[j]);
    made.store(out + token * columns, i);
  }
}
