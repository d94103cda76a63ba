/* Zeros in the gradient of attention's bias, where not every element is met by a tile, or two batches
   add to it (backward_sm90/bias_gradient.cuh). Every architecture. */
#include "prelude.cuh"

using bias_t = ${bias_dtype};
constexpr int THREADS = ${threads};

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_zeros(bias_t* __restrict__ dbias,  // contiguous, from a 16-byte boundary on
                             const i64 size) {            // whole 16 bytes
  constexpr int COUNT = 16 / sizeof(bias_t);
  const i64 step = static_cast<i64>(gridDim.x) * THREADS * COUNT;
  const i64 thread = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  for (i64 i = thread * COUNT; i < size; i += step)
    *reinterpret_cast<uint4*>(dbias + i) = make_uint4(0, 0, 0, 0);
}
