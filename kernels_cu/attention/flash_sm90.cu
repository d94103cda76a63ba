/* Attention forward on sm_90 (sm_90a): TMA brings the tiles, wgmma multiplies them, and one
   warpgroup's exponentials run under the other's products.

   o = softmax(softmax_scale * q k^T + causal mask) v         lse = log(sum(exp(scores)))

   One block an SM works through one tile of 64 * CONSUMERS query rows after another. Its first
   warpgroup is the producer (attention/sm90/producer.cuh): a thread of it asks TMA for Q and tiles
   of K, another for tiles of V, into rings (attention/sm90/rings.cuh). The others are consumers of
   64 rows each. mbarriers say which stages are full and which are free. Which tile comes next is drawn
   from a counter (attention/sm90/work.cuh).

     consumer, for each tile j, from the last to the first (those that need a mask come first):
        S'  = Q K_j^T              issued   } both run on the tensor cores
        O  += P V_(j+1)            issued   } while the other consumer is at its exponentials
        wait for S';  mask;  m' = max(m, rowmax S')
        wait for O;   S' = exp2(S' * c - m' * c);  P = S' in 16 bits
        O *= exp2((m - m') * c), which almost never runs
     at the end, with S' of the next queries under way while this output is stored:
        wait for O;   o = O / rowsum P,  lse = (m * c + log2(rowsum P)) * ln(2)

   with c = softmax_scale * log2(e). P stays in registers, as the next product's A operand. An
   optimistic variant does not look for a maximum first (sm90/speculative_softmax.cuh). Rendered in:
   forms of attention (features.cuh), pages (pages.cuh), of codes too (sm90/page_codes.cuh), beside
   sequences that decode (mixed/work_items.cuh); rows that go on (row_state.cuh); for few queries,
   parts of the keys, tiles of several heads (sm90/parts.cuh).
   Source: Shah et al., "FlashAttention-3" (2024). */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "tile/pingpong.cuh"
#include "attention/sm90/epilogue.cuh"
#include "attention/sm90/producer.cuh"
#include "attention/sm90/products.cuh"
#include "attention/sm90/rings.cuh"
#include "attention/sm90/speculative_softmax.cuh"
//% if codes
#include "attention/sm90/page_codes.cuh"
//% endif
//% if not together
#include "attention/row_state.cuh"
//% else
#include "attention/mixed/work_items.cuh"
#include "attention/mixed/single_tokens.cuh"
//% endif
//% if form
#include "attention/sm90/alibi.cuh"
#include "attention/sm90/score_tile.cuh"
#include "attention/sm90/softcap.cuh"
#include "attention/sm90/span.cuh"
//% endif

using elem_t = ${dtype};
constexpr int BLOCK_K = ${block_k};                            // keys of a tile
constexpr int CONSUMERS = ${consumers};                        // warpgroups of 64 query rows
constexpr int HEAD_DIM = ${head_dim};                          // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};                      // of v and o, padded
constexpr int K_STAGES = ${k_stages}, V_STAGES = ${v_stages};  // tiles of K, V in shared memory
constexpr int Q_STAGES = ${q_stages};                          // tiles of Q
constexpr int PRODUCER_REGISTERS = ${producer_registers};
constexpr int CONSUMER_REGISTERS = ${consumer_registers};
constexpr int GUARD = ${guard};       // bytes between tiles: 0 except where memory is checked
constexpr int HEADS = ${heads};       // whose queries share a tile
constexpr bool RESUMED = ${resumed};  // rows begin with what other keys left (row_state.cuh)
constexpr int BLOCK_Q = 64 * CONSUMERS, ROWS = BLOCK_Q / HEADS;
//% if form
constexpr bool VARLEN = ${varlen};  // packed sequences
constexpr bool SOFTCAP = ${softcap}, ALIBI = ${alibi}, SINKS = ${sinks}, SCORE_MOD = ${has_mod};
constexpr bool BIAS = ${bias}, MASK = ${mask};
constexpr int ARRAYS = BIAS + MASK, CODE_STAGES = ${code_stages};  // of codes in shared memory
constexpr int SCORE_STAGES = ${score_stages};  // tiles of bias and mask in shared memory
using bias_t = ${bias_dtype};
using Way = ScoreWay<SOFTCAP, SCORE_MOD, BIAS, MASK, HEAD_DIM_V>;
constexpr bool NATURAL = Way::NATURAL;
using Scores = ScoreTiles<bias_t, BIAS, MASK, BLOCK_Q, BLOCK_K>;
constexpr int SCORE_BYTES = Scores::BYTES;
// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"
//% else
constexpr bool VARLEN = false, NATURAL = false, ALIBI = false;
constexpr int ARRAYS = 0, SCORE_STAGES = 0, SCORE_BYTES = 0, CODE_STAGES = 0;
//% endif
using Item = WorkItem<ROWS>;
using Span = ${span};  // of keys, in tiles
constexpr bool PARTED = SpanOf<Span>::PARTED;
// With two tiles of Q the next one's first scores are under way while this output is stored; with
// one, the next one comes meanwhile.
constexpr bool AHEAD = Q_STAGES > 1;
constexpr int PRODUCERS = 1 + ${code_groups};  // warpgroups; all but the first behind the consumers
constexpr int WARPGROUP = 128, THREADS = WARPGROUP * (PRODUCERS + CONSUMERS);
static_assert(PRODUCERS * PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                  (PRODUCERS + CONSUMERS) * registers_at_start(THREADS),
              "more would be waited for forever");
