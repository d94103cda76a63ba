/* Products with few rows of each expert, as in decoding: weights of the experts that have rows are
   streamed once, at the speed of device memory.

     out[place] = act(x[row] . weight[expert] + bias[expert])      the expert of the place's tile

   The row is the place, or with GATHER the token whose choice the place has: nothing is permuted
   before. A block has OUTPUTS columns of out at a time; its warps take spans of k in turns, UNROLL
   of them under way at any time, and what they have summed is added up in shared memory in their
   order: the same bits every time. While it is, the first spans of the block's next part are on
   their way (gemm/expert_walk.cuh). Which experts have rows is read here: the host does not wait.

   Without GATHER a block asks for lines of its first weight, to L2, before the previous kernel is
   over: that is the product before, and experts are known since before that. Where they are not, the
   lines are another weight's, and nothing is wrong.

   sm_80 and later. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/expert_product.cuh"
#include "ptx/pdl.cuh"

using elem_t = ${dtype};
using Activation = ${activation};
constexpr bool GATE = ${gate}, GATHER = ${gather};
constexpr bool ROWS_OF_K = ${rows_of_k};  // weight_layout "nk": rows are contiguous in k
constexpr int ROWS = ${rows};             // of a part, at most
constexpr int TILE = ${tile_rows};        // outputs of the weight
constexpr int WARPS = ${warps};
constexpr int UNROLL = ${unroll};      // spans of a warp under way
constexpr int RESIDENT = ${resident};  // blocks of a multiprocessor, at least

constexpr bool PREFETCH = __CUDA_ARCH__ >= 900 && !GATHER && ROWS_OF_K;  // where launches overlap
constexpr int HALVES = GATE ? 2 : 1, OUTPUTS = TILE / HALVES, THREADS = 32 * WARPS;
using Weight = ${weight_lines} < elem_t, TILE, HALVES > ;
using Product = ExpertProduct<elem_t, Weight, ROWS, GATHER>;

// Lines of the weight that this block begins with, if experts' ids are there already.
__device__ __forceinline__ void prefetch_weight(const elem_t* weight, const int* expert_ids,
                                                int tiles, int experts, int n, int k) {
  const int columns = ceil_div(n, OUTPUTS), tile = blockIdx.x / columns;
  if (tile >= tiles) return;
  // Volatile: this read is no excuse for not reading it again when it is there.
  const int expert = *static_cast<const volatile int*>(expert_ids + tile);
  if (static_cast<u32>(expert) >= static_cast<u32>(experts)) return;
  prefetch_rows<TILE, HALVES, THREADS>(weight + expert * (static_cast<i64>(HALVES) * n * k), k,
                                       blockIdx.x % columns * OUTPUTS, n, k);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) grouped_linear_stream(
    const elem_t* __restrict__ x,       // [places, k], with GATHER [tokens, k]
    const elem_t* __restrict__ weight,  // [experts, n, k] or [experts, k, n]; with GATE 2 n for n
    const elem_t* __restrict__ bias,    // [experts, n], with GATE [experts, 2 n], or null
    // Not __restrict__: what nobody writes here the compiler would read before the wait.
    const int* sorted_token_ids,        // [places]: token * top_k + choice
    const int* expert_ids,              // [places / block_size], -1: nobody's
    const int* num_tokens_post_padded,  // [1]: places that are taken
    const int* offsets,                 // [experts + 1]: experts' first places
    const int* counts,                  // [experts]: how many are taken by tokens
    elem_t* __restrict__ out,           // [places, n]
    const int n, const int k, const int experts, const int places, const int block_size,
    const int top_k, const i64 x_stride) {
  if (PREFETCH) prefetch_weight(weight, expert_ids, places / block_size, experts, n, k);
  after_previous_kernel();
  __shared__ float sums[WARPS][ROWS][TILE];
  const int warp = threadIdx.x / WARP_SIZE, spans = ceil_div(k, Product::SPAN);
  const int columns = ceil_div(n, OUTPUTS), tiles = num_tokens_post_padded[0] / block_size;
  const i64 outputs = HALVES * n;
  ExpertWalk<ROWS> walk = {expert_ids,
                           offsets,
                           counts,
                           block_size,
                           columns,
                           tiles * columns,
                           static_cast<int>(blockIdx.x)};

  Product product = {x, x_stride, sorted_token_ids, top_k, k};
  typename Product::Step ring[UNROLL];
  const auto begin = [&](const ExpertPart& part, const typename Product::Rows& rows) {
    const elem_t* const own = weight + part.expert * (outputs * k);
    product.begin({own, ROWS_OF_K ? k : outputs, part.column * OUTPUTS, n, k}, part, rows);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) product.load_weight(ring[i], warp * UNROLL + i);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) product.load_x(ring[i], warp * UNROLL + i);
  };

  ExpertPart part, next;
  bool more = walk.take(part);
  typename Product::Rows rows = {};
  if (more) begin(part, product.look_up(part));
  while (more) {
    more = walk.take(next);
    if (more) rows = product.look_up(next);

    // 1. Spans of this warp; beyond the end they are zeros.
#pragma unroll 1
    for (int span = warp * UNROLL; span < spans; span += WARPS * UNROLL) {
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        product.multiply(ring[i], span + i);
        product.load_weight(ring[i], span + WARPS * UNROLL + i);
        product.load_x(ring[i], span + WARPS * UNROLL + i);
      }
    }

    // 2. The warps' sums; meanwhile the next part begins.
    product.template store<TILE>(sums[warp][0]);
    if (more) begin(next, rows);
    __syncthreads();

    // 3. In their order, and the epilogue.
    const elem_t* const own_bias = bias == nullptr ? nullptr : bias + part.expert * outputs;
    const Epilogue<Activation, GATE, elem_t, elem_t> epilogue = {own_bias, nullptr, nullptr,
                                                                 0,        1.f,     n};
    const int first = part.column * OUTPUTS;
#pragma unroll 1
    for (int i = threadIdx.x; i < part.rows * OUTPUTS; i += THREADS) {
      const int row = i / OUTPUTS, column = i % OUTPUTS;
      float total[2] = {};
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total[half] += sums[w][row][column + half * OUTPUTS];
      if (first + column < n)
        out[(part.place + row) * static_cast<i64>(n) + first + column] =
            static_cast<elem_t>(epilogue(total[0], total[1], 0, first + column));
    }
    __syncthreads();  // the sums are free again
    part = next;
  }
}
