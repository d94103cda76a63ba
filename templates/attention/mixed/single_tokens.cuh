// Sequences of one new token beside others that are prefilled (mixed/work_items.cuh): what decode.cu does,
// by the eight warps of two consumers, before the block's tiles of queries.
//
// The rows of a tile are the query heads of one KV head, up to 16. Each warp has a ring of its own,
// which cp.async fills, where the rings of Q, K and V will be:
//
//   shared memory   Q stage 0 | Q stage 1 | K stage 0 | ...      RINGS of RING_BYTES to a stage
//   warps             0   1   |   2   3   |   4   5   | ...
//
// Keys are shared out over blocks as decode/schedule.cuh says; the last block that has a part of a
// head adds up all parts, in their order. A segment's outputs are left in its rings' last stages, while
// the others are filled for the next segment.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/proxy_fence.cuh"
#include "tile/last_block.cuh"
#include "attention/decode/rows.cuh"
#include "attention/decode/segment_keys.cuh"
#include "attention/mma.cuh"

// What the kernel's arguments say of them. Strides of q and o: from token to token, head to head.
template <typename T>
struct SingleTokenArrays {
  const T *q, *k, *v;
  const int* page_table;
  const float* sinks;
  T* o;
  float *lse, *workspace;
  u32* counters;
  Strides q_strides, k_strides, v_strides, o_strides;
  int head_dim, head_dim_v, table_width, page_log2;
  u32 num_pages;
  int slots;  // of parts in the workspace
  float softmax_scale;
};

template <typename Rings, typename T, bool SINKS>
struct SingleTokens {
  static constexpr int WARPS = 8, THREADS = WARPS * WARP_SIZE, BARRIER = 4;
  static constexpr int HEAD_DIM = Rings::WIDTH, QUADS = HEAD_DIM / 4;
  static constexpr int KEYS = 16,
                       UNIT_LOG2 = 7;  // of a step; of a unit, which is a step of each warp
  static constexpr int RING_BYTES = 16384, RINGS = Rings::QTile::BYTES / RING_BYTES;
  using KvTile = SwizzledTile<KEYS, HEAD_DIM>;
  using KReader = FragmentReader<KvTile, BlockOrder::COL_MAJOR>;
  using VReader = FragmentReader<KvTile, BlockOrder::ROW_MAJOR>;
  static constexpr int STAGE_BYTES = 2 * KvTile::BYTES, STAGES = RING_BYTES / STAGE_BYTES;
  static constexpr int OUTPUT_BYTES = WarpRows<HEAD_DIM>::BYTES;
  static constexpr int OUTPUT_STAGES = ceil_div(OUTPUT_BYTES, STAGE_BYTES);
  static constexpr int AHEAD_STEPS = STAGES - OUTPUT_STAGES, OUTPUTS = AHEAD_STEPS * STAGE_BYTES;
  using Keys = SegmentKeys<KvTile, T, WARPS, WARP_SIZE, STAGES>;
  static constexpr int PART_LANES = min_of(WARP_SIZE, QUADS);
  static constexpr int PARTS_AT_ONCE =
      min_of(PART_LANES, OUTPUT_STAGES* STAGE_BYTES / (WARP_SIZE * 16));
  static_assert(STAGES > 1 && RINGS > 0 && KEYS * WARPS == 1 << UNIT_LOG2, "a ring of steps");
  static_assert(AHEAD_STEPS > 0, "outputs and queues are left in the ring");
  static_assert(Rings::QTile::BYTES == Rings::KTile::BYTES &&
                    Rings::QTile::BYTES == Rings::VTile::BYTES,
                "stages are alike");
  static_assert((Rings::Q_STAGES + Rings::K_STAGES + Rings::V_STAGES) * RINGS >= WARPS,
                "a ring for each warp");

  const SingleTokenArrays<T>& arrays;
  const Sequences& sequences;
  const QueryRows& query_rows;
  unsigned char* shared_memory;
  float scale_log2;
  int thread, lane, warp;  // of the consumers'

  __device__ __forceinline__ SingleTokens(const SingleTokenArrays<T>& given, const Sequences& all,
                                          const QueryRows& rows, unsigned char* memory,
                                          float softmax_scale_log2, int of_consumers)
      : arrays(given),
        sequences(all),
        query_rows(rows),
        shared_memory(memory),
        scale_log2(softmax_scale_log2),
        thread(of_consumers),
        lane(of_consumers % WARP_SIZE),
        warp(__shfl_sync(FULL_MASK, of_consumers / WARP_SIZE, 0)) {}

