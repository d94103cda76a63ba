/* Attention backward, dK and dV, every product in fp32 FMAs (no tensor cores).

   A block owns BLOCK_K keys of one KV head and walks over the query rows that see them, of all
   query heads that read this KV head, in tiles of BLOCK_Q:

     for each tile:   S' = K Q^T                    keys are rows
                      P' = 2^(S' * c - lse)         c = softmax_scale * log2(e)
                      dS' = P' (V dO^T - delta)
                      dV += P' dO,  dK += dS' Q
     at the end:      dK *= softmax_scale

   For fp32 inputs, and for 16-bit ones on sm_75. Every architecture. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "attention/fp32.cuh"
#include "attention/key_block.cuh"
//% if form
#include "attention/backward/features.cuh"
//% endif

using elem_t = ${dtype};
constexpr int BLOCK_K = ${own};    // keys of a block
constexpr int BLOCK_Q = ${other};  // query rows of a tile
constexpr int NUM_WARPS = ${num_warps};
constexpr int HEAD_DIM = ${head_dim};      // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};  // of v and dout, padded
constexpr bool ALIGNED = ${aligned};       // rows of all arrays start on 16-byte boundaries
constexpr int GUARD = ${guard} / 4;        // floats between tiles: 0 except where memory is checked
//% if form
using bias_t = ${bias_dtype};
constexpr bool VARLEN = ${varlen};  // packed sequences
constexpr bool SOFTCAP = ${softcap}, ALIBI = ${alibi}, BIAS = ${bias}, MASK = ${mask};
constexpr bool SCORE_MOD = ${has_mod}, CURVED = SOFTCAP || SCORE_MOD;

// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"
//% endif

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS = BLOCK_K / (THREADS / LANES);  // of a thread
constexpr int QUERIES = BLOCK_Q / LANES;           // of a thread, in S'
constexpr int K_PITCH = HEAD_DIM + 4, V_PITCH = HEAD_DIM_V + 4, P_PITCH = BLOCK_Q + 4;

static_assert(ROWS >= 1 && ROWS * THREADS == BLOCK_K * LANES, "warps share the rows evenly");
static_assert(BLOCK_Q % LANES == 0, "lanes share the queries evenly");
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM_V % 64 == 0, "16 lanes, float4s");

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_keys_fp32(
    //% if form
    // Null where the form has no such thing. Packed: dout, q and dq are [total_q, heads_q, dim], k,
    // v and their gradients [total_k, heads_kv, dim], the rows of lse_log2 and delta as
    // attention/backward/padded_rows.cuh says.
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_k,    // [batch + 1]
    const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q]
    const bias_t* __restrict__ bias,         // [batch, heads_q, seqlen_q, seqlen_k], broadcast
    const u8* __restrict__ mask /* the same; 0 hides the key */ ${score_arrays},
    //% endif
    const elem_t* __restrict__ dout,     // [batch, heads_q, seqlen_q, head_dim_v] strides in
    const elem_t* __restrict__ q,        // [batch, heads_q, seqlen_q, head_dim]   elements,
    const elem_t* __restrict__ k,        // [batch, heads_kv, seqlen_k, head_dim]  last dimension
    const elem_t* __restrict__ v,        // [batch, heads_kv, seqlen_k, head_dim_v] contiguous
    const float* __restrict__ lse_log2,  // [batch, heads_q, rows_padded] contiguous
    const float* __restrict__ delta,     // the same
    elem_t* __restrict__ dk,             // as k
    elem_t* __restrict__ dv,             // as v
    const Strides dout_strides, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const Strides dk_strides, const Strides dv_strides, const int heads_q,
    const int group_size,  // query heads a KV head
    const int ${seqlen_q}, const int ${seqlen_k}, const int head_dim, const int head_dim_v,
    //% if form
    const AttentionForm form${score_scalars},
    //% endif
    const int rows_padded, const float softmax_scale,
    const float softmax_scale_log2,  // softmax_scale * log2(e)
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(16) float shared_memory[];
  float* k_tile = shared_memory;                        // [BLOCK_K][K_PITCH]
  float* v_tile = k_tile + BLOCK_K * K_PITCH + GUARD;   // [BLOCK_K][V_PITCH]
  float* q_tile = v_tile + BLOCK_K * V_PITCH + GUARD;   // [BLOCK_Q][K_PITCH]
  float* do_tile = q_tile + BLOCK_Q * K_PITCH + GUARD;  // [BLOCK_Q][V_PITCH]
  float* p_tile = do_tile + BLOCK_Q * V_PITCH + GUARD;  // [BLOCK_K][P_PITCH]
  float* ds_tile = p_tile + BLOCK_K * P_PITCH + GUARD;  // [BLOCK_K][P_PITCH]
  const int x = threadIdx.x % LANES;
  const int row0 = threadIdx.x / WARP_SIZE * 2 * ROWS + threadIdx.x % WARP_SIZE / LANES;

  //% if form
  const KeyBlock<BLOCK_K> place(blockIdx.x, max_seqlen_k, heads_q / group_size);
  const SequenceRows<VARLEN> queries(cu_seqlens_q, place.batch, max_seqlen_q);
  const SequenceRows<VARLEN> held(cu_seqlens_k, place.batch, max_seqlen_k);
  const int seqlen_q = queries.length, seqlen_k = held.length;
  if (VARLEN && place.k0 >= seqlen_k) return;
  q += queries.start * q_strides.row;
  dout += queries.start * dout_strides.row;
  k += held.start * k_strides.row;
  v += held.start * v_strides.row;
  //% else
  const KeyBlock<BLOCK_K> place(blockIdx.x, seqlen_k, heads_q / group_size);
  //% endif
  const int k0 = place.k0, kv_head = place.head;
  const i64 batch = place.batch;

  //% if form
  const KeyBand band(seqlen_q, seqlen_k, form.window_left, form.window_right);
  const int first_tile = band.first_row(k0) / BLOCK_Q;
  const int end_row = min(band.end_row(min(k0 + BLOCK_K, seqlen_k) - 1), seqlen_q);
  const int tiles = ceil_div(max(end_row, 0), BLOCK_Q);
  //% else
  // Query i sees key row r of the block if i >= first_seeing + r.
  const int first_seeing = causal ? k0 - (seqlen_k - seqlen_q) : -BLOCK_K;
  const int first_tile = max(first_seeing, 0) / BLOCK_Q, tiles = ceil_div(seqlen_q, BLOCK_Q);
  //% endif

  // 1. K and V.
  copy_tile_fp32<BLOCK_K, HEAD_DIM, K_PITCH, THREADS, ALIGNED>(
      k_tile, k + batch * k_strides.batch + kv_head * k_strides.head + k0 * k_strides.row,
      k_strides.row, seqlen_k - k0, head_dim);
  copy_tile_fp32<BLOCK_K, HEAD_DIM_V, V_PITCH, THREADS, ALIGNED>(
      v_tile, v + batch * v_strides.batch + kv_head * v_strides.head + k0 * v_strides.row,
      v_strides.row, seqlen_k - k0, head_dim_v);

  float dk_acc[ROWS][HEAD_DIM / 64][4] = {}, dv_acc[ROWS][HEAD_DIM_V / 64][4] = {};
  const int count = max(tiles - first_tile, 0);
  for (int i = 0; i < count * group_size; ++i) {
    const int head = kv_head * group_size + i / count, q0 = (first_tile + i % count) * BLOCK_Q;
    // 2. The tile before is used up, this one is fetched.
    __syncthreads();
    copy_tile_fp32<BLOCK_Q, HEAD_DIM, K_PITCH, THREADS, ALIGNED>(
        q_tile, q + batch * q_strides.batch + head * q_strides.head + q0 * q_strides.row,
        q_strides.row, seqlen_q - q0, head_dim);
    copy_tile_fp32<BLOCK_Q, HEAD_DIM_V, V_PITCH, THREADS, ALIGNED>(
        do_tile,
        dout + batch * dout_strides.batch + head * dout_strides.head + q0 * dout_strides.row,
        dout_strides.row, seqlen_q - q0, head_dim_v);
    // 3. It has arrived, K and V with the first.
    __syncthreads();

    float s[ROWS][QUERIES], dp[ROWS][QUERIES];
    dot_rows<HEAD_DIM, K_PITCH>(s, k_tile + row0 * K_PITCH, q_tile + x * K_PITCH);
    dot_rows<HEAD_DIM_V, V_PITCH>(dp, v_tile + row0 * V_PITCH, do_tile + x * V_PITCH);
    //% if form
    const auto rules = backward_rules<SOFTCAP, true, SCORE_MOD, ALIBI>(
        form, ScoreMod{place.batch, head, seqlen_q, seqlen_k${score_values}}, alibi_slopes, batch,
        head, seqlen_q, seqlen_k);
    const auto arrays = backward_arrays<BIAS, false, MASK, false>(form, bias, mask, batch, head,
                                                                  seqlen_q, seqlen_k);
    //% endif
    //% if form
    const i64 row =
        first_padded_row<VARLEN>(batch, head, heads_q, rows_padded, queries.start) + q0 + x;
    //% else
    const i64 row = (batch * heads_q + head) * rows_padded + q0 + x;
    //% endif
#pragma unroll
    for (int j = 0; j < QUERIES; ++j) {
      const float lse = lse_log2[row + j * LANES], less = delta[row + j * LANES];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int key = row0 + 2 * r, place = key * P_PITCH + x + j * LANES;
        //% if form
        const float slope = final_score<CURVED>(s[r][j], rules, arrays, band, softmax_scale,
                                                q0 + x + j * LANES, k0 + key);
        const float p = exp2_fast(fmaf(s[r][j], LOG2E, -lse));
        ds_tile[place] = p * slope * (dp[r][j] - less);
        //% else
        const bool seen = q0 + x + j * LANES >= first_seeing + key;
        const float p = seen ? exp2_fast(fmaf(s[r][j], softmax_scale_log2, -lse)) : 0.f;
        ds_tile[place] = p * (dp[r][j] - less);
        //% endif
        p_tile[place] = p;
      }
    }
    __syncwarp();
    add_rows<BLOCK_Q, P_PITCH, V_PITCH>(dv_acc, p_tile + row0 * P_PITCH, do_tile + 4 * x);
    add_rows<BLOCK_Q, P_PITCH, K_PITCH>(dk_acc, ds_tile + row0 * P_PITCH, q_tile + 4 * x);
  }

  //% if form
  dk += held.start * dk_strides.row;
  dv += held.start * dv_strides.row;
  //% endif
  dk += batch * dk_strides.batch + kv_head * dk_strides.head + k0 * dk_strides.row;
  dv += batch * dv_strides.batch + kv_head * dv_strides.head + k0 * dv_strides.row;
  store_rows<ALIGNED>(dk, dk_strides.row, dk_acc, softmax_scale, x, row0, seqlen_k - k0, head_dim);
  store_rows<ALIGNED>(dv, dv_strides.row, dv_acc, 1.f, x, row0, seqlen_k - k0, head_dim_v);
}
