/* Attention backward on sm_90 (sm_90a): TMA brings the tiles, wgmma multiplies them.

     P = exp(softmax_scale * q k^T - lse)         dV = P^T dO
     dS = P * (dO v^T - delta)                    dK = softmax_scale * dS^T q

   A thread block has 128 keys in shared memory, adds up their dK and dV in registers and goes
   through the tiles of queries that see them (backward_sm90/schedule.cuh). Two warpgroups own 64
   keys each; P^T and dS^T, accumulators in 16 bits, are the A operands of the next products:

     for each tile:  dP^T - delta = V dO^T - delta;  dV += P^T dO    issued
                     dS^T = P^T * (dP^T - delta)     and to shared memory, for the third warpgroup
                     S^T = K Q^T of the next tile;  dK += dS^T Q    issued
                     P^T = exp2(S^T * c - lse_log2)  while dK is multiplied

   The third warpgroup multiplies dS K of all 128 keys, a tile behind the others, and adds it to
   `dq_sum` in L2, from its accumulators (DIRECT) or by the copy engine; backward_dq_convert.cu
   makes dQ of it. In any order: dq_sum is 0 before. DETERMINISTIC: blocks add to a tile in a fixed
   order, and the first one overwrites it. In the fourth, a thread each loads tiles, and K and V, and
   two copy dQ in turns (copies.cuh). Features: features.cuh, score_mod.cuh of backward_sm90/.

   Registers decide the schedule: dK and dV take 128 of 208, S^T or dP^T 32, P^T or dS^T 16. With
   dV under way while dS^T is made both of the latter would be needed, and ptxas serialises wgmma
   (C7512). DS_SHARED: dK takes dS^T from where the third warpgroup has it, so that dV is under way
   then, and dK while the next dP^T is multiplied.

   Source: Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024). */
#include "prelude.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/proxy_fence.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "attention/backward_sm90/barriers.cuh"
#include "attention/backward_sm90/bias_gradient.cuh"
#include "attention/backward_sm90/copies.cuh"
#include "attention/backward_sm90/dq_products.cuh"
#include "attention/backward_sm90/layout.cuh"
#include "attention/backward_sm90/loads.cuh"
#include "attention/backward_sm90/tile.cuh"
//% if form
#include "attention/backward_sm90/features.cuh"
#include "attention/backward_sm90/score_mod.cuh"
//% endif

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${block_q};    // queries of a tile
constexpr int HEAD_DIM = ${head_dim};  // of q, k, v and o, padded with zeros; of tiles WIDTH
constexpr bool DETERMINISTIC = ${deterministic};
constexpr bool DS_SHARED = ${ds_shared};  // dK takes dS^T from shared memory, else from registers
constexpr bool DIRECT = ${direct};        // dQ is added up from registers, else from shared memory
constexpr int Q_STAGES = ${q_stages}, DO_STAGES = ${do_stages};  // tiles in shared memory
constexpr int DQ_STAGES = ${dq_stages};                          // parts of dQ
constexpr int MAIN_REGISTERS = ${main_registers}, DQ_REGISTERS = ${dq_registers};
constexpr int COPY_REGISTERS = ${copy_registers};
constexpr int LSE_AHEAD = ${lse_ahead}, DELTA_AHEAD = ${delta_ahead};  // pairs that are read early
constexpr int GUARD = ${guard};  // bytes between tiles: 0 except where memory is checked
constexpr bool VARLEN = ${varlen}, SOFTCAP = ${softcap}, ALIBI = ${alibi};
constexpr bool BIAS = ${bias}, MASK = ${mask}, CURVED = ${curved};  // of a score_mod
using bias_t = ${bias_dtype};
//% if has_mod
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"
//% endif

constexpr int BLOCK_K = 128, WARPGROUP = 128, THREADS = 4 * WARPGROUP, Q_STEPS = BLOCK_Q / 16;
// What setmaxnreg gives to some it has taken from others of those that a block was launched with.
static_assert(2 * MAIN_REGISTERS + DQ_REGISTERS + COPY_REGISTERS <= 65536 / WARPGROUP,
              "more would be waited for forever");

