// The producer of attention on sm_90: who draws tiles of queries and asks TMA for what they need.
//
// A thread each for Q and K, for V, for bias and mask, in warps of their own. Packed tiles (VARLEN)
// may have to be cut, which takes the whole warp where else a thread asks for them.
#pragma once
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "tile/tma_tile.cuh"
#include "attention/sm90/parts.cuh"
#include "attention/sm90/work.cuh"

// All tiles of queries, each as often as its keys have parts, and the counter they are drawn from.
struct AttentionWorkItems {
  int blocks_q, heads_q, group_size, batch, section_heads, whole, count;
  u32* counters;

  __device__ __forceinline__ AttentionWorkItems(int blocks, int heads, int queries_per_key,
                                                int batches, int heads_together, int parts,
                                                u32* drawn)
      : blocks_q(blocks),
        heads_q(heads),
        group_size(queries_per_key),
        batch(batches),
        section_heads(heads_together),
        whole(blocks * heads * batches),
        count(whole * parts),
        counters(drawn) {}

  static constexpr bool FIRST_DRAWN = false;  // a block's first is its own index
  __device__ __forceinline__ int draw() const { return draw_work(counters, count); }
  template <typename Item>
  __device__ __forceinline__ Item item(int number) const {
    return Item(number, blocks_q, heads_q, heads_q * batch, section_heads);
  }
};

// The same of some of the sequences: `list` is how many, then which; the kernel before makes it.
struct ListedWorkItems : AttentionWorkItems {
  const int* list;

  __device__ __forceinline__ ListedWorkItems(int blocks, int heads, int queries_per_key,
                                             int batches, int heads_together, int parts, u32* drawn,
                                             const int* sequences)
      : AttentionWorkItems(blocks, heads, queries_per_key, batches, heads_together, parts, drawn),
        list(sequences) {
    after_previous_kernel();
    whole = blocks * heads * list[0], count = whole * parts;
  }

  template <typename Item>
  __device__ __forceinline__ Item item(int number) const {
    Item found(number, blocks_q, heads_q, heads_q * max(list[0], 1), section_heads);
    if (list[0] > 0) found.batch = list[1 + found.batch];
    return found;
  }
};

// K and V are brought as products read them; the other way is page_codes.cuh.
struct NoCodes {
  static constexpr int WARPS = 0;
  struct Place {};
};

// SpanOf: which keys a work item sees. HEADS share a tile of queries (parts.cuh). Codes: what becomes
// K and V on the way.
template <typename Rings, bool VARLEN, typename SpanOf, int HEADS = 1, typename Codes = NoCodes>
struct AttentionProducer {
  using Item = WorkItem<Rings::BLOCK_Q / HEADS>;
  using QTile = typename Rings::QTile;
  using KTile = typename Rings::KTile;
  using VTile = typename Rings::VTile;
  using KPlace = RingPlace<Rings::K_STAGES>;
  using VPlace = RingPlace<Rings::V_STAGES>;
  const Barriers<Rings::STAGES>& barriers;
  u32 shared;  // where the rings are
  int group_size;
  const SpanOf& span_of;
  bool asks;  // whether this is the one thread of a warp that TMA hears from

  __device__ __forceinline__ AttentionProducer(const Barriers<Rings::STAGES>& waits_at, u32 rings,
                                               int queries_per_key, const SpanOf& keys_of,
                                               bool first_lane)
      : barriers(waits_at),
        shared(rings),
        group_size(queries_per_key),
        span_of(keys_of),
        asks(first_lane) {}