  __device__ __forceinline__ static int ring_place(int warp) {
    return warp / RINGS * Rings::Q_STAGE + warp % RINGS * RING_BYTES;
  }
  __device__ __forceinline__ static void meet() { named_barrier_wait_aligned<THREADS>(BARRIER); }

  // All of a block's share, in a crew of `abreast` of `blocks`.
  __device__ __forceinline__ void run(int blocks, int abreast) const {
    const LaneSequence lanes(sequences, 0, UNIT_LOG2);
    const Crew crew(abreast);
    const int heads = query_rows.kv_heads, listed = crew.size > 1 ? 1 : heads;
    const Shares shares(count_units(sequences, lanes, UNIT_LOG2) * listed,
                        blocks / static_cast<u32>(crew.size));
    const int share_end = shares.begin(crew.number + 1);
    int unit = shares.begin(crew.number);
    if (unit >= share_end) return;
    Place place = find_place(sequences, lanes, UNIT_LOG2, listed, unit);
    const u32 ring = shared_address(shared_memory) + ring_place(warp);
    Segment next(place, unit, share_end, 0, crew.member());
    Keys keys = keys_of(place, next);
    int page[STAGES];
    fetch_first(keys, ring, page);
    while (true) {
      const Segment segment = next;
      const HeadParts cut(segment, shares, crew, 0);
      const int counter =
          cut.counter(place.sequence * heads + segment.head, sequences.batch * heads, 0);
      const RowTile tile{query_rows, sequences.queries(place.sequence), segment.head, 0,
                         query_rows.count()};
      OnlineSoftmax<1> softmax;
      float acc[1][HEAD_DIM / 8][4] = {};
      if (SINKS && segment.unit == segment.head_begin && warp == 0) begin_with_sinks(softmax, tile);
      attend(acc, softmax, keys, ring, page, tile);
      const bool more = segment.end < share_end;
      if (more) {
        if (segment.end == place.first + listed * place.units)
          place.advance(sequences, segment.end, UNIT_LOG2);
        next = Segment(place, segment.end, share_end, 0, crew.member());
        keys = keys_of(place, next);
        fetch_first(keys, ring, page);
      }
      leave_rows<HEAD_DIM, false>(shared_memory + ring_place(warp) + OUTPUTS,
                                  states() + warp * WARP_ROWS, acc, softmax, scale_log2, lane,
                                  tile.count);
      meet();
      merge(segment, tile, cut, counter);
      if (!more) return;
    }
  }

  __device__ __forceinline__ Keys keys_of(const Place& place, const Segment& segment) const {
    return Keys(segment,
                PageList(arrays.page_table, place.row, arrays.table_width, arrays.page_log2),
                HeadPages<T>(arrays.k, segment.head, arrays.k_strides, arrays.head_dim),
                HeadPages<T>(arrays.v, segment.head, arrays.v_strides, arrays.head_dim_v),
                sequences.first_key(place.length), place.length, UNIT_LOG2,
                max(place.length - sequences.window, 0), warp);
  }
  __device__ __forceinline__ void fetch_first(const Keys& keys, u32 ring,
                                              int (&page)[STAGES]) const {
    keys.look_up(page);
    keys.template fetch_first<0, AHEAD_STEPS>(ring, page, arrays.page_log2, arrays.num_pages);
  }

