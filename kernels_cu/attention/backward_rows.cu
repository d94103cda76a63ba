/* What attention's backward has to know of each query row, before anything else:

     lse_log2 = log2(e) * lse                 +inf where lse is -inf (no key) and past the end
     delta    = rowsum(dout * o) - dlse       0 past the end

   `lanes` neighbours, a power of two, share a row; a block takes THREADS / lanes rows. Both arrays
   are [batch, heads_q, rows_padded], so that a tile of rows is always whole. Where dq is added up
   by atomics, its sums are set to 0 here. Every architecture.

   Source: Dao, "FlashAttention-2" (2023): dS = P (dP - delta). */
#include "prelude.cuh"
#include "device/reduce.cuh"
#include "device/vector.cuh"

using elem_t = ${dtype};
constexpr int THREADS = ${threads};
constexpr bool ALIGNED = ${aligned};        // rows of dout and o start on 16-byte boundaries
constexpr int SIZE = Vector<elem_t>::SIZE;  // neighbouring columns of a lane
constexpr float POSITIVE_INFINITY = -NEG_INFINITY;

static_assert(THREADS % WARP_SIZE == 0, "whole warps: rows are shared by neighbours");

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_rows(
    const elem_t* __restrict__ dout,  // [batch, heads_q, seqlen_q, head_dim_v] strides in
    const elem_t* __restrict__ o,     // elements, last dimension contiguous
    const float* __restrict__ lse,    // [batch, heads_q, seqlen_q] contiguous
    const float* __restrict__ dlse,   // the same, or null
    float* __restrict__ lse_log2,     // [batch, heads_q, rows_padded] contiguous
    float* __restrict__ delta,        // the same
    float* __restrict__ dq_sum,       // [batch, heads_q, rows_padded, sum_columns], or null
    u32* __restrict__ turns,          // [batch, heads_q, rows_padded / 16], or null
    const Strides dout_strides, const Strides o_strides, const int heads_q, const int seqlen_q,
    const int head_dim_v, const int rows_padded, const i64 rows,  // batch * heads_q * rows_padded
    const int sum_columns, const int lanes) {
  const i64 row = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) / lanes;
  const int lane = threadIdx.x % lanes;
  const int query = row % rows_padded, head = row / rows_padded % heads_q;
  const i64 batch = row / rows_padded / heads_q;
  const bool exists = row < rows && query < seqlen_q;

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
  if (row >= rows) return;
  if (dq_sum != nullptr)
    for (int column = 4 * lane; column < sum_columns; column += 4 * lanes)
      *reinterpret_cast<float4*>(dq_sum + row * sum_columns + column) =
          make_float4(0.f, 0.f, 0.f, 0.f);
  if (lane > 0) return;
  if (turns != nullptr && query % 16 == 0) turns[row / 16] = 0;
  const i64 place = (batch * heads_q + head) * seqlen_q + query;
  const float natural = exists ? lse[place] : NEG_INFINITY;
  lse_log2[row] = natural == NEG_INFINITY ? POSITIVE_INFINITY : natural * LOG2E;
  delta[row] = exists && dlse != nullptr ? sum - dlse[place] : sum;
}
