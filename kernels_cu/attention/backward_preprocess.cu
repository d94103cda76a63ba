/* What attention's backward has to know of each query row, before anything else:

     lse_log2 = log2(e) * lse                 +inf where lse is -inf (no key) and past the end
     delta    = rowsum(dout * o) - dlse       0 past the end

   `lanes` neighbours, a power of two, share a row; a block takes THREADS / lanes rows of a head.
   Both arrays are [batch, heads_q, rows_padded], so that a tile of rows is always whole. Where dq is added up
   by atomics, its sums are set to 0 here. Packed sequences have their rows as
   attention/backward/padded_rows.cuh says. Every architecture.

   Source: Dao, "FlashAttention-2" (2023): dS = P (dP - delta). */
#include "prelude.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"
//% if varlen
#include "attention/backward/padded_rows.cuh"
#include "attention/sequence_rows.cuh"
//% endif

using elem_t = ${dtype};
constexpr int THREADS = ${threads};
constexpr bool ALIGNED = ${aligned};        // rows of dout and o start on 16-byte boundaries
constexpr int SIZE = Vector<elem_t>::SIZE;  // neighbouring columns of a lane
constexpr float POSITIVE_INFINITY = -NEG_INFINITY;
constexpr float FAR = 16777216.f;  // 2^24

static_assert(THREADS % WARP_SIZE == 0, "whole warps: rows are shared by neighbours");

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_rows(
    //% if varlen
    // dout and o are [total_q, heads_q, head_dim_v], lse and dlse [heads_q, total_q].
    const int* __restrict__ cu_seqlens_q,  // [batch + 1]
    //% endif
    const elem_t* __restrict__ dout,  // [batch, heads_q, seqlen_q, head_dim_v] strides in
    const elem_t* __restrict__ o,     // elements, last dimension contiguous
    const float* __restrict__ lse,    // [batch, heads_q, seqlen_q] contiguous
    const float* __restrict__ dlse,   // the same, or null
    float* __restrict__ lse_log2,     // [batch, heads_q, rows_padded] contiguous
    float* __restrict__ delta,        // the same
    float* __restrict__ dq_sum,       // [batch, heads_q, rows_padded, sum_columns], or null
    u32* __restrict__ turns,          // [batch, heads_q, rows_padded / 16], or null
    const Strides dout_strides, const Strides o_strides, const int heads_q, const int ${seqlen_q},
    //% if varlen
    const int total_q,
    //% endif
    const int head_dim_v, const int rows_padded, const int sum_columns, const int lanes) {
  // No block has rows of two heads, so what must be divided is the same for all of it.
  const int lane_bits = 31 - __clz(lanes), lane = threadIdx.x & (lanes - 1);
  const int rows_a_block = THREADS >> lane_bits;
  //% if varlen
  const int length = round_up(max_seqlen_q, ROW_STEP);
  //% else
  const int length = rows_padded;
  //% endif
  const int blocks = ceil_div(length, rows_a_block), sequence = blockIdx.x / blocks;
  const int query = blockIdx.x % blocks * rows_a_block + (threadIdx.x >> lane_bits);
  const int batch = sequence / heads_q, head = sequence % heads_q;
  //% if varlen
  const SequenceRows<true> own(cu_seqlens_q, batch, max_seqlen_q);
  const int seqlen_q = own.length;
  const bool stored = query < round_up(seqlen_q, ROW_STEP);
  const i64 target = first_padded_row<true>(batch, head, heads_q, rows_padded, own.start) + query;
  dout += own.start * dout_strides.row;
  o += own.start * o_strides.row;
  //% else
  const bool stored = query < rows_padded;
  const i64 target = static_cast<i64>(sequence) * rows_padded + query;
  //% endif
  const bool exists = query < seqlen_q;

  float sum = 0.f;
  if (exists) {
    dout += batch * dout_strides.batch + head * dout_strides.head + query * dout_strides.row;
    o += batch * o_strides.batch + head * o_strides.head + query * o_strides.row;
    for (int column = SIZE * lane; column < head_dim_v; column += SIZE * lanes) {
      if (ALIGNED && column + SIZE <= head_dim_v) {
        const Vector<elem_t> x = load_vector_once(dout + column), y = load_vector_once(o + column);
#pragma unroll
        for (int i = 0; i < SIZE; ++i) sum = fmaf(x.get(i), y.get(i), sum);
      } else {
        for (int i = column; i < min(column + SIZE, head_dim_v); ++i)
          sum = fmaf(static_cast<float>(dout[i]), static_cast<float>(o[i]), sum);
      }
    }
  }
  sum = lanes_reduce(sum, lanes, Sum());
  if (!stored) return;
  if (dq_sum != nullptr)
    for (int column = 4 * lane; column < sum_columns; column += 4 * lanes)
      *reinterpret_cast<float4*>(dq_sum + target * sum_columns + column) =
          make_float4(0.f, 0.f, 0.f, 0.f);
  if (lane > 0) return;
  if (turns != nullptr && query % 16 == 0) turns[target / 16] = 0;
  //% if varlen
  const i64 place = static_cast<i64>(head) * total_q + own.start + query;
  //% else
  const i64 place = static_cast<i64>(sequence) * seqlen_q + query;
  //% endif
  const float natural = exists ? lse[place] : NEG_INFINITY;
  const float sum_log2 = natural == NEG_INFINITY ? POSITIVE_INFINITY : natural * LOG2E;
  // Where fp32 has lse to whole numbers only, probabilities are 0 and never beyond all bounds.
  lse_log2[target] = fabsf(sum_log2) > FAR ? fmaf(fabsf(sum_log2), 0x1p-20f, sum_log2) : sum_log2;
  delta[target] = exists && dlse != nullptr ? sum - dlse[place] : sum;
}