constexpr int QK_STEPS = HEAD_DIM / 16, PV_STEPS = BLOCK_K / 16;
using Rings = AttentionRings<BLOCK_Q, BLOCK_K, HEAD_DIM, HEAD_DIM_V, Q_STAGES, K_STAGES, V_STAGES,
                             GUARD, SCORE_STAGES, SCORE_BYTES, CODE_STAGES>;
using Codes = ${codes_type};  // of pages, which become K and V
using OTile = Rings::OTile;

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_flash_sm90(
    const __grid_constant__ TensorMap q_map,  // q [batch, heads_q, seqlen_q, head_dim], boxes of
    const __grid_constant__ TensorMap k_map,  // BLOCK_Q rows; k [batch, heads_kv, seqlen_k,
    const __grid_constant__ TensorMap v_map,  // head_dim] and v of BLOCK_K; each 64 columns wide
    //% if staged and not parts
    const __grid_constant__ TensorMap o_map,  // o [batch, heads_q, seqlen_q, head_dim_v], 16 rows
    //% endif
    //% if bias
    const __grid_constant__ TensorMap bias_map,  // [batch, heads_q, seqlen_q, seqlen_k], broadcast
    //% endif
    //% if mask
    const __grid_constant__ TensorMap mask_map,  // the same; 0 hides the key
    //% endif
    //% if form
    // Null where there is no such thing. Packed: q and o are [1, heads_q, total_q, dim], k and v
    // [1, heads_kv, total_k, dim], lse [heads_q, total_q].
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_k,    // [batch + 1]
    const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q]
    const float* __restrict__ sinks /* [heads_q] */ ${score_arrays} ${page_arrays},  //
    //% endif
    //% if together
    const elem_t* __restrict__ q,  // as q_map has it; k and v [pages, heads_kv, page, head_dim],
    const elem_t* __restrict__ k, const elem_t* __restrict__ v,  // rows on 16-byte boundaries
    float* __restrict__ workspace,  // `slots` slots of parts (decode/merge.cuh)
    //% endif
    //% if parts
    float* __restrict__ o_parts,  // [parts, batch, heads_q, seqlen_q, HEAD_DIM_V]
    //% elif form or not staged
    elem_t* __restrict__ o,  // [batch, heads_q, seqlen_q, head_dim_v], rows on 16-byte boundaries
    //% endif
    float* __restrict__ ${lse} ${state_array},  // [batch, heads_q, seqlen_q] contiguous, or null
    u32* __restrict__ counters,                 // [1], 0 before and after; more where together
    const int batch, const int heads_q, const int group_size, const int ${seqlen_q},
    const int ${seqlen_k} ${o_scalars}, const int section_heads,  // whose K and V fit into L2
    //% if form
    const AttentionForm form${score_scalars} ${page_numbers},
    //% endif
    //% if together
    const Strides q_strides, const Strides k_strides, const Strides v_strides, const int head_dim,
    const int table_rows, const int slots, const int abreast,
    const float tile_weight,  // see MixedWorkItems
    //% endif
    const float softmax_scale_log2,  // softmax_scale * log2(e), above 0
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const Barriers<Rings::STAGES> barriers{shared + Rings::BARRIERS};
  const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0);
  const ${works} works(ceil_div(${seqlen_q}, ROWS), heads_q / HEADS, group_size / HEADS, batch,
                       section_heads, ${parts or 1}, counters ${listed});
  // Of the producer: one thread asks, or with VARLEN a whole warp, whose first lane TMA hears from.
  const bool asks = !VARLEN || threadIdx.x % WARP_SIZE == 0;
  const int warp = __shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0);
  //% if paged
  const PagedKeys keys{page_table, seq_lens, rows, table_width, page_log2, num_pages, max_seqlen_k};
  const SpanOf<Span> span_of{cu_seqlens_q, keys, box_log2, max_seqlen_q, form};
  //% elif form
  const SpanOf<Span> span_of{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, form};
  //% else
  const SpanOf<Span> span_of{seqlen_q, seqlen_k, causal${comma_parts}};
  //% endif
  if (threadIdx.x == 0)
    barriers.begin<Q_STAGES, CONSUMERS, Codes::WARPS, CODE_STAGES>(VARLEN, ARRAYS);
  __syncthreads();
  after_previous_kernel();

  //% if together
  const bool decodes = blockIdx.x < works.decoding_blocks;
  //% endif
  if (warpgroup == 0 || PRODUCERS > 1 && warpgroup > CONSUMERS) {
    // ---- producer
    fewer_registers<PRODUCER_REGISTERS>();
    //% if together
    if (decodes) named_barrier_wait<THREADS>(5);  // until then the rings are the consumers'
    //% endif
    const AttentionProducer<Rings, VARLEN, SpanOf<Span>, HEADS, Codes> producer(
        barriers, shared, group_size / HEADS, span_of, asks);
    producer.run<ARRAYS>(
        warp, works, q_map, k_map, v_map, [&](u32 to, u32 full, const Item& place, int tile) {
          //% if bias or mask
          Scores::load(to, full, ${score_maps}, tile * BLOCK_K, place.q0, place.head, place.batch);
          //% endif
        });
  } else {
    // ---- consumers
    more_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, lane = threadIdx.x % WARP_SIZE;
    //% if together
    if (decodes) {
      // clang-format off
      const SingleTokenArrays<elem_t> arrays{
          q, k, v, page_table, sinks, o, lse, workspace, counters + 1,
          {q_strides.row, q_strides.head, 0}, k_strides, v_strides,
          {o_strides.row, o_strides.head, 0}, head_dim, head_dim_v, table_width, page_log2,
          static_cast<u32>(num_pages), slots, form.softmax_scale};
      // clang-format on
      const Sequences sequences{
          seq_lens, rows, batch, max_seqlen_k, table_rows, 1 + form.window_left, cu_seqlens_q};
      const QueryRows one_token{group_size, 1, heads_q / group_size, 1.f / group_size,
                                form.total_q};
      SingleTokens<Rings, elem_t, SINKS>(arrays, sequences, one_token, shared_memory,
                                         softmax_scale_log2, threadIdx.x - WARPGROUP)
          .run(works.decoding_blocks, abreast);
      proxy_fence();
      named_barrier_wait<THREADS>(5);
    }
    //% endif
    const int warp_row = consumer * 64 + threadIdx.x % WARPGROUP / WARP_SIZE * 16;
    const int warp_query = warp_row % ROWS, warp_head = warp_row / ROWS;  // of the tile's
    const u64 q_operand = wgmma_tile(shared + consumer * 64 * Rings::QTile::ROW_BYTES, 0);
    const u64 k_operand = wgmma_tile(shared + Rings::K, 0);
    const u64 v_operand = wgmma_tile(shared + Rings::V, Rings::VTile::PANEL_BYTES);
    const bool signals = lane == 0;
    RingPlace<K_STAGES> k_place;
    RingPlace<V_STAGES> v_place;
    RingPlace<Q_STAGES> q_place;
    RingPlace<SLOTS> slot;
    float s[1][BLOCK_K / 8][4];
    const float unscaled_log2 = NATURAL ? LOG2E : softmax_scale_log2;
    const int lse_length = ${lse_length};
    float* const found_lse = RESUMED ? nullptr : ${lse};
    //% if form
    RingPlace<SCORE_STAGES> score_place;
    const float scale = NATURAL && !SOFTCAP ? form.softmax_scale : 1.f;
    const float unit = NATURAL ? 1.f : 1.f / form.softmax_scale;
    //% endif
    const auto take_work = [&] { return next_work<ROWS, true, PARTED>(barriers, slot); };
    // Scores of the next tile of keys, of the queries in a stage.
    const auto issue_scores = [&](int q_stage) {
      mbarrier_wait(barriers.k_full(k_place.stage), k_place.parity);
      wgmma_fence();
      issue_qk<elem_t, Rings, QK_STEPS>(s, q_operand + q_stage * (Rings::Q_STAGE >> 4),
                                        k_operand + k_place.stage * (Rings::K_STAGE >> 4));
    };
    const auto release_k = [&] { release(k_place, barriers.k_empty(k_place.stage), signals); };
    const auto release_v = [&] { release(v_place, barriers.v_empty(v_place.stage), signals); };
    const auto first_scores = [&] {
      mbarrier_wait(barriers.q_full(q_place.stage), q_place.parity);
      issue_scores(q_place.stage);
    };
    const auto release_q = [&](int stage) {
      if (!VARLEN && !signals) return;  // of a packed tile every lane may have stored a part
      release_staged(barriers.q_empty(stage));
    };
    const PingPong<CONSUMERS> pingpong(consumer, works.count <= gridDim.x);
    bool stored = false;
    Item next = take_work();
    first_scores();
    while (true) {
      wgmma_wait<0>();
      const Item place = next;
      if (place.batch >= batch) break;
      const Span range = span_of(place);
      const int q_stage = q_place.stage;
      q_place.advance();
      const float key_scale = ${key_scale}, scale_log2 = unscaled_log2 * key_scale;
      float acc[1][HEAD_DIM_V / 8][4] = {};
      u32 p[PV_STEPS][4];
      float correction[1][2];
      OnlineSoftmax<1, ALIBI> softmax;
      //% if optimistic
      const auto scores_again = [&] {
        multiply_again<elem_t, Rings>(s, shared + q_stage * Rings::Q_STAGE, warp_row,
                                      shared + Rings::K + k_place.stage * Rings::K_STAGE);
      };
      //% endif
      int tile = range.end - 1;
      //% if form
      KeyBand band(range.seqlen_q, range.seqlen_k, form.window_left, form.window_right);
      ScorePlace scores_at{0, place.q0, 0};
      const SoftCapOfWarp softcap(form.softcap, form.softmax_scale);
      const RuleIf<ALIBI, AlibiOfWarp> alibi(alibi_slopes, form.alibi_batch_stride, place.batch,
                                             place.head, range.seqlen_q, range.seqlen_k, unit);
      const ScoreMod mod{place.batch, place.head, range.seqlen_q, range.seqlen_k${score_values}};
      auto rules = tile_rules<Way, BIAS, MASK, Scores>(form, mod, scores_at);
      if (SINKS) softmax.begin_with(sinks[place.head] * (unit / key_scale), lane);
      //% endif
      //% if resumed
      const auto rows = [&] {
        return RowState<elem_t>(sums, sums_strides, o, o_strides, lse, heads_q, lse_rows,
                                head_dim_v, place.batch, place.head, place.q0 + warp_row, seqlen_q,
                                done_first, done_end);
      };
      rows().prefetch<16>(lane);
      //% endif
      const auto mask = [&] {
        //% if form
        const int row = place.q0 + warp_row, key = tile * BLOCK_K;
        if (ARRAYS > 0) {
          mbarrier_wait(barriers.scores_full(score_place.stage), score_place.parity);
          scores_at.begin(shared + Rings::SCORES + score_place.stage * Rings::SCORE_STAGE, key);
        }
        if (Way::CAP_WARP) softcap.on_fragments(s);
        if (Way::RULES) rules_on_fragments(s, lane, rules, scale, row, key);
        if (ARRAYS > 0) {
          __syncwarp();
          release(score_place, barriers.scores_empty(score_place.stage), signals);
        }
        //% if alibi
        alibi.on_fragments(s, softmax.frame[0], lane, row, key);
        //% endif
        if (!range.is_whole(tile)) rules_on_fragments(s, lane, band, 1.f, row, key);
        //% else
        if (!range.is_whole(tile))
          mask_scores(s, lane,
                      [&](int row) { return range.visible(tile, warp_query + row, causal); });
        //% endif
      };
      release_k();
      mask();
      softmax.raise_max(s, scale_log2, correction);
      exponentials(s, softmax, scale_log2);
      round_to<elem_t>(p, s);
      if (AHEAD && stored) release_q(q_stage ^ 1);
      stored = true;

      for (--tile; tile >= range.first; --tile) {
        register_fence(p);
        register_fence(acc[0]);
        pingpong.wait();
        issue_scores(q_stage);
        mbarrier_wait(barriers.v_full(v_place.stage), v_place.parity);
        wgmma_fence();
        issue_pv<elem_t>(acc, p, v_operand + v_place.stage * (Rings::V_STAGE >> 4));
        pingpong.pass();
        wgmma_wait<1>();
        //% if optimistic
        const bool rescale = speculative_exponentials(s, softmax, scale_log2, correction, ${most},
                                                      range.is_whole(tile), mask, scores_again);
        wgmma_wait<0>();
        release_k();
        release_v();
        //% else
        release_k();
        mask();
        const bool rescale = softmax.raise_max(s, scale_log2, correction);
        wgmma_wait<0>();  // so that the other consumer's products run under the exponentials
        release_v();
        exponentials(s, softmax, scale_log2);
        //% endif
        round_to<elem_t>(p, s);
        if (rescale) scale_rows(acc, correction);
      }
      if (!AHEAD) release_q(q_stage);  // the next Q comes while this one's output is made
      mbarrier_wait(barriers.v_full(v_place.stage), v_place.parity);
      register_fence(p);
      register_fence(acc[0]);
      wgmma_fence();
      issue_pv<elem_t>(acc, p, v_operand + v_place.stage * (Rings::V_STAGE >> 4));
      if (AHEAD) first_scores();
      next = take_work();
      wgmma_wait<AHEAD ? 1 : 0>();
      release_v();
      // Normalise and store; what is staged lies in this warp's own rows of Q: TMA stores it.
      const int head = place.head * HEADS + warp_head;
      const int tensor = VARLEN ? 0 : PARTED ? place.part * batch + place.batch : place.batch;
      const int row0 = place.q0 + warp_query, rows_left = min(16, range.seqlen_q - row0);
      const i64 head_index = static_cast<i64>(tensor) * heads_q + head;
      float inverse[2];
      finish_sums(inverse, softmax, scale_log2, lane,
                  found_lse == nullptr ? nullptr
                                       : found_lse + head_index * lse_length + range.q_start + row0,
                  rows_left, ${value_scale});
      //% if parts
      float* const to = o_parts + (head_index * seqlen_q + row0) * HEAD_DIM_V;
      store_part(to, acc, inverse, lane, rows_left);
      if (!AHEAD) first_scores();
      //% elif resumed
      rows().finish(acc[0], softmax, 0, scale_log2, lane);
      if (!AHEAD) first_scores();
      //% elif staged
      const u32 warp_o_tile = shared + q_stage * Rings::Q_STAGE + warp_row * OTile::ROW_BYTES;
      stage_rows<elem_t, OTile>(acc, inverse, lane, warp_o_tile);
      //% if form
      if (VARLEN && rows_left < 16)
        store_rows<OTile>(o, o_strides, place.head, range.q_start + row0, warp_o_tile, lane,
                          rows_left, head_dim_v);
      else
        //% endif
        if (signals) tma_store_tile<OTile>(o_map, warp_o_tile, range.q_start + row0, head, tensor);
      //% else
      const i64 row = range.q_start + row0;
      store_sums(o + tensor * o_strides.batch + head * o_strides.head + row * o_strides.row,
                 o_strides.row, acc, inverse, lane, rows_left, head_dim_v);
      first_scores();
      //% endif
    }
    pingpong.end();
    if (signals) bulk_wait_read();
  }
}
