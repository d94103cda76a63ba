/* out = act(scale * x . weight + bias) + residual for up to eight rows of x: the weight is streamed
   once, at the speed of device memory.

   A block has OUTPUTS columns of out; its warps take spans of k in turns, UNROLL of them under way
   at any time, and what they have summed is added up in shared memory in their order: the same bits
   every time. A weight goes from global memory into the registers in which it is multiplied; x is
   small and stays in L1.

     [n, k], [k, n]   of 16 bits: tensor cores                                gemm/gemv_mma.cuh
                      fp32: FMA                                               gemm/gemv_fma.cuh

   Before the previous kernel is over a block asks for lines of its weight, to L2: that reads nothing,
   so it is right whoever writes the weight.

   Every architecture with bf16 products (sm_80); fp32 everywhere. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/gemv_mma.cuh"
#include "gemm/gemv_fma.cuh"
#include "ptx/pdl.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
constexpr bool GATE = ${gate};
constexpr bool ROWS_OF_K = ${rows_of_k};         // weight_layout "nk": rows are contiguous in k
constexpr bool PREFETCH = __CUDA_ARCH__ >= 900;  // where launches overlap
constexpr int WARPS = ${warps};
constexpr int UNROLL = ${unroll};      // spans of a warp under way
constexpr int RESIDENT = ${resident};  // blocks of a multiprocessor, at least

constexpr int TILE = ${tile_rows};  // outputs of the weight
constexpr int HALVES = GATE ? 2 : 1;
using Product = ${product};
constexpr int OUTPUTS = TILE / HALVES, THREADS = 32 * WARPS;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    linear_gemv(const elem_t* __restrict__ x,        // [m, k]
                const elem_t* __restrict__ weight,   // [n, k] or [k, n]; with GATE 2 n for n
                const elem_t* __restrict__ bias,     // [n], with GATE [2 n], or null
                const out_t* __restrict__ residual,  // [m, n] or null
                out_t* __restrict__ out,             // [m, n]
                elem_t* __restrict__ pre,            // [m, n], with GATE [m, 2 n], or null
                const int m,                         // 1..8
                const int n, const int k, const i64 x_stride, const i64 weight_stride,
                const i64 out_stride, const i64 residual_stride, const float scale) {
  const int first = blockIdx.x * OUTPUTS;
  if (PREFETCH && ROWS_OF_K)
    prefetch_rows<TILE, HALVES, THREADS>(weight, weight_stride, first, n, k);
  else if (PREFETCH)
    prefetch_columns<TILE, HALVES>(weight, weight_stride, first, n, k);
  after_previous_kernel();
  __shared__ float sums[WARPS][TOKENS][TILE];
  const int warp = threadIdx.x / WARP_SIZE, spans = ceil_div(k, Product::SPAN);

  // 1. Spans of this warp; beyond the end they are zeros.
  Product product(x, x_stride, weight, weight_stride, first, m, n, k);
  typename Product::Step ring[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) product.load_weight(ring[i], warp * UNROLL + i);
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) product.load_x(ring[i], warp * UNROLL + i);
#pragma unroll 1
  for (int span = warp * UNROLL; span < spans; span += WARPS * UNROLL) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      product.multiply(ring[i]);
      product.load_weight(ring[i], span + WARPS * UNROLL + i);
      product.load_x(ring[i], span + WARPS * UNROLL + i);
    }
  }
  product.store(sums[warp][0]);
  __syncthreads();

  // 2. The warps' sums in their order, and the epilogue.
  const Epilogue<Activation, GATE, elem_t, out_t> epilogue = {bias,  residual, pre, residual_stride,
                                                              scale, n};
#pragma unroll 1
  for (int i = threadIdx.x; i < m * OUTPUTS; i += THREADS) {
    const int row = i / OUTPUTS, column = i % OUTPUTS;
    float total[2] = {};
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int w = 0; w < WARPS; ++w) total[half] += sums[w][row][column + half * OUTPUTS];
    if (first + column < n)
      out[row * out_stride + first + column] =
          static_cast<out_t>(epilogue(total[0], total[1], row, first + column));
  }
}
