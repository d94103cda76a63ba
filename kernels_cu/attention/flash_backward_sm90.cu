/* Attention backward on Hopper (sm_90a): TMA brings the tiles, wgmma multiplies them.

     P = exp(softmax_scale * q k^T - lse)         dV = P^T dO
     dS = P * (dO v^T - delta)                    dK = softmax_scale * dS^T q

   A thread block has 128 keys in shared memory, adds up their dK and dV in registers and goes
   through the tiles of queries that see them (device/backward_schedule.cuh). Two warpgroups own 64
   keys each; P^T and dS^T, accumulators in 16 bits, are the A operands of the next products:

     for each tile:  dP^T = V dO^T;  dV += P^T dO    issued; others' arithmetic runs meanwhile
                     dS^T = P^T * (dP^T - delta)     and to shared memory, for the third warpgroup
                     S^T = K Q^T of the next tile;  dK += dS^T Q    issued
                     P^T = exp2(S^T * c - lse_log2)  while dK is multiplied

   The third warpgroup multiplies dS K of all 128 keys, a tile behind the others, and adds it to
   `dq_sum` in L2, from its accumulators (DIRECT) or by the copy engine. In any order: dq_sum is 0
   before, and backward_dq.cu makes dQ of it. DETERMINISTIC: blocks add to a tile in a fixed order;
   the first one overwrites it, the last one makes dQ of it. In the fourth, a thread each loads
   tiles, loads K and V, and starts the copies of dQ and waits for turns.

   Registers decide the schedule: dK and dV take 128 of 208, S^T or dP^T 32, P^T or dS^T 16. With
   dV under way while dS^T is made both of the latter were needed: ptxas serialises wgmma (C7512).
   Forms of attention are rendered in as device/backward_form.cuh has them.

   Source: Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024). */
#include "prelude.cuh"
#include "device/backward_barriers.cuh"
#include "device/backward_copies.cuh"
//% if form
#include "device/backward_form.cuh"
//% endif
#include "device/backward_loads.cuh"
#include "device/backward_sums.cuh"
#include "device/backward_tile.cuh"
#include "device/mbarrier.cuh"
#include "device/stmatrix.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${block_q};    // queries of a tile
constexpr int HEAD_DIM = ${head_dim};  // of q, k, v and o, padded with zeros
constexpr bool DETERMINISTIC = ${deterministic};
constexpr bool DIRECT = ${direct};  // dQ is added up from registers, else from shared memory
constexpr int Q_STAGES = ${q_stages}, DO_STAGES = ${do_stages};  // tiles in shared memory
constexpr int MAIN_REGISTERS = ${main_registers}, DQ_REGISTERS = ${dq_registers};
constexpr int COPY_REGISTERS = ${copy_registers};
constexpr int GUARD = ${guard};  // bytes between tiles: 0 except where memory is checked
constexpr bool VARLEN = ${varlen}, SOFTCAP = ${softcap}, ALIBI = ${alibi};

constexpr int BLOCK_K = 128, WARPGROUP = 128, THREADS = 4 * WARPGROUP;
// What setmaxnreg gives to some it has taken from others of those that a block was launched with.
static_assert(2 * MAIN_REGISTERS + DQ_REGISTERS + COPY_REGISTERS <= 65536 / WARPGROUP,
              "more would be waited for forever");
static_assert(!(DIRECT && DETERMINISTIC), "turns are taken by the thread that starts copies");
constexpr int DIM_STEPS = HEAD_DIM / 16, Q_STEPS = BLOCK_Q / 16, K_STEPS = BLOCK_K / 16;
constexpr int DQ_COLUMNS = 64;  // of dQ multiplied at a time, of 64 queries
constexpr int CHUNKS = DQ_COLUMNS / 8;
constexpr int DQ_ACROSS = HEAD_DIM / DQ_COLUMNS, DQ_PARTS = BLOCK_Q / 64 * DQ_ACROSS;

using QTile = SwizzledTile<BLOCK_Q, HEAD_DIM>;  // of Q and dO
using KTile = SwizzledTile<BLOCK_K, HEAD_DIM>;  // of K and V, at the end of dK and dV
using DSTile = SwizzledTile<BLOCK_K, BLOCK_Q>;
static_assert(QTile::PANEL_COLUMNS == 64 && DSTile::PANEL_COLUMNS == 64, "TMA's 128-byte swizzle");

