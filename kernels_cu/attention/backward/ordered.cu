/* Attention backward, dK, dV and sums of dQ in a fixed order, on tensor cores (mma.sync; sm_80 and
   newer).

   backward_dkdv.cu's products of a block of keys, with SUMS and without score features, but blocks
   of keys wait for one another where they add to a tile of dQ (backward/ordered_sums.cuh): five
   products, and the same bits at every call. A block goes through its tiles from the last one
   backwards; what it has added to a tile it passes on when the next tile's scores are made.

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
#include "attention/backward/ordered_sums.cuh"
#include "attention/backward/sum_fragments.cuh"
#include "attention/key_block.cuh"

using elem_t = ${dtype};
constexpr int BLOCK_K = ${block_k};  // keys of a block
constexpr int BLOCK_Q = ${block_q};  // query rows of a tile
constexpr int WARPS_K = ${warps_k};
constexpr int WARPS_C = ${warps_c};
constexpr int HEAD_DIM = ${head_dim};      // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};  // of v and dout, padded
constexpr int STAGES = ${stages};          // tiles of Q and dO in shared memory
constexpr int MIN_BLOCKS = ${min_blocks};  // blocks an SM should hold: caps the registers
constexpr int GUARD = ${guard};            // bytes between tiles: 0 except where memory is checked

constexpr int NUM_WARPS = WARPS_K * WARPS_C;
constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS_A_WARP = BLOCK_K / WARPS_K;
constexpr int M_BLOCKS = ROWS_A_WARP / 16;  // 16-row mma blocks of a warp
constexpr bool EXCHANGE = WARPS_C > 1;      // of P' and dS', through shared memory
constexpr int SHARE = EXCHANGE ? BLOCK_Q / WARPS_C : BLOCK_Q;               // queries of a warp
constexpr int QUERIES = min_of(SHARE, ${step_q}), STEPS = SHARE / QUERIES;  // so many at a time
constexpr int K_COLUMNS = HEAD_DIM / 8 / WARPS_C, V_COLUMNS = HEAD_DIM_V / 8 / WARPS_C;

static_assert(ROWS_A_WARP == 16 || ROWS_A_WARP == 32, "a warp owns one or two mma row blocks");
static_assert(QUERIES % 16 == 0 && SHARE % QUERIES == 0, "queries go into products 16 at a time");
static_assert(HEAD_DIM % (32 * WARPS_C) == 0 && HEAD_DIM_V % (32 * WARPS_C) == 0,
              "warps share the columns evenly, 16 at a time");

using Layout = DkDvLayout<BLOCK_K, BLOCK_Q, HEAD_DIM, HEAD_DIM_V, STAGES, EXCHANGE, true, GUARD>;
using KTile = Layout::KTile;
using VTile = Layout::VTile;
using QTile = Layout::QTile;
using DoTile = Layout::DoTile;
using PTile = Layout::PTile;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward_ordered(
    const elem_t* __restrict__ dout,     // [batch, heads_q, seqlen_q, head_dim_v] strides in
    const elem_t* __restrict__ q,        // [batch, heads_q, seqlen_q, head_dim]   elements,
    const elem_t* __restrict__ k,        // [batch, heads_kv, seqlen_k, head_dim]  last dimension
    const elem_t* __restrict__ v,        // [batch, heads_kv, seqlen_k, head_dim_v] contiguous
    const float* __restrict__ lse_log2,  // [batch, heads_q, rows_padded] contiguous
    const float* __restrict__ delta,     // the same
    elem_t* __restrict__ dk,             // as k
    elem_t* __restrict__ dv,             // as v
    float* __restrict__ dq_sum,  // fragments (backward/sum_fragments.cuh) of [batch, heads_q,
                                 // rows_padded, HEAD_DIM]
    u32* __restrict__ turns,     // [batch, heads_q, rows_padded / 16], 0 before and after
    u32* __restrict__ counters,  // [1], 0 before and after
    const Strides dout_strides, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const Strides dk_strides, const Strides dv_strides, const int heads_q,
    const int group_size,  // query heads a KV head
    const int seqlen_q, const int seqlen_k, const int head_dim, const int head_dim_v,
    const int heads_abreast, const int rows_padded, const float softmax_scale,
    const float softmax_scale_log2,  // softmax_scale * log2(e)
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 k_tile = shared_address(shared_memory), v_tile = k_tile + Layout::V;
  const u32 ds_tile = k_tile + Layout::DS;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int warp_row = warp % WARPS_K * ROWS_A_WARP, turn = warp / WARPS_K;

  const int index = abreast_index<BLOCK_K>(draw_number(counters, k_tile), seqlen_k, heads_abreast);
  const KeyBlock<BLOCK_K> place(index, seqlen_k, heads_q / group_size);
  const int k0 = place.k0, kv_head = place.head, batch = place.batch;
  // Query i sees key row r of the block if i >= first_seeing + r.
  const int first_seeing = causal ? k0 - (seqlen_k - seqlen_q) : -BLOCK_K;
  const int tiles = ceil_div(seqlen_q, BLOCK_Q);  // in order, rows that see no key get zeros
  const int first_tile = k0 == 0 ? 0 : max(first_seeing, 0) / BLOCK_Q;
  const int unmasked = first_seeing + BLOCK_K - 1;  // from this query on, all keys are seen
  const auto head_rows = [&](int of_head) {
    return (static_cast<i64>(batch) * heads_q + of_head) * rows_padded;
  };

  // From the last tile backwards, to the last one of the next query head where one turns.
  const auto next_tile = [&](int of_tile, bool turns) { return (turns ? tiles : of_tile) - 1; };
  // The additions to the tile before this one, after which all threads have met, are there.
  const auto leave_tile = [&](int head, int tile) {
    const bool turned = tile + 1 == tiles;
    const int row = (turned ? anew(first_tile) : tile + 1) * BLOCK_Q;
    const int last_key = min(row + BLOCK_Q, seqlen_q) - 1 + seqlen_k - seqlen_q;
    const int others = causal ? max(last_key, 0) / BLOCK_K + 1 : ceil_div(seqlen_k, BLOCK_K);
    red_inc_release(turns + (head_rows(head - turned) + row) / 16, others);
  };
  // Tiles of rows of all query heads, the last of which goes into stage 1 % STAGES.
  int left = max(tiles - first_tile, 0) * group_size;
  const auto fetch = [&](int number, int next_head, int of_tile) {
    const u32 stage = k_tile + Layout::RING + number % STAGES * Layout::STAGE;
    const i64 row = static_cast<i64>(of_tile) * BLOCK_Q;
    fetch_queries<Layout, THREADS, true>(stage, q, q_strides, head_dim, dout, dout_strides,
                                         head_dim_v, batch, next_head, row,
                                         seqlen_q - of_tile * BLOCK_Q);
    fetch_statistics<Layout>(stage, lse_log2, delta, head_rows(next_head) + row);
  };

  // 1. K, V and the first tile are on their way.
  copy_keys<KTile, THREADS, true, InOrder>(k_tile, k, k_strides, place, seqlen_k, head_dim);
  copy_keys<VTile, THREADS, true, InOrder>(v_tile, v, v_strides, place, seqlen_k, head_dim_v);
  int tile = tiles - 1, head = kv_head * group_size;
  if (STAGES > 1 && left > 0) fetch(left, head, tile);
  cp_async_commit();

  const DkDvReaders<Layout> own(lane, turn);
  const u32 warp_k_tile = k_tile + warp_row * KTile::ROW_BYTES;
  const u32 warp_v_tile = v_tile + warp_row * VTile::ROW_BYTES;
  const u32 warp_p_tile = k_tile + Layout::P + warp_row * PTile::ROW_BYTES;
  const u32 warp_ds_tile = ds_tile + warp_row * PTile::ROW_BYTES;
  float dk_acc[M_BLOCKS][K_COLUMNS][4] = {}, dv_acc[M_BLOCKS][V_COLUMNS][4] = {};

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
      const bool turns = tile == first_tile;
      fetch(left - 1, head + turns, next_tile(tile, turns));
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
      u32 k_fragments[HEAD_DIM / 16][M_BLOCKS][4], v_fragments[HEAD_DIM_V / 16][M_BLOCKS][4];
      multiply_qk<elem_t, 16, false>(p, k_fragments, warp_k_tile, own.k, q_queries, own.q);
      if (q0 < unmasked || k0 + BLOCK_K > seqlen_k) {
        const int row0 = thread_index_again() / WARP_SIZE % WARPS_K * ROWS_A_WARP;
        mask_queries(p, thread_index_again() % WARP_SIZE, hidden_score(softmax_scale_log2),
                     [&](int row) {
                       if (k0 + row0 + row >= seqlen_k) return QUERIES;
                       return first_seeing + row0 + row - q0 - query;
                     });
      }
      probabilities(p, softmax_scale_log2, lse_row + query, lane);
      multiply_qk<elem_t, 16, false>(ds, v_fragments, warp_v_tile, own.v, do_queries, own.dout);
      score_gradients(ds, p, delta_row + query, lane);
      exchange_rows<elem_t, PTile>(ds, lane, query, warp_ds_tile);
      if constexpr (EXCHANGE) {
        exchange_rows<elem_t, PTile>(p, lane, query, warp_p_tile);
      } else {
        accumulate_packed<elem_t>(dv_acc, p, do_queries, own.do_rows);
        accumulate_packed<elem_t>(dk_acc, ds, q_queries, own.q_rows);
      }
    }

    // 3. P' and dS' of these keys are there for all queries of the tile, and the tile's turn has
    // come.
    if (thread_index_again() == 0) {
      if (tile + 1 < tiles || head % group_size > 0) leave_tile(head, tile);
      wait_for_turn(turns + (head_rows(head) + q0) / 16, k0 / BLOCK_K);
    }
    __syncthreads();
    if constexpr (EXCHANGE)
      accumulate_exchanged<elem_t, WARPS_C>(dk_acc, dv_acc, own, warp_p_tile, warp_ds_tile, stage);
    add_dq<elem_t, KTile, PTile, NUM_WARPS>(dq_sum + (head_rows(head) + q0) * HEAD_DIM, ds_tile,
                                            k_tile, k0 == 0);
    const bool turns = tile == first_tile;
    tile = next_tile(tile, turns), head += turns;
  }

  // 4. dK and dV are staged where K and V were, then stored in whole chunks. Places are computed
  //    again rather than kept in registers through the loop.
  cp_async_wait<0>();
  __syncthreads();
  if (threadIdx.x == 0) leave_tile(head, tile);
  KeyBlock<BLOCK_K> again = place;
  again.head = head / group_size - 1;
  store_dk_dv<Layout, WARPS_K, WARPS_C, true, InOrder>(
      shared_address(shared_memory), dk_acc, dv_acc, softmax_scale, again, dk, dk_strides, head_dim,
      dv, dv_strides, head_dim_v, seqlen_k);
}