using Layout = BackwardLayout<BLOCK_Q, HEAD_DIM, Q_STAGES, DO_STAGES, DQ_STAGES, BIAS, MASK, GUARD>;
using QTile = Layout::QTile;  // of Q and dO
using KTile = Layout::KTile;  // of K
using VTile = Layout::VTile;
using DSTile = Layout::DSTile;
using Rings = BackwardRings<Layout>;
// Work items are taken by the warps that multiply, and by the thread that loads K and V.
using Barriers = BackwardBarriers<Layout, 3 * 4 + 1>;
//% if form
using Sizes = FormSizes<BLOCK_Q, BLOCK_K, DETERMINISTIC, VARLEN, ALIBI, MASK>;
//% else
using Sizes = BackwardSizes<BLOCK_Q, BLOCK_K, DETERMINISTIC>;
//% endif
using Tile = BackwardTile<BLOCK_Q, BLOCK_K>;

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_flash_backward_sm90(
    const __grid_constant__ TensorMap q_map,     // q, dout [batch, heads_q, seqlen_q, head_dim],
    const __grid_constant__ TensorMap dout_map,  // BLOCK_Q rows; all boxes are 64 columns wide
    const __grid_constant__ TensorMap k_map,     // k, v [batch, heads_kv, seqlen_k, head_dim],
    const __grid_constant__ TensorMap v_map,     // BLOCK_K rows
    //% if bias
    const __grid_constant__ TensorMap bias_map,  // [batch, heads_q, seqlen_q, seqlen_k], broadcast
    //% endif
    elem_t* __restrict__ dk,  // [batch, heads_kv, seqlen_k, head_dim], rows on 16 bytes
    elem_t* __restrict__ dv,  // the same with head_dim_v columns
    //% if form
    // Null where dense. Packed arrays are as attention/backward_sm90/tensor_rows.cuh and
    // attention/backward/padded_rows.cuh say.
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_k,    // [batch + 1]
    const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q], or null
    const u32* __restrict__ mask_bits /* see backward_sm90/mask.cuh */ ${score_arrays},
    //% endif
    const float* __restrict__ lse_log2,  // [batch, heads_q, rows_padded] contiguous, log2(e) * lse
    const float* __restrict__ delta,     // like lse_log2: rowsum(dout * o)
    float* __restrict__ dq_sum,          // [batch, heads_q, rows_padded, WIDTH] as fragments
    // (attention/backward/sum_fragments.cuh), 0 unless DETERMINISTIC
    //% if dbias_sums
    float* __restrict__ dbias_parts,  // [batch, heads_q, seqlen_k]: sums over queries
    //% elif dbias
    elem_t* __restrict__ dbias,  // [bias_batch, heads_q, seqlen_q, seqlen_k] contiguous
    //% endif
    //% if deterministic
    u32* __restrict__ turns,  // [batch, heads_q, rows_padded / 16], 0 before and after
    //% endif
    //% if form or not deterministic
    u32* __restrict__ counters,  // [1], 0 before and after
    //% endif
    const Strides dk_strides, const Strides dv_strides, const int batch, const int heads_q,
    const int group_size, const int seqlen_q, const int seqlen_k, const int head_dim,
    const int head_dim_v, const int rows_padded, const float softmax_scale,
    const float softmax_scale_log2,  // softmax_scale * log2(e), above 0
    //% if form
    const AttentionForm form${bias_batch} ${score_scalars},
    const Strides mask_bits_strides,  // between batches, heads and tiles, in words
    //% endif
    const int rounds,    // see backward_sm90/schedule.cuh, or with a form features.cuh
    const int causal) {  // query i sees keys up to i + seqlen_k - seqlen_q
  //% if not deterministic
  constexpr u32* turns = nullptr;
  //% elif not form
  constexpr u32* counters = nullptr;
  //% endif
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const Barriers barriers{shared + Layout::BARRIERS};
  const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x % WARPGROUP / WARP_SIZE;
  const bool signals = lane == 0;
  //% if form
  const Sizes sizes(cu_seqlens_q, cu_seqlens_k, batch, heads_q, group_size, seqlen_q, seqlen_k,
                    rows_padded, rounds, form, alibi_slopes, mask_bits, mask_bits_strides);
  //% else
  const Sizes sizes{batch, heads_q, group_size, seqlen_q, seqlen_k, rows_padded, causal, rounds};
  //% endif

  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  int works_taken = 0, step_number = 0;  // step_number: tiles of queries so far
  const auto next_work = [&] { return take_work(barriers, works_taken++, signals); };
  if (warpgroup < 2) {
    // ---- dK and dV of 64 keys
    more_registers<MAIN_REGISTERS>();
    const auto warp_row = [] { return thread_index_again() / WARP_SIZE * 16; };
    const u64 k_operand = wgmma_tile(shared + warpgroup * 64 * KTile::ROW_BYTES, 0);
    const u64 v_operand = k_operand + (Layout::V >> 4);
    const u64 q_operand = wgmma_tile(shared + Layout::Q, QTile::PANEL_BYTES);
    const u64 do_operand = wgmma_tile(shared + Layout::DO, QTile::PANEL_BYTES);
    FragmentReader<DSTile, BlockOrder::ROW_MAJOR> ds_place(lane);
    ds_place.lane_offset += warp_row() * DSTile::ROW_BYTES;
    const u64 ds_operand = wgmma_tile(shared + Layout::DS + warpgroup * 64 * DSTile::ROW_BYTES, 0);
    const u32 lane_rows = shared + Layout::ROWS + lane % 4 * 8;
    u32 p[Q_STEPS][4];
    bool masked, ends;  // the tile whose scores are next: some are hidden; it is its piece's last
    RowPairs<LSE_AHEAD> lse;
    RowPairs<DELTA_AHEAD> delta;
    bool do_ready;
    const auto rows_at = [&](int step) {
      return lane_rows + step % Layout::ROWS_STAGES * Layout::ROWS_STAGE;
    };
    // What lies in shared memory comes late beside products: it is read before scores are waited for.
    const auto look_ahead = [&](int step) {
      const Tile tile(barriers.tile(step));
      masked = tile.masked(), ends = tile.last;
      lse.load(rows_at(step));
    };
    // P^T of the tile, and what its dP^T takes.
    const auto take_scores = [&](float (&s)[1][BLOCK_Q / 8][4], int step, bool there) {
      //% if has_mod
      const ScoreTilePlace at(barriers.tile(step));
      const ScoreMod mod{at.batch, at.head, seqlen_q, seqlen_k${score_values}};
      if constexpr (CURVED)
        curved_scores<elem_t, Layout>(p, s, mod, barriers, shared, step, there, lse, rows_at(step),
                                      form);
      else
        modify_scores(s, mod, at, form.softmax_scale);
      //% endif
      //% if form
      if constexpr (!CURVED)
        feature_scores<Layout, SOFTCAP, ALIBI, bias_t>(s, barriers, shared, step, lane,
                                                       ${has_mod} ? 1.f : softmax_scale_log2, form);
      //% else
      if (masked) mask_columns(s, lane, Tile(barriers.tile(step)), warp_row());
      //% endif
      const float scale = SOFTCAP || ALIBI || BIAS || ${has_mod} ? 1.f : softmax_scale_log2;
      if constexpr (!CURVED) probabilities<elem_t>(p, s, scale, lse, rows_at(step));
      delta.load(rows_at(step) + BLOCK_Q * 4);
      const RingPlace<DO_STAGES> do_ring = ring_place<DO_STAGES>(step);
      do_ready = mbarrier_test(barriers.do_full(do_ring.stage), do_ring.parity);
    };

    // dK or dV of a work item, of which this is a tile.
    const auto store = [&](elem_t* target, const Strides& strides, int columns,
                           const float (&sum)[1][HEAD_DIM / 8][4], float scale, int step) {
      store_key_sums<VARLEN, Tile>(target, strides, columns, sum, scale, lane, warp_row(),
                                   barriers.tile(step));
    };

    const auto leave_do = [&](int stage) {
      __syncwarp();  // lanes have read what rows bring along
      if (signals) mbarrier_arrive(barriers.do_empty(stage));
    };

    bool more = next_work() < sizes.works();
    if (!more) return;
    mbarrier_wait(barriers.k_full(0), 0);
    mbarrier_wait(barriers.q_full(0), 0);
    wgmma_fence();
    {
      float s[1][BLOCK_Q / 8][4];
      issue_keys<elem_t, Layout, false>(s, k_operand, q_operand);
      look_ahead(0);
      wgmma_wait<0>();
      take_scores(s, 0, true);
    }
    while (more) {
      float dk_sum[1][HEAD_DIM / 8][4] = {}, dv_sum[1][HEAD_DIM / 8][4] = {};
      int taken = works_taken - 1;  // the piece of the next scores
      mbarrier_wait(barriers.v_full(), taken & 1);
      register_fence(dv_sum[0]);
      register_fence(dk_sum[0]);
      for (bool last = false; !last;) {
        // 1. dP^T and dV, then dS^T; meanwhile what step 2 needs. Behind the last tile: other keys.
        const int stage = step_number % Q_STAGES, tile_number = step_number;
        const RingPlace<DO_STAGES> do_ring = ring_place<DO_STAGES>(step_number);
        const RingPlace<Layout::DS_STAGES> ds_ring = ring_place<Layout::DS_STAGES>(step_number);
        const u64 do_tile = do_operand + do_ring.stage * (Layout::Q_STAGE >> 4);
        float dp[1][BLOCK_Q / 8][4];  // in here, so that its registers are free elsewhere
        start_differentials(dp, delta, rows_at(step_number) + BLOCK_Q * 4);
        if (!do_ready) mbarrier_wait(barriers.do_full(do_ring.stage), do_ring.parity);
        register_fence(p);
        register_fence(dp[0]);
        wgmma_fence();
        issue_keys<elem_t, Layout, true>(dp, v_operand, do_tile);
        issue_sum<elem_t>(dv_sum, p, do_tile);
        last = ends;
        if (last) {
          more = next_work() < sizes.works();
          taken += more;
          if (more) mbarrier_wait(barriers.k_full(taken % 2), taken / 2 % 2);
        }
        step_number += more;
        const RingPlace<Q_STAGES> next = ring_place<Q_STAGES>(step_number);
        mbarrier_wait(barriers.q_full(next.stage), next.parity);
        mbarrier_wait(barriers.ds_empty(ds_ring.stage), ds_ring.parity ^ 1);
        wgmma_wait<DS_SHARED ? 1 : 0>();
        u32 ds[Q_STEPS][4];
        //% if softcap
        capped_differentials<elem_t>(ds, p, dp, rows_at(tile_number), form.softcap);
        //% elif curved
        curved_differentials<elem_t, Layout>(ds, dp, shared, ds_ring.stage);
        //% else
        differentials<elem_t>(ds, p, dp);
        //% endif
        if (!DS_SHARED) leave_do(do_ring.stage);
        if (DS_SHARED && signals && tile_number > 0)
          mbarrier_arrive(barriers.q_empty((tile_number - 1) % Q_STAGES));
        if (signals && last) mbarrier_arrive(barriers.v_empty());
#pragma unroll
        for (int step = 0; step < Q_STEPS; ++step)
          stmatrix_x4(
              ds_place.address(shared + Layout::DS + ds_ring.stage * Layout::DS_STAGE, 0, step),
              ds[step]);

        // 2. S^T of the next tile, then dK; meanwhile dS^T is handed to the third warpgroup. (After all
        // tiles the last one's scores once more: products must not stand under a condition.)
        if constexpr (!DS_SHARED) register_fence(ds);
        wgmma_fence();
        float s[1][BLOCK_Q / 8][4];
        const u64 q_tile = q_operand + stage * (Layout::Q_STAGE >> 4);
        issue_keys<elem_t, Layout, false>(s, k_operand + taken % 2 * (Layout::K_STAGE >> 4),
                                          q_operand + next.stage * (Layout::Q_STAGE >> 4));
        if constexpr (!DS_SHARED) issue_sum<elem_t>(dk_sum, ds, q_tile);
        proxy_fence();
        if (DS_SHARED) named_barrier_wait_aligned<128>(1 + warpgroup);
        __syncwarp();
        if (signals) mbarrier_arrive(barriers.ds_full(ds_ring.stage));
        if constexpr (DS_SHARED)
          issue_shared_sum<elem_t, Layout>(
              dk_sum, ds_operand + (ds_ring.stage * Layout::DS_STAGE >> 4), q_tile);
        if (!DS_SHARED && last) store(dv, dv_strides, head_dim_v, dv_sum, 1.f, tile_number);
        look_ahead(step_number);

        wgmma_wait<1>();  // 3. P^T while dK is multiplied.
        if (DS_SHARED) leave_do(do_ring.stage);
        if (DS_SHARED && last) store(dv, dv_strides, head_dim_v, dv_sum, 1.f, tile_number);
        take_scores(s, step_number, more);
        if constexpr (DS_SHARED) continue;  // dK is waited for with the next tile's dP
        wgmma_wait<0>();
        __syncwarp();  // after all tiles, lanes have read of this stage once more
        if (signals) mbarrier_arrive(barriers.q_empty(stage));
      }
      if constexpr (DS_SHARED) wgmma_wait<0>();
      // 4. All have been multiplied with this K.
      if (signals) mbarrier_arrive(barriers.k_empty(works_taken % 2));
      store(dk, dk_strides, head_dim, dk_sum, softmax_scale, step_number - more);
    }
  } else if (warpgroup == 2) {
    fewer_registers<DQ_REGISTERS>();  // ---- dQ
    //% if dbias_sums
    BiasSums<elem_t, DSTile> bias_gradient{dbias_parts, heads_q, seqlen_k};
    //% elif dbias
    BiasRows<elem_t, DSTile> bias_gradient{dbias, heads_q, seqlen_q, seqlen_k, bias_batch < batch};
    //% else
    NoBiasGradient bias_gradient;
    //% endif
    multiply_dq<elem_t, Layout, Tile, DETERMINISTIC, DIRECT>(
        barriers, shared, sizes, next_work, works_taken, step_number, dq_sum, lane, warp,
        threadIdx.x == 2 * WARPGROUP, bias_gradient);
  } else {
    fewer_registers<COPY_REGISTERS>();
    const int role = __shfl_sync(FULL_MASK, warp, 0);
    if (role == 0 && elect_one()) {
      // ---- tiles of Q and dO, and notes of what they are
      load_tiles(BackwardLoads<Rings, Barriers>{barriers, Rings(shared), q_map, dout_map, lse_log2,
                                                delta, ${bias_address}},
                 sizes, counters);
    } else if (role == 1 && elect_one()) {
      // ---- K and V
      const KeyLoads<KTile, VTile, Barriers> loads{barriers,           shared, Layout::K_STAGE,
                                                   shared + Layout::V, k_map,  v_map};
      load_keys(loads, sizes);
    } else if (DETERMINISTIC && signals) {
      // ---- copies of dQ, in turns
      //% if deterministic
      const DQParts<Layout, Sizes::INDEX_ROWS> parts{dq_sum, shared};
      copy_ordered<Layout>(barriers, turns, warp - 2, parts);
      //% endif
    }
  }
}