  // All of it: one thread says what comes next and asks for its Q and K, another one, in a warp of
  // its own, for its V, and where there are ARRAYS a third one for them:
  // load_arrays(to, full, place, tile). With VARLEN a whole warp in place of a thread. Where there are
  // Codes the first warp asks for all of them, and the others make K and V of them.
  template <int ARRAYS, typename Works, typename Load>
  __device__ __forceinline__ void run(int warp, const Works& works, const TensorMap& q_map,
                                      const TensorMap& k_map, const TensorMap& v_map,
                                      const Load& load_arrays) const {
    int tail_parity = 0;
    if (warp == 0 && (VARLEN || elect_one())) {
      lead(works, q_map, k_map, v_map, tail_parity);
    } else if (Codes::WARPS > 0) {
      if constexpr (Codes::WARPS > 0) {
        if (warp > Codes::HELPERS && warp < 4) return;
        RingPlace<SLOTS> slot;
        const int of_group = Codes::THREADS - (blockDim.x - threadIdx.x);  // the block's last warps
        Codes{barriers, shared}.widen(
            works.batch, warp < 4 ? threadIdx.x - WARP_SIZE : of_group,
            [&] { return take_work<true>(slot); }, span_of);
      }
    } else if (warp == 1 && (VARLEN || elect_one())) {
      tma_prefetch(v_map);
      VPlace v_place;
      follow(works.batch, [&](const Item& place, const auto& range, int tile) {
        load_v(v_map, v_place, tail_parity, place, range, tile);
      });
    } else if (ARRAYS > 0 && warp == 2 && (VARLEN || elect_one())) {
      RingPlace<Rings::SCORE_STAGES> score_place;
      follow(works.batch, [&](const Item& place, const auto&, int tile) {
        load_scores(score_place, [&](u32 to, u32 full) { load_arrays(to, full, place, tile); });
      });
    }
  }

  // Draws one tile of queries after another, says which it is, and asks for its Q and K.
  template <typename Works>
  __device__ __forceinline__ void lead(const Works& works, const TensorMap& q_map,
                                       const TensorMap& k_map, const TensorMap& v_map,
                                       int& tail_parity) const {
    KPlace k_place;
    typename Codes::Place codes;
    RingPlace<SLOTS> slot;
    RingPlace<Rings::Q_STAGES> q_place;
    tma_prefetch(q_map), tma_prefetch(k_map);
    const int first = Works::FIRST_DRAWN ? next_number(works) : blockIdx.x;
    for (int number = first;; number = next_number(works)) {
      // Consumers begin with the next tile before they know whether there is one: so the last is
      // followed by one outside the tensors, which comes as zeros.
      const bool last = number >= works.count;
      int part = 0, within = last ? 0 : number;
      if (SpanOf::PARTED) part = within / works.whole, within -= part * works.whole;
      Item piece = works.template item<Item>(within);
      piece.part = part;
      const auto range = span_of(piece);
      // Tiles past the end of their sequence are nobody's.
      if (VARLEN && !last && piece.q0 >= range.seqlen_q) continue;
      if (last) piece.batch = works.batch;
      mbarrier_wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
      if (asks) announce(barriers, slot.stage, piece);
      slot.advance();
      const int tensor = VARLEN ? last : piece.batch;  // the outermost index
      const int kv_head = piece.head / group_size;
      const auto load_k = [&](int tile) {
        if constexpr (Codes::WARPS > 0) {
          if (!last)
            Codes{barriers, shared}.template load<typename Codes::KCodes>(k_map, codes, range, tile,
                                                                          kv_head);
        } else if constexpr (SpanOf::PAGED) {
          auto pages = range.pages;
          if (last) pages.length = 0;
          const auto box = pages.template box<KTile::ROWS>(tile);
          mbarrier_wait(barriers.k_empty(k_place.stage), k_place.parity ^ 1);
          pages.template load<KTile>(shared + Rings::K + k_place.stage * Rings::K_STAGE, k_map,
                                     barriers.k_full(k_place.stage), box,
                                     piece.head / works.group_size);
        } else {
          mbarrier_wait(barriers.k_empty(k_place.stage), k_place.parity ^ 1);
          if (asks)
            tma_load_tile<KTile>(shared + Rings::K + k_place.stage * Rings::K_STAGE, k_map,
                                 barriers.k_full(k_place.stage), range.k_start + tile * KTile::ROWS,
                                 piece.head / works.group_size, tensor);
        }
        k_place.advance();
      };
      const auto load_q = [&] {
        mbarrier_wait(barriers.q_empty(q_place.stage), q_place.parity ^ 1);
        const u32 to = shared + q_place.stage * Rings::Q_STAGE;
        const u32 full = barriers.q_full(q_place.stage);
        if constexpr (HEADS > 1)
          tma_load_heads<QTile, HEADS>(to, q_map, full, piece.q0, piece.head, tensor);
        else
          tma_load_rows<QTile, VARLEN>(to, q_map, full, barriers.q_tail(), tail_parity,
                                       range.q_start + piece.q0, piece.head, tensor,
                                       range.seqlen_q - piece.q0);
        q_place.advance();
      };
      load_k(range.end - 1);
      load_q();
      if (last) break;
      if constexpr (Codes::WARPS > 0) {
        for (int tile = range.end - 1; tile >= range.first; --tile) {
          if (tile > range.first) load_k(tile - 1);
          Codes{barriers, shared}.template load<typename Codes::VCodes>(v_map, codes, range, tile,
                                                                        kv_head);
        }
      } else {
        for (int tile = range.end - 2; tile >= range.first; --tile) load_k(tile);
      }
    }
  }

