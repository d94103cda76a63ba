/* Attention backward, dK and dV, on tensor cores (mma.sync; sm_80 and newer).

   A block owns BLOCK_K keys of one KV head and walks over the query rows that see them, of all
   query heads that read this KV head, in tiles of BLOCK_Q. Probabilities are made again from lse:

     for each tile:   S'  = K Q^T                    keys are rows: S' is S transposed
                      P'  = 2^(S' * c - lse)         c = softmax_scale * log2(e)
                      dP' = V dO^T
                      dS' = P' (dP' - delta)
                      dV += P' dO,  dK += dS' Q      P' and dS' rounded to 16 bits
     at the end:      dK *= softmax_scale

   With keys as rows, P' and dS' are already A operands of the products that follow: nothing is
   transposed but Q and dO, by ldmatrix. WARPS_K warps share the keys. If WARPS_C is 1, P' and dS'
   stay in the registers of their warp. Else WARPS_C warps share the same keys: each makes the
   scores of its share of the queries, all pass P' and dS' on through shared memory, and each has
   its share of the columns of dK and dV. That is how two 16-row blocks a warp (each fragment of
   shared memory is used twice) fit into registers where dK and dV are 128 or more columns wide.

   With SUMS every tile's dQ = dS K is made here as well and added to fp32 sums in device memory:
   five products instead of the seven that take backward_dq.cu beside this kernel, but blocks add in
   whatever order they come. backward_dq_convert.cu rounds the sums.

   A bias and a mask are what sums of S' start from where a form has nothing but these and a band
   (ACC_INIT, backward/accumulator_init.cuh). Of a bias with one row for all queries the gradient is
   the sum of dS' over them (DBIAS): each head's is left to backward_bias_sum.cu.

   Q, dO and their rows' lse and delta travel through a ring of STAGES tiles filled by cp.async.

   Source: Dao, "FlashAttention-2" (2023), for the algorithm. */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/special_registers.cuh"
#include "attention/backward/dkdv_layout.cuh"
#include "attention/backward/mma.cuh"
#include "attention/backward/sum_fragments.cuh"
#include "attention/key_block.cuh"
//% if form
#include "attention/backward/accumulator_init.cuh"
#include "attention/backward/features.cuh"
//% endif

using elem_t = ${dtype};
constexpr int BLOCK_K = ${block_k};  // keys of a block
constexpr int BLOCK_Q = ${block_q};  // query rows of a tile
constexpr int WARPS_K = ${warps_k};
constexpr int WARPS_C = ${warps_c};
constexpr int HEAD_DIM = ${head_dim};      // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};  // of v and dout, padded
constexpr int STAGES = ${stages};          // tiles of Q and dO in shared memory
constexpr int MIN_BLOCKS = ${min_blocks};  // blocks an SM should hold: caps the registers
constexpr bool SUMS = ${sums};             // whether dQ is added up, too
constexpr bool ALIGNED = ${aligned};       // rows of all arrays start on 16-byte boundaries
constexpr int GUARD = ${guard};            // bytes between tiles: 0 except where memory is checked
constexpr bool ACC_INIT = ${seeded};       // sums of products start from bias and mask
//% if form
using bias_t = ${bias_dtype};
constexpr bool VARLEN = ${varlen};  // packed sequences
constexpr bool SOFTCAP = ${softcap}, ALIBI = ${alibi}, BIAS = ${bias}, MASK = ${mask};
constexpr bool SCORE_MOD = ${has_mod}, CURVED = SOFTCAP || SCORE_MOD;
constexpr bool RULES = !ACC_INIT && (CURVED || ALIBI || BIAS || MASK);  // beside the band of keys
constexpr bool DBIAS = ${dbias};  // of a bias with one row for all: sums of columns of dS
static_assert(ACC_INIT ? !(CURVED || ALIBI) : !DBIAS, "a bias is part of a product, or comes last");

// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"
//% endif

constexpr int NUM_WARPS = WARPS_K * WARPS_C;
constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS_A_WARP = BLOCK_K / WARPS_K;
constexpr int M_BLOCKS = ROWS_A_WARP / 16;  // 16-row mma blocks of a warp
constexpr bool EXCHANGE = WARPS_C > 1;      // of P' and dS', through shared memory
constexpr bool SHARES_DS = EXCHANGE || SUMS;
constexpr int SHARE = EXCHANGE ? BLOCK_Q / WARPS_C : BLOCK_Q;               // queries of a warp
constexpr int QUERIES = min_of(SHARE, ${step_q}), STEPS = SHARE / QUERIES;  // so many at a time
constexpr int K_COLUMNS = HEAD_DIM / 8 / WARPS_C, V_COLUMNS = HEAD_DIM_V / 8 / WARPS_C;