// Shared memory: K, V, rings of Q and dO, of dS, dQ, what rows bring along; the barriers.
constexpr int ROWS_BYTES = 2 * BLOCK_Q * 4, DS_STAGES = 2;  // lse_log2 of a tile, then delta
constexpr int V_OFFSET = KTile::BYTES + GUARD, Q_OFFSET = 2 * V_OFFSET;
constexpr int Q_STAGE = QTile::BYTES + GUARD, DO_OFFSET = Q_OFFSET + Q_STAGES * Q_STAGE;
constexpr int DS_OFFSET = DO_OFFSET + DO_STAGES * Q_STAGE, DS_STAGE = DSTile::BYTES + GUARD;
constexpr int DQ_OFFSET = DS_OFFSET + DS_STAGES * DS_STAGE, DQ_WARP_BYTES = 16 * DQ_COLUMNS * 4;
constexpr int DQ_STAGE = 4 * DQ_WARP_BYTES + GUARD, ROWS_STAGE = ROWS_BYTES + GUARD;
constexpr int ROWS_OFFSET = DQ_OFFSET + (DIRECT ? 0 : DQ_PARTS * DQ_STAGE);
constexpr int BARRIERS_OFFSET = ROWS_OFFSET + Q_STAGES * ROWS_STAGE;

using Barriers = BackwardBarriers<Q_STAGES, DO_STAGES, DS_STAGES, DQ_PARTS>;
//% if form
using Sizes = FormSizes<BLOCK_Q, BLOCK_K, DETERMINISTIC, VARLEN, ALIBI>;
//% else
using Sizes = BackwardSizes<BLOCK_Q, BLOCK_K, DETERMINISTIC>;
//% endif
using Tile = BackwardTile<BLOCK_Q, BLOCK_K>;
constexpr int INDEX_BLOCKS = Sizes::INDEX_ROWS / 16;  // of a tile's index, 16 rows each
using Copies = DQCopies<HEAD_DIM, DQ_COLUMNS>;
using Rings = BackwardRings<QTile, BLOCK_Q, Q_STAGES, Q_OFFSET, DO_STAGES, DO_OFFSET, Q_STAGE,
                            ROWS_OFFSET, ROWS_STAGE>;

// D[64 x BLOCK_Q] (+)= A[64 x 16] B[BLOCK_Q x 16]^T.                PTX ISA: wgmma.mma_async
__device__ __forceinline__ void product_keys(float (&d)[1][BLOCK_Q / 8][4], u64 a, u64 b, int add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, ${keys_add}, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n${block_q}k16.f32.${ptx_type}.${ptx_type} "
      "{${keys_registers}}, ${keys_a}, ${keys_b}, add, 1, 1, 0, 0;\n"
      "}"
      : ${keys_operands}
      : "l"(a), "l"(b), "r"(add));
}

// D[64 x HEAD_DIM] += A[64 x 16] B[16 x HEAD_DIM], A from registers.
__device__ __forceinline__ void product_sum(float (&d)[1][HEAD_DIM / 8][4], const u32 (&a)[4],
                                            u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n${head_dim}k16.f32.${ptx_type}.${ptx_type} "
      "{${sum_registers}}, {${sum_a}}, ${sum_b}, 1, 1, 1, 1;"
      : ${sum_operands}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// D[64 x DQ_COLUMNS] (+)= A[16 x 64]^T B[16 x DQ_COLUMNS].
__device__ __forceinline__ void product_dq(float (&d)[1][CHUNKS][4], u64 a, u64 b, int add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, ${dq_add}, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.${ptx_type}.${ptx_type} "
      "{${dq_list}}, ${dq_a}, ${dq_b}, add, 1, 1, 1, 1;\n"
      "}"
      : ${dq_operands}
      : "l"(a), "l"(b), "r"(add));
}

// S^T or dP^T: both operands have HEAD_DIM columns.
__device__ __forceinline__ void issue_keys(float (&d)[1][BLOCK_Q / 8][4], u64 keys, u64 queries) {
#pragma unroll
  for (int step = 0; step < DIM_STEPS; ++step) {
    const int panel = step / 4, within = step % 4 * 2;  // 32 bytes a step, in units of 16
    product_keys(d, keys + (panel * KTile::PANEL_BYTES >> 4) + within,
                 queries + (panel * QTile::PANEL_BYTES >> 4) + within, step > 0);
  }
  wgmma_commit();
}

