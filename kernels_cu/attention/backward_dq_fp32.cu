/* Attention backward, dQ, every product in fp32 FMAs (no tensor cores).

   A block owns BLOCK_Q query rows of one head and walks over the keys that they see in tiles of
   BLOCK_K:

     for each tile:   P  = 2^(Q K^T * c - lse)      c = softmax_scale * log2(e)
                      dS = P (dO V^T - delta)
                      dQ += dS K
     at the end:      dQ *= softmax_scale

   For fp32 inputs, and for 16-bit ones on sm_75. Every architecture. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "attention/fp32.cuh"
#include "attention/query_block.cuh"
//% if form
#include "attention/backward/features.cuh"
//% endif

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${own};    // query rows of a block
constexpr int BLOCK_K = ${other};  // keys of a tile
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
constexpr bool DALIBI = ${dalibi};  // whether slopes of ALiBi have a gradient

// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"
//% endif

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS = BLOCK_Q / (THREADS / LANES);  // of a thread
constexpr int KEYS = BLOCK_K / LANES;              // of a thread, in S
constexpr int Q_PITCH = HEAD_DIM + 4, DO_PITCH = HEAD_DIM_V + 4, DS_PITCH = BLOCK_K + 4;

static_assert(ROWS >= 1 && ROWS * THREADS == BLOCK_Q * LANES, "warps share the rows evenly");
static_assert(BLOCK_K % LANES == 0, "lanes share the keys evenly");
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM_V % 64 == 0, "16 lanes, float4s");

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_queries_fp32(
    //% if form
    // Null where the form has no such thing. Packed: dout, q and dq are [total_q, heads_q, dim], k,
    // v and their gradients [total_k, heads_kv, dim], the rows of lse_log2 and delta as
    // attention/backward/padded_rows.cuh says.
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_k,    // [batch + 1]
    const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q]
    const bias_t* __restrict__ bias,         // [batch, heads_q, seqlen_q, seqlen_k], broadcast
    const u8* __restrict__ mask /* the same; 0 hides the key */ ${score_arrays},
    const float* __restrict__ dlse,  // as lse of the forward; or null
    float* __restrict__ dalibi_rows,  // as delta: what rows add to the gradient of their slope; or null
    //% endif
    const elem_t* __restrict__ dout,     // [batch, heads_q, seqlen_q, head_dim_v] strides in
    const elem_t* __restrict__ q,        // [batch, heads_q, seqlen_q, head_dim]   elements,
    const elem_t* __restrict__ k,        // [batch, heads_kv, seqlen_k, head_dim]  last dimension
    const elem_t* __restrict__ v,        // [batch, heads_kv, seqlen_k, head_dim_v] contiguous
    const float* __restrict__ lse_log2,  // [batch, heads_q, rows_padded] contiguous
    const float* __restrict__ delta,     // the same
    elem_t* __restrict__ dq,             // as q
    const Strides dout_strides, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const Strides dq_strides, const int heads_q,
    const int group_size,  // query heads a KV head
    const int ${seqlen_q}, const int ${seqlen_k}, const int head_dim, const int head_dim_v,
    //% if form
    const AttentionForm form${score_scalars},
    //% endif
    const int rows_padded, const float softmax_scale,
    const float softmax_scale_log2,  // softmax_scale * log2(e)
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(16) float shared_memory[];
  float* q_tile = shared_memory;                         // [BLOCK_Q][Q_PITCH]
  float* do_tile = q_tile + BLOCK_Q * Q_PITCH + GUARD;   // [BLOCK_Q][DO_PITCH]
  float* k_tile = do_tile + BLOCK_Q * DO_PITCH + GUARD;  // [BLOCK_K][Q_PITCH]
  float* v_tile = k_tile + BLOCK_K * Q_PITCH + GUARD;    // [BLOCK_K][DO_PITCH]
  float* ds_tile = v_tile + BLOCK_K * DO_PITCH + GUARD;  // [BLOCK_Q][DS_PITCH]
  const int x = threadIdx.x % LANES;
  const int row0 = threadIdx.x / WARP_SIZE * 2 * ROWS + threadIdx.x % WARP_SIZE / LANES;

  //% if form
  const QueryBlock<BLOCK_Q> place(blockIdx.x, max_seqlen_q, heads_q);
  const SequenceRows<VARLEN> queries(cu_seqlens_q, place.batch, max_seqlen_q);
  const SequenceRows<VARLEN> held(cu_seqlens_k, place.batch, max_seqlen_k);
  const int seqlen_q = queries.length, seqlen_k = held.length;
  if (VARLEN && place.q0 >= seqlen_q) return;
  q += queries.start * q_strides.row;
  dout += queries.start * dout_strides.row;
  dq += queries.start * dq_strides.row;
  k += held.start * k_strides.row;
  v += held.start * v_strides.row;
  //% else
  const QueryBlock<BLOCK_Q> place(blockIdx.x, seqlen_q, heads_q);
  //% endif
  const int q0 = place.q0, kv_head = place.head / group_size;
  q += place.batch * q_strides.batch + place.head * q_strides.head + q0 * q_strides.row;
  dq += place.batch * dq_strides.batch + place.head * dq_strides.head + q0 * dq_strides.row;
  dout += place.batch * dout_strides.batch + place.head * dout_strides.head;
  dout += q0 * dout_strides.row;
  k += place.batch * k_strides.batch + kv_head * k_strides.head;
  v += place.batch * v_strides.batch + kv_head * v_strides.head;

  //% if form
  const KeyBand band(seqlen_q, seqlen_k, form.window_left, form.window_right);
  const BandTiles<BLOCK_K> tiles(band, q0, min(q0 + BLOCK_Q, seqlen_q) - 1);
  const auto rules = backward_rules<SOFTCAP, true, SCORE_MOD, ALIBI>(
      form, ScoreMod{place.batch, place.head, seqlen_q, seqlen_k${score_values}}, alibi_slopes,
      place.batch, place.head, seqlen_q, seqlen_k);
  const auto arrays = backward_arrays<BIAS, false, MASK, false>(form, bias, mask, place.batch,
                                                                place.head, seqlen_q, seqlen_k);
  const int first_key = tiles.first * BLOCK_K, keys = min(tiles.end * BLOCK_K, seqlen_k);
  //% else
  // Query row i of the block sees keys 0 .. min(seqlen_k, first_hidden + i) - 1.
  const int first_hidden = causal ? q0 + seqlen_k - seqlen_q + 1 : seqlen_k;
  const int last_row = min(BLOCK_Q, seqlen_q - q0) - 1;
  const int keys = min(seqlen_k, causal ? first_hidden + last_row : seqlen_k);
  const int first_key = 0;
  //% endif

  // 1. Q, dO, and what each row brings along.
  copy_tile_fp32<BLOCK_Q, HEAD_DIM, Q_PITCH, THREADS, ALIGNED>(q_tile, q, q_strides.row,
                                                               seqlen_q - q0, head_dim);
  copy_tile_fp32<BLOCK_Q, HEAD_DIM_V, DO_PITCH, THREADS, ALIGNED>(do_tile, dout, dout_strides.row,
                                                                  seqlen_q - q0, head_dim_v);
  float lse[ROWS], less[ROWS];
  //% if form
  const i64 head_row =
      first_padded_row<VARLEN>(place.batch, place.head, heads_q, rows_padded, queries.start);
  //% else
  const i64 head_row = (static_cast<i64>(place.batch) * heads_q + place.head) * rows_padded;
  //% endif
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    lse[r] = lse_log2[head_row + q0 + row0 + 2 * r];
    less[r] = delta[head_row + q0 + row0 + 2 * r];
  }

  float acc[ROWS][HEAD_DIM / 64][4] = {};
  //% if form
  DistanceSum distances[ROWS];  // with DALIBI
  //% endif
  for (int k0 = first_key; k0 < keys; k0 += BLOCK_K) {
    // 2. The tile before is used up, this one is fetched.
    __syncthreads();
    copy_tile_fp32<BLOCK_K, HEAD_DIM, Q_PITCH, THREADS, ALIGNED>(
        k_tile, k + k0 * k_strides.row, k_strides.row, seqlen_k - k0, head_dim);
    copy_tile_fp32<BLOCK_K, HEAD_DIM_V, DO_PITCH, THREADS, ALIGNED>(
        v_tile, v + k0 * v_strides.row, v_strides.row, seqlen_k - k0, head_dim_v);
    // 3. It has arrived, Q and dO with the first.
    __syncthreads();

    float s[ROWS][KEYS], dp[ROWS][KEYS];
    dot_rows<HEAD_DIM, Q_PITCH>(s, q_tile + row0 * Q_PITCH, k_tile + x * Q_PITCH);
    dot_rows<HEAD_DIM_V, DO_PITCH>(dp, do_tile + row0 * DO_PITCH, v_tile + x * DO_PITCH);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = row0 + 2 * r;
      //% if not form
      const int visible = min(seqlen_k, causal ? first_hidden + row : seqlen_k) - k0 - x;
      //% endif
#pragma unroll
      for (int j = 0; j < KEYS; ++j) {
        //% if form
        const float slope = final_score<CURVED>(s[r][j], rules, arrays, band, softmax_scale,
                                                q0 + row, k0 + x + j * LANES);
        const float p = exp2_fast(fmaf(s[r][j], LOG2E, -lse[r]));
        const float ds = p * (dp[r][j] - less[r]);
        if constexpr (DALIBI)
          distances[r].add(ds, p, q0 + row + seqlen_k - seqlen_q - k0 - x - j * LANES);
        ds_tile[row * DS_PITCH + x + j * LANES] = ds * slope;
        //% else
        const float p = exp2_fast(fmaf(s[r][j], softmax_scale_log2, -lse[r]));
        ds_tile[row * DS_PITCH + x + j * LANES] =
            j * LANES < visible ? p * (dp[r][j] - less[r]) : 0.f;
        //% endif
      }
    }
    __syncwarp();
    add_rows<BLOCK_K, DS_PITCH, Q_PITCH>(acc, ds_tile + row0 * DS_PITCH, k_tile + 4 * x);
  }
  //% if form
  if constexpr (DALIBI) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = q0 + row0 + 2 * r;
      distances[r].template join<LANES>();
      if (x > 0 || row >= seqlen_q) continue;
      const float* row_dlse = dlse;
      if (dlse != nullptr)
        row_dlse += VARLEN
                        ? static_cast<i64>(place.head) * form.total_q + queries.start + row
                        : (static_cast<i64>(place.batch) * heads_q + place.head) * seqlen_q + row;
      dalibi_rows[head_row + row] = distances[r].value(less[r], row_dlse);
    }
  }
  //% endif
  store_rows<ALIGNED>(dq, dq_strides.row, acc, softmax_scale, x, row0, seqlen_q - q0, head_dim);
}
