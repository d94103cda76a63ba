/* Attention backward, the gradient of a bias, on tensor cores (mma.sync; sm_80 and newer).

   A bias is added to scores, so its gradient is dS, summed over whatever the bias is broadcast over.
   A block owns BLOCK_Q rows and BLOCK_K keys of it, or BLOCK_K keys where all rows share one, and
   walks over the batches, heads and query tiles that share them (attention/backward/bias_walk.cuh):

     for each:    S  = Q K^T
                  P  = 2^(final score * log2(e) - lse)
                  dP = dO V^T
                  dbias += P (dP - delta)              in registers, in fp32

   Nobody else adds to these sums, so they are the same at every call, and nothing as large as the
   scores is stored but the gradient. That costs two products more than writing dS where dQ is made,
   as backward_dq.cu does where nothing, or few batches, share a bias. Where there are few
   tiles, `parts` blocks share a walk and leave their sums to backward_bias_sum.cu.

   The next step's Q, dO, K and V travel while one is multiplied, if STAGES is 2; else another block of
   the SM multiplies meanwhile. ACC_INIT: as in backward_dq.cu. */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "attention/backward/accumulator_init.cuh"
#include "attention/backward/bias_walk.cuh"
#include "attention/backward/features.cuh"
#include "attention/backward/mma.cuh"

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${block_q};  // rows of a block
constexpr int BLOCK_K = ${block_k};  // keys of a block
constexpr int NUM_WARPS = ${num_warps};
constexpr int HEAD_DIM = ${head_dim};      // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};  // of v and dout, padded
constexpr int STAGES = ${stages};          // of Q, dO, K and V in shared memory
constexpr bool ALIGNED = ${aligned};       // rows of all arrays start on 16-byte boundaries
constexpr int GUARD = ${guard};            // bytes between tiles: 0 except where memory is checked
constexpr bool AHEAD = ${ahead};  // a step's bias is asked for before its tiles have arrived
using bias_t = ${bias_dtype};
constexpr bool VARLEN = ${varlen};  // packed sequences
constexpr bool SOFTCAP = ${softcap}, ALIBI = ${alibi}, SCORE_MOD = ${has_mod};
constexpr bool ACC_INIT = ${seeded};  // sums of products start from bias and mask
constexpr bool BIAS = ${bias}, BIAS_PAIRED = ${bias_paired};  // paired: see attention/score.cuh
constexpr bool MASK = ${mask}, MASK_PAIRED = ${mask_paired};

// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS_A_WARP = BLOCK_Q / NUM_WARPS, M_BLOCKS = ROWS_A_WARP / 16;
constexpr int KEYS = min_of(BLOCK_K, ${step_k});  // of a tile at a time
constexpr int QK_STEPS = HEAD_DIM / 16, DOV_STEPS = HEAD_DIM_V / 16;

static_assert(ROWS_A_WARP == 16 || ROWS_A_WARP == 32, "a warp owns one or two mma row blocks");
static_assert(BLOCK_K % KEYS == 0 && KEYS % 16 == 0, "keys go into products 16 at a time");
static_assert(STAGES == 1 || STAGES == 2, "the next step is the only one under way");
static_assert(ROW_STEP % BLOCK_Q == 0, "lse and delta are padded to whole tiles");
static_assert(BLOCK_K <= THREADS, "a thread adds up a column of what the warps have");

using KeyOrder = OrderIf<ACC_INIT, ColumnRuns<KEYS / 8>>;
constexpr bool ANEW = true;  // there are no registers to keep places in
using QTile = SwizzledTile<BLOCK_Q, HEAD_DIM>;
using DoTile = SwizzledTile<BLOCK_Q, HEAD_DIM_V>;
using KTile = SwizzledTile<BLOCK_K, HEAD_DIM>;
using VTile = SwizzledTile<BLOCK_K, HEAD_DIM_V>;
constexpr int DO_OFFSET = QTile::BYTES + GUARD;  // in a stage
constexpr int K_OFFSET = DO_OFFSET + DoTile::BYTES + GUARD;
constexpr int V_OFFSET = K_OFFSET + KTile::BYTES + GUARD;
constexpr int STAGE_BYTES = V_OFFSET + VTile::BYTES + GUARD;
static_assert(NUM_WARPS * BLOCK_K * 4 <= QTile::BYTES, "sums of columns take the place of Q");

// Sums of this block's rows, where the bias has one for all: thread i gets that of key i.
__device__ __forceinline__ float column_sum(const float (&acc)[M_BLOCKS][BLOCK_K / 8][4],
                                            float* sums) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
  for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = 0.f;
#pragma unroll
      for (int m = 0; m < M_BLOCKS; ++m) sum += acc[m][n][i] + acc[m][n][2 + i];
#pragma unroll
      for (int distance = 4; distance < WARP_SIZE; distance *= 2)
        sum += __shfl_xor_sync(FULL_MASK, sum, distance);
      if (lane < 4) sums[warp * BLOCK_K + KeyOrder::row(n * 8 + lane * 2 + i)] = sum;
    }
  __syncthreads();
  float sum = 0.f;
  if (threadIdx.x < BLOCK_K)
