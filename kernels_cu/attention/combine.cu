/* What attention found in parts of the keys, put together: with parts o_i and lse_i, and m the
   greatest lse_i,

     w_i = exp(lse_i - m),   o = sum of w_i o_i / sum of w_i,   lse = m + log(sum of w_i),

   added in the order of the parts and rounded once. A part of which a row saw no key has lse_i = -inf
   and weighs nothing; where no part saw any, o = 0 and lse = -inf.

   A thread has four columns of a row, in all parts:

     threads 0 .. COLUMNS / 4 - 1    row 0     reads of a part are whole lines
     the next COLUMNS / 4            row 1

   Lies between merge_states.cu, which puts together what callers have, in their dtype and strides, and
   a last part that would do the same: that is one block at work where here are many. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "ptx/pdl.cuh"

using elem_t = ${dtype};
constexpr int COLUMNS = ${head_dim_v};  // of a part's row, the last ones padding
constexpr int THREADS = 128, EACH = 4, LANES = COLUMNS / EACH;

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_combine(const float* __restrict__ o_parts,    // [parts, rows, COLUMNS]
                      const float* __restrict__ lse_parts,  // [parts, rows]
                      elem_t* __restrict__ o,   // [batch, heads_q, seqlen_q, columns], 16-byte rows
                      float* __restrict__ lse,  // [rows], or null
                      const Strides o_strides, const int parts, const int heads_q,
                      const int seqlen_q, const int rows,  // batch * heads_q * seqlen_q
                      const int columns) {
  after_previous_kernel();
  const int number = blockIdx.x * THREADS + threadIdx.x, row = number / LANES;
  const int column = number % LANES * EACH;
  if (row >= rows) return;

  float top = NEG_INFINITY;
  for (int part = 0; part < parts; ++part)
    top = fmaxf(top, lse_parts[static_cast<i64>(part) * rows + row]);
  const float frame = top == NEG_INFINITY ? 0.f : top;  // -inf - -inf is no number

  float sum = 0.f, value[EACH] = {};
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    const i64 at = static_cast<i64>(part) * rows + row;
    const float weight = exp2_fast((lse_parts[at] - frame) * LOG2E);
    const float4 x = *reinterpret_cast<const float4*>(o_parts + at * COLUMNS + column);
    sum += weight;
    value[0] = fmaf(weight, x.x, value[0]), value[1] = fmaf(weight, x.y, value[1]);
    value[2] = fmaf(weight, x.z, value[2]), value[3] = fmaf(weight, x.w, value[3]);
  }

  if (lse != nullptr && column == 0) lse[row] = frame + logf(sum);
  if (column >= columns) return;
  const float scale = sum == 0.f ? 0.f : 1.f / sum;
  const int query = row % seqlen_q, head = row / seqlen_q % heads_q;
  const int batch = row / seqlen_q / heads_q;
  elem_t* const to = o + batch * o_strides.batch + head * o_strides.head + query * o_strides.row;
  const uint2 packed = {pack2<elem_t>(value[0] * scale, value[1] * scale),
                        pack2<elem_t>(value[2] * scale, value[3] * scale)};
  *reinterpret_cast<uint2*>(to + column) = packed;
}
