/* Attention backward, the gradient of a bias, every product in fp32 FMAs (no tensor cores).

   A block owns BLOCK_Q rows and BLOCK_K keys of it, or BLOCK_K keys where all rows share one, and
   walks over the batches, heads and query tiles that share them (attention/backward/bias_walk.cuh), as
   backward_bias.cu does:

     for each:    dbias += P (dO V^T - delta)     P = 2^(final score * log2(e) - lse)

   For fp32 inputs, and for 16-bit ones on sm_75. Every architecture. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "attention/backward/bias_walk.cuh"
#include "attention/backward/features.cuh"
#include "attention/fp32.cuh"

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${own};    // rows of a block
constexpr int BLOCK_K = ${other};  // keys of a block
constexpr int NUM_WARPS = ${num_warps};
constexpr int HEAD_DIM = ${head_dim};      // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};  // of v and dout, padded
constexpr bool ALIGNED = ${aligned};       // rows of all arrays start on 16-byte boundaries
constexpr int GUARD = ${guard} / 4;        // floats between tiles: 0 except where memory is checked
using bias_t = ${bias_dtype};
constexpr bool VARLEN = ${varlen};  // packed sequences
constexpr bool SOFTCAP = ${softcap}, ALIBI = ${alibi}, BIAS = ${bias}, MASK = ${mask};
constexpr bool SCORE_MOD = ${has_mod};

// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS = BLOCK_Q / (THREADS / LANES);  // of a thread
constexpr int KEYS = BLOCK_K / LANES;              // of a thread
constexpr int Q_PITCH = HEAD_DIM + 4, DO_PITCH = HEAD_DIM_V + 4;

static_assert(ROWS >= 1 && ROWS * THREADS == BLOCK_Q * LANES, "warps share the rows evenly");
static_assert(BLOCK_K % LANES == 0, "lanes share the keys evenly");
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM_V % 64 == 0, "16 lanes, float4s");
static_assert(2 * NUM_WARPS * BLOCK_K <= BLOCK_Q * Q_PITCH, "sums of columns take the place of Q");

// Sums of this block's rows, where the bias has one for all, in sums[BLOCK_K].
__device__ __forceinline__ void add_columns(const float (&acc)[ROWS][KEYS], float* sums) {
  const int x = threadIdx.x % LANES, group = threadIdx.x / LANES;
#pragma unroll
  for (int j = 0; j < KEYS; ++j) {
    float sum = 0.f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sum += acc[r][j];
    sums[group * BLOCK_K + x + j * LANES] = sum;
  }
  __syncthreads();
  for (int key = threadIdx.x; key < BLOCK_K; key += THREADS)  // each its own
    for (int other = 1; other < THREADS / LANES; ++other) sums[key] += sums[other * BLOCK_K + key];
}

// This block's tile -> its place in the gradient, or in the sums of a part of it.
template <typename T>
__device__ __forceinline__ void store(T* __restrict__ tile, const BiasShape& shape, int rows,
                                      int k0, const float (&acc)[ROWS][KEYS], float* sums) {
  if (shape.rows == 1) {
    add_columns(acc, sums);
    for (int key = threadIdx.x; key < min(BLOCK_K, shape.columns - k0); key += THREADS)
      tile[k0 + key] = static_cast<T>(sums[key]);
    return;
  }
  const int x = threadIdx.x % LANES;
  const int row0 = threadIdx.x / WARP_SIZE * 2 * ROWS + threadIdx.x % WARP_SIZE / LANES;
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      const int row = row0 + 2 * r, column = k0 + x + j * LANES;
      if (row < rows && column < shape.columns)
        tile[static_cast<i64>(row) * shape.columns + column] = static_cast<T>(acc[r][j]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_bias_fp32(
    // Null where the form has no such thing; packed arrays as in backward_dkdv.cu.
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_k,    // [batch + 1]
    const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q]
    const bias_t* __restrict__ bias,         // [batch, heads_q, seqlen_q, seqlen_k], broadcast
    const u8* __restrict__ mask /* the same; 0 hides the key */ ${score_arrays},
    const elem_t* __restrict__ dout,     // [batch, heads_q, seqlen_q, head_dim_v] strides in
    const elem_t* __restrict__ q,        // [batch, heads_q, seqlen_q, head_dim]   elements,
    const elem_t* __restrict__ k,        // [batch, heads_kv, seqlen_k, head_dim]  last dimension
    const elem_t* __restrict__ v,        // [batch, heads_kv, seqlen_k, head_dim_v] contiguous
    const float* __restrict__ lse_log2,  // [batch, heads_q, rows_padded] contiguous
    const float* __restrict__ delta,     // the same
    bias_t* __restrict__ dbias,          // [bias_batch, bias_heads, bias_rows, max_seqlen_k]
    float* __restrict__ dbias_parts,     // [parts, as dbias], or null where there is one part
    const Strides dout_strides, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const int batch, const int heads_q,
    const int group_size,  // query heads a KV head
    const int max_seqlen_q, const int max_seqlen_k, const int head_dim, const int head_dim_v,
    const AttentionForm form${score_scalars}, const int rows_padded, const int bias_batch,
    const int bias_heads, const int bias_rows, const int parts) {
  extern __shared__ __align__(16) float shared_memory[];
  float* q_tile = shared_memory;                         // [BLOCK_Q][Q_PITCH]
  float* do_tile = q_tile + BLOCK_Q * Q_PITCH + GUARD;   // [BLOCK_Q][DO_PITCH]
  float* k_tile = do_tile + BLOCK_Q * DO_PITCH + GUARD;  // [BLOCK_K][Q_PITCH]
  float* v_tile = k_tile + BLOCK_K * Q_PITCH + GUARD;    // [BLOCK_K][DO_PITCH]
  const int x = threadIdx.x % LANES;
  const int row0 = threadIdx.x / WARP_SIZE * 2 * ROWS + threadIdx.x % WARP_SIZE / LANES;
  const BiasShape shape{bias_batch, bias_heads, bias_rows, max_seqlen_k};
  const BiasTile<BLOCK_Q, BLOCK_K> tile(blockIdx.x, shape);
  const BiasProblem problem{batch,        heads_q,          max_seqlen_q,
                            max_seqlen_k, form.window_left, form.window_right,
                            parts,        cu_seqlens_q,     cu_seqlens_k};

  float acc[ROWS][KEYS] = {};
  BiasWalk<VARLEN, BLOCK_Q, BLOCK_K> at(tile, shape, problem);
  for (; at.step < at.end; at.advance(tile, shape, problem)) {
    const i64 query = at.q_start + at.q0, key = at.k_start + tile.k0;
    const int kv_head = at.head / group_size;
    // 1. The tiles before are used up, these are fetched.
    __syncthreads();
    copy_tile_fp32<BLOCK_Q, HEAD_DIM, Q_PITCH, THREADS, ALIGNED>(
        q_tile, q + at.batch * q_strides.batch + at.head * q_strides.head + query * q_strides.row,
        q_strides.row, at.seqlen_q - at.q0, head_dim);
    copy_tile_fp32<BLOCK_Q, HEAD_DIM_V, DO_PITCH, THREADS, ALIGNED>(
        do_tile,
        dout + at.batch * dout_strides.batch + at.head * dout_strides.head +
            query * dout_strides.row,
        dout_strides.row, at.seqlen_q - at.q0, head_dim_v);
    copy_tile_fp32<BLOCK_K, HEAD_DIM, Q_PITCH, THREADS, ALIGNED>(
        k_tile, k + at.batch * k_strides.batch + kv_head * k_strides.head + key * k_strides.row,
        k_strides.row, at.seqlen_k - tile.k0, head_dim);
    copy_tile_fp32<BLOCK_K, HEAD_DIM_V, DO_PITCH, THREADS, ALIGNED>(
        v_tile, v + at.batch * v_strides.batch + kv_head * v_strides.head + key * v_strides.row,
        v_strides.row, at.seqlen_k - tile.k0, head_dim_v);
    // 2. They have arrived.
    __syncthreads();

    float s[ROWS][KEYS], dp[ROWS][KEYS];
    dot_rows<HEAD_DIM, Q_PITCH>(s, q_tile + row0 * Q_PITCH, k_tile + x * Q_PITCH);
    dot_rows<HEAD_DIM_V, DO_PITCH>(dp, do_tile + row0 * DO_PITCH, v_tile + x * DO_PITCH);
    const KeyBand band(at.seqlen_q, at.seqlen_k, form.window_left, form.window_right);
    const auto rules = backward_rules<SOFTCAP, true, SCORE_MOD, ALIBI>(
        form, ScoreMod{at.batch, at.head, at.seqlen_q, at.seqlen_k${score_values}}, alibi_slopes,
        at.batch, at.head, at.seqlen_q, at.seqlen_k);
    const auto arrays = backward_arrays<BIAS, false, MASK, false>(
        form, bias, mask, at.batch, at.head, at.seqlen_q, at.seqlen_k);
    const i64 rows =
        first_padded_row<VARLEN>(at.batch, at.head, heads_q, rows_padded, at.q_start) + at.q0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = row0 + 2 * r;
      const float lse = lse_log2[rows + row], less = delta[rows + row];
#pragma unroll
      for (int j = 0; j < KEYS; ++j) {
        final_score<false>(s[r][j], rules, arrays, band, form.softmax_scale, at.q0 + row,
                           tile.k0 + x + j * LANES);
        acc[r][j] = fmaf(exp2_fast(fmaf(s[r][j], LOG2E, -lse)), dp[r][j] - less, acc[r][j]);
      }
    }
  }

  // 3. The sums, where Q was.
  __syncthreads();
  const i64 place = tile.offset(shape);
  if (parts == 1) {
    store(dbias + place, shape, bias_rows - tile.row0, tile.k0, acc, shared_memory);
  } else {
    store(dbias_parts + tile.part * shape.size() + place, shape, bias_rows - tile.row0, tile.k0,
          acc, shared_memory);
  }
}
