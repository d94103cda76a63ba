/* Attention of a few new tokens of each sequence to all of its keys, in pages or in one piece, on
   tensor cores (mma.sync; sm_80 and newer).

   o = softmax(softmax_scale * q k^T + mask) v         lse = log(sum(exp(scores)))

   Every key and value is read once and multiplied little: all is about bytes on their way. The rows
   of a tile are the query heads that share a KV head, times the new tokens, so that one product
   serves them all. The keys of all sequences and heads are shared out evenly over a grid that fills
   the GPU once (decode/schedule.cuh): no block waits for another, however long the sequences are,
   and the lengths are read here, so that a captured graph follows them. Neighbouring blocks have the
   same keys of different heads, which lie beside each other in pages.

     for each segment of a block's share (one sequence and KV head):
       each group of warps takes every GROUPS-th step of KEYS keys through a ring of STAGES steps of
       its own, which cp.async fills: no barrier of the block in the loop
         S = Q K^T,  P = exp2(S * c - max),  O += P V        as in flash.cu, in registers
       the groups' outputs are merged by way of shared memory                    (decode/merge.cuh)
       the whole head: stored.  A part of it: left in the workspace, and the last block of the head
       to do so adds up the parts, in their order                             (tile/last_block.cuh)

   A row tile of 16 has a warp a group; one of 64 has four, which share their keys.

   Packed (VARLEN of a form): sequences with one new token each, others are left out.
   Keys and values may be kept as e4m3 or int8; then a head has a k_scale and a v_scale.

   Forms of attention are rendered in (decode/features.cuh), as in flash.cu: a band of keys in
   place of the causal mask, and units from a window's first key on; rules for the scores, two sets
   of them, since a lane's two rows are of two heads or tokens; sinks, which the first part of a head
   has. A kernel without is what it would be if there were none.

   Sources: Dao et al., "Flash-Decoding for long-context inference" (2023), for splitting keys;
   Osama et al., "Stream-K" (2023), for sharing out evenly what does not divide. */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/pdl.cuh"
#include "ptx/special_registers.cuh"
#include "tile/last_block.cuh"
#include "attention/decode/rows.cuh"
#include "attention/decode/segment_keys.cuh"
//% if storage == "fp8"
#include "attention/decode/e4m3.cuh"
//% endif
//% if form
#include "attention/decode/features.cuh"
//% endif

using elem_t = ${dtype};
using stored_t = ${kept};              // of keys and values
constexpr int HEAD_DIM = ${head_dim};  // padded with zeros
constexpr int ROWS = ${rows};          // of a tile: heads times new tokens
constexpr int NUM_WARPS = ${num_warps};
constexpr int KEYS = ${keys};              // of a step
constexpr int STAGES = ${stages};          // steps in a group's ring
constexpr int MIN_BLOCKS = ${min_blocks};  // blocks an SM should hold: caps the registers
constexpr bool Q_IN_REGISTERS = ${q_in_registers};
constexpr bool ABREAST = HEAD_DIM <= 128;  // registers do not suffice for more
constexpr int GUARD = ${guard};            // bytes between rings: 0 except where memory is checked
//% if form
using bias_t = ${bias_dtype};
constexpr bool SOFTCAP = ${softcap}, ALIBI = ${alibi}, SINKS = ${sinks}, SCORE_MOD = ${has_mod};
constexpr bool BIAS = ${bias}, BIAS_PAIRED = ${bias_paired};  // paired: see attention/score.cuh
constexpr bool MASK = ${mask}, MASK_PAIRED = ${mask_paired};
constexpr bool RULES = SOFTCAP || ALIBI || SINKS || SCORE_MOD || BIAS || MASK;
constexpr bool ANEW = BIAS || MASK || SCORE_MOD;  // rows' addresses are worked out at each step

// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"
//% else
constexpr bool RULES = false, ANEW = false;  // for the scores
//% endif
constexpr bool EARLY = ${early};  // first keys come before the previous kernel is over

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int GROUP_WARPS = ROWS / WARP_ROWS, GROUPS = NUM_WARPS / GROUP_WARPS;
constexpr int GROUP_THREADS = GROUP_WARPS * WARP_SIZE;
constexpr bool SCALED = sizeof(stored_t) == 1;
constexpr int QUADS = HEAD_DIM / 4;  // of columns, in a row

