/* Attention forward, one pass over the keys, every product in fp32 FMAs (no tensor cores).

   o = softmax(softmax_scale * q k^T + causal mask) v         lse = log(sum(exp(scores)))

   For fp32 inputs, where tensor cores would round q, k, v to ten bits of mantissa, and for bf16 on
   sm_75, which has no bf16 tensor cores. Every architecture.

     for each tile:   S  = c Q K^T                  c = softmax_scale * log2(e)
                      m' = max(m, rowmax S)         shuffles over the 16 lanes that share a row
                      P  = 2^(S - m')               through shared memory, within a warp
                      O  = O * 2^(m - m') + P V
     at the end:      o  = O / rowsum P,  lse = (m + log2(rowsum P)) * ln(2)

   Who computes what: LANES = 16 threads share a row, a warp has two groups of them. Thread (g, x)
   does rows g, g + 2, ... of its warp, and in S keys x, x + 16, ..., in O columns 4x .. 4x + 3 of
   each 64. With eight rows a thread, S takes 12 float4 loads from shared memory for 128 FMAs, P V
   16 for 256 (head_dim_v = 128): the FMA pipes, 128 a cycle and SM, stay ahead of shared memory's
   32 words. Neighbouring rows of Q and K are 4 banks apart, those of P 4 or (BLOCK_K an odd
   multiple of 16) 20, so no load of a product meets a bank conflict.

   K and V have a tile each, and two barriers a tile keep them: while one of the two is multiplied,
   the other is fetched for the next product.

   Forms of attention are rendered in as they are in flash.cu.

   Source: Dao, "FlashAttention-2" (2023), for the algorithm. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "tile/reduce.cuh"
#include "tile/tile_fp32.cuh"
#include "attention/fp32.cuh"
//% if form
#include "attention/features.cuh"
//% endif

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${block_q};  // query rows of a block
constexpr int BLOCK_K = ${block_k};  // keys of a tile
constexpr int NUM_WARPS = ${num_warps};
constexpr int HEAD_DIM = ${head_dim};                    // of q and k, padded with zeros
constexpr int HEAD_DIM_V = round_up(${head_dim_v}, 64);  // of v and o, padded: 16 lanes, float4s
constexpr int MIN_BLOCKS = ${min_blocks};  // blocks an SM should hold: caps the registers
constexpr bool ALIGNED = ${aligned};       // rows of q, k, v, o start on 16-byte boundaries
constexpr int GUARD = ${guard} / 4;        // floats between tiles: 0 except where memory is checked
//% if form
using bias_t = ${bias_dtype};
constexpr bool VARLEN = ${varlen};  // packed sequences
constexpr bool SOFTCAP = ${softcap}, ALIBI = ${alibi}, SINKS = ${sinks};
constexpr bool BIAS = ${bias}, BIAS_PAIRED = ${bias_paired};  // paired: see attention/score.cuh
constexpr bool MASK = ${mask}, MASK_PAIRED = ${mask_paired};

// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"
//% endif

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS = BLOCK_Q / (THREADS / LANES);  // of a thread
constexpr int ROWS_A_WARP = 2 * ROWS;
constexpr int KEYS = BLOCK_K / LANES;              // of a thread, in S
constexpr int VECTORS = HEAD_DIM_V / (4 * LANES);  // float4s of a thread, in O

static_assert(ROWS >= 1 && ROWS * THREADS == BLOCK_Q * LANES, "warps share the rows evenly");
static_assert(BLOCK_K % LANES == 0, "lanes share the keys evenly");
static_assert(HEAD_DIM % 32 == 0, "the padding of QK_PITCH turns rows by four banks");

// Shared memory in floats: Q and K with padding, V without (its rows are read along), P with.
constexpr int QK_PITCH = HEAD_DIM + 4, P_PITCH = BLOCK_K + 4;
constexpr int Q_FLOATS = BLOCK_Q * QK_PITCH, K_FLOATS = BLOCK_K * QK_PITCH;
constexpr int V_FLOATS = BLOCK_K * HEAD_DIM_V;  // + BLOCK_Q * P_PITCH of P; times 4 in bytes

// S = Q K^T for this thread's rows (two apart) and keys (LANES apart).
__device__ __forceinline__ void multiply_qk(float (&s)[ROWS][KEYS], const float* q_rows,
                                            const float* k_rows) {
#pragma unroll 2
  for (int d = 0; d < HEAD_DIM; d += 4) {
    float4 key[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; ++j) key[j] = load4(k_rows + j * LANES * QK_PITCH + d);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float4 query = load4(q_rows + 2 * i * QK_PITCH + d);
#pragma unroll
      for (int j = 0; j < KEYS; ++j) {
        s[i][j] = fmaf(query.x, key[j].x, s[i][j]);
        s[i][j] = fmaf(query.y, key[j].y, s[i][j]);
        s[i][j] = fmaf(query.z, key[j].z, s[i][j]);
        s[i][j] = fmaf(query.w, key[j].w, s[i][j]);
      }
    }
  }
}

// Turns one row's scores into probabilities under the maximum so far; row_sum is this lane's part.
// Returns what the row's accumulators must be multiplied by.
__device__ __forceinline__ float online_softmax(float (&s)[KEYS], float& row_max, float& row_sum) {
  float new_max = s[0];
#pragma unroll
  for (int j = 1; j < KEYS; ++j) new_max = fmaxf(new_max, s[j]);
  new_max = fmaxf(row_max, lanes_max<LANES>(new_max));
  const float offset = new_max == NEG_INFINITY ? 0.f : new_max;  // no key yet: 2^(-inf - 0) = 0
  const float correction = exp2_fast(row_max - offset);
  row_max = new_max;
  row_sum *= correction;
#pragma unroll
  for (int j = 0; j < KEYS; ++j) {
    s[j] = exp2_fast(s[j] - offset);
    row_sum += s[j];
  }
  return correction;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_flash_fp32(
    //% if form
    // Null where the form has no such thing. Packed: q and o are [total_q, heads_q, dim], k and v
    // [total_k, heads_kv, dim], lse [heads_q, total_q].
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_k,    // [batch + 1]
    const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q]
    const bias_t* __restrict__ bias,         // [batch, heads_q, seqlen_q, seqlen_k], broadcast
    const u8* __restrict__ mask,             // the same; 0 hides the key
    const float* __restrict__ sinks /* [heads_q] */ ${score_arrays},
    //% endif
    const elem_t* __restrict__ q,  // [batch, heads_q, seqlen_q, head_dim]    strides in elements,
    const elem_t* __restrict__ k,  // [batch, heads_kv, seqlen_k, head_dim]   last dimension
    const elem_t* __restrict__ v,  // [batch, heads_kv, seqlen_k, head_dim_v] contiguous
    elem_t* __restrict__ o,        // [batch, heads_q, seqlen_q, head_dim_v]
    float* __restrict__ lse,       // [batch, heads_q, seqlen_q] contiguous, or null
    const Strides q_strides, const Strides k_strides, const Strides v_strides,
    const Strides o_strides, const int heads_q, const int group_size,  // query heads a KV head
    const int ${seqlen_q}, const int ${seqlen_k}, const int head_dim, const int head_dim_v,
    //% if form
    const AttentionForm form${score_scalars},
    //% endif
    const float softmax_scale_log2,  // softmax_scale * log2(e), not 0
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(16) float shared_memory[];
  float* q_tile = shared_memory;              // [BLOCK_Q][QK_PITCH]
  float* k_tile = q_tile + Q_FLOATS + GUARD;  // [BLOCK_K][QK_PITCH]
  float* v_tile = k_tile + K_FLOATS + GUARD;  // [BLOCK_K][HEAD_DIM_V]
  float* p_tile = v_tile + V_FLOATS + GUARD;  // [BLOCK_Q][P_PITCH]
  const int x = threadIdx.x % LANES;
  const int row0 = threadIdx.x / WARP_SIZE * ROWS_A_WARP + threadIdx.x % WARP_SIZE / LANES;

  // Blocks of one head are neighbours (they share K and V in L2), longest causal rows first.
  const int blocks_q = ceil_div(${seqlen_q}, BLOCK_Q);
  const int q0 = (blocks_q - 1 - static_cast<int>(blockIdx.x % blocks_q)) * BLOCK_Q;
  const int head = blockIdx.x / blocks_q % heads_q, batch = blockIdx.x / blocks_q / heads_q;
  q += batch * q_strides.batch + head * q_strides.head + q0 * q_strides.row;
  k += batch * k_strides.batch + (head / group_size) * k_strides.head;
  v += batch * v_strides.batch + (head / group_size) * v_strides.head;
  o += batch * o_strides.batch + head * o_strides.head + q0 * o_strides.row;

  //% if form
  const SequenceRows<VARLEN> queries(cu_seqlens_q, batch, max_seqlen_q);
  const SequenceRows<VARLEN> held(cu_seqlens_k, batch, max_seqlen_k);
  const int seqlen_q = queries.length, seqlen_k = held.length;
  if (VARLEN && q0 >= seqlen_q) return;
  q += queries.start * q_strides.row;
  k += held.start * k_strides.row;
  v += held.start * v_strides.row;
  o += queries.start * o_strides.row;
  const int last_row = min(BLOCK_Q, seqlen_q - q0) - 1;
  const KeyBand band(seqlen_q, seqlen_k, form.window_left, form.window_right);
  const BandTiles<BLOCK_K> seen(band, q0, q0 + last_row);
  const int first_tile = seen.first, tiles = seen.end;
  const auto rules = score_rules(
      RuleIf<SOFTCAP, SoftCap<true>>(form.softcap),
      PerScore<ScoreMod>({batch, head, seqlen_q, seqlen_k${score_values}}, seqlen_q, seqlen_k),
      RuleIf<ALIBI, Alibi>(alibi_slopes, form.alibi_batch_stride, batch, head, seqlen_q, seqlen_k),
      RuleIf<BIAS, Bias<bias_t, BIAS_PAIRED>>(bias, form.bias, batch, head, seqlen_q, seqlen_k),
      RuleIf<MASK, Where<u8, MASK_PAIRED>>(mask, form.mask, batch, head, seqlen_q, seqlen_k), band);
  //% else
  // Query row i of the block sees keys 0 .. min(seqlen_k, first_hidden + i) - 1.
  const int first_hidden = causal ? q0 + seqlen_k - seqlen_q + 1 : seqlen_k;
  const int last_row = min(BLOCK_Q, seqlen_q - q0) - 1;
  const int keys = min(seqlen_k, causal ? first_hidden + last_row : seqlen_k);
  const int tiles = ceil_div(max(keys, 0), BLOCK_K);
  const int first_tile = 0;
  //% endif

  const auto fetch_k = [&](int t) {
    copy_tile_fp32<BLOCK_K, HEAD_DIM, QK_PITCH, THREADS, ALIGNED>(
        k_tile, k + static_cast<i64>(t) * BLOCK_K * k_strides.row, k_strides.row,
        seqlen_k - t * BLOCK_K, head_dim);
  };
  const auto fetch_v = [&](int t) {
    copy_tile_fp32<BLOCK_K, HEAD_DIM_V, HEAD_DIM_V, THREADS, ALIGNED>(
        v_tile, v + static_cast<i64>(t) * BLOCK_K * v_strides.row, v_strides.row,
        seqlen_k - t * BLOCK_K, head_dim_v);
  };

  // 1. Q and the first tile of K.
  copy_tile_fp32<BLOCK_Q, HEAD_DIM, QK_PITCH, THREADS, ALIGNED>(q_tile, q, q_strides.row,
                                                                seqlen_q - q0, head_dim);
  if (tiles > first_tile) fetch_k(first_tile);
  __syncthreads();

  float acc[ROWS][VECTORS][4] = {};
  float row_max[ROWS], row_sum[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) row_max[i] = NEG_INFINITY, row_sum[i] = 0.f;
