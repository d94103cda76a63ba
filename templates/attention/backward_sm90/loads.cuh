// Threads of attention's backward: one loads tiles of Q and dO, with what their rows bring along,
// and notes for all others what each tile is; one loads K and V.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "tile/tma_tile.cuh"
#include "attention/backward_sm90/queue.cuh"

// Where rings of tiles lie in shared memory.
template <typename Layout>
struct BackwardRings : Layout {
  u32 shared;

  __device__ __forceinline__ explicit BackwardRings(u32 base) : shared(base) {}

  __device__ __forceinline__ u32 q(int stage) const {
    return shared + Layout::Q + stage * Layout::Q_STAGE;
  }
  __device__ __forceinline__ u32 dout(int stage) const {
    return shared + Layout::DO + stage * Layout::DO_STAGE;
  }
  // lse_log2 of a tile's rows, then delta, then bits of a mask.
  __device__ __forceinline__ u32 rows(int stage) const {
    return shared + Layout::ROWS + stage * Layout::ROWS_STAGE;
  }
};

// What it takes to load tiles.
template <typename Rings, typename Barriers>
struct BackwardLoads {
  const Barriers& barriers;
  Rings rings;
  const TensorMap &q_map, &dout_map;
  const float *lse_log2, *delta;
  const TensorMap* bias_map;  // or null
};

// A tile for both thread blocks of a cluster, of which each asks for every other panel.
template <typename Tile>
__device__ __forceinline__ void load_shared_tile(u32 shared, const TensorMap& map, u32 barrier,
                                                 int row, int head, int batch, int turn) {
  mbarrier_expect(barrier, Tile::BYTES);
#pragma unroll
  for (int panel = 0; panel < Tile::PANELS; ++panel)
    if (panel % 2 == turn)
      tma_load_multicast(shared + panel * Tile::PANEL_BYTES, map, barrier,
                         panel * Tile::PANEL_COLUMNS, row, head, batch, 3);
}

// The load of a thread block's tile `step_number`.
template <typename Rings, typename Barriers>
struct TileLoad {
  using Loads = BackwardLoads<Rings, Barriers>;
  const Loads& loads;
  RingPlace<Rings::Q_STAGES> q_ring;
  RingPlace<Rings::DO_STAGES> do_ring;
  u32 q_full = 0, about = 0, rows = 0;  // where it goes, and notes of it

  __device__ __forceinline__ TileLoad(const Loads& of, int step_number)
      : loads(of),
        q_ring(ring_place<Rings::Q_STAGES>(step_number)),
        do_ring(ring_place<Rings::DO_STAGES>(step_number)) {}

