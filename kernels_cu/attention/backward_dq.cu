/* Attention backward, dQ, on tensor cores (mma.sync; sm_80 and newer).

   A block owns BLOCK_Q query rows of one head and walks over the keys that they see, in tiles of
   BLOCK_K from the last to the first: the tiles that need a mask come first. Probabilities are made
   again from lse:

     for each tile:   S  = Q K^T
                      P  = 2^(S * c - lse)           c = softmax_scale * log2(e)
                      dP = dO V^T
                      dS = P (dP - delta)            rounded to 16 bits: an A operand
                      dQ += dS K
     at the end:      dQ *= softmax_scale

   A bias and a mask are what the sums of S start from where a form has nothing but these and a band
   (ACC_INIT, backward/accumulator_init.cuh); the next ones travel beside the product of dQ. A bias
   with a row for each query and head has dS itself as its gradient (DBIAS), stored here; where
   batches share it, a launch for each adds to what the one before has stored.

   Nobody else adds to these rows of dQ, so the result is the same at every call. That costs two of
   the backward's seven products: S and dP are made here and in backward_dkdv.cu.

   Source: Dao, "FlashAttention-2" (2023), for the formulas. */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/special_registers.cuh"
#include "attention/backward/dq_layout.cuh"
#include "attention/backward/mma.cuh"
#include "attention/query_block.cuh"
//% if form
#include "attention/backward/accumulator_init.cuh"
#include "attention/backward/features.cuh"
//% endif

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${block_q};  // query rows of a block
constexpr int BLOCK_K = ${block_k};  // keys of a tile
constexpr int NUM_WARPS = ${num_warps};
constexpr int HEAD_DIM = ${head_dim};           // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};       // of v and dout, padded
constexpr int STAGES = ${stages};               // tiles of K and V in shared memory
constexpr int MIN_BLOCKS = ${min_blocks};       // blocks an SM should hold: caps the registers
constexpr bool ALIGNED = ${aligned};            // rows of all arrays start on 16-byte boundaries
constexpr bool IN_REGISTERS = ${in_registers};  // Q and dO, from the first tile to the last
constexpr int GUARD = ${guard};       // bytes between tiles: 0 except where memory is checked
constexpr bool ACC_INIT = ${seeded};  // sums of products start from bias and mask
//% if form
using bias_t = ${bias_dtype};
constexpr bool VARLEN = ${varlen};  // packed sequences
constexpr bool SOFTCAP = ${softcap}, ALIBI = ${alibi};
constexpr bool BIAS = ${bias}, BIAS_PAIRED = ${bias_paired};  // paired: see attention/score.cuh
constexpr bool MASK = ${mask}, MASK_PAIRED = ${mask_paired};
constexpr bool SCORE_MOD = ${has_mod}, CURVED = SOFTCAP || SCORE_MOD;
constexpr bool RULES = !ACC_INIT && (CURVED || ALIBI || BIAS || MASK);  // beside the band of keys
constexpr bool DALIBI = ${dalibi};  // whether slopes of ALiBi have a gradient
constexpr bool DBIAS = ${dbias};    // whether dS is stored: of a bias with a row for each query
static_assert(!ACC_INIT || !(CURVED || ALIBI), "after these a bias is no part of a product");
static_assert(!DBIAS || ACC_INIT, "keys stand in runs");

// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"
//% endif

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS_A_WARP = BLOCK_Q / NUM_WARPS;
constexpr int M_BLOCKS = ROWS_A_WARP / 16;        // 16-row mma blocks of a warp
constexpr int KEYS = min_of(BLOCK_K, ${step_k});  // of a tile at a time
constexpr int STEPS = BLOCK_K / KEYS;
constexpr int QK_STEPS = HEAD_DIM / 16, DOV_STEPS = HEAD_DIM_V / 16;

using KeyOrder = OrderIf<ACC_INIT, ColumnRuns<KEYS / 8>>;
constexpr bool ANEW = ${form} && KEYS > 16;  // some is computed again, not kept in registers

static_assert(ROWS_A_WARP == 16 || ROWS_A_WARP == 32, "a warp owns one or two mma row blocks");
static_assert(KEYS % 16 == 0 && BLOCK_K % KEYS == 0, "keys go into products 16 at a time");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0,
              "tiles are made of 32- or 64-wide panels");

