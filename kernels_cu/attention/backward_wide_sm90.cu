/* Attention backward on sm_90 (sm_90a) of head dimensions above 128: backward_sm90.cu's warpgroups,
   rings and order of additions, but of 64 keys, whose dK and dV do not fit into one warpgroup.

     P = exp(softmax_scale * q k^T - lse)         dV = P^T dO
     dS = P * (dO v^T - delta)                    dK = softmax_scale * dS^T q

   Two warpgroups share the 64 keys. Of a tile of 64 queries each makes the scores of 32, and of dK
   and dV it adds up half of the columns, for which it needs P^T and dS^T of all queries: both go
   through shared memory, at two meetings a tile.

     for each tile:  dP^T - delta = V dO^T - delta   issued, own queries; the dK before is done
                     meeting: P^T is there           dV += P^T dO   issued, own columns
                     dS^T = P^T * (dP^T - delta)     while dV is multiplied; to shared memory
                     S^T = K Q^T of the next tile    issued, own queries
                     meeting: dS^T is there          dK += dS^T Q   issued, own columns
                     P^T = exp2(S^T * c - lse_log2)  while dK is multiplied; to shared memory

   The third warpgroup multiplies dS K and adds it to `dq_sum`, the fourth has the threads that load
   and copy, as there. K, V and two tiles each of Q and dO are 192 KB: there is one K, so a piece of
   work begins with scores of its own. In order dQ needs 16 KB, which P^T and dS^T leave it: there
   is one of each, and a third meeting before P^T, where in any order there are two. With 128
   columns of values tiles have 128 queries, and there is one of dO. PAIRED: two thread blocks of a
   cluster with neighbouring keys bring Q and dO for both and add up their dQ
   (backward_sm90/dq_pairs.cuh).

   A step takes 2,560 clocks of the tensor cores and of shared memory 3,250 in any order (4,250 in
   order): S and dP 192 KB, dV and dK 96, dQ 64, tiles 64 (dQ staged and read again 128).

   Source: Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024). */
#include "prelude.cuh"
#include "ptx/cluster.cuh"
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
#include "attention/backward_sm90/dq_pairs.cuh"
#include "attention/backward_sm90/dq_products.cuh"
#include "attention/backward_sm90/halves.cuh"
#include "attention/backward_sm90/layout.cuh"
#include "attention/backward_sm90/loads.cuh"
#include "attention/backward_sm90/tile.cuh"
//% if form
#include "attention/backward_sm90/features.cuh"
//% endif

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${block_q};                                // queries of a tile
constexpr int HEAD_DIM = ${head_dim}, HEAD_DIM_V = ${head_dim_v};  // padded with zeros
constexpr bool DETERMINISTIC = ${deterministic};
constexpr bool DIRECT = ${direct};  // dQ is added up from registers, else by copies
constexpr int Q_STAGES = ${q_stages}, DO_STAGES = ${do_stages};  // tiles in shared memory
constexpr int P_STAGES = ${p_stages}, DS_STAGES = ${ds_stages};  // P^T and dS^T of tiles
constexpr int DQ_STAGES = ${dq_stages};                          // parts of dQ
constexpr int MAIN_REGISTERS = ${main_registers}, DQ_REGISTERS = ${dq_registers};
constexpr int COPY_REGISTERS = ${copy_registers};
constexpr int LSE_AHEAD = ${lse_ahead}, DELTA_AHEAD = ${delta_ahead};  // pairs that are read early
constexpr int GUARD = ${guard};  // bytes between tiles: 0 except where memory is checked
constexpr bool VARLEN = ${varlen}, SOFTCAP = ${softcap}, ALIBI = ${alibi}, MASK = ${mask};

constexpr bool PAIRED = ${paired};  // two thread blocks of a cluster have neighbouring keys
constexpr bool SHARED_TILES = ${shared_tiles};  // and read each tile of Q and dO once

constexpr int BLOCK_K = 64, WORK_K = PAIRED ? 2 * BLOCK_K : BLOCK_K;  // keys of a work item
constexpr int WARPGROUP = 128, THREADS = 4 * WARPGROUP;
constexpr int OWN_Q = BLOCK_Q / 2, Q_STEPS = OWN_Q / 16;  // of a warpgroup
enum Meeting { P_READY = 1, DS_READY = 2, P_READ = 3 };   // named barriers of both warpgroups
// What setmaxnreg gives to some it has taken from others of those that a block was launched with.
static_assert(2 * MAIN_REGISTERS + DQ_REGISTERS + COPY_REGISTERS <= 65536 / WARPGROUP,
              "more would be waited for forever");

