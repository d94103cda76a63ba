/* A step of AdamW for one parameter, as PyTorch's fused optimizer makes it, in fp32:

     first  = beta1 first + (1 - beta1) grad
     second = beta2 second + (1 - beta2) grad^2
     param  = param (1 - rate decay) - rate / (1 - beta1^step) first
                                       / (sqrt(second / (1 - beta2^step)) + eps)

   Each is rounded once to the parameter's dtype; param is made of both moments as they were before
   rounding. A thread makes one access of WIDTH elements to each array, so that a block reads four
   pieces of memory and writes three; elements behind the last whole access are made one by one.
   Rate and step are read from memory: a captured graph's change from step to step. Results may lie
   where the inputs do. Every architecture.

   Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "ptx/pdl.cuh"
#include "ptx/sqrt.cuh"
#include "tile/vector.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};  // all arrays start on 16-byte boundaries
constexpr int THREADS = ${threads};

constexpr int WIDTH = VECTOR ? 16 / sizeof(elem_t) : 1;
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

struct Rates {
  float beta1, beta2, kept, step, inverse, eps;  // kept: of param; inverse: of second's bias

  __device__ __forceinline__ float3 update(float param, float grad, float first,
                                           float second) const {
    first = fmaf(beta1, first - grad, grad);
    second = fmaf(beta2, second - grad * grad, grad * grad);
    const float scale = sqrt_fast(second * inverse) + eps;
    return {param * kept - step * first * inverse_fast(scale), first, second};
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw(const elem_t* param,               // [elements]
          const elem_t* __restrict__ grad,   // [elements]
          const elem_t* first,               // [elements], the moments
          const elem_t* second,              // [elements]
          const float* __restrict__ rate,    // [1]
          const float* __restrict__ number,  // [1], of the step, from 1
          elem_t* new_param, elem_t* new_first, elem_t* new_second, const float beta1,
          const float beta2, const float log_beta1, const float log_beta2, const float eps,
          const float decay, const i64 elements) {
  after_previous_kernel();
  const float at = *number, lr = *rate;
  const Rates rates = {
      beta1, beta2, 1.f - lr * decay, lr / -expm1f(at * log_beta1), 1.f / -expm1f(at * log_beta2),
      eps};
  const i64 begin = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * WIDTH;
  if (VECTOR && begin + WIDTH <= elements) {
    Vector<elem_t> p = load_vector(param + begin), m = load_vector(first + begin);
    Vector<elem_t> v = load_vector(second + begin);
    const Vector<elem_t> g = load_vector_once(grad + begin);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
      const float3 made = rates.update(p.get(k), g.get(k), m.get(k), v.get(k));
      p.set(k, made.x), m.set(k, made.y), v.set(k, made.z);
    }
    store_vector(new_param + begin, p);
    store_vector(new_first + begin, m);
    store_vector(new_second + begin, v);
    return;
  }
  for (i64 i = begin; i < min(begin + WIDTH, elements); ++i) {
    const float3 made = rates.update(static_cast<float>(param[i]), static_cast<float>(grad[i]),
                                     static_cast<float>(first[i]), static_cast<float>(second[i]));
    new_param[i] = static_cast<elem_t>(made.x);
    new_first[i] = static_cast<elem_t>(made.y);
    new_second[i] = static_cast<elem_t>(made.z);
  }
}
