/* The gradient of attention's bias out of sums that blocks of backward_bias.cu or
   backward_dkdv.cu have left, in a fixed order: the same bits each time. Every architecture. */
#include "prelude.cuh"

using bias_t = ${bias_dtype};
constexpr int THREADS = ${threads};

// An element of a head of the bias is what `batches` batches and heads_summed / heads of each one's
// rows have of it.
extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_bias_sum(
    const float* __restrict__ dbias_parts,  // [bias_batch * batches, heads_summed, columns]
    bias_t* __restrict__ dbias,             // [bias_batch, heads, columns]
    const i64 size,                         // of dbias
    const i64 columns, const int heads, const int heads_summed, const int batches) {
  const i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= size) return;
  const i64 row = i / columns;
  const int head = static_cast<int>(row % heads), shared = heads_summed / heads;
  dbias_parts += (row / heads * batches * heads_summed + head * shared) * columns + i % columns;
  float sum = 0.f;
  for (int batch = 0; batch < batches; ++batch) {
#pragma unroll 8
    for (int part = 0; part < shared; ++part) sum += dbias_parts[part * columns];
    dbias_parts += heads_summed * columns;
  }
  dbias[i] = static_cast<bias_t>(sum);
}