#pragma unroll
    for (int other = 0; other < NUM_WARPS; ++other) sum += sums[other * BLOCK_K + threadIdx.x];
  return sum;
}

// Whether all of a step's queries see all keys of the tile.
__device__ __forceinline__ bool sees_all(const KeyBand& band, int q0, int seqlen_q, int k0) {
  return band.first(min(q0 + BLOCK_Q, seqlen_q) - 1) <= k0 && band.end(q0) >= k0 + BLOCK_K;
}

// This block's tile -> its place in the gradient, or in the sums of a part of it.
template <typename T>
__device__ __forceinline__ void store(T* __restrict__ tile, const BiasShape& shape, int rows,
                                      int k0, const float (&acc)[M_BLOCKS][BLOCK_K / 8][4],
                                      float* sums) {
  if (shape.rows == 1) {
    const float sum = column_sum(acc, sums);
    const int column = k0 + threadIdx.x;
    if (threadIdx.x < BLOCK_K && column < shape.columns) tile[column] = static_cast<T>(sum);
    return;
  }
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
  for (int r = 0; r < 2 * M_BLOCKS; ++r) {
    const int row = warp * ROWS_A_WARP + r * 8 + lane / 4;
    if (row >= rows) continue;
    T* to = tile + static_cast<i64>(row) * shape.columns;
#pragma unroll
    for (int first = 0; first < BLOCK_K / 8; first += ACC_INIT ? KEYS / 8 : 1) {
      const float* pair = &acc[r / 2][first][r % 2 * 2];
      if constexpr (ACC_INIT) {
        store_run<T, KEYS / 8>(to, k0 + first * 8 + lane % 4 * (KEYS / 4), shape.columns, pair);
      } else {
        store_neighbours(to, k0 + first * 8 + lane % 4 * 2, shape.columns, pair[0], pair[1]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_bias(
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
    const AttentionForm form${score_scalars},
    const float inverse_scale,  // 1 / softmax_scale, where ACC_INIT
    const int rows_padded, const int bias_batch, const int bias_heads, const int bias_rows,
    const int parts) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 tiles = shared_address(shared_memory);
  const int lane = threadIdx.x % WARP_SIZE, warp_row = threadIdx.x / WARP_SIZE * ROWS_A_WARP;
  const BiasShape shape{bias_batch, bias_heads, bias_rows, max_seqlen_k};
  const BiasTile<BLOCK_Q, BLOCK_K> tile(blockIdx.x, shape);
  const BiasProblem problem{batch,        heads_q,          max_seqlen_q,
                            max_seqlen_k, form.window_left, form.window_right,
                            parts,        cu_seqlens_q,     cu_seqlens_k};
  using Walk = BiasWalk<VARLEN, BLOCK_Q, BLOCK_K>;

  const auto fetch = [&](const Walk& at, int number) {
    const u32 stage = tiles + number * STAGE_BYTES;
    const i64 query = at.q_start + at.q0, key = at.k_start + tile.k0;
    const int kv_head = at.head / group_size, queries = at.seqlen_q - at.q0;
    const int keys = at.seqlen_k - tile.k0;
    copy_tile<QTile, THREADS, ALIGNED, InOrder, ANEW>(
        stage, q + at.batch * q_strides.batch + at.head * q_strides.head + query * q_strides.row,
        q_strides.row, queries, head_dim);
    copy_tile<DoTile, THREADS, ALIGNED, InOrder, ANEW>(stage + DO_OFFSET,
                                                       dout + at.batch * dout_strides.batch +
                                                           at.head * dout_strides.head +
                                                           query * dout_strides.row,
                                                       dout_strides.row, queries, head_dim_v);
    copy_tile<KTile, THREADS, ALIGNED, KeyOrder, ANEW>(
        stage + K_OFFSET,
        k + at.batch * k_strides.batch + kv_head * k_strides.head + key * k_strides.row,
        k_strides.row, keys, head_dim);
    copy_tile<VTile, THREADS, ALIGNED, KeyOrder, ANEW>(
        stage + V_OFFSET,
        v + at.batch * v_strides.batch + kv_head * v_strides.head + key * v_strides.row,
        v_strides.row, keys, head_dim_v);
  };

  const FragmentReader<QTile, BlockOrder::ROW_MAJOR> q_reader(lane);
  const FragmentReader<DoTile, BlockOrder::ROW_MAJOR> do_reader(lane);
  const FragmentReader<KTile, BlockOrder::COL_MAJOR> k_reader(lane);
  const FragmentReader<VTile, BlockOrder::COL_MAJOR> v_reader(lane);
  float acc[M_BLOCKS][BLOCK_K / 8][4] = {};
  AccumulatorInit<false, M_BLOCKS, KEYS / 8, bias_t, BIAS, MASK> init;
  const auto fetch_init = [&](const Walk& at, int first) {
    const u32 thread = thread_index_again();
    init.fetch(thread % WARP_SIZE, form, bias, mask, at.batch, at.head, at.seqlen_q, at.seqlen_k,
               at.q0 + thread / WARP_SIZE * ROWS_A_WARP, tile.k0 + first);
  };

  // 1. The first step's tiles are on their way.
  Walk next(tile, shape, problem);
  int number = 0;  // of the stage
  if (next.step < next.end) {
    fetch(next, number);
    if constexpr (ACC_INIT) fetch_init(next, 0);
  }
  cp_async_commit();

  while (next.step < next.end) {
    const Walk now = next;
    next.advance(tile, shape, problem);
    const i64 head_row =
        first_padded_row<VARLEN>(now.batch, now.head, heads_q, rows_padded, now.q_start);
    const RowStatistics<M_BLOCKS> rows(lse_log2, delta, head_row + now.q0 + warp_row, lane);
    const KeyBand band(now.seqlen_q, now.seqlen_k, form.window_left, form.window_right);
    const auto rules = backward_rules<SOFTCAP, false, SCORE_MOD, ALIBI>(
        form, ScoreMod{now.batch, now.head, now.seqlen_q, now.seqlen_k${score_values}},
        alibi_slopes, now.batch, now.head, now.seqlen_q, now.seqlen_k);
    const auto arrays = backward_arrays<BIAS, BIAS_PAIRED, MASK, MASK_PAIRED>(
        form, bias, mask, now.batch, now.head, now.seqlen_q, now.seqlen_k);
    float added[BLOCK_K / KEYS][M_BLOCKS][KEYS / 8][4];
#pragma unroll
    for (int part = 0; part < (AHEAD ? BLOCK_K / KEYS : 0); ++part)
      load_added<false>(added[part], lane, arrays, now.q0 + warp_row, tile.k0 + part * KEYS);

    // 2. They have arrived, and every warp is done with the step before: its stage is free.
    cp_async_wait<0>();
    __syncthreads();
    if (STAGES > 1 && next.step < next.end) fetch(next, number ^ 1);
    cp_async_commit();
    const u32 stage = tiles + number * STAGE_BYTES;
    const u32 warp_q_tile = stage + warp_row * QTile::ROW_BYTES;
    const u32 warp_do_tile = stage + DO_OFFSET + warp_row * DoTile::ROW_BYTES;

#pragma unroll
    for (int first = 0; first < BLOCK_K; first += KEYS) {
      u32 q_fragments[QK_STEPS][M_BLOCKS][4], do_fragments[DOV_STEPS][M_BLOCKS][4];
      if (!ACC_INIT && !AHEAD)
        load_added<false>(added[first / KEYS], lane, arrays, now.q0 + warp_row, tile.k0 + first);
      float s[M_BLOCKS][KEYS / 8][4] = {}, ds[M_BLOCKS][KEYS / 8][4] = {};
      float slopes[M_BLOCKS][KEYS / 8][4];
      if constexpr (ACC_INIT) {  // the next ones travel beside this step
        init.start(s, inverse_scale);
        if (first + KEYS < BLOCK_K) {
          fetch_init(now, first + KEYS);
        } else if (next.step < next.end) {
          fetch_init(next, 0);
        }
      }
      multiply_qk<elem_t, 16, false>(s, q_fragments, warp_q_tile, q_reader,
                                     stage + K_OFFSET + first * KTile::ROW_BYTES, k_reader);
      if constexpr (!ACC_INIT) {
        final_scores<false, false, true>(s, slopes, added[first / KEYS], lane, rules, band,
                                         form.softmax_scale, now.q0 + warp_row, tile.k0 + first);
      } else if (!sees_all(band, now.q0, now.seqlen_q, tile.k0)) {
        const u32 thread = thread_index_again();
        hide_outside<false, true>(s, thread % WARP_SIZE, band, hidden_score(inverse_scale),
                                  now.q0 + thread / WARP_SIZE * ROWS_A_WARP, tile.k0 + first);
      }
      multiply_qk<elem_t, 16, false>(ds, do_fragments, warp_do_tile, do_reader,
                                     stage + V_OFFSET + first * VTile::ROW_BYTES, v_reader);
      rows.score_gradients(ds, s, ACC_INIT ? form.softmax_scale * LOG2E : LOG2E);
#pragma unroll
      for (int m = 0; m < M_BLOCKS; ++m)
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[m][first / 8 + n][i] += ds[m][n][i];
    }

    if (STAGES == 1) {  // nothing travels while a step is multiplied
      __syncthreads();
      if (next.step < next.end) fetch(next, 0);
      cp_async_commit();
    } else {
      number ^= 1;
    }
  }

  // 3. The sums, where Q was. The tile's place is computed again rather than kept in registers.
  cp_async_wait<0>();
  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared_memory);
  const BiasTile<BLOCK_Q, BLOCK_K> again(block_index_again(), shape);
  const i64 place = again.offset(shape);
  if (parts == 1) {
    store(dbias + place, shape, bias_rows - again.row0, again.k0, acc, sums);
  } else {
    store(dbias_parts + again.part * shape.size() + place, shape, bias_rows - again.row0, again.k0,
          acc, sums);
  }
}
