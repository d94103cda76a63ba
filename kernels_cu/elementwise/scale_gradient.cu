/* out = x * factor for a factor in memory, rounded once. Where out is x and the factor is 1 nothing
   is read or written: the gradient of a loss that nobody has scaled is 1, which the host does not
   know. As many blocks as the GPU has room for take accesses in turns. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "tile/vector.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // both arrays start on 16-byte boundaries
constexpr int THREADS = ${threads};

constexpr int WIDTH = VECTOR ? 16 / sizeof(elem_t) : 1;
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS)
    scale_gradient(const elem_t* x,                   // [elements]
                   const float* __restrict__ factor,  // [1]
                   elem_t* out,                       // [elements], may be x
                   const i64 elements) {
  after_previous_kernel();
  const float by = *factor;
  if (out == x && by == 1.f) return;
  const i64 step = static_cast<i64>(gridDim.x) * THREADS * WIDTH;
  i64 at = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * WIDTH;
  for (; VECTOR && at + WIDTH <= elements; at += step) {
    Vector<elem_t> found = load_vector(x + at);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) found.set(k, found.get(k) * by);
    store_vector(out + at, found);
  }
  for (; at < elements; at += step)  // with vectors one thread's, once
    for (i64 i = at; i < min(at + WIDTH, elements); ++i)
      out[i] = static_cast<elem_t>(static_cast<float>(x[i]) * by);
}