static_assert(GROUP_WARPS == 1 || GROUPS == 1, "a group is a warp, or the block");
static_assert(HEAD_DIM % 64 == 0, "tiles are made of 64-wide panels, or 32-wide ones of codes");
static_assert(KEYS == 16 || KEYS == 32, "a lane knows the page of one key");
static_assert((GROUPS & (GROUPS - 1)) == 0, "a unit is a power of two");

using QTile = SwizzledTile<ROWS, HEAD_DIM>;
using KvTile =
    SwizzledTile<KEYS, HEAD_DIM * sizeof(stored_t) / 2>;  // of 16 bits, or pairs of codes
constexpr int STAGE_BYTES = 2 * KvTile::BYTES, RING_BYTES = STAGES * STAGE_BYTES;
constexpr int RING_STEP = RING_BYTES + GUARD;
// Where a block has an SM to itself, and registers suffice, outputs are left in the ring's last stages,
// while the others are filled for the next segment.
constexpr bool AHEAD = MIN_BLOCKS == 1 && HEAD_DIM == 128 && ROWS == WARP_ROWS && !ANEW && !EARLY;
constexpr int OUTPUT_STAGES =
    AHEAD ? ceil_div(GROUP_WARPS * WarpRows<HEAD_DIM>::BYTES, STAGE_BYTES) : STAGES;
constexpr int AHEAD_STEPS = STAGES - OUTPUT_STAGES;  // of the next segment
constexpr int OUTPUTS = AHEAD_STEPS * STAGE_BYTES;   // where they are in a ring
static_assert(OUTPUT_STAGES * STAGE_BYTES >= GROUP_WARPS * WarpRows<HEAD_DIM>::BYTES &&
                  AHEAD_STEPS < STAGES && (AHEAD_STEPS > 0 || !AHEAD),
              "outputs are left in the ring");

// Parts that a head is put together of at a time: a queue of 16 bytes each is a thread's own.
constexpr int PART_LANES = min_of(WARP_SIZE, QUADS);
constexpr int QUEUE_PARTS = OUTPUT_STAGES * STAGE_BYTES / (GROUP_THREADS * 16);
constexpr int PARTS_AT_ONCE = QUEUE_PARTS >= PART_LANES ? PART_LANES : PART_LANES / 2;
static_assert(QUEUE_PARTS >= PARTS_AT_ONCE, "the queue is where outputs were");