  template <bool WHOLE_WARP>
  __device__ __forceinline__ Item take_work(RingPlace<SLOTS>& slot) const {
    return next_work<Rings::BLOCK_Q / HEADS, WHOLE_WARP, SpanOf::PARTED>(barriers, slot);
  }

  // The others: load(piece, range, tile) for tile after tile of keys of what has been announced.
  template <typename Load>
  __device__ __forceinline__ void follow(int batch, const Load& load) const {
    RingPlace<SLOTS> slot;
    while (true) {
      const Item piece = take_work<VARLEN>(slot);
      if (piece.batch >= batch) break;
      const auto range = span_of(piece);
      for (int tile = range.end - 1; tile >= range.first; --tile) load(piece, range, tile);
    }
  }

  // A tile of bias and mask: load(to, full) asks for it.
  template <typename Load>
  __device__ __forceinline__ void load_scores(RingPlace<Rings::SCORE_STAGES>& place,
                                              const Load& load) const {
    const u32 to = shared + Rings::SCORES + place.stage * Rings::SCORE_STAGE;
    const u32 full = barriers.scores_full(place.stage);
    mbarrier_wait(barriers.scores_empty(place.stage), place.parity ^ 1);
    place.advance();
    if (asks) load(to, full);
  }

  template <typename Span>
  __device__ __forceinline__ void load_v(const TensorMap& map, VPlace& place, int& tail_parity,
                                         const Item& piece, const Span& range, int tile) const {
    if constexpr (SpanOf::PAGED) {
      const u32 to = shared + Rings::V + place.stage * Rings::V_STAGE;
      const auto box = range.pages.template box<VTile::ROWS>(tile);
      const int rows = range.seqlen_k - tile * VTile::ROWS;
      const bool whole = rows >= VTile::ROWS;
      mbarrier_wait(barriers.v_empty(place.stage), place.parity ^ 1);
      const u32 full = barriers.v_full(place.stage), arrives = whole ? full : barriers.v_tail();
      range.pages.template load<VTile>(to, map, arrives, box, piece.head / group_size);
      if (!whole) clear_rows<VTile>(to, rows, threadIdx.x % WARP_SIZE, arrives, tail_parity);
      if (!whole || !asks) mbarrier_arrive(full);
    } else {
      mbarrier_wait(barriers.v_empty(place.stage), place.parity ^ 1);
      tma_load_rows<VTile, VARLEN>(shared + Rings::V + place.stage * Rings::V_STAGE, map,
                                   barriers.v_full(place.stage), barriers.v_tail(), tail_parity,
                                   range.k_start + tile * VTile::ROWS, piece.head / group_size,
                                   VARLEN ? 0 : piece.batch, range.seqlen_k - tile * VTile::ROWS);
    }
    place.advance();
  }

  template <typename Works>
  __device__ __forceinline__ int next_number(const Works& works) const {
    const int number = asks ? works.draw() : 0;
    return VARLEN ? __shfl_sync(FULL_MASK, number, 0) : number;
  }
};
