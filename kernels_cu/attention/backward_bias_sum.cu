/* The gradient of attention's bias out of the sums that blocks of backward_bias.cu have left, in the
   order of the parts: the same bits each time. Every architecture. */
#include "prelude.cuh"

using bias_t = ${bias_dtype};
constexpr int THREADS = ${threads};

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_bias_sum(const float* __restrict__ dbias_parts,  // [parts, size]
                                bias_t* __restrict__ dbias,             // [size]
                                const i64 size, const int parts) {
  const i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= size) return;
  float sum = 0.f;
#pragma unroll 4
  for (int part = 0; part < parts; ++part) sum += dbias_parts[part * size + i];
  dbias[i] = static_cast<bias_t>(sum);
}