  // Until there is room, also for notes.
  __device__ __forceinline__ void begin(int step_number) {
    const Barriers& barriers = loads.barriers;
    q_full = barriers.q_full(q_ring.stage), about = barriers.tile(step_number);
    rows = loads.rings.rows(Rings::ROWS_WITH_Q ? q_ring.stage : do_ring.stage);
    mbarrier_wait(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
  }
  // The tile from `row` on, whose rows bring along what lies at `index` tiles.
  __device__ __forceinline__ void load(int row, int head, int batch, int index,
                                       const u32* mask = nullptr) const {
    using QTile = typename Rings::QTile;
    using DOTile = typename Rings::DOTile;
    const Barriers& barriers = loads.barriers;
    const int turn = Rings::SHARED_TILES ? cluster_rank() : 0;
    if constexpr (Rings::SHARED_TILES)
      load_shared_tile<QTile>(loads.rings.q(q_ring.stage), loads.q_map, q_full, row, head, batch,
                              turn);
    else
      tma_load_tile<QTile>(loads.rings.q(q_ring.stage), loads.q_map, q_full, row, head, batch);
    if (!Rings::ROWS_WITH_Q) mbarrier_wait(barriers.do_empty(do_ring.stage), do_ring.parity ^ 1);
    mbarrier_expect(q_full, Rings::ROWS_BYTES + Rings::MASK_BYTES);
    const i64 first = static_cast<i64>(index) * Rings::BLOCK_Q;
    bulk_load(rows, loads.lse_log2 + first, Rings::ROWS_BYTES / 2, q_full);
    bulk_load(rows + Rings::ROWS_BYTES / 2, loads.delta + first, Rings::ROWS_BYTES / 2, q_full);
    if (Rings::MASK_BYTES > 0) bulk_load(rows + Rings::ROWS_BYTES, mask, Rings::MASK_BYTES, q_full);
    if (Rings::ROWS_WITH_Q) mbarrier_wait(barriers.do_empty(do_ring.stage), do_ring.parity ^ 1);
    if constexpr (Rings::SHARED_TILES)
      load_shared_tile<DOTile>(loads.rings.dout(do_ring.stage), loads.dout_map,
                               barriers.do_full(do_ring.stage), row, head, batch, turn ^ 1);
    else
      tma_load_tile<DOTile>(loads.rings.dout(do_ring.stage), loads.dout_map,
                            barriers.do_full(do_ring.stage), row, head, batch);
  }
};

// One work item after the other.
template <int BLOCK_Q, int BLOCK_K, bool ORDERED, typename Rings, typename Barriers>
__device__ __forceinline__ void load_tiles(const BackwardLoads<Rings, Barriers>& loads,
                                           const BackwardSizes<BLOCK_Q, BLOCK_K, ORDERED>& sizes,
                                           u32* counters) {
  const Barriers& barriers = loads.barriers;
  start_notes(barriers);
  for (int step_number = 0;;) {
    const int number = announce_next<BackwardWorkItem>(barriers, counters, sizes);
    if (number >= sizes.works()) break;
    note_work(barriers, number, sizes.again());
    for (bool last = false; !last; ++step_number) {
      const BackwardWorkItem work = noted_work(barriers);
      BackwardWalk at = noted_walk(barriers);
      const auto now = sizes.again();
      TileLoad<Rings, Barriers> load(loads, step_number);
      const int q0 = at.tile * BLOCK_Q, first_key = work.block * BLOCK_K + sizes.own_key;
      const int index = at.index(work, now);
      last = at.left == 1;
      load.begin(step_number);
      store_shared_chunk(load.about,
                         make_uint4(sizes.causal ? first_key - now.diagonal() - q0 : -BLOCK_K,
                                    sizes.seqlen_k - first_key, last, index));
      const int rank = ORDERED ? work.rank(at.tile, now) : 0;
      const int others = ORDERED ? now.turns(at.tile) : 0;
      store_shared_pair(load.about + 16, rank, others);
      store_shared_chunk(load.about + 32, make_uint4(work.batch, first_key, work.head, 0));
      load.load(q0, at.head, work.batch, index);
      at.advance(work, now);
      note_walk(barriers, at);
    }
  }
}

// What it takes to load K and V.
template <typename KTile, typename VTile, typename Barriers>
struct KeyLoads {
  const Barriers& barriers;
  u32 k_tile, k_stage_bytes, v_tile;
  const TensorMap &k_map, &v_map;

  // Those of piece `taken` of a thread block, from `row` on.
  __device__ __forceinline__ void load(int taken, int row, int head, int batch) const {
    const RingPlace<Barriers::K_STAGES> place = ring_place<Barriers::K_STAGES>(taken);
    mbarrier_wait(barriers.k_empty(place.stage), place.parity ^ 1);
    tma_load_tile<KTile>(k_tile + place.stage * k_stage_bytes, k_map, barriers.k_full(place.stage),
                         row, head, batch);
    mbarrier_wait(barriers.v_empty(), taken & 1 ^ 1);
    tma_load_tile<VTile>(v_tile, v_map, barriers.v_full(), row, head, batch);
  }
};

template <int BLOCK_Q, int BLOCK_K, bool ORDERED, typename KTile, typename VTile, typename Barriers>
__device__ __forceinline__ void load_keys(const KeyLoads<KTile, VTile, Barriers>& loads,
                                          const BackwardSizes<BLOCK_Q, BLOCK_K, ORDERED>& sizes) {
  for (int taken = 0;; ++taken) {
    const int number = take_work_alone(loads.barriers, taken);
    if (number >= sizes.works()) break;
    const BackwardWorkItem work(number, sizes);
    loads.load(taken, work.block * BLOCK_K + sizes.own_key, work.head, work.batch);
  }
}