//% if form
#pragma unroll
  for (int i = 0; SINKS && i < ROWS; ++i) {  // a key without a value, of lane 0
    row_max[i] = sinks[head] * LOG2E;
    row_sum[i] = x == 0 && row_max[i] > NEG_INFINITY ? 1.f : 0.f;
  }
  //% endif

  for (int tile = first_tile; tile < tiles; ++tile) {
    // 2. V of this tile is fetched while K is multiplied.
    fetch_v(tile);
    float s[ROWS][KEYS] = {};
    multiply_qk(s, q_tile + row0 * QK_PITCH, k_tile + x * QK_PITCH);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
//% if form
#pragma unroll
      for (int j = 0; j < KEYS; ++j) {
        float score[1] = {s[i][j] * form.softmax_scale};
        rules.apply(score, q0 + row0 + 2 * i, tile * BLOCK_K + x, j * LANES);
        s[i][j] = score[0] * LOG2E;
      }
      //% else
      const int visible =
          min(seqlen_k, causal ? first_hidden + row0 + 2 * i : seqlen_k) - tile * BLOCK_K - x;
#pragma unroll
      for (int j = 0; j < KEYS; ++j)
        s[i][j] = j * LANES < visible ? s[i][j] * softmax_scale_log2 : NEG_INFINITY;
      //% endif
      const float correction = online_softmax(s[i], row_max[i], row_sum[i]);
#pragma unroll
      for (int j = 0; j < KEYS; ++j) p_tile[(row0 + 2 * i) * P_PITCH + x + j * LANES] = s[i][j];
#pragma unroll
      for (int c = 0; c < VECTORS; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][c][e] *= correction;
    }

    // 3. V and P have arrived, K is used up: the next K is fetched while V is multiplied.
    __syncthreads();
    if (tile + 1 < tiles) fetch_k(tile + 1);
    add_rows<BLOCK_K, P_PITCH, HEAD_DIM_V>(acc, p_tile + row0 * P_PITCH, v_tile + 4 * x);

    // 4. The next K has arrived, V and P are used up.
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = row0 + 2 * i;
    const float sum = lanes_sum<LANES>(row_sum[i]);
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    if (row > last_row) continue;
#pragma unroll
    for (int c = 0; c < VECTORS; ++c) {
      const int column = 4 * (x + c * LANES);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][c][e] *= inverse;
      store_global4<ALIGNED>(o + row * o_strides.row + column, acc[i][c], head_dim_v - column);
    }
    if (lse != nullptr && x == 0) {
      //% if form
      const i64 lse_head = VARLEN ? static_cast<i64>(head) * form.total_q + queries.start
                                  : (static_cast<i64>(batch) * heads_q + head) * seqlen_q;
      //% else
      const i64 lse_head = (static_cast<i64>(batch) * heads_q + head) * seqlen_q;
      //% endif
      lse[lse_head + q0 + row] = sum == 0.f ? NEG_INFINITY : (row_max[i] + log2f(sum)) * LN2;
    }
  }
}
