/* Attention forward as the formula says it: the reference the other kernels are read against.

   o = softmax(softmax_scale * q k^T + causal mask) v         lse = log(sum(exp(scores)))

   For one query row, with c = softmax_scale * log2(e) and keys j the row may see:

     s_j = c * q . k_j                      scores in powers of two: exp(x) = 2^(x * log2(e))
     m   = max_j s_j                        subtracted, so that no 2^s overflows
     o   = sum_j 2^(s_j - m) v_j / sum_j 2^(s_j - m)
     lse = (m + log2(sum_j 2^(s_j - m))) * ln(2)

   The maximum must be known before the first exponential, hence two passes over the keys, the
   scores computed anew in each. One warp does one query row: lane i holds columns i, i + 32, ... of
   the query and of the output, a dot product is a few FMAs a lane and one sum over the warp. Any
   head dimension up to MAX_HEAD_DIM, any alignment; accumulation in fp32 for every dtype.

   Nothing is reused: each row reads K twice and V once from memory (or cache), 6 flops for every
   three elements. tiled.cu is the next step. Every architecture.

   Source: Vaswani et al., "Attention Is All You Need" (2017). */
#include "prelude.cuh"
#include "tile/reduce.cuh"
#include "attention/query_block.cuh"

using elem_t = ${dtype};
constexpr int NUM_WARPS = ${num_warps};  // and query rows of a block

constexpr int MAX_HEAD_DIM = 256;                  // of q and k, and of v and o
constexpr int COLUMNS = MAX_HEAD_DIM / WARP_SIZE;  // of a lane, at most
constexpr int THREADS = NUM_WARPS * WARP_SIZE;

static_assert(THREADS <= 1024, "a block has at most 1024 threads");

extern "C" __global__ void __launch_bounds__(THREADS) attention_naive(
    const elem_t* __restrict__ q,  // [batch, heads_q, seqlen_q, head_dim]    strides in elements,
    const elem_t* __restrict__ k,  // [batch, heads_kv, seqlen_k, head_dim]   last dimension
    const elem_t* __restrict__ v,  // [batch, heads_kv, seqlen_k, head_dim_v] contiguous
    elem_t* __restrict__ o,        // [batch, heads_q, seqlen_q, head_dim_v]
    float* __restrict__ lse,       // [batch, heads_q, seqlen_q] contiguous, or null
    const Strides q_strides, const Strides k_strides, const Strides v_strides,
    const Strides o_strides, const int heads_q, const int group_size,  // query heads a KV head
    const int seqlen_q, const int seqlen_k, const int head_dim, const int head_dim_v,
    const float softmax_scale_log2,  // softmax_scale * log2(e), not 0
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;

  const QueryBlock<NUM_WARPS> place(blockIdx.x, seqlen_q, heads_q);
  const int row = place.q0 + warp, kv_head = place.head / group_size;
  if (row >= seqlen_q) return;
  q += place.batch * q_strides.batch + place.head * q_strides.head + row * q_strides.row;
  k += place.batch * k_strides.batch + kv_head * k_strides.head;
  v += place.batch * v_strides.batch + kv_head * v_strides.head;
  o += place.batch * o_strides.batch + place.head * o_strides.head + row * o_strides.row;
  const int keys = causal ? min(seqlen_k, row + seqlen_k - seqlen_q + 1) : seqlen_k;  // may be < 0

  float query[COLUMNS], acc[COLUMNS] = {};
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const int column = lane + i * WARP_SIZE;
    query[i] = column < head_dim ? static_cast<float>(q[column]) * softmax_scale_log2 : 0.f;
  }
  const auto score = [&](int key) {
    const elem_t* k_row = k + key * k_strides.row;
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int column = lane + i * WARP_SIZE;
      if (column < head_dim) dot = fmaf(query[i], static_cast<float>(k_row[column]), dot);
    }
    return lanes_sum<WARP_SIZE>(dot);
  };

  // First pass: the row's maximum.
  float row_max = NEG_INFINITY, row_sum = 0.f;
  for (int key = 0; key < keys; ++key) row_max = fmaxf(row_max, score(key));

  // Second pass: the sum of the exponentials, and of the values weighted with them.
  for (int key = 0; key < keys; ++key) {
    const float p = exp2f(score(key) - row_max);
    row_sum += p;
    const elem_t* v_row = v + key * v_strides.row;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int column = lane + i * WARP_SIZE;
      if (column < head_dim_v) acc[i] = fmaf(p, static_cast<float>(v_row[column]), acc[i]);
    }
  }

  // A row without keys: zeros, and minus infinity.
  const float inverse = keys > 0 ? 1.f / row_sum : 0.f;
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const int column = lane + i * WARP_SIZE;
    if (column < head_dim_v) o[column] = static_cast<elem_t>(acc[i] * inverse);
  }
  if (lse != nullptr && lane == 0)
    lse[(static_cast<i64>(place.batch) * heads_q + place.head) * seqlen_q + row] =
        keys > 0 ? (row_max + log2f(row_sum)) * LN2 : NEG_INFINITY;
}
