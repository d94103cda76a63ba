/* dQ out of the sums that blocks of keys have added up (backward_dkdv.cu), times
   softmax_scale, rounded. A warp takes 16 rows and 64 columns. Packed sequences have their rows as
   attention/backward/padded_rows.cuh says. sm_80 and newer. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/quad_transpose.cuh"
#include "tile/tile_copy.cuh"
#include "attention/backward/sum_fragments.cuh"
//% if varlen
#include "attention/sequence_rows.cuh"
//% endif

using elem_t = ${dtype};
constexpr int THREADS = ${threads};
constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int COLUMNS = 64;  // of a warp

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_dq(
    //% if varlen
    // dq is [total_q, heads_q, head_dim], and 0 before: that of sequences without keys is left.
    const int* __restrict__ cu_seqlens_q,  // [batch + 1]
    const int* __restrict__ cu_seqlens_k,  // [batch + 1]
    //% endif
    const float* __restrict__ dq_sum,  // [batch * heads_q * rows_padded / 16] fragments of
                                       // sum_columns, see attention/backward/sum_fragments.cuh
    elem_t* __restrict__ dq,           // [batch, heads_q, seqlen_q, head_dim], rows on 16 bytes
    const Strides dq_strides, const int heads_q, const int ${seqlen_q}, const int head_dim,
    const int rows_padded, const int sum_columns, const float softmax_scale) {
  const int lane = threadIdx.x % WARP_SIZE, pieces = sum_columns / COLUMNS;
  //% if varlen
  const int row_blocks = ceil_div(max_seqlen_q, 16);
  //% else
  const int row_blocks = rows_padded / 16;
  //% endif
  // A block has rows of one head: a few divisions of 32 bits.
  const u32 blocks = ceil_div(row_blocks * pieces, WARPS), every_head = blockIdx.x / blocks;
  const u32 own_warp = (blockIdx.x - every_head * blocks) * WARPS + threadIdx.x / WARP_SIZE;
  const int row_block = own_warp / pieces, first = (own_warp - row_block * pieces) * (COLUMNS / 8);
  const int head = every_head % heads_q;
  const i64 of_batch = every_head / heads_q;
  //% if varlen
  const SequenceRows<true> own(cu_seqlens_q, of_batch, max_seqlen_q);
  const int seqlen_q = cu_seqlens_k[of_batch] < cu_seqlens_k[of_batch + 1] ? own.length : 0;
  dq += own.start * dq_strides.row;
  const i64 sum_block =
      (first_padded_row<true>(of_batch, head, heads_q, rows_padded, own.start) + row_block * 16) /
      16;
  //% else
  const i64 sum_block = static_cast<i64>(every_head) * row_blocks + row_block;
  //% endif
  if (row_block * 16 >= seqlen_q) return;
  // Lane (g, t) of a fragment has columns 2t, 2t + 1 of rows g and g + 8. It takes all eight
  // columns of blocks t and t + 4 instead, so that it stores 16 bytes.
  const int query = row_block * 16 + lane / 4;
  dq += of_batch * dq_strides.batch + head * dq_strides.head + query * dq_strides.row;
  u32 words[2][COLUMNS / 8];
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; ++n) {
    const float4 x = __ldcs(reinterpret_cast<const float4*>(
        dq_sum + fragment_place(sum_block, first + n, sum_columns / 8, lane)));
    words[0][n] = pack2<elem_t>(x.x * softmax_scale, x.y * softmax_scale);
    words[1][n] = pack2<elem_t>(x.z * softmax_scale, x.w * softmax_scale);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int part = 0; part < COLUMNS / 8; part += 4) {
      const uint4 chunk = quad_transpose(&words[half][part], lane);
      const int column = (first + part + lane % 4) * 8;
      if (query + half * 8 < seqlen_q && column < head_dim)
        store_global_chunk(dq + half * 8 * dq_strides.row + column, chunk);
    }
}
