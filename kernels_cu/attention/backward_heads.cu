/* Gradients of what a head of attention has one number of: its sink, its ALiBi slope.

     dsinks[h]            = sum over batches and rows of -exp(sink - lse) * delta
     dalibi_slopes[b, h]  = sum over rows (of all batches where they share it) of dalibi_rows

   lse_log2 and delta are those of backward_preprocess.cu, dalibi_rows those of the kernel that makes
   dq. A block has a head and adds up in the same order each time. Every architecture.

   A sink is a logit without a value, so that of dS = P (dP - delta) only delta is left. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "tile/reduce.cuh"
#include "attention/backward/padded_rows.cuh"
#include "attention/sequence_rows.cuh"

constexpr int THREADS = ${threads};
constexpr bool VARLEN = ${varlen};  // packed sequences

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_heads(
    const int* __restrict__ cu_seqlens_q,   // [batch + 1], or null: dense
    const float* __restrict__ sinks,        // [heads_q], or null
    const float* __restrict__ lse_log2,     // [batch, heads_q, rows_padded] or packed, see
    const float* __restrict__ delta,        //   attention/backward/padded_rows.cuh
    const float* __restrict__ dalibi_rows,  // the same, or null
    float* __restrict__ dsinks,             // [heads_q], or null
    float* __restrict__ dalibi_slopes,      // [batch or 1, heads_q], or null
    const int batch, const int heads_q, const int max_seqlen_q, const int rows_padded,
    const int alibi_batch_stride) {  // of dalibi_slopes: 0 where all batches share theirs
  __shared__ float warps[2][THREADS / WARP_SIZE];
  const int head = blockIdx.x;
  float of_sink = 0.f, of_slope = 0.f;
  const float sink_log2 = dsinks == nullptr ? 0.f : sinks[head] * LOG2E;

  for (int b = 0; b < batch; ++b) {
    const SequenceRows<VARLEN> own(cu_seqlens_q, b, max_seqlen_q);
    const i64 first = first_padded_row<VARLEN>(b, head, heads_q, rows_padded, own.start);
    for (int row = threadIdx.x; row < own.length; row += THREADS) {
      if (dsinks != nullptr)
        of_sink = fmaf(-exp2_fast(sink_log2 - lse_log2[first + row]), delta[first + row], of_sink);
      if (dalibi_slopes != nullptr) of_slope += dalibi_rows[first + row];
    }
    if (alibi_batch_stride > 0 || b == batch - 1) {
      const float sum = block_reduce<THREADS>(of_slope, warps[0], Sum());
      if (dalibi_slopes != nullptr && threadIdx.x == 0)
        dalibi_slopes[b * alibi_batch_stride + head] = sum;
      of_slope = 0.f;
      __syncthreads();
    }
  }
  const float sum = block_reduce<THREADS>(of_sink, warps[1], Sum());
  if (dsinks != nullptr && threadIdx.x == 0) dsinks[head] = sum;
}