  // The warp's rows of Q as A fragments, straight from memory: there are few.
  __device__ __forceinline__ void load_queries(u32 (&q)[HEAD_DIM / 16][1][4],
                                               const RowTile& tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      const T* const from = arrays.q + tile.offset(arrays.q_strides, min(row, tile.count - 1));
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i) {
        const int column = i * 8 + lane % 4 * 2;
        u32& pair = q[i / 2][0][i % 2 * 2 + half];
        pair = 0;
        if (row < tile.count && column < arrays.head_dim)
          pair = *reinterpret_cast<const u32*>(from + column);
      }
    }
  }

  // This warp's keys of a segment, whose first steps are on their way.
  __device__ __forceinline__ void attend(float (&acc)[1][HEAD_DIM / 8][4],
                                         OnlineSoftmax<1>& softmax, const Keys& keys, u32 ring,
                                         const int (&page)[STAGES], const RowTile& tile) const {
    keys.template fetch_first<AHEAD_STEPS, STAGES - 1>(ring, page, arrays.page_log2,
                                                       arrays.num_pages);
    int next_page = page[STAGES - 1];
    u32 q[HEAD_DIM / 16][1][4];
    load_queries(q, tile);
    const KReader k_reader(lane);
    const VReader v_reader(lane);
    for (int step = 0; step < keys.steps; ++step) {
      cp_async_wait<STAGES - 2>();  // this step has arrived, and the warp is done with the last
      __syncwarp();
      if (step + STAGES - 1 < keys.steps)
        keys.fetch(ring, step + STAGES - 1, next_page, arrays.page_log2, arrays.num_pages);
      cp_async_commit();
      next_page = keys.page(step + STAGES);
      const u32 stage = ring + step % STAGES * STAGE_BYTES;
      const int key = keys.key(step);
      float s[1][KEYS / 8][4] = {};
      multiply_qk<T, 16, true>(s, q, 0, k_reader, stage, k_reader);
      if (key < keys.seen || key + KEYS > keys.end) hide(s, keys.seen - key, keys.end - key);
      float correction[1][2];
      if (softmax.raise_max(s, scale_log2, correction)) scale_rows(acc, correction);
      multiply_pv<T, 16>(acc, s, softmax, scale_log2, stage + KvTile::BYTES, v_reader);
    }
    cp_async_wait<0>();
    __syncwarp();
  }

  __device__ __forceinline__ void begin_with_sinks(OnlineSoftmax<1>& softmax,
                                                   const RowTile& tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(lane / 4 + half * 8, tile.count - 1);
      const float sink = arrays.sinks[query_rows.head(tile.kv_head, row)];
      softmax.begin_row_with(0, half, sink / arrays.softmax_scale, lane);
    }
  }

  // Scores of keys before `first` and from `end` on.
  __device__ __forceinline__ void hide(float (&s)[1][KEYS / 8][4], int first, int end) const {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = n * 8 + lane % 4 * 2 + i % 2;
        if (key < first || key >= end) s[0][n][i] = NEG_INFINITY;
      }
  }

  // What is said of the warps' rows.
  __device__ __forceinline__ static RowState* states() {
    __shared__ RowState of_rows[WARPS * WARP_ROWS];
    return of_rows;
  }

  // The warps' outputs become one: stored, or a part of the head in the workspace; who leaves the
  // last part puts all together.
  __device__ __forceinline__ void merge(const Segment& segment, const RowTile& tile,
                                        const HeadParts& cut, int counter) const {
    const Parts<HEAD_DIM> parts(arrays.workspace, arrays.slots, tile.count);
    const auto store = [&](int row, int column, const Quad& quad) {
      tile.store(arrays.o, arrays.o_strides, arrays.lse, arrays.head_dim_v, row, column, quad);
    };
    for (int i = thread; i < tile.count * QUADS; i += THREADS) {
      const int row = i / QUADS, column = i % QUADS * 4;
      const Quad quad = merge_warps<HEAD_DIM, WARPS>(
          [&](int i) { return shared_memory + ring_place(i) + OUTPUTS; }, states(), WARP_ROWS, row,
          column, 1.f);
      if (cut.count == 1)
        store(row, column, quad);
      else
        parts.leave(cut.own_slot(segment, 0), row, column, quad);
    }
    meet();
    if (cut.count == 1 || !is_last(arrays.counters + counter, cut.count)) return;
    const u32 queue = shared_address(shared_memory) + ring_place(warp) + OUTPUTS + lane * 16;
    for (int i = thread; i - lane < tile.count * QUADS; i += THREADS) {
      const int row = min(i / QUADS, tile.count - 1), column = i % QUADS * 4;
      const Quad quad = parts.template merge<PART_LANES, PARTS_AT_ONCE>(
          queue, WARP_SIZE * 16, cut.count, row, column,
          [&](int part) { return cut.slot(part, 0); });
      if (i < tile.count * QUADS) store(row, column, quad);
    }
    meet();
  }

  // last_block of the consumers alone.
  __device__ __forceinline__ bool is_last(u32* counter, u32 count) const {
    __shared__ bool last;
    if (thread == 0) last = atom_inc_acq_rel(counter, count) == count - 1;
    meet();
    return last;
  }
};
