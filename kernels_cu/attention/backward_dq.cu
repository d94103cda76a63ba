/* dQ out of the sums that blocks of keys have added up (flash_backward_keys.cu), times
   softmax_scale, rounded. A warp takes 16 rows and 64 columns. Packed sequences have their rows as
   device/padded_rows.cuh says. sm_80 and newer. */
#include "prelude.cuh"
#include "device/math.cuh"
#include "device/sum_fragments.cuh"
//% if varlen
#include "device/sequence_rows.cuh"
//% endif

using elem_t = ${dtype};
constexpr int THREADS = ${threads};
constexpr int COLUMNS = 64;  // of a warp

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_dq(
    //% if varlen
    const int* __restrict__ cu_seqlens_q,  // [batch + 1]; dq is [total_q, heads_q, head_dim]
    //% endif
    const float* __restrict__ dq_sum,  // [batch * heads_q * rows_padded / 16] fragments of
                                       // sum_columns, see device/sum_fragments.cuh
    elem_t* __restrict__ dq,           // [batch, heads_q, seqlen_q, head_dim], rows on 16 bytes
    const Strides dq_strides, const int batch, const int heads_q, const int ${seqlen_q},
    const int head_dim, const int rows_padded, const int sum_columns, const float softmax_scale) {
  const int lane = threadIdx.x % WARP_SIZE, pieces = sum_columns / COLUMNS;
  const i64 warp = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) / WARP_SIZE;
  const i64 row_block = warp / pieces;
  //% if varlen
  const int row_blocks = ceil_div(max_seqlen_q, 16), first = warp % pieces * (COLUMNS / 8);
  //% else
  const int row_blocks = rows_padded / 16, first = warp % pieces * (COLUMNS / 8);
  //% endif
  const int query = row_block % row_blocks * 16 + lane / 4;
  const int head = row_block / row_blocks % heads_q;
  const i64 of_batch = row_block / row_blocks / heads_q;
  if (of_batch >= batch) return;
  //% if varlen
  const SequenceRows<true> own(cu_seqlens_q, of_batch, max_seqlen_q);
  const int seqlen_q = own.length;
  if (query - lane / 4 >= seqlen_q) return;
  dq += own.start * dq_strides.row;
  const i64 sum_block =
      (first_padded_row<true>(of_batch, head, heads_q, rows_padded, own.start) + query) / 16;
  //% else
  const i64 sum_block = row_block;
  //% endif
  dq += of_batch * dq_strides.batch + head * dq_strides.head + query * dq_strides.row;
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; ++n) {
    const int column = (first + n) * 8 + lane % 4 * 2;
    const float4 x = *reinterpret_cast<const float4*>(
        dq_sum + fragment_place(sum_block, first + n, sum_columns / 8, lane));
    if (column >= head_dim) continue;
    const u32 top = pack2<elem_t>(x.x * softmax_scale, x.y * softmax_scale);
    const u32 bottom = pack2<elem_t>(x.z * softmax_scale, x.w * softmax_scale);
    if (query < seqlen_q) *reinterpret_cast<u32*>(dq + column) = top;
    if (query + 8 < seqlen_q) *reinterpret_cast<u32*>(dq + 8 * dq_strides.row + column) = bottom;
  }
}
