/* Scales that many rows of Q and of K share, for attention/quantize_codes.cu: of a head, or of all.

   A block looks through ROWS rows of Q or of K, as they are before they become codes: K less its mean
   with SMOOTH, rotated with ROTATE. The last block of a span to end puts the blocks' greatest
   magnitudes together, which no order changes. From sm_80 on. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "tile/last_block.cuh"
#include "attention/quantize_rows.cuh"

using elem_t = ${dtype};
using Codes = ${codes};  // of q and k
constexpr bool SMOOTH = ${smooth}, ROTATE = ${rotate}, PACKED = ${packed};
constexpr int HEAD_DIM = ${head_dim};  // of q and k, at most
constexpr int ROWS = ${rows};          // of a block
constexpr int THREADS = ${threads};
using Tile = RowTile<HEAD_DIM, ROWS, THREADS, PACKED>;
static_assert(ROWS == THREADS / 2, "sixteen rows a warp");

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM > 128 ? 2 : 4)
    attention_quantize_spans(
        //% if packed
        const int* __restrict__ cu_seqlens_q,  // [batch + 1]
        const int* __restrict__ cu_seqlens_k,  // [batch + 1]
        //% endif
        const elem_t* __restrict__ q,       // [batch, heads_q, seqlen_q, head_dim]
        const elem_t* __restrict__ k,       // [batch, heads_kv, seqlen_k, head_dim]
        const float* __restrict__ k_means,  // [batch, heads_kv, head_dim], or null
        float* __restrict__ span_scales,    // [q_spans + k_spans]
        u32* workspace,                     // [gridDim.x]
        u32* counters,                      // [q_spans + k_spans], 0 before and after
        const Strides q_strides, const Strides k_strides, const int heads_q, const int heads_kv,
        const int q_blocks,                    // of all heads; those of K follow
        const int q_spans, const int k_spans,  // heads of all, or 1; 0 where there are no rows
        const int seqlen_q, const int seqlen_k, const int head_dim) {
  after_previous_kernel();
  __shared__ u32 warps[THREADS / WARP_SIZE];
  const int block = blockIdx.x;
  const bool of_q = block < q_blocks;

  // 1. The greatest magnitude of these rows.
  //% if not packed
  const int *const cu_seqlens_q = nullptr, *const cu_seqlens_k = nullptr;
  //% endif
  const int longest = of_q ? seqlen_q : seqlen_k;
  const Tile tile(of_q ? block : block - q_blocks, ceil_div(longest, ROWS),
                  of_q ? heads_q : heads_kv, of_q ? cu_seqlens_q : cu_seqlens_k, longest);
  __shared__ __align__(16) float means[HEAD_DIM];
  BlockRows<elem_t, HEAD_DIM, ROTATE> rows;
  rows.load(tile, of_q ? q : k, of_q ? q_strides : k_strides, head_dim);
  if (SMOOTH && !of_q) {
    const float* const mean = k_means + tile.head * head_dim;
    const u32 own_means = means_of_rows<HEAD_DIM, ROTATE>(means, mean, head_dim);
    rows.template finish<true>(own_means, tile.length);
  } else {
    rows.template finish<false>(0, tile.length);
  }
  u32 most = max(rows.most(0), rows.most(1));
  most = block_most<THREADS>(most, warps);
  if (threadIdx.x == 0) workspace[block] = most;

  // 2. Of all blocks of the span.
  const int first = of_q ? 0 : q_blocks;
  const int blocks = of_q ? q_blocks / q_spans : (static_cast<int>(gridDim.x) - q_blocks) / k_spans;
  const int span = (block - first) / blocks, place = (of_q ? 0 : q_spans) + span;
  if (!last_block(counters + place, blocks)) return;
  most = 0;
  for (int i = threadIdx.x; i < blocks; i += THREADS)
    most = max(most, __ldcg(workspace + first + span * blocks + i));
  most = block_most<THREADS>(most, warps);
  if (threadIdx.x == 0) span_scales[place] = scale_of<float, Codes>(most);
}