using QReader = FragmentReader<QTile, BlockOrder::ROW_MAJOR>;
using KReader = FragmentReader<KvTile, BlockOrder::COL_MAJOR>;
using VReader = FragmentReader<KvTile, BlockOrder::ROW_MAJOR>;
using Keys = SegmentKeys<KvTile, stored_t, GROUPS, GROUP_THREADS, STAGES>;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_decode(
    //% if form
    // Null where the form has no such thing. seqlen_k: `longest`.
    const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q]
    const bias_t* __restrict__ bias,         // [batch, heads_q, seqlen_q, seqlen_k], broadcast
    const u8* __restrict__ mask,             // the same; 0 hides the key
    const float* __restrict__ sinks /* [heads_q] */ ${score_arrays} ${packed_array},
    //% endif
    const elem_t* __restrict__ q,        // [batch, heads_q, seqlen_q, head_dim]
    const stored_t* __restrict__ k,      // [pages, heads_kv, page_size, head_dim]
    const stored_t* __restrict__ v,      // [pages, heads_kv, page_size, head_dim_v]
    const int* __restrict__ page_table,  // [table_rows, table_width], or null: row i has page i
    const int* __restrict__ seq_lens,    // [table_rows], or null: `longest`
    const int* __restrict__ rows,        // [batch], rows of the table, or null: its own
    const float* __restrict__ k_scale,   // [heads_kv], where SCALED
    const float* __restrict__ v_scale,   // [heads_kv]
    elem_t* __restrict__ o,              // [batch, heads_q, seqlen_q, head_dim_v]
    float* __restrict__ lse,             // [batch, heads_q, seqlen_q] contiguous, or null
    float* __restrict__ workspace,       // `slots` slots of parts, see Parts
    u32* __restrict__ counters,          // see HeadParts
    const Strides q_strides, const Strides k_strides,  // in elements; of k and v: from page to
    const Strides v_strides, const Strides o_strides,  // page, head to head, token to token
    const int batch, const int heads_kv, const int group_size,  // query heads a KV head
    const float group_inverse,                                  // 1 / group_size
    const int seqlen_q, const int head_dim, const int head_dim_v, const int longest,
    const int table_rows, const int table_width, const int page_log2, const u32 num_pages,
    const int unit_log2,  // of keys of a unit: a step of every group, or more
    const int split,      // whether every unit is a part of its own
    const int slots,      // of parts in the workspace
    const int abreast,    // heads of a sequence that neighbouring blocks have: all, or 1
    //% if form
    const AttentionForm form${score_scalars},
    //% endif
    const float softmax_scale_log2,  // softmax_scale * log2(e), not 0
    const int causal) {              // new token i sees keys up to i + length - seqlen_q
  // Early: nothing under way writes tables, keys before the new ones, and `seq_lens`: [batch], them.
  //% if early
  let_next_kernel();
  //% else
  after_previous_kernel();
  //% endif
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ RowState states[NUM_WARPS * WARP_ROWS];
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int group = warp / GROUP_WARPS, row_block = warp % GROUP_WARPS;
  unsigned char* const rings = shared_memory + QTile::BYTES + GUARD;
  const u32 q_tile = shared_address(shared_memory);
  const u32 ring = shared_address(rings) + group * RING_STEP;
  const u32 warp_q_tile = q_tile + row_block * WARP_ROWS * QTile::ROW_BYTES;
  const QReader q_reader(lane);
  const KReader k_reader(lane);
  const VReader v_reader(lane);

  // 1. The share of this block.
  //% if form
  const Sequences sequences{seq_lens, rows,       batch,
                            longest,  table_rows, seqlen_q + form.window_left ${packed_ends}};
  //% else
  const Sequences sequences{seq_lens, rows, batch, longest, table_rows ${early_lengths}};
  //% endif
  const QueryRows query_rows{group_size, seqlen_q, heads_kv, group_inverse ${packed_rows}};
  const int all_rows = query_rows.count(), row_tiles = ceil_div(all_rows, ROWS);
  const int heads = heads_kv * row_tiles;  // of a sequence: one for each of its tiles of rows
  const LaneSequence lanes(sequences, 0, unit_log2);
  const Crew crew(ABREAST ? abreast : 1);
  const int listed = crew.size > 1 ? 1 : heads;  // heads of a sequence in this block's list
  const Shares shares(count_units(sequences, lanes, unit_log2) * listed, crew.count());
  const int share_end = shares.begin(crew.number + 1);
  const int unit = shares.begin(crew.number);
  if (unit >= share_end) return;
  Place place = find_place(sequences, lanes, unit_log2, listed, unit);
  const Parts<HEAD_DIM> parts(workspace, slots, min(all_rows, ROWS));

  const auto tile_of = [&](const Segment& segment) {
    const int kv_head = row_tiles == 1 ? segment.head : segment.head / row_tiles;
    const int row0 = (segment.head - kv_head * row_tiles) * ROWS;
    return RowTile{query_rows, sequences.queries(place.sequence), kv_head, row0,
                   min(ROWS, all_rows - row0)};
  };
  const auto keys_of = [&](const Segment& segment, int kv_head) {
    //% if form
    const int seen = KeyBand(seqlen_q, place.length, form.window_left, form.window_right).first(0);
    //% else
    const int seen = 0;
    //% endif
    return Keys(segment, PageList(page_table, place.row, table_width, page_log2),
                HeadPages<stored_t>(k, kv_head, k_strides, head_dim),
                HeadPages<stored_t>(v, kv_head, v_strides, head_dim_v),
                sequences.first_key(place.length), place.length, unit_log2, seen, group);
  };
  Segment next(place, unit, share_end, split, crew.member());
  QueryCopy<QTile, THREADS> queries;
  Keys keys;
  int page[STAGES];
  const auto ask = [&](const RowTile& of) {  // for Q before pages: that waits for nothing
    if (!EARLY) queries = QueryCopy<QTile, THREADS>(of, q, q_strides, head_dim);
    keys = keys_of(next, of.kv_head);
    keys.look_up(page);
    keys.fetch_first<0, AHEAD_STEPS>(ring, page, page_log2, num_pages);
  };
  if (AHEAD) ask(tile_of(next));

  for (;;) {
    const Segment segment = next;
    const RowTile tile = tile_of(segment);
    const int kv_head = tile.kv_head, row0 = tile.row0, length = place.length;
    if (!AHEAD) ask(tile);
    //% if form
    const KeyBand band(seqlen_q, length, form.window_left, form.window_right);
    //% endif

    // 2. Q and the first steps are on their way. Q gets the sign of the scale: a negative one would
    //    turn maxima into minima.
    //% if early
    keys.fetch_first<0, STAGES - 1>(ring, page, page_log2, num_pages, [&](int key) {
      if (key + KEYS > length - seqlen_q) after_previous_kernel(false);
    });
    after_previous_kernel(false);
    queries = QueryCopy<QTile, THREADS>(tile, q, q_strides, head_dim);
    //% else
    keys.fetch_first<AHEAD_STEPS, STAGES - 1>(ring, page, page_log2, num_pages);
    //% endif
    int next_page = page[STAGES - 1];
    queries.store<SCALED>(q_tile, !RULES && softmax_scale_log2 < 0.f ? 0x80008000u : 0u);
    //% if form
    const float key_scale = SCALED ? k_scale[kv_head] : 1.f;
    const float scale_log2 = RULES ? LOG2E : fabsf(softmax_scale_log2) * key_scale;
    //% else
    const float scale_log2 = fabsf(softmax_scale_log2) * (SCALED ? k_scale[kv_head] : 1.f);
    //% endif
    const float v_factor = SCALED ? v_scale[kv_head] : 1.f;
    const HeadParts cut(segment, shares, crew, split);
    const auto counter_of = [&] {
      return cut.counter(place.sequence * heads + segment.head, batch * heads, split);
    };
    int counter = AHEAD ? counter_of() : 0;
    __syncthreads();
    u32 q_fragments[HEAD_DIM / 16][1][4];
    if (Q_IN_REGISTERS) {
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; ++step)
        ldmatrix_x4(q_fragments[step][0], q_reader.address(warp_q_tile, 0, step));
    }

    //% if form
    // 3. The keys of this group, some of which each row sees (`band`), by rules of its own.
    const auto rows_of = [&](int thread) {
      const int row = thread % GROUP_THREADS / WARP_SIZE * WARP_ROWS + thread % WARP_SIZE / 4;
      return LaneRows(query_rows, kv_head, row0 + row);
    };
    const auto rules_of = [&](int head) {
      const int b = place.sequence;
      return score_rules(
          RuleIf<SOFTCAP, SoftCap<false>>(form.softcap),
          PerScore<ScoreMod>({b, head, seqlen_q, length${score_values}}, seqlen_q, length),
          RuleIf<ALIBI, Alibi>(alibi_slopes, form.alibi_batch_stride, b, head, seqlen_q, length),
          RuleIf<BIAS, Bias<bias_t, BIAS_PAIRED>>(bias, form.bias, b, head, seqlen_q, length),
          RuleIf<MASK, Where<u8, MASK_PAIRED>>(mask, form.mask, b, head, seqlen_q, length));
    };
    const KeyBand bands[2] = {band, band};
    const int first_whole = band.first(seqlen_q - 1), end_whole = band.end(0);  // all rows see
    //% else
    // 3. The keys of this group. Row r of the warp sees keys 0 .. visible[r / 8] - 1.
    const int hidden = causal ? seqlen_q - 1 : 0;  // keys that the first token does not see
    int visible[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = query_rows.token(row0 + row_block * WARP_ROWS + lane / 4 + half * 8);
      visible[half] = min(length, length - hidden + (causal ? token : 0));
    }
    //% endif
    OnlineSoftmax<1> softmax;
    float acc[1][HEAD_DIM / 8][4] = {};
    //% if form
    if (SINKS && segment.unit == segment.head_begin && group == 0) {
      const LaneRows mine = rows_of(threadIdx.x);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        softmax.begin_row_with(0, half, sinks[mine.head[half]], lane);
    }
    //% endif
    for (int step = 0; step < keys.steps; ++step) {
      // This step has arrived, and the group is done with the last one.
      cp_async_wait<STAGES - 2>();
      group_sync<GROUP_WARPS>();
      if (step + STAGES - 1 < keys.steps)
        keys.fetch(ring, step + STAGES - 1, next_page, page_log2, num_pages);
      cp_async_commit();
      next_page = keys.page(step + STAGES);
      const u32 stage = ring + step % STAGES * STAGE_BYTES, v_stage = stage + KvTile::BYTES;
      const int key = keys.key(step);
      float s[1][KEYS / 8][4] = {};
      multiply_keys<elem_t, stored_t, Q_IN_REGISTERS>(s, q_fragments, warp_q_tile, q_reader, stage,
                                                      k_reader);
      //% if form
      const LaneRows mine = rows_of(ANEW ? thread_index_again() : threadIdx.x);
      if (RULES) {
        const decltype(rules_of(0)) rules[2] = {rules_of(mine.head[0]), rules_of(mine.head[1])};
        rules_on_rows(s, lane, rules, form.softmax_scale * key_scale, mine.token, key);
      }
      if (key < first_whole || key + KEYS > end_whole)
        rules_on_rows(s, lane, bands, 1.f, mine.token, key);
      //% else
      if (key + KEYS > length - hidden)
        mask_scores(s, lane, [&](int row) { return visible[row / 8] - key; });
      //% endif
      float correction[1][2];
      if (softmax.raise_max(s, scale_log2, correction)) scale_rows(acc, correction);
      multiply_values<elem_t, stored_t>(acc, s, softmax, scale_log2, v_stage, v_reader);
    }

    // 4. The groups' outputs become one; AHEAD, the next segment's first steps are on their way then.
    cp_async_wait<0>();
    group_sync<GROUP_WARPS>();
    const bool more = segment.end < share_end;
    const auto go_on = [&] {
      if (segment.end == place.first + listed * place.units)
        place.advance(sequences, segment.end, unit_log2);
      next = Segment(place, segment.end, share_end, split, crew.member());
    };
    if (AHEAD && more) {
      go_on();
      ask(tile_of(next));
    }
    unsigned char* const outputs = rings + OUTPUTS;
    leave_rows<HEAD_DIM, SCALED>(
        outputs + group * RING_STEP + row_block * WarpRows<HEAD_DIM>::BYTES,
        states + warp * WARP_ROWS, acc, softmax, scale_log2, lane,
        tile.count - row_block * WARP_ROWS);
    __syncthreads();
    for (int i = threadIdx.x; i < tile.count * QUADS; i += THREADS) {
      const int row = i / QUADS, column = i % QUADS * 4;
      const Quad quad = merge_warps<HEAD_DIM, GROUPS>(
          [&](int i) { return outputs + i * RING_STEP; }, states, ROWS, row, column, v_factor);
      if (cut.count == 1) {
        tile.store(o, o_strides, lse, head_dim_v, row, column, quad);
      } else {
        parts.leave(cut.own_slot(segment, split), row, column, quad);
      }
    }

    // 5. The last block that has a part of the head adds them up. Before thread 0 says that this
    //    part is there, all threads have written theirs of it; nobody reads the rings any more.
    __syncthreads();
    if (!AHEAD) counter = counter_of();
    if (cut.count > 1 && last_block(counters + counter, cut.count)) {
      const u32 queue = ring + OUTPUTS + threadIdx.x % GROUP_THREADS * 16;
      for (int i = threadIdx.x; i - lane < tile.count * QUADS; i += THREADS) {
        const int row = min(i / QUADS, tile.count - 1), column = i % QUADS * 4;
        const Quad quad = parts.merge<PART_LANES, PARTS_AT_ONCE>(
            queue, GROUP_THREADS * 16, cut.count, row, column,
            [&](int part) { return cut.slot(part, split); });
        if (i < tile.count * QUADS) tile.store(o, o_strides, lse, head_dim_v, row, column, quad);
      }
      __syncthreads();
    }

    if (!more) return;
    if (!AHEAD) go_on();
  }
}