// dV or dK.
__device__ __forceinline__ void issue_sum(float (&d)[1][HEAD_DIM / 8][4],
                                          const u32 (&a)[Q_STEPS][4], u64 b) {
#pragma unroll
  for (int step = 0; step < Q_STEPS; ++step) product_sum(d, a[step], b + step * (2048 >> 4));
  wgmma_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_flash_backward_sm90(
    const __grid_constant__ TensorMap q_map,     // q, dout [batch, heads_q, seqlen_q, head_dim],
    const __grid_constant__ TensorMap dout_map,  // BLOCK_Q rows; all boxes are 64 columns wide
    const __grid_constant__ TensorMap k_map,     // k, v [batch, heads_kv, seqlen_k, head_dim],
    const __grid_constant__ TensorMap v_map,     // BLOCK_K rows
    const __grid_constant__ TensorMap dk_map,    // like k and v, 16 rows
    const __grid_constant__ TensorMap dv_map,
    //% if deterministic
    const __grid_constant__ TensorMap dq_map,  // like q, 16 rows
    //% endif
    //% if form
    // Null where dense. Packed arrays are as device/tensor_rows.cuh and padded_rows.cuh say.
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_k,    // [batch + 1]
    const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q], or null
    //% endif
    const float* __restrict__ lse_log2,  // [batch, heads_q, rows_padded] contiguous, log2(e) * lse
    const float* __restrict__ delta,     // like lse_log2: rowsum(dout * o)
    float* __restrict__ dq_sum,  // [batch, heads_q, rows_padded, HEAD_DIM] as fragments (see
                                 // device/sum_fragments.cuh), 0 unless DETERMINISTIC
    //% if deterministic
    u32* __restrict__ turns,  // [batch, heads_q, rows_padded / 16], 0 before and after
    //% endif
    //% if form or not deterministic
    u32* __restrict__ counters,  // [1], 0 before and after
    //% endif
    const int batch, const int heads_q, const int group_size, const int seqlen_q,
    const int seqlen_k, const int rows_padded, const float softmax_scale,
    const float softmax_scale_log2,  // softmax_scale * log2(e), above 0
    //% if form
    const AttentionForm form,
    //% endif
    //% if deterministic
    const int rounds,  // see backward_schedule.cuh, or with a form backward_form.cuh
    //% endif
    const int causal) {  // query i sees keys up to i + seqlen_k - seqlen_q
  //% if not deterministic
  constexpr u32* turns = nullptr;
  constexpr int rounds = 1;
  //% elif not form
  constexpr u32* counters = nullptr;
  //% endif
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const Barriers barriers{shared + BARRIERS_OFFSET};
  const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x % WARPGROUP / WARP_SIZE;
  const bool signals = lane == 0;
  //% if form
  const Sizes sizes(cu_seqlens_q, cu_seqlens_k, batch, heads_q, group_size, seqlen_q, seqlen_k,
                    rows_padded, rounds, form, alibi_slopes);
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
    const int warp_row = warpgroup * 64 + warp * 16;
    const u64 k_operand = wgmma_tile(shared + warpgroup * 64 * KTile::ROW_BYTES, 0);
    const u64 v_operand = k_operand + (V_OFFSET >> 4);
    const u64 q_operand = wgmma_tile(shared + Q_OFFSET, QTile::PANEL_BYTES);
    const u64 do_operand = wgmma_tile(shared + DO_OFFSET, QTile::PANEL_BYTES);
    const FragmentReader<DSTile, BlockOrder::ROW_MAJOR> ds_place(lane);
    const u32 lane_rows = shared + ROWS_OFFSET + lane % 4 * 8;
    RingPlace<Q_STAGES> place;

    const auto store_rows = [&](const TensorMap& map, const float (&sum)[1][HEAD_DIM / 8][4],
                                float scale, int number, int offset) {
      const u32 warp_tile = shared + warp_row * KTile::ROW_BYTES + offset;
      stage_rows<elem_t, KTile>(sum, scale, lane, warp_tile);
      proxy_fence();
      __syncwarp();
      if (!signals) return;
      //% if form
      store_keys<KTile, VARLEN>(map, warp_tile, barriers.tile(step_number - !offset), warp_row);
      //% else
      const BackwardWork work(number, sizes);
      tma_store_tile<KTile>(map, warp_tile, work.block * BLOCK_K + warp_row, work.head, work.batch);
      //% endif
    };

    for (int number = next_work(); number < sizes.works(); number = next_work()) {
      float dk[1][HEAD_DIM / 8][4] = {}, dv[1][HEAD_DIM / 8][4] = {};
      u32 p[Q_STEPS][4];
      const auto take_probabilities = [&](float (&s)[1][BLOCK_Q / 8][4], int stage, int step) {
        //% if form
        band_scores<SOFTCAP, ALIBI, BLOCK_Q, BLOCK_K>(s, lane, barriers.tile(step), warp_row, form);
        //% else
        const Tile tile(barriers.tile(step));
        if (tile.masked())
          mask_columns(s, lane, [&](int row) { return tile.first_visible(warp_row + row); });
        //% endif
        const float scale = SOFTCAP || ALIBI ? 1.f : softmax_scale_log2;
        probabilities<elem_t>(p, s, scale, lane_rows + stage * ROWS_STAGE);
      };

      const int kv_parity = works_taken - 1 & 1;
      mbarrier_wait(barriers.k_full(), kv_parity);
      mbarrier_wait(barriers.q_full(place.stage), place.parity);
      wgmma_fence();
      {
        float s[1][BLOCK_Q / 8][4];
        issue_keys(s, k_operand, q_operand + place.stage * (Q_STAGE >> 4));
        wgmma_wait<0>();
        take_probabilities(s, place.stage, step_number);
      }
      mbarrier_wait(barriers.v_full(), kv_parity);
      for (bool last = false; !last;) {
        // 1. dP^T and dV, then dS^T.
        const int stage = place.stage;
        const RingPlace<DO_STAGES> do_ring = ring_place<DO_STAGES>(step_number);
        const u64 do_tile = do_operand + do_ring.stage * (Q_STAGE >> 4);
        mbarrier_wait(barriers.do_full(do_ring.stage), do_ring.parity);
        settle(p);
        settle(dv[0]);
        settle(dk[0]);
        wgmma_fence();
        float dp[1][BLOCK_Q / 8][4];  // in here, so that its registers are free elsewhere
        issue_keys(dp, v_operand, do_tile);
        issue_sum(dv, p, do_tile);
        wgmma_wait<0>();
        if (signals) mbarrier_arrive(barriers.do_empty(do_ring.stage));
        u32 ds[Q_STEPS][4];
        const u32 rows = lane_rows + stage * ROWS_STAGE;
        //% if softcap
        capped_differentials<elem_t>(ds, p, dp, rows, rows + BLOCK_Q * 4, form.softcap);
        //% else
        differentials<elem_t>(ds, p, dp, rows + BLOCK_Q * 4);
        //% endif

        // 2. dS for the third warpgroup.
        const RingPlace<DS_STAGES> ds_ring = ring_place<DS_STAGES>(step_number);
        const u32 ds_tile = shared + DS_OFFSET + ds_ring.stage * DS_STAGE;
        mbarrier_wait(barriers.ds_empty(ds_ring.stage), ds_ring.parity ^ 1);
#pragma unroll
        for (int step = 0; step < Q_STEPS; ++step)
          stmatrix_x4(ds_place.address(ds_tile, warp_row / 16, step), ds[step]);
        proxy_fence();
        __syncwarp();
        if (signals) mbarrier_arrive(barriers.ds_full(ds_ring.stage));

        // 3. dV, when it is complete, is staged where V was, which this warpgroup alone reads.
        last = Tile(barriers.tile(step_number)).last;
        if (last) {
          warpgroup_sync(1 + warpgroup);
          store_rows(dv_map, dv, 1.f, number, V_OFFSET);
        }

        // 4. S^T of the next tile, then dK; P^T meanwhile. (After the last tile its own scores once
        // more: products must not stand under a condition.)
        place.advance();
        if (!last) mbarrier_wait(barriers.q_full(place.stage), place.parity);
        const int next_stage = last ? stage : place.stage, next_step = step_number + !last;
        ++step_number;
        settle(ds);
        wgmma_fence();
        float s[1][BLOCK_Q / 8][4];
        issue_keys(s, k_operand, q_operand + next_stage * (Q_STAGE >> 4));
        issue_sum(dk, ds, q_operand + stage * (Q_STAGE >> 4));
        wgmma_wait<1>();
        take_probabilities(s, next_stage, next_step);
        wgmma_wait<0>();
        __syncwarp();  // after the last tile, lanes have read of this stage once more
        if (signals) mbarrier_arrive(barriers.q_empty(stage));
      }
      // 5. dK is staged where K was, which the third warpgroup reads, too.
      if (signals) tma_store_wait(), mbarrier_arrive(barriers.v_empty());
      warpgroup_sync(1 + warpgroup);
      const RingPlace<DS_STAGES> ds_ring = ring_place<DS_STAGES>(step_number - 1);
      mbarrier_wait(barriers.ds_empty(ds_ring.stage), ds_ring.parity);
      store_rows(dk_map, dk, softmax_scale, number, 0);
      if (signals) tma_store_wait(), mbarrier_arrive(barriers.k_empty());
    }
  } else if (warpgroup == 2) {
    fewer_registers<DQ_REGISTERS>();  // ---- dQ
    const u64 ds_operand = wgmma_tile(shared + DS_OFFSET, DSTile::PANEL_BYTES);
    const u64 k_operand = wgmma_tile(shared, KTile::PANEL_BYTES);
    for (int number = next_work(); number < sizes.works(); number = next_work()) {
      mbarrier_wait(barriers.k_full(), works_taken - 1 & 1);
      for (bool last = false; !last; ++step_number) {
        const RingPlace<DS_STAGES> ds_ring = ring_place<DS_STAGES>(step_number);
        mbarrier_wait(barriers.ds_full(ds_ring.stage), ds_ring.parity);
        if (!DIRECT && threadIdx.x == 2 * WARPGROUP) mbarrier_arrive(barriers.begun());
        const u64 ds_tile = ds_operand + (ds_ring.stage * DS_STAGE >> 4);
        const Tile tile(barriers.tile(step_number));
        const BackwardTurn turn{barriers.tile(step_number) + 16};
        last = tile.last;
#pragma unroll
        for (int part = 0; part < DQ_PARTS; ++part) {
          const int panel = part % DQ_ACROSS, block = part / DQ_ACROSS;
          float dq[1][CHUNKS][4];
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < K_STEPS; ++step)
            product_dq(dq, ds_tile + (block * DSTile::PANEL_BYTES + step * 2048 >> 4),
                       k_operand + (panel * KTile::PANEL_BYTES + step * 2048 >> 4), step > 0);
          wgmma_commit();
          wgmma_wait<0>();
          __syncwarp();  // lanes have read what the tile is
          if (signals && part == DQ_PARTS - 1) mbarrier_arrive(barriers.ds_empty(ds_ring.stage));
          if (DIRECT) {
            const i64 row_block = static_cast<i64>(tile.index) * INDEX_BLOCKS + block * 4 + warp;
            give_sums(dq_sum + fragment_place(row_block, panel * CHUNKS, HEAD_DIM / 8, 0), dq,
                      lane);
            continue;
          }
          const u32 staging = shared + DQ_OFFSET + part * DQ_STAGE + warp * DQ_WARP_BYTES;
          mbarrier_wait(barriers.dq_ready(part), step_number & 1);
          if (DETERMINISTIC && turn.last()) {
            if (turn.rank() > 0) add_staged(dq, staging, lane);
            __syncwarp();
            stage_rows<elem_t, SwizzledTile<16, DQ_COLUMNS>>(dq, softmax_scale, lane, staging);
          } else {
            stage_fragments(staging, dq, lane);
          }
          proxy_fence();
          __syncwarp();
          if (signals) mbarrier_arrive(barriers.dq_full(part));
        }
      }
    }
  } else {
    fewer_registers<COPY_REGISTERS>();
    if (warp == 0 && signals) {
      // ---- tiles of Q and dO, and notes of what they are
      const Rings rings{shared};
      load_tiles(BackwardLoads<Rings, Barriers>{barriers, rings, q_map, dout_map, lse_log2, delta},
                 sizes, counters);
    } else if (warp == 1 && signals) {
      // ---- K and V
      const KeyLoads<KTile, Barriers> loads{barriers, shared, shared + V_OFFSET, k_map, v_map};
      load_keys(loads, sizes);
    } else if (warp == 2 && signals) {
      // ---- copies of dQ, in turns
      const auto copies = [&](int index, int part) {
        const i64 row_block = static_cast<i64>(index) * INDEX_BLOCKS + part / DQ_ACROSS * 4;
        const i64 place = fragment_place(row_block, part % DQ_ACROSS * CHUNKS, HEAD_DIM / 8, 0);
        return Copies{dq_sum + place, shared + DQ_OFFSET + part * DQ_STAGE};
      };
      DQThread<DETERMINISTIC, DQ_PARTS, Barriers> thread{barriers, turns};
      const auto finish = [&](const Copies& copies, BackwardTurn turn, int part) {
        //% if deterministic
        copies.finish<VARLEN>(dq_map, turn, part / DQ_ACROSS * 64, part % DQ_ACROSS * DQ_COLUMNS);
        //% endif
      };
      while (take_work_alone(barriers, works_taken++) < sizes.works())
        for (bool last = DIRECT; !last; ++step_number)
          last = thread.tile(step_number, copies, finish);
      thread.finish_turn();
      bulk_wait();
    }
  }
}
