/* Attention forward on codes on sm_90 (sm_90a): attention/flash_sm90.cu with Q and K of e4m3 or int8,
   and V of e4m3, e5m2 or 16 bits.

   o = softmax(softmax_scale * q k^T + mask) v         q, k = codes * scales

   TMA, producer, work and consumers are those of flash_sm90.cu; numbers are those of flash_codes.cu.
   A row of Q has a scale, and so have SCALE_KEYS keys of a head: both are in the FMA before an
   exponential, so sums of codes become scores nowhere else. A column of V has a scale as well, which
   the output is multiplied by.

     V of 8 bits     V^T [head_dim_v, keys] lies with its keys in the order of attention/codes.cuh, so P
                     goes from the first product's registers into the second's; P is e4m3 up to 448.
                     PROMOTE: sums of so many keys leave the tensor core, which keeps 13 bits behind
                     the leading one of them, and are added up in fp32, in shared memory
     V of 16 bits    P is rounded to 16 bits, and V is as the caller has it
     PACKED          sequences lie one behind the other (attention/packed_codes.cuh)

   Source: Shah et al., "FlashAttention-3" (2024); Zhang et al., "SageAttention2" (2024). */
#include "prelude.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special_registers.cuh"
#include "tile/pingpong.cuh"
#include "attention/mma.cuh"
#include "attention/sm90/code_rows.cuh"
#include "attention/sm90/codes.cuh"
#include "attention/sm90/epilogue.cuh"
#include "attention/sm90/producer.cuh"

using elem_t = ${dtype};        // of o, and of V that is no codes
using sum_t = ${sum};           // of products of codes: float (e4m3), int (int8)
constexpr bool INT8 = ${int8};  // Q and K are
constexpr bool V_CODES = ${v_codes}, E5M2 = ${e5m2};  // V is
constexpr int BLOCK_K = ${block_k};                   // keys of a tile
constexpr int CONSUMERS = ${consumers};               // warpgroups of 64 query rows
constexpr int HEAD_DIM = ${head_dim};                 // of q, k, v and o, padded with zeros
constexpr int STAGES = ${stages};                     // tiles of K and of V in shared memory
constexpr int Q_STAGES = ${q_stages};                 // tiles of Q
constexpr int SCALE_KEYS = ${scale_keys};
constexpr int RAISED = V_CODES ? 5 : 0;  // powers of two that P is raised by, at first
constexpr int PROMOTE = ${promote};      // keys, at most, whose sum is made apart, or 0
// Consumers take turns at the tensor cores: three of them, or two where it was seen to be faster.
constexpr bool TURNS =
    CONSUMERS > 2 || (HEAD_DIM == 128 && BLOCK_K == 128 && V_CODES && !INT8 && PROMOTE == 0);
constexpr int PRODUCER_REGISTERS = ${producer_registers};
constexpr int CONSUMER_REGISTERS = ${consumer_registers};
constexpr bool PACKED = ${packed};  // sequences
constexpr int GUARD = ${guard};     // bytes between tiles: 0 except where memory is checked

constexpr int BLOCK_Q = 64 * CONSUMERS, WARPGROUP = 128, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr bool AHEAD = Q_STAGES > 1;  // the next tile's first scores are made beside the last P V
constexpr int QK_STEPS = HEAD_DIM / 32, PV_STEPS = BLOCK_K / (V_CODES ? 32 : 16);
constexpr int GROUPS = BLOCK_K == 96 ? 3 : BLOCK_K / SCALE_KEYS;  // of keys that share a scale
constexpr int EVERY = PROMOTE / BLOCK_K;                          // tiles
static_assert(PROMOTE == 0 || (V_CODES && EVERY > 0), "whole tiles of codes");
static_assert(BLOCK_K == 96 || BLOCK_K % SCALE_KEYS == 0, "a group has one scale");
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                  (1 + CONSUMERS) * registers_at_start(THREADS),
              "more would be waited for forever");

using Rings =
    CodeRings<BLOCK_Q, BLOCK_K, HEAD_DIM, V_CODES, (PROMOTE > 0), Q_STAGES, STAGES, GUARD>;
using OTile = Rings::OTile;
using Item = WorkItem<BLOCK_Q>;
using Spans = SpanOf<BandSpan<BLOCK_Q, BLOCK_K, PACKED>>;
using Softmax = CodedSoftmax<BLOCK_K, SCALE_KEYS, GROUPS, RAISED>;