using Layout = DqLayout<BLOCK_Q, BLOCK_K, HEAD_DIM, HEAD_DIM_V, STAGES, GUARD>;
using QTile = Layout::QTile;
using DoTile = Layout::DoTile;
using KTile = Layout::KTile;
using VTile = Layout::VTile;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward_queries(
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
    bias_t* __restrict__ dbias,       // [bias_batch, heads_q, seqlen_q, seqlen_k]; or null
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
    const float inverse_scale,  // 1 / softmax_scale, where ACC_INIT
    const int bias_batch,
    const int
        first_batch,  // of this launch; with one dbias for all batches it adds to what is there
    //% endif
    const int rows_padded, const float softmax_scale,
    const float softmax_scale_log2,  // softmax_scale * log2(e)
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 q_tile = shared_address(shared_memory), do_tile = q_tile + Layout::DO;
  const u32 ring = q_tile + Layout::RING;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;

  //% if form
  QueryBlock<BLOCK_Q> place(blockIdx.x, max_seqlen_q, heads_q);
  place.batch += first_batch;
  const SequenceRows<VARLEN> queries(cu_seqlens_q, place.batch, max_seqlen_q);
  const SequenceRows<VARLEN> held(cu_seqlens_k, place.batch, max_seqlen_k);
  const int seqlen_q = queries.length, seqlen_k = held.length;
  if (VARLEN && place.q0 >= seqlen_q) return;
  q += queries.start * q_strides.row;
  dout += queries.start * dout_strides.row;
  k += held.start * k_strides.row;
  v += held.start * v_strides.row;
  //% else
  const QueryBlock<BLOCK_Q> place(blockIdx.x, seqlen_q, heads_q);
  //% endif
  const int q0 = place.q0, kv_head = place.head / group_size;
  q += place.batch * q_strides.batch + place.head * q_strides.head + q0 * q_strides.row;
  dout += place.batch * dout_strides.batch + place.head * dout_strides.head;
  dout += q0 * dout_strides.row;

  //% if form
  const KeyBand band(seqlen_q, seqlen_k, form.window_left, form.window_right);
  const auto block_tiles = [&](int row) {
    return BandTiles<BLOCK_K>(band, row, min(row + BLOCK_Q, seqlen_q) - 1);
  };
  const BandTiles<BLOCK_K> tiles = block_tiles(q0);
  const auto rules = backward_rules<SOFTCAP, false, SCORE_MOD, ALIBI>(
      form, ScoreMod{place.batch, place.head, seqlen_q, seqlen_k${score_values}}, alibi_slopes,
      place.batch, place.head, seqlen_q, seqlen_k);
  const auto arrays = backward_arrays<BIAS, BIAS_PAIRED, MASK, MASK_PAIRED>(
      form, bias, mask, place.batch, place.head, seqlen_q, seqlen_k);
  const int first_tile = tiles.first;
  int tile = tiles.end - 1;
  //% else
  // Query row i of the block sees keys 0 .. min(seqlen_k, first_hidden + i) - 1.
  const int first_hidden = causal ? q0 + seqlen_k - seqlen_q + 1 : seqlen_k;
  const int last_row = min(BLOCK_Q, seqlen_q - q0) - 1;
  const int keys = min(seqlen_k, causal ? first_hidden + last_row : seqlen_k);
  const int unmasked_tiles = max(min(seqlen_k, first_hidden), 0) / BLOCK_K;
  int tile = ceil_div(max(keys, 0), BLOCK_K) - 1;
  const int first_tile = 0;
  //% endif

  // Where this head begins: once, or computed at every tile, as registers allow.
  //% if form or head_dim == 64
  k += place.batch * k_strides.batch + kv_head * k_strides.head;
  v += place.batch * v_strides.batch + kv_head * v_strides.head;
  const auto k_start = [] { return 0; }, v_start = k_start;
  //% else
  const auto k_start = [&] { return place.batch * k_strides.batch + kv_head * k_strides.head; };
  const auto v_start = [&] { return place.batch * v_strides.batch + kv_head * v_strides.head; };
  //% endif
  const auto fetch = [&](int t) {
    const u32 stage = ring + (t % STAGES) * Layout::STAGE;
    const i64 row = static_cast<i64>(t) * BLOCK_K;
    const int rows_left = seqlen_k - t * BLOCK_K;
    copy_tile<KTile, THREADS, ALIGNED, KeyOrder>(stage, k + k_start() + row * k_strides.row,
                                                 k_strides.row, rows_left, head_dim);
    copy_tile<VTile, THREADS, ALIGNED, KeyOrder>(stage + Layout::V,
                                                 v + v_start() + row * v_strides.row, v_strides.row,
                                                 rows_left, head_dim_v);
  };

  //% if form
  const i64 head_row =
      first_padded_row<VARLEN>(place.batch, place.head, heads_q, rows_padded, queries.start);
  if (ACC_INIT && threadIdx.x < BLOCK_Q / 4) {  // there are no registers for them
    const i64 row = head_row + q0 + threadIdx.x * 4;
    cp_async_16(q_tile + Layout::LSE + threadIdx.x * 16, lse_log2 + row);
    cp_async_16(q_tile + Layout::DELTA + threadIdx.x * 16, delta + row);
  }
  //% else
  const i64 head_row = (static_cast<i64>(place.batch) * heads_q + place.head) * rows_padded;
  //% endif

  // 1. Q, dO and the first tiles are on their way; each lane has lse and delta of its rows.
  copy_tile<QTile, THREADS, ALIGNED>(q_tile, q, q_strides.row, seqlen_q - q0, head_dim);
  copy_tile<DoTile, THREADS, ALIGNED>(do_tile, dout, dout_strides.row, seqlen_q - q0, head_dim_v);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (tile - stage >= first_tile) fetch(tile - stage);
    cp_async_commit();
  }
  const RowStatistics<M_BLOCKS> rows(lse_log2, delta, head_row + q0 + warp * ROWS_A_WARP, lane);

  const RowReader<QTile> q_reader(lane);
  const RowReader<DoTile> do_reader(lane);
  const ColumnReader<KTile> k_reader(lane);
  const ColumnReader<VTile> v_reader(lane);
  const RowReader<KTile> k_rows(lane);
  const u32 warp_q_tile = q_tile + warp * ROWS_A_WARP * QTile::ROW_BYTES;
  const u32 warp_do_tile = do_tile + warp * ROWS_A_WARP * DoTile::ROW_BYTES;
  u32 q_fragments[QK_STEPS][M_BLOCKS][4], do_fragments[DOV_STEPS][M_BLOCKS][4];
  float acc[M_BLOCKS][HEAD_DIM / 8][4] = {};
  //% if form
  DistanceSum distances[M_BLOCKS][2];  // with DALIBI: of rows g, g + 8 of each 16-row block
  AccumulatorInit<false, M_BLOCKS, KEYS / 8, bias_t, BIAS, MASK> init;
  const auto fetch_init = [&](int of_tile, int of_step) {
    const u32 thread = thread_index_again();
    init.fetch(thread % WARP_SIZE, form, bias, mask, ANEW ? anew(place.batch) : place.batch,
               place.head, seqlen_q, seqlen_k, q0 + thread / WARP_SIZE * ROWS_A_WARP,
               of_tile * BLOCK_K + of_step * KEYS);
  };
  if (ACC_INIT && tile >= first_tile) fetch_init(tile, 0);
  const bool adds = first_batch > 0 && bias_batch == 1;
  using Gradient = BiasGradient<M_BLOCKS, KEYS / 8, bias_t>;
  const Gradient dbias_rows(dbias, (bias_batch == 1 ? 0 : place.batch) * heads_q + place.head,
                            seqlen_q, seqlen_k);
  //% endif

  if (IN_REGISTERS) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    load_fragments(q_fragments, warp_q_tile, q_reader);
    load_fragments(do_fragments, warp_do_tile, do_reader);
  }

  for (; tile >= first_tile; --tile) {
    // 2. This tile has arrived, and every warp is done with the one before: its stage is free.
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    if (tile - (STAGES - 1) >= first_tile) fetch(tile - (STAGES - 1));
    cp_async_commit();
    const u32 stage = ring + (tile % STAGES) * Layout::STAGE;

#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      const u32 k_keys = stage + step * KEYS * KTile::ROW_BYTES;
      const u32 v_keys = stage + Layout::V + step * KEYS * VTile::ROW_BYTES;
      //% if form
      float slopes[M_BLOCKS][KEYS / 8][4], added[M_BLOCKS][KEYS / 8][4];
      if constexpr (!ACC_INIT && (BIAS || MASK))
        load_added<false>(added, lane, arrays, q0 + warp * ROWS_A_WARP,
                          tile * BLOCK_K + step * KEYS);
      //% endif
      float p[M_BLOCKS][KEYS / 8][4] = {}, ds[M_BLOCKS][KEYS / 8][4] = {};
      //% if form
      if constexpr (ACC_INIT) init.start(p, inverse_scale);
      Gradient::Runs sums;
      //% endif
      multiply_qk<elem_t, 16, IN_REGISTERS>(p, q_fragments, warp_q_tile, q_reader, k_keys,
                                            k_reader);
      //% if form
      if constexpr (RULES) {
        final_scores<false, CURVED, BIAS || MASK>(p, slopes, added, lane, rules, band,
                                                  softmax_scale, q0 + warp * ROWS_A_WARP,
                                                  tile * BLOCK_K + step * KEYS);
      } else if (!block_tiles(ANEW ? anew(q0) : q0).is_whole(tile)) {
        const int row0 = thread_index_again() / WARP_SIZE * ROWS_A_WARP;
        hide_outside<false, ACC_INIT>(p, thread_index_again() % WARP_SIZE, band,
                                      hidden_score(softmax_scale_log2), q0 + row0,
                                      tile * BLOCK_K + step * KEYS);
      }
      if constexpr (DBIAS)
        if (adds) dbias_rows.fetch<ROWS_A_WARP>(sums, q0, tile * BLOCK_K + step * KEYS);
      //% else
      if (tile >= unmasked_tiles)
        mask_scores(
            p, lane,
            [&](int row) {
              const int seen = causal ? first_hidden + warp * ROWS_A_WARP + row : seqlen_k;
              return min(seqlen_k, seen) - tile * BLOCK_K - step * KEYS;
            },
            hidden_score(softmax_scale_log2));
      //% endif
      multiply_qk<elem_t, 16, IN_REGISTERS>(ds, do_fragments, warp_do_tile, do_reader, v_keys,
                                            v_reader);
      //% if form
      if constexpr (ACC_INIT) {
        const float* own = reinterpret_cast<const float*>(shared_memory + Layout::LSE);
        RowStatistics<M_BLOCKS>(own, own + (Layout::DELTA - Layout::LSE) / 4, warp * ROWS_A_WARP,
                                lane)
            .score_gradients(ds, p, softmax_scale_log2);
      } else {
        rows.score_gradients(ds, p, RULES ? LOG2E : softmax_scale_log2);
      }
      if constexpr (DALIBI)
        add_distances(distances, ds, p, rows, lane, q0 + warp * ROWS_A_WARP + seqlen_k - seqlen_q,
                      tile * BLOCK_K + step * KEYS);
      if constexpr (CURVED) scale_by(ds, slopes);
      if constexpr (DBIAS)
        dbias_rows.store<ROWS_A_WARP>(sums, ds, adds, q0, tile * BLOCK_K + step * KEYS);
      if constexpr (ACC_INIT) {  // the next ones, which travel beside the product that follows
        const bool last = step + 1 == STEPS;
        if (!last || tile > first_tile) fetch_init(tile - last, last ? 0 : step + 1);
      }
      //% else
      rows.score_gradients(ds, p, softmax_scale_log2);
      //% endif
      accumulate_packed<elem_t>(acc, ds, k_keys, k_rows);
    }
  }

  // 3. dQ is staged over this warp's own rows of Q, then stored in whole chunks. The block's place
  //    is computed again rather than kept in registers through the loop.
  cp_async_wait<0>();
  __syncthreads();
  //% if form
  if constexpr (DALIBI) {
    const int row = q0 + warp * ROWS_A_WARP;
    const float* row_dlse = dlse;
    if (dlse != nullptr)
      row_dlse += VARLEN ? static_cast<i64>(place.head) * form.total_q + queries.start + row
                         : (static_cast<i64>(place.batch) * heads_q + place.head) * seqlen_q + row;
    store_distances(dalibi_rows + head_row + row, distances, rows, row_dlse, seqlen_q - row);
  }
  if (DBIAS && !adds)
    dbias_rows.store_zeros<ROWS_A_WARP>(q0, tiles.first * BLOCK_K, tiles.end * BLOCK_K);
  QueryBlock<BLOCK_Q> again(block_index_again(), max_seqlen_q, heads_q);
  again.batch += first_batch;
  dq += queries.start * dq_strides.row;
  //% else
  const QueryBlock<BLOCK_Q> again(block_index_again(), seqlen_q, heads_q);
  //% endif
  const int end_lane = thread_index_again() % WARP_SIZE;
  const int warp_row = thread_index_again() / WARP_SIZE * ROWS_A_WARP, row0 = again.q0 + warp_row;
  const u32 warp_tile = shared_address(shared_memory) + warp_row * QTile::ROW_BYTES;
  stage_rows<elem_t, QTile, 1>(acc, softmax_scale, end_lane, 0, warp_tile);
  __syncwarp();
  dq += again.batch * dq_strides.batch + again.head * dq_strides.head + row0 * dq_strides.row;
  store_tile<QTile, ROWS_A_WARP, ALIGNED>(dq, dq_strides.row, warp_tile, end_lane,
                                          min(ROWS_A_WARP, seqlen_q - row0), head_dim);
}
