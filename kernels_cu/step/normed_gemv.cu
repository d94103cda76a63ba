/* Up to eight rows, normalised, times a weight, in one launch of a decode step:

     h   = LayerNorm(x) (CENTERED) or RMSNorm(x), rounded to x's type; it is in no global memory
     out = activation(h weight^T + bias) [* up]                                           [m, n]
     or, APPEND: the heads of q, k and v = h weight^T + bias; those of q and k turned by RoPE; q to
     out_q, k and v to the tokens' slots in a paged KV cache (step/qkv_append.cuh)

   The weight comes first: the spans that a warp begins with are on their way to registers before the
   previous kernel is over (PDL), so the weight, bias and the norm's weights are not what work still
   under way writes. Then each block normalises all rows for itself (step/normed_rows.cuh): they come
   out of L2, while the weight comes out of memory. The product is gemv's (gemm/gemv_mma.cuh), and as
   there the warps' sums are added up in their order: the same bits every time.

   With APPEND a block has columns of one head, of both halves, so that a thread has both numbers of a
   pair that RoPE turns.

   sm_80 and later. */
#include "prelude.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "gemm/epilogue.cuh"
#include "gemm/gemv_mma.cuh"
#include "ptx/pdl.cuh"
#include "step/normed_rows.cuh"
//% if append
#include "step/qkv_append.cuh"
//% endif

using elem_t = ${dtype};
using Activation = ${activation};
constexpr bool CENTERED = ${centered}, APPEND = ${append}, ROPE = ${rope}, GATE = ${gate};
constexpr int TILE = ${tile_rows};  // outputs of the weight
constexpr int WARPS = ${warps};
constexpr int UNROLL = ${unroll};      // spans of a warp under way
constexpr int RESIDENT = ${resident};  // blocks of a multiprocessor, at least

constexpr int THREADS = 32 * WARPS, HALVES = GATE || APPEND ? 2 : 1, OUTPUTS = TILE / HALVES;
using Product = RowsMma<elem_t, TILE, HALVES, SharedRow<elem_t>>;
static_assert(!(GATE && APPEND), "one reason for two halves");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    step_normed_gemv(const elem_t* x,                         // [m, k]
                     const elem_t* __restrict__ weight,       // [n, k]; with GATE [2 n, k]
                     const elem_t* __restrict__ bias,         // [n], with GATE [2 n], or null
                     const elem_t* __restrict__ norm_weight,  // [k]
                     const elem_t* __restrict__ norm_bias,    // [k], or null where not CENTERED
                     //% if append
                     const int* __restrict__ slot_mapping,  // [m]
                     const int* __restrict__ positions,     // [m], of position_words words each
                     const float* __restrict__ table,       // [table_rows, head_dim]
                     elem_t* __restrict__ k_pages, elem_t* __restrict__ v_pages,
                     elem_t* __restrict__ out_q,  // [m, heads_q, head_dim]
                     const int k_page_step, const int k_head_step, const int k_token_step,
                     const int v_page_step, const int v_head_step, const int v_token_step,
                     const u32 num_slots, const int page_log2, const int position_words,
                     const int table_rows, const int heads_q, const int heads_kv,
                     const int head_dim,
                     //% else
                     elem_t* __restrict__ out,  // [m, n]
                     const i64 out_stride,
                     //% endif
                     const int m,  // 1..8
                     const int n, const int k, const i64 x_stride, const i64 weight_stride,
                     const float eps) {
  extern __shared__ __align__(16) unsigned char normed[];
  __shared__ float sums[WARPS][TOKENS][TILE];
  const u32 rows = shared_address(normed);
  //% if append
  const int columns = head_dim / 2, of_head = columns / OUTPUTS;
  const int head = blockIdx.x / of_head, first = blockIdx.x % of_head * OUTPUTS;
  const int head_column = head * head_dim;
  //% else
  const int columns = n, first = blockIdx.x * OUTPUTS;
  constexpr int head_column = 0;
  //% endif
  const int warp = threadIdx.x / WARP_SIZE, spans = ceil_div(k, Product::SPAN);

  // 1. The weight's first spans and the norm's are asked for; then the rows.
  Product product({rows, m, k}, weight + head_column * weight_stride, weight_stride, first, columns,
                  k);
  typename Product::Step ring[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) product.load_weight(ring[i], warp * UNROLL + i);
  const RowNorm<elem_t, WARPS, CENTERED> norm(norm_weight, norm_bias, m, k);
  after_previous_kernel();
  norm.normalise(rows, x, x_stride, m, eps);
  __syncthreads();

  // 2. Spans of this warp; beyond the end they are zeros.
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

  // 3. The warps' sums in their order, and what becomes of them.
  //% if append
  const QkvAppend<elem_t, ROPE> append = {
      out_q,
      k_pages,
      v_pages,
      slot_mapping,
      positions,
      table,
      {k_page_step, k_head_step, k_token_step, num_slots, page_log2},
      {v_page_step, v_head_step, v_token_step, num_slots, page_log2},
      position_words,
      table_rows,
      heads_q,
      heads_kv,
      head_dim};
  //% else
  const Epilogue<Activation, GATE, elem_t, elem_t> epilogue = {bias, nullptr, nullptr, 0, 1.f, n};
  //% endif
#pragma unroll 1
  for (int i = threadIdx.x; i < m * OUTPUTS; i += THREADS) {
    const int row = i / OUTPUTS, column = i % OUTPUTS;
    float total[2] = {};
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int w = 0; w < WARPS; ++w) total[half] += sums[w][row][column + half * OUTPUTS];
    //% if append
    if (bias != nullptr) {
      total[0] += static_cast<float>(bias[head_column + first + column]);
      total[1] += static_cast<float>(bias[head_column + columns + first + column]);
    }
    append(total[0], total[1], row, head, first + column);
    //% else
    if (first + column < n)
      out[row * out_stride + first + column] =
          static_cast<elem_t>(epilogue(total[0], total[1], row, first + column));
    //% endif
  }
}