using Layout = BackwardLayout<BLOCK_Q, HEAD_DIM, Q_STAGES, DO_STAGES, DQ_STAGES, false, MASK, GUARD,
                              BLOCK_K, 1, DS_STAGES, P_STAGES, HEAD_DIM_V, SHARED_TILES>;
using QTile = Layout::QTile;
using KTile = Layout::KTile;
using VTile = Layout::VTile;
using DSTile = Layout::DSTile;
using Rings = BackwardRings<Layout>;
// Work items are taken by the warps that multiply, and by the thread that loads K and V.
using Barriers = BackwardBarriers<Layout, 3 * 4 + 1>;
//% if form
using Sizes = FormSizes<BLOCK_Q, WORK_K, DETERMINISTIC, VARLEN, ALIBI, MASK>;
//% else
using Sizes = BackwardSizes<BLOCK_Q, WORK_K, DETERMINISTIC>;
//% endif
using Tile = BackwardTile<BLOCK_Q, BLOCK_K>;

extern "C" __global__ void
    //% if paired
    __cluster_dims__(2)
    //% endif
    __launch_bounds__(THREADS, 1) attention_flash_backward_wide_sm90(
        const __grid_constant__ TensorMap q_map,  // q, dout [batch, heads_q, seqlen_q, head_dim],
        const __grid_constant__ TensorMap dout_map,  // BLOCK_Q rows; all boxes are 64 columns wide
        const __grid_constant__ TensorMap k_map,     // k, v [batch, heads_kv, seqlen_k, head_dim],
        const __grid_constant__ TensorMap v_map,     // BLOCK_K rows
        elem_t* __restrict__ dk,  // [batch, heads_kv, seqlen_k, head_dim], rows on 16 bytes
        elem_t* __restrict__ dv,  // the same with head_dim_v columns
        //% if form
        // Null where dense. Packed arrays are as attention/backward_sm90/tensor_rows.cuh and
        // attention/backward/padded_rows.cuh say.
        const int* __restrict__ cu_seqlens_q,    // [batch + 1]
        const int* __restrict__ cu_seqlens_k,    // [batch + 1]
        const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q], or null
        const u32* __restrict__ mask_bits,       // see backward_sm90/mask.cuh
        //% endif
        const float* __restrict__ lse_log2,  // [batch, heads_q, rows_padded] contiguous, log2(e) * lse
        const float* __restrict__ delta,     // like lse_log2: rowsum(dout * o)
        float* __restrict__ dq_sum,          // [batch, heads_q, rows_padded, WIDTH] as fragments
        // (attention/backward/sum_fragments.cuh), 0 unless DETERMINISTIC
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
        const AttentionForm form,
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
                    rows_padded, rounds, form, alibi_slopes, mask_bits, mask_bits_strides,
                    PAIRED ? cluster_rank() * BLOCK_K : 0);
  //% else
  const Sizes sizes{batch,    heads_q,  group_size,
                    seqlen_q, seqlen_k, rows_padded,
                    causal,   rounds,   PAIRED ? cluster_rank() * BLOCK_K : 0};
  //% endif

  const PairBarriers pair{shared + Layout::BARRIERS + Barriers::BYTES + 32};
  if (threadIdx.x == 0) {
    barriers.init();
    if (PAIRED) pair.init();
  }
  if (PAIRED)
    meet_cluster();
  else
    __syncthreads();
  int works_taken = 0, step_number = 0;  // step_number: tiles of queries so far
  const auto next_work = [&] { return take_work(barriers, works_taken++, signals); };
  if (warpgroup < 2) {
    // ---- half of the columns of dK and dV
    more_registers<MAIN_REGISTERS>();
    // What is where: computed again for each product, as registers are short.
    const auto operand = [&](int first, int stage_bytes, int stage, int own) {
      return wgmma_tile(shared + first + stage_bytes * stage + anew(warpgroup) * own,
                        QTile::PANEL_BYTES);
    };
    constexpr int ROWS = OWN_Q * QTile::ROW_BYTES;
    const auto q_tile = [&](int stage, int own) {
      return operand(Layout::Q, Layout::Q_STAGE, stage, own);
    };
    const auto do_tile = [&](int stage, int own) {
      return operand(Layout::DO, Layout::DO_STAGE, stage, own);
    };
    const auto warp_row = [] { return own_key<Layout>(); };
    FragmentReader<DSTile, BlockOrder::ROW_MAJOR> place(lane);  // of own scores in P^T, dS^T
    place.lane_offset += warp_row() * DSTile::ROW_BYTES;
    const u32 lane_rows = shared + Layout::ROWS + own_query<Layout>() * 4 + lane % 4 * 8;
    const auto rows_at = [&](int step) {
      return lane_rows + step % Layout::ROWS_STAGES * Layout::ROWS_STAGE;
    };
    u32 p[Q_STEPS][4];
    RowPairs<LSE_AHEAD> lse;
    RowPairs<DELTA_AHEAD> delta;
    // A tile has been multiplied.
    const auto leave = [&](u32 barrier) {
      mbarrier_arrive(barrier);
      if (SHARED_TILES) cluster_arrive_at(barrier, cluster_rank() ^ 1);
    };
    const auto share = [&](u32 tile, const u32(&own)[Q_STEPS][4]) {
#pragma unroll
      for (int step = 0; step < Q_STEPS; ++step)
        stmatrix_x4(place.address(tile, 0, warpgroup * Q_STEPS + step), own[step]);
      proxy_fence();
    };
    // P^T of the tile, and what its dP^T takes.
    const auto take_scores = [&](float (&s)[1][OWN_Q / 8][4], int step) {
      //% if form
      feature_scores<Layout, SOFTCAP, ALIBI, float>(s, barriers, shared, step, lane,
                                                    softmax_scale_log2, form);
      //% else
      Tile tile(barriers.tile(step));
      tile.shift -= own_query<Layout>();
      if (tile.masked()) mask_columns(s, lane, tile, warp_row());
      //% endif
      const float scale = SOFTCAP || ALIBI ? 1.f : softmax_scale_log2;
      probabilities<elem_t>(p, s, scale, lse, rows_at(step));
      delta.load(rows_at(step) + BLOCK_Q * 4);
      if (P_STAGES == 1) named_barrier_wait_aligned<2 * WARPGROUP>(P_READ);
      share(shared + Layout::P + step % P_STAGES * Layout::DS_STAGE, p);
    };
    // dK or dV of a work item, of which this is a tile.
    const auto store = [&](elem_t* target, const Strides& strides, int columns, const auto& sums,
                           float scale, int step) {
      sums.template store<VARLEN, Tile>(target, strides, columns, scale, lane, warp_row(),
                                        barriers.tile(step), warpgroup);
    };

    while (next_work() < sizes.works()) {
      const int taken = works_taken - 1, first_step = step_number;
      HalfSums<HEAD_DIM> dk_sum;
      HalfSums<HEAD_DIM_V> dv_sum;
      {
        const RingPlace<Q_STAGES> ring = ring_place<Q_STAGES>(step_number);
        mbarrier_wait(barriers.k_full(0), taken & 1);
        mbarrier_wait(barriers.q_full(ring.stage), ring.parity);
        float s[1][OWN_Q / 8][4];
        wgmma_fence();
        issue_keys<elem_t, Layout, false>(s, operand(0, 0, 0, 0), q_tile(ring.stage, ROWS));
        lse.load(rows_at(step_number));
        wgmma_wait<0>();
        take_scores(s, step_number);
      }
      mbarrier_wait(barriers.v_full(), taken & 1);
      dv_sum.fence();
      dk_sum.fence();
      for (bool last = false; !last; ++step_number) {
        // 1. dP^T while the last tile's dK is multiplied, then dV.
        const RingPlace<Q_STAGES> q_ring = ring_place<Q_STAGES>(step_number);
        const RingPlace<DO_STAGES> do_ring = ring_place<DO_STAGES>(step_number);
        const RingPlace<DS_STAGES> ds_ring = ring_place<DS_STAGES>(step_number);
        float dp[1][OWN_Q / 8][4];
        start_differentials(dp, delta, rows_at(step_number) + BLOCK_Q * 4);
        last = Tile(barriers.tile(step_number)).last;
        mbarrier_wait(barriers.do_full(do_ring.stage), do_ring.parity);
        register_fence(dp[0]);
        wgmma_fence();
        issue_keys<elem_t, Layout, true, HEAD_DIM_V>(dp, operand(Layout::V, 0, 0, 0),
                                                     do_tile(do_ring.stage, ROWS));
        wgmma_wait<1>();
        if (signals && step_number > first_step)
          leave(barriers.q_empty((step_number - 1) % Q_STAGES));
        named_barrier_wait_aligned<2 * WARPGROUP>(P_READY);
        wgmma_fence();
        dv_sum.issue<elem_t, Layout>(
            operand(Layout::P, Layout::DS_STAGE, step_number % P_STAGES, 0), [&](int at, int own) {
              return operand(Layout::DO + at, Layout::DO_STAGE, do_ring.stage, own);
            });

        // 2. dS^T, then S^T of the next tile and dK. (After the last tile its own scores once more:
        // products must not stand under a condition.)
        const int next_step = step_number + !last;
        const RingPlace<Q_STAGES> next = ring_place<Q_STAGES>(next_step);
        mbarrier_wait(barriers.q_full(next.stage), next.parity);
        mbarrier_wait(barriers.ds_empty(ds_ring.stage), ds_ring.parity ^ 1);
        wgmma_wait<1>();
        u32 ds[Q_STEPS][4];
        //% if softcap
        capped_differentials<elem_t>(ds, p, dp, rows_at(step_number), form.softcap);
        //% else
        differentials<elem_t>(ds, p, dp);
        //% endif
        if (signals && last) mbarrier_arrive(barriers.v_empty());
        share(shared + Layout::DS + ds_ring.stage * Layout::DS_STAGE, ds);
        float s[1][OWN_Q / 8][4];
        wgmma_fence();
        issue_keys<elem_t, Layout, false>(s, operand(0, 0, 0, 0), q_tile(next.stage, ROWS));
        named_barrier_wait_aligned<2 * WARPGROUP>(DS_READY);
        __syncwarp();
        if (signals) mbarrier_arrive(barriers.ds_full(ds_ring.stage));
        wgmma_fence();
        dk_sum.issue<elem_t, Layout>(
            operand(Layout::DS, Layout::DS_STAGE, ds_ring.stage, 0), [&](int at, int own) {
              return operand(Layout::Q + at, Layout::Q_STAGE, q_ring.stage, own);
            });

        // 3. P^T of the next tile while dK is multiplied.
        lse.load(rows_at(next_step));
        wgmma_wait<1>();
        __syncwarp();  // lanes have read what rows bring along
        if (signals) leave(barriers.do_empty(do_ring.stage));
        if (!last) take_scores(s, next_step);
      }
      // 4. dV is stored while the last dK is multiplied.
      store(dv, dv_strides, head_dim_v, dv_sum, 1.f, step_number - 1);
      wgmma_wait<0>();
      if (signals) {
        leave(barriers.q_empty((step_number - 1) % Q_STAGES));
        mbarrier_arrive(barriers.k_empty(0));
      }
      store(dk, dk_strides, head_dim, dk_sum, softmax_scale, step_number - 1);
    }
  } else if (warpgroup == 2) {
    fewer_registers<DQ_REGISTERS>();  // ---- dQ
    if constexpr (PAIRED)
      multiply_dq_paired<elem_t, Layout, Tile, DETERMINISTIC>(
          barriers, pair, shared, sizes, next_work, works_taken, step_number, dq_sum, lane, warp,
          threadIdx.x == 2 * WARPGROUP);
    else
      multiply_dq<elem_t, Layout, Tile, DETERMINISTIC, DIRECT>(
          barriers, shared, sizes, next_work, works_taken, step_number, dq_sum, lane, warp,
          threadIdx.x == 2 * WARPGROUP, NoBiasGradient{});
  } else {
    fewer_registers<COPY_REGISTERS>();
    const int role = __shfl_sync(FULL_MASK, warp, 0);
    if (role == 0 && elect_one()) {
      // ---- tiles of Q and dO, and notes of what they are
      load_tiles(BackwardLoads<Rings, Barriers>{barriers, Rings(shared), q_map, dout_map, lse_log2,
                                                delta, nullptr},
                 sizes, PAIRED ? nullptr : counters);
    } else if (role == 1 && elect_one()) {
      // ---- K and V
      const KeyLoads<KTile, VTile, Barriers> loads{barriers,           shared, Layout::K_STAGE,
                                                   shared + Layout::V, k_map,  v_map};
      load_keys(loads, sizes);
    } else if (DETERMINISTIC && signals) {
      // ---- copies of dQ, in turns; or turns alone
      //% if deterministic
      const DQParts<Layout, Sizes::INDEX_ROWS> parts{dq_sum, shared};
      if constexpr (PAIRED)
        take_turns<Layout, Sizes::INDEX_ROWS>(barriers, pair, turns, warp - 2);
      else
        copy_ordered<Layout>(barriers, turns, warp - 2, parts);
      //% endif
    }
  }
  if (PAIRED) {  // nobody ends while the other one still gives
    __syncwarp();
    meet_cluster();
  }
}