static_assert(ROWS_A_WARP == 16 || ROWS_A_WARP == 32, "a warp owns one or two mma row blocks");
static_assert(QUERIES % 16 == 0 && SHARE % QUERIES == 0, "queries go into products 16 at a time");
static_assert(HEAD_DIM % (32 * WARPS_C) == 0 && HEAD_DIM_V % (32 * WARPS_C) == 0,
              "warps share the columns evenly, 16 at a time");

using KeyOrder = OrderIf<ACC_INIT, RowRuns<M_BLOCKS>>;
constexpr bool ANEW =
    ${form} && M_BLOCKS > 1;  // some is computed again rather than kept in registers

using Layout =
    DkDvLayout<BLOCK_K, BLOCK_Q, HEAD_DIM, HEAD_DIM_V, STAGES, EXCHANGE, SHARES_DS, GUARD>;
using KTile = Layout::KTile;
using VTile = Layout::VTile;
using QTile = Layout::QTile;
using DoTile = Layout::DoTile;
using PTile = Layout::PTile;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward_keys(
    //% if form
    // Null where the form has no such thing. Packed: rows are [total, heads, dim], those of
    // lse_log2 and delta as attention/backward/padded_rows.cuh says.
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
    float* __restrict__ dq_sum,  // fragments (backward/sum_fragments.cuh) of [batch, heads_q,
                                 // rows_padded, HEAD_DIM]; null without SUMS
    //% if form
    float* __restrict__ dbias_parts,  // [batch, heads_q, WARPS_C, max_seqlen_k]; null without DBIAS
    //% endif
    const Strides dout_strides, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const Strides dk_strides, const Strides dv_strides, const int heads_q,
    const int group_size,  // query heads a KV head
    const int ${seqlen_q}, const int ${seqlen_k}, const int head_dim, const int head_dim_v,
    //% if form
    const AttentionForm form${score_scalars},
    const float inverse_scale,  // 1 / softmax_scale, where ACC_INIT
    //% endif
    const int rows_padded, const float softmax_scale,
    const float softmax_scale_log2,  // softmax_scale * log2(e)
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 k_tile = shared_address(shared_memory), v_tile = k_tile + Layout::V;
  const u32 ds_tile = k_tile + Layout::DS;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int warp_row = warp % WARPS_K * ROWS_A_WARP, turn = warp / WARPS_K;

  //% if form
  const KeyBlock<BLOCK_K> place(blockIdx.x, max_seqlen_k, heads_q / group_size);
  const SequenceRows<VARLEN> queries(cu_seqlens_q, place.batch, max_seqlen_q);
  const SequenceRows<VARLEN> held(cu_seqlens_k, place.batch, max_seqlen_k);
  const int seqlen_q = queries.length, seqlen_k = held.length;
  if (VARLEN && !DBIAS && place.k0 >= seqlen_k) return;
  q += queries.start * q_strides.row;
  dout += queries.start * dout_strides.row;
  k += held.start * k_strides.row;
  v += held.start * v_strides.row;
  const int k0 = place.k0, kv_head = place.head, batch = place.batch;
  const KeyBand band(seqlen_q, seqlen_k, form.window_left, form.window_right);
  const BandRows<BLOCK_Q, BLOCK_K> rows(band, k0, seqlen_q, seqlen_k);
  const int first_tile = rows.first, tiles = VARLEN && k0 >= seqlen_k ? 0 : rows.end;
  // Whether a tile's queries see all keys of the block.
  const auto sees_all = [&](int q0) {
    return band_sees_all<BLOCK_Q, BLOCK_K, SUMS>(band, q0, ANEW ? anew(k0) : k0, seqlen_k);
  };
  const auto head_rows = [&](int of_head) {
    return first_padded_row<VARLEN>(ANEW ? anew(batch) : batch, of_head, heads_q, rows_padded,
                                    queries.start);
  };
  //% else
  const KeyBlock<BLOCK_K> place(blockIdx.x, seqlen_k, heads_q / group_size);
  const int k0 = place.k0, kv_head = place.head, batch = place.batch;
  // Query i sees key row r of the block if i >= first_seeing + r.
  const int first_seeing = causal ? k0 - (seqlen_k - seqlen_q) : -BLOCK_K;
  const int first_tile = max(first_seeing, 0) / BLOCK_Q, tiles = ceil_div(seqlen_q, BLOCK_Q);
  const int unmasked = first_seeing + BLOCK_K - 1;  // from this query on, all keys are seen
  const auto head_rows = [&](int of_head) {
    return (static_cast<i64>(batch) * heads_q + of_head) * rows_padded;
  };
  //% endif

  // Tiles of rows of all query heads, the last of which goes into stage 1 % STAGES.
  int left = max(tiles - first_tile, 0) * group_size;
  const auto fetch = [&](int number, int next_head, int next_tile) {
    const u32 stage = k_tile + Layout::RING + number % STAGES * Layout::STAGE;
    const i64 row = static_cast<i64>(next_tile) * BLOCK_Q;
    const int rows_left = seqlen_q - next_tile * BLOCK_Q;
    fetch_queries<Layout, THREADS, ALIGNED>(stage, q, q_strides, head_dim, dout, dout_strides,
                                            head_dim_v, ANEW ? anew(place.batch) : place.batch,
                                            next_head, row, rows_left);
    fetch_statistics<Layout>(stage, lse_log2, delta, head_rows(next_head) + row);
  };

  // 1. K, V and the first tile are on their way.
  copy_keys<KTile, THREADS, ALIGNED, KeyOrder>(k_tile, k, k_strides, place, seqlen_k, head_dim);
  copy_keys<VTile, THREADS, ALIGNED, KeyOrder>(v_tile, v, v_strides, place, seqlen_k, head_dim_v);
  int tile = first_tile, head = kv_head * group_size;
  if (STAGES > 1 && left > 0) fetch(left, head, tile);
  cp_async_commit();

  const DkDvReaders<Layout> own(lane, turn);
  const u32 warp_k_tile = k_tile + warp_row * KTile::ROW_BYTES;
  const u32 warp_v_tile = v_tile + warp_row * VTile::ROW_BYTES;
  const u32 warp_p_tile = k_tile + Layout::P + warp_row * PTile::ROW_BYTES;
  const u32 warp_ds_tile = ds_tile + warp_row * PTile::ROW_BYTES;
  float dk_acc[M_BLOCKS][K_COLUMNS][4] = {}, dv_acc[M_BLOCKS][V_COLUMNS][4] = {};
  //% if form
  KeySums<M_BLOCKS> key_sums;
  AccumulatorInit<true, M_BLOCKS, QUERIES / 8, bias_t, BIAS, MASK> init;
  const auto fetch_init = [&](int of_head, int of_tile, int step) {
    init.fetch_keys<WARPS_K, EXCHANGE ? SHARE : 0>(form, bias, mask, batch, of_head, seqlen_q,
                                                   seqlen_k, of_tile * BLOCK_Q + step * QUERIES,
                                                   k0);
  };
  const auto fetch_next_init = [&](int step) {
    const bool last = step + 1 == STEPS, turns = last && tile + 1 == tiles;
    if (!last || left > 1)
      fetch_init(turns ? head + 1 : head, turns ? first_tile : tile + last, last ? 0 : step + 1);
  };
  if (ACC_INIT && left > 0) fetch_init(head, tile, 0);
  if (DBIAS && left == 0)
    store_no_sums<BLOCK_K, WARPS_C, THREADS>(dbias_parts, place, heads_q, group_size, max_seqlen_k);
  //% endif

  for (; left > 0; --left) {
    // 2. This tile has arrived, and every warp is done with the one before: its stage is free.
    if (STAGES > 1) cp_async_wait<0>();
    __syncthreads();
    if (STAGES == 1) {  // nothing travels while a tile is multiplied
      fetch(left, head, tile);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
    } else if (left > 1) {
      const bool turns = tile + 1 == tiles;  // to the next query head
      fetch(left - 1, head + turns, turns ? first_tile : tile + 1);
      cp_async_commit();
    }
    const int offset = Layout::RING + left % STAGES * Layout::STAGE;
    const u32 stage = k_tile + offset;
    const float* lse_row = reinterpret_cast<const float*>(shared_memory + offset + Layout::LSE);
    const float* delta_row = reinterpret_cast<const float*>(shared_memory + offset + Layout::DELTA);
    const int q0 = tile * BLOCK_Q;

#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      const int query = (EXCHANGE ? turn * SHARE : 0) + step * QUERIES;  // in the tile
      const u32 q_queries = stage + query * QTile::ROW_BYTES;
      const u32 do_queries = stage + Layout::DO + query * DoTile::ROW_BYTES;
      float p[M_BLOCKS][QUERIES / 8][4] = {}, ds[M_BLOCKS][QUERIES / 8][4] = {};
      //% if form
      float slopes[M_BLOCKS][QUERIES / 8][4], added[M_BLOCKS][QUERIES / 8][4];
      if constexpr (!ACC_INIT && (BIAS || MASK))
        load_added<true>(added, lane,
                         backward_arrays<BIAS, false, MASK, false>(form, bias, mask, batch, head,
                                                                   seqlen_q, seqlen_k),
                         k0 + warp_row, q0 + query);
      if constexpr (ACC_INIT) init.start(p, inverse_scale);
      if constexpr (ACC_INIT && EXCHANGE && STEPS > 1) fetch_next_init(step);
      //% endif
      u32 k_fragments[HEAD_DIM / 16][M_BLOCKS][4], v_fragments[HEAD_DIM_V / 16][M_BLOCKS][4];
      multiply_qk<elem_t, 16, false>(p, k_fragments, warp_k_tile, own.k, q_queries, own.q);
      //% if form
      if constexpr (RULES) {
        const auto rules = backward_rules<SOFTCAP, false, SCORE_MOD, ALIBI>(
            form, ScoreMod{place.batch, head, seqlen_q, seqlen_k${score_values}}, alibi_slopes,
            batch, head, seqlen_q, seqlen_k);
        final_scores<true, CURVED, BIAS || MASK>(p, slopes, added, lane, rules, band, softmax_scale,
                                                 k0 + warp_row, q0 + query);
      } else if (!sees_all(q0)) {
        const int row0 = thread_index_again() / WARP_SIZE % WARPS_K * ROWS_A_WARP;
        hide_outside<true, ACC_INIT>(p, thread_index_again() % WARP_SIZE, band,
                                     hidden_score(softmax_scale_log2), k0 + row0, q0 + query);
      }
      probabilities(p, RULES ? LOG2E : softmax_scale_log2, lse_row + query, lane);
      //% else
      if (q0 < unmasked || (SUMS && k0 + BLOCK_K > seqlen_k)) {
        const int row0 = thread_index_again() / WARP_SIZE % WARPS_K * ROWS_A_WARP;
        mask_queries(p, thread_index_again() % WARP_SIZE, hidden_score(softmax_scale_log2),
                     [&](int row) {
                       if (SUMS && k0 + row0 + row >= seqlen_k) return QUERIES;
                       return first_seeing + row0 + row - q0 - query;
                     });
      }
      probabilities(p, softmax_scale_log2, lse_row + query, lane);
      //% endif
      multiply_qk<elem_t, 16, false>(ds, v_fragments, warp_v_tile, own.v, do_queries, own.dout);
      score_gradients(ds, p, delta_row + query, lane);
      //% if form
      if constexpr (CURVED) scale_by(ds, slopes);
      if constexpr (DBIAS) key_sums.add(ds);
      //% endif
      if constexpr (SHARES_DS) exchange_rows<elem_t, PTile>(ds, lane, query, warp_ds_tile);
      if constexpr (EXCHANGE) {
        exchange_rows<elem_t, PTile>(p, lane, query, warp_p_tile);
      } else {
        accumulate_packed<elem_t>(dv_acc, p, do_queries, own.do_rows);
        //% if form
        if constexpr (ACC_INIT) fetch_next_init(step);  // beside the product that follows
        //% endif
        accumulate_packed<elem_t>(dk_acc, ds, q_queries, own.q_rows);
      }
    }

    // 3. P' and dS' of these keys are there for all queries of the tile; with SUMS those of all
    // keys.
    if constexpr (SUMS) __syncthreads();
    if constexpr (EXCHANGE && !SUMS) named_barrier_wait<WARPS_C * WARP_SIZE>(1 + warp % WARPS_K);
    //% if form
    if constexpr (ACC_INIT && EXCHANGE && STEPS == 1) fetch_next_init(0);
    //% endif
    if constexpr (EXCHANGE)
      accumulate_exchanged<elem_t, WARPS_C>(dk_acc, dv_acc, own, warp_p_tile, warp_ds_tile, stage);
    if constexpr (SUMS)
      add_dq<elem_t, KTile, PTile, NUM_WARPS>(dq_sum + (head_rows(head) + q0) * HEAD_DIM, ds_tile,
                                              k_tile);
    //% if form
    if (DBIAS && tile + 1 == tiles)
      key_sums.store(dbias_parts, (static_cast<i64>(batch) * heads_q + head) * WARPS_C + turn, lane,
                     k0 + warp_row, seqlen_k, max_seqlen_k);
    //% endif
    if (++tile == tiles) tile = first_tile, ++head;
  }

  // 4. dK and dV are staged where K and V were, then stored in whole chunks. Places are computed
  //    again rather than kept in registers through the loop.
  cp_async_wait<0>();
  __syncthreads();
  //% if form
  const KeyBlock<BLOCK_K> again(block_index_again(), max_seqlen_k, anew(heads_q) / group_size);
  dk += held.start * dk_strides.row;
  dv += held.start * dv_strides.row;
  //% else
  const KeyBlock<BLOCK_K> again(block_index_again(), seqlen_k, heads_q / group_size);
  //% endif
  store_dk_dv<Layout, WARPS_K, WARPS_C, ALIGNED, KeyOrder>(
      shared_address(shared_memory), dk_acc, dv_acc, softmax_scale, again, dk, dk_strides, head_dim,
      dv, dv_strides, head_dim_v, seqlen_k);
}