// First row of a consumer's warp in the tile of queries.
__device__ __forceinline__ int warp_row_of(int thread) {
  return (thread - WARPGROUP) / WARP_SIZE * 16;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_flash_codes_sm90(
    const __grid_constant__ TensorMap q_map,  // q [batch, heads_q, seqlen_q, head_dim] codes, boxes
    const __grid_constant__ TensorMap k_map,  // of BLOCK_Q rows; k [batch, heads_kv, seqlen_k,
    //% if v_codes
    const __grid_constant__ TensorMap v_map,  // head_dim] codes; v [batch, heads_kv, head_dim_v,
                                              // v_keys] codes, boxes of HEAD_DIM rows
    //% else
    const __grid_constant__ TensorMap v_map,  // head_dim] codes; v [batch, heads_kv, seqlen_k,
                                              // head_dim_v], boxes of BLOCK_K rows
    //% endif
    //% if not packed
    const __grid_constant__ TensorMap o_map,  // o [batch, heads_q, seqlen_q, head_dim_v], 16 rows
    //% endif
    //% if packed
    const int* __restrict__ cu_seqlens_q,  // [batch + 1]; all others but o, v_scales and a v that
    const int* __restrict__ cu_seqlens_k,  // is no codes have one batch then, of total_q rows a head
    elem_t* __restrict__ o,                // [total_q, heads_q, head_dim_v]
    //% endif
    const float* __restrict__ q_scales,  // [batch, heads_q, seqlen_q]
    const float* __restrict__ k_scales,  // [batch, heads_kv, v_keys / SCALE_KEYS]
    const float* __restrict__ v_scales,  // [batch, heads_kv, head_dim_v], or null
    const float* __restrict__ shift,     // [batch, heads_q, seqlen_q], or null
    float* __restrict__ lse,             // [batch, heads_q, seqlen_q], or null
    u32* __restrict__ counters,          // [1], 0 before and after
    //% if packed
    const Strides o_strides, const int total_q,
    //% endif
    const int batch, const int heads_q, const int group_size,  // query heads a KV head
    const int max_seqlen_q, const int max_seqlen_k, const int head_dim_v,
    const int v_keys,                               // places of a head's keys, whole SCALE_KEYS
    const int section_heads,                        // whose K and V fit into L2
    const int window_left, const int window_right,  // keys before and behind its own a query sees
    const float softmax_scale,                      // above 0
    const float softmax_scale_log2) {               // softmax_scale * log2(e)
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const Barriers<Rings::STAGES> barriers{shared + Rings::BARRIERS};
  const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0);
  const int warp = __shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0);
  const AttentionWorkItems works(ceil_div(max_seqlen_q, BLOCK_Q), heads_q, group_size, batch,
                                 section_heads, 1, counters);
  //% if not packed
  const int *const cu_seqlens_q = nullptr, *const cu_seqlens_k = nullptr, total_q = max_seqlen_q;
  //% endif
  const Spans span_of{cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                      max_seqlen_k, window_left,  window_right};
  const bool asks = !PACKED || threadIdx.x % WARP_SIZE == 0;  // one thread, or a whole warp's first
  if (threadIdx.x == 0) barriers.begin<Q_STAGES, CONSUMERS>(PACKED, 0);
  __syncthreads();
  after_previous_kernel();

  if (warpgroup == 0) {
    // ---- producer: a thread for Q and K, one for V
    fewer_registers<PRODUCER_REGISTERS>();
    const AttentionProducer<Rings, PACKED, Spans> producer(barriers, shared, group_size, span_of,
                                                           asks);
    int tail_parity = 0;
    if (warp == 0 && (PACKED || elect_one())) {
      producer.lead(works, q_map, k_map, v_map, tail_parity);
    } else if (warp == 1 && (PACKED || elect_one())) {
      tma_prefetch(v_map);
      RingPlace<STAGES> place;
      producer.follow(batch, [&](const Item& piece, const auto& range, int tile) {
        //% if v_codes
        const int head = piece.head / group_size;
        load_code_values<Rings>(
            barriers, place, shared, asks, v_map,
            first_place<PACKED>(cu_seqlens_k, piece.batch) + tile * BLOCK_K, head,
            PACKED ? 0 : piece.batch,
            v_scales + (piece.batch * (heads_q / group_size) + head) * head_dim_v,
            tile == range.first ? head_dim_v * 4 : 0);  // scales come with the last tile
        //% else
        producer.load_v(v_map, place, tail_parity, piece, range, tile);
        //% endif
      });
    }
  } else {
    // ---- consumers
    more_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, lane = threadIdx.x % WARP_SIZE;
    const int warp_row = warp_row_of(threadIdx.x);
    const u64 q_operand = Rings::QTile::operand(shared + consumer * 64 * Rings::QTile::ROW_BYTES);
    const u64 k_operand = Rings::KTile::operand(shared + Rings::K);
    const u64 v_operand = Rings::VTile::operand(shared + Rings::V);
    const bool signals = lane == 0;
    int items = 0, tiles = 0;  // work items, and tiles of K, that are done
    sum_t sums[BLOCK_K / 8][4];
    float (&s)[1][BLOCK_K / 8][4] = reinterpret_cast<float (&)[1][BLOCK_K / 8][4]>(sums);

    const auto warp_o = [&] {
      return shared + Rings::O + (thread_index_again() - WARPGROUP) / WARP_SIZE * Rings::O_WARP;
    };
    const auto wait_k = [&] {
      const auto place = place_of<STAGES>(tiles);
      mbarrier_wait(barriers.k_full(place.stage), place.parity);
    };
    const auto issue_scores = [&](int q_stage) {
      const auto place = place_of<STAGES>(tiles);
      register_fence(sums);
      wgmma_fence();
      issue_code_scores<Rings, QK_STEPS>(sums, q_operand + q_stage * (Rings::Q_STAGE >> 4),
                                         k_operand + place.stage * (Rings::K_STAGE >> 4));
    };
    const auto release_k = [&] {
      if (signals) mbarrier_arrive(barriers.k_empty(place_of<STAGES>(tiles).stage));
      ++tiles;
    };
    const auto release_v = [&](int tile) {
      if (signals) mbarrier_arrive(barriers.v_empty(place_of<STAGES>(tile).stage));
    };
    const auto first_scores = [&](int item) {
      const auto place = place_of<Q_STAGES>(item);
      mbarrier_wait(barriers.q_full(place.stage), place.parity);
      wait_k();
      issue_scores(place.stage);
    };
    const auto take_work = [&](int item) {
      auto slot = place_of<SLOTS>(item);
      return next_work<BLOCK_Q, true>(barriers, slot);
    };
    const PingPong<CONSUMERS> pingpong(consumer, TURNS);

    Item next = take_work(0);
    first_scores(0);
    while (true) {
      const Item place = next;
      if (place.batch >= batch) break;
      const auto range = span_of(place);
      const int q_stage = items++ % Q_STAGES, row0 = place.q0 + warp_row;
      const int tensor = PACKED ? 0 : place.batch;
      const i64 first_row = (tensor * heads_q + place.head) * i64{total_q} + range.q_start;
      const int kv_head = tensor * (heads_q / group_size) + place.head / group_size;
      const int key_groups = ceil_div(max(range.seqlen_k, 1), SCALE_KEYS);
      const int tile_group = static_cast<u32>((range.end - 1) * BLOCK_K) / SCALE_KEYS;
      const float* scales =
          k_scales + (kv_head * (v_keys / SCALE_KEYS) + tile_group +
                      first_place<PACKED>(cu_seqlens_k, place.batch) / SCALE_KEYS);
      float of_rows[2], of_group[GROUPS];
      load_row_scales(of_rows, q_scales + first_row, row0 + lane / 4, range.seqlen_q - 1,
                      softmax_scale_log2);
      //% if v_codes
      float acc[1][HEAD_DIM / 8][4];
      //% else
      float acc[1][HEAD_DIM / 8][4] = {};
      //% endif
      int summed = 0;  // tiles whose P V are in acc
      SumsAside<HEAD_DIM / 8> aside;
      u32 p[PV_STEPS][4];
      float correction[1][2];
      Softmax softmax;
      int tile = range.end - 1;
      bool v_here = false;  // that of the tile before is seen to be, without a wait
      const auto rows_of = [&](const int* ends, int longest) {  // read again: registers are few
        return SequenceRows<PACKED>(ends, PACKED ? anew(place.batch) : 0, longest);
      };

      // Sums of codes that have arrived, what they are multiplied by, and the mask.
      const auto prepare_scores = [&](bool as_they_came) {
        if (as_they_came) register_fence(sums), sums_to_float(sums);
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; ++i)
          softmax.by[i / GROUPS][i % GROUPS] = of_rows[i / GROUPS] * of_group[i % GROUPS];
        if (!range.is_whole(tile)) {
          KeyBand band(rows_of(cu_seqlens_q, max_seqlen_q).length,
                       rows_of(cu_seqlens_k, max_seqlen_k).length, window_left, window_right);
          rules_on_fragments(s, lane_index_again(), band, 1.f,
                             place.q0 + warp_row_of(thread_index_again()), tile * BLOCK_K);
        }
      };
      const auto round_probabilities = [&] {
        //% if v_codes
        round_to_e4m3(p, s);
        //% else
        round_to<elem_t>(p, s);
        //% endif
      };
      const auto issue_values = [&] {
        const auto place = place_of<STAGES>(tiles - 1);
        if (!v_here) mbarrier_wait(barriers.v_full(place.stage), place.parity);
        register_fence(p);
        register_fence(acc[0]);
        wgmma_fence();
        const u64 v = v_operand + place.stage * (Rings::V_STAGE >> 4);
        //% if v_codes
        issue_code_values<Rings::VTile, E5M2>(acc[0], p, v, summed++ > 0);
        //% else
        issue_pv<elem_t>(acc, p, v);
        //% endif
      };
      softmax.load(of_group, scales, tile, key_groups - 1 - tile_group);
      wgmma_wait<0>();
      release_k();
      prepare_scores(true);
      softmax.raise_max(s, correction);
      softmax.speculate(s, softmax.row_sum);  // right as it is: maxima are known
      round_probabilities();
      if (tile > range.first) wait_k();
      for (--tile; tile >= range.first; --tile) {
        pingpong.wait();
        issue_scores(q_stage);
        issue_values();
        pingpong.pass();
        scales -= Softmax::step(tile);
        softmax.load(of_group, scales, tile);
        wgmma_wait<1>();
        // By the maxima there are; those of this tile are looked for where a sum says that one may have
        // grown, and scores are made again where these must be known.
        bool rescale = false, exact = softmax.exact;
        float sums_of[2];
        // What comes next is looked for here, so that answers are there when they are wanted.
        const auto k_place = place_of<STAGES>(tiles + 1), v_place = place_of<STAGES>(tiles);
        const bool k_here = mbarrier_test(barriers.k_full(k_place.stage), k_place.parity);
        v_here = mbarrier_test(barriers.v_full(v_place.stage), v_place.parity);
        prepare_scores(true);
#pragma unroll 1
        while (true) {
          if (exact) rescale = softmax.raise_max(s, correction);
          const bool doubt = softmax.speculate(s, sums_of);
          if (exact || !doubt || softmax.settle(s, sums_of, correction, rescale)) break;
          exact = true;
          code_scores_again<INT8, Rings>(
              s, shared + q_stage * Rings::Q_STAGE, warp_row_of(thread_index_again()),
              shared + Rings::K + place_of<STAGES>(tiles).stage * Rings::K_STAGE);
          softmax.load(of_group, scales, tile);
          prepare_scores(false);
        }
        //% if v_codes
        if (summed == 1) rescale = softmax.raise_peaked(s, sums_of, correction, rescale);
        //% endif
        softmax.row_sum[0] += sums_of[0], softmax.row_sum[1] += sums_of[1];
        release_k();
        if (tile > range.first && !k_here) wait_k();
        wgmma_wait<0>();
        release_v(tiles - 2);
        register_fence(sums);
        round_probabilities();
        register_fence(acc[0]);
        //% if promote
        if (rescale || summed == EVERY)
          summed = aside.add(acc, rescale, correction[0], summed % EVERY, warp_o(),
                             lane_index_again());  // all warps count; others may have rescaled
        //% else
        if (rescale) scale_rows(acc, correction);
        //% endif
      }
      if (PACKED || signals) mbarrier_arrive(barriers.q_empty(q_stage));
      // The last product, and behind it the first scores of what comes next.
      issue_values();
      if (AHEAD) first_scores(items);
      wgmma_wait<AHEAD ? 1 : 0>();
      register_fence(acc[0]);
      if (PROMOTE > 0) aside.take(acc, warp_o(), lane_index_again());
      next = take_work(items);

      // Normalise, and store by way of this warp's rows of the staged output. Where these are is
      // computed again rather than kept in registers through the loop.
      const int end_lane = lane_index_again(), own_row = warp_row_of(thread_index_again());
      const SequenceRows<PACKED> mine = rows_of(cu_seqlens_q, max_seqlen_q);
      const int end_row = place.q0 + own_row, rows_left = min(16, mine.length - end_row);
      const i64 end_head = static_cast<i64>(PACKED ? 0 : anew(place.batch)) * heads_q + place.head;
      float inverse[2];
      finish_coded_rows(inverse, softmax, end_lane, rows_left, lse, shift,
                        end_head * total_q + mine.start + end_row, softmax_scale);
      //% if v_codes
      const int v_stage = place_of<STAGES>(tiles - 1).stage;
      scale_columns(acc, shared + Rings::V + v_stage * Rings::V_STAGE + Rings::V_SCALES, head_dim_v,
                    end_lane);
      register_fence(acc[0]);
      //% endif
      __syncwarp();
      release_v(tiles - 1);
      if (signals) bulk_wait_read();  // of what was staged there before
      __syncwarp();
      stage_rows<elem_t, OTile>(acc, inverse, end_lane, warp_o());
      //% if packed
      store_staged_rows<OTile>(
          o + anew(place.head) * o_strides.head + (mine.start + end_row) * o_strides.row,
          o_strides.row, warp_o(), end_lane, rows_left, anew(head_dim_v));
      //% else
      if (signals) tma_store_tile<OTile>(o_map, warp_o(), end_row, place.head, place.batch);
      //% endif
      if (!AHEAD) first_scores(items);
    }
    wgmma_wait<0>();
    register_fence(sums);
    if (CONSUMERS > 1) pingpong.end();
    if (signals) bulk_wait_read();
  }
}
