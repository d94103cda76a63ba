// dQ of two thread blocks of a cluster that have neighbouring keys: each adds the other's half of a
// tile to its own before it goes to device memory, whose additions are half as many then (L2 makes
// so many a second, and with 64 keys a block they are what everybody waits for).
//
//   block 0   its keys' part of the other's half ---+   +---> added to its own half, to `dq_sum`
//   block 1   ............................... the same, the other way
//
// A half is the queries of a row block where a tile has two, else panels of 64 columns. A warp
// gives to the same warp of the other block, by way of shared memory there; while it waits for what
// it is given the next product is under way. In order two threads ask for the turn, and pass it on.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_products.cuh"
#include "tile/ring.cuh"
#include "tile/tile_copy.cuh"
#include "attention/backward_sm90/dq_products.cuh"

// What the other block's warp gives is there, its place there is free; a tile's turn has come, and
// all has been added to it (for each of two threads that have every second tile).
struct PairBarriers {
  u32 base;
  static constexpr int COPIERS = 2;

  __device__ __forceinline__ u32 given(int warp) const { return base + warp * 16; }
  __device__ __forceinline__ u32 free(int warp) const { return base + warp * 16 + 8; }
  __device__ __forceinline__ u32 turn(int copier) const { return base + 64 + copier * 16; }
  __device__ __forceinline__ u32 done(int copier) const { return base + 72 + copier * 16; }
  __device__ __forceinline__ void init() const {
#pragma unroll
    for (int warp = 0; warp < 4; ++warp)
      mbarrier_init(given(warp), 1), mbarrier_init(free(warp), 1);
#pragma unroll
    for (int copier = 0; copier < COPIERS; ++copier)
      mbarrier_init(turn(copier), 1), mbarrier_init(done(copier), 4);
    mbarrier_init_fence();
  }
};

// Which parts of a tile, 64 rows of 64 columns, a block owns.
template <typename Layout>
struct PairHalf {
  static constexpr int BLOCKS = Layout::BLOCK_Q / 64, PARTS = Layout::DQ_PARTS / 2;
  static constexpr bool ROWS = BLOCKS == 2;  // a half is a row block, else panels
  static constexpr int SHARERS = ROWS ? 1 : 2;
  static_assert(Layout::DQ_PARTS % 2 == 0, "halves");
  int rank;

  __device__ __forceinline__ int block() const { return ROWS ? rank : 0; }
  __device__ __forceinline__ int panel(int part) const { return ROWS ? part : rank * PARTS + part; }
};

template <typename T, typename Layout, typename Tile, bool ORDERED, typename Barriers,
          typename Sizes, typename NextWork>
__device__ __forceinline__ void multiply_dq_paired(const Barriers& barriers,
                                                   const PairBarriers& pair, u32 shared,
                                                   const Sizes& sizes, const NextWork& next_work,
                                                   int& works_taken, int& step_number,
                                                   float* dq_sum, int lane, int warp, bool leads) {
  using KTile = typename Layout::KTile;
  using DSTile = typename Layout::DSTile;
  using Half = PairHalf<Layout>;
  constexpr int INDEX_BLOCKS = Sizes::INDEX_ROWS / 16;
  constexpr int CHUNKS = 8, K_STEPS = KTile::ROWS / 16;
  const u64 ds_operand = wgmma_tile(shared + Layout::DS, DSTile::PANEL_BYTES);
  const u64 k_operand = wgmma_tile(shared, KTile::PANEL_BYTES);
  const bool signals = lane == 0;
  const int rank = cluster_rank();
  const Half own{rank}, others{rank ^ 1};
  // Computed again where they are wanted, as registers are short.
  const auto place = [&] {
    return shared + Layout::DQ + anew(warp) * Layout::DQ_WARP_BYTES + anew(lane) * 16;
  };
  int parity = 0;
  while (next_work() < sizes.works()) {
    const int taken = works_taken - 1;
    mbarrier_wait(barriers.k_full(0), taken & 1);
    for (bool last = false; !last; ++step_number) {
      const RingPlace<Layout::DS_STAGES> ds_ring = ring_place<Layout::DS_STAGES>(step_number);
      const int copier = step_number % Barriers::COPIERS;
      mbarrier_wait(barriers.ds_full(ds_ring.stage), ds_ring.parity);
      if (ORDERED && leads) mbarrier_arrive(barriers.begun(copier));
      const u64 ds_tile = ds_operand + (ds_ring.stage * Layout::DS_STAGE >> 4);
      const Tile tile(barriers.tile(step_number));
      last = tile.last;
      const bool first = ORDERED && load_shared_word(barriers.tile(step_number) + 16) == 0;
      const int row_block = tile.index * INDEX_BLOCKS + own.block() * 4 + warp;
      const auto issue = [&](float (&dq)[1][CHUNKS][4], const Half& half, int part) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
          wgmma_shared<T, true, true>(
              dq[0], ds_tile + (half.block() * DSTile::PANEL_BYTES + step * 2048 >> 4),
              k_operand + (half.panel(part) * KTile::PANEL_BYTES + step * 2048 >> 4), step > 0);
        wgmma_commit();
      };
      float gift[1][CHUNKS][4], dq[1][CHUNKS][4];
      issue(gift, others, 0);
      issue(dq, own, 0);
#pragma unroll
      for (int part = 0; part < Half::PARTS; ++part, parity ^= 1) {
        const bool more = part + 1 < Half::PARTS;
        if (signals) mbarrier_expect(pair.given(warp), Layout::DQ_WARP_BYTES);
        wgmma_wait<1>();
        mbarrier_wait(pair.free(warp), parity ^ 1);
        const u32 there = cluster_address(place(), rank ^ 1);
        const u32 given_there = cluster_address(pair.given(anew(warp)), rank ^ 1);
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n)
          cluster_send_floats(there + n * WARP_SIZE * 16, gift[0][n], given_there);
        wgmma_wait<0>();
        if (more) issue(gift, others, part + 1);
        __syncwarp();  // lanes have read what the tile is
        if (signals && !more) mbarrier_arrive(barriers.ds_empty(ds_ring.stage));
        mbarrier_wait(pair.given(warp), parity);
        const u32 here = place();
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n) {
          float given[4];
          load_shared_floats(given, here + n * WARP_SIZE * 16);
#pragma unroll
          for (int i = 0; i < 4; ++i) dq[0][n][i] += given[i];
        }
        register_fence(dq[0]);
        __syncwarp();  // all lanes have read
        if (signals) cluster_arrive_at(pair.free(warp), rank ^ 1);
        if (ORDERED && part == 0)
          mbarrier_wait(pair.turn(copier), step_number / Barriers::COPIERS & 1);
        give_sums(dq_sum + fragment_place(row_block, own.panel(part) * CHUNKS,
                                          Layout::SUM_COLUMNS / 8, 0),
                  dq, lane, first);
        if (more) issue(dq, own, part + 1);
      }
      __syncwarp();
      if (ORDERED && signals) mbarrier_arrive(pair.done(copier));
    }
    if (signals) mbarrier_arrive(barriers.k_empty(0));
  }
  if (ORDERED && leads)  // there are no more tiles
    for (int i = 0; i < Barriers::COPIERS; ++i) {
      store_shared_word(barriers.tile(step_number + i) + 12, -1);
      mbarrier_arrive(barriers.begun((step_number + i) % Barriers::COPIERS));
    }
}

// Thread `copier` of two: the turns of its tiles, until one has no index.
template <typename Layout, int INDEX_ROWS, typename Barriers>
__device__ __forceinline__ void take_turns(const Barriers& barriers, const PairBarriers& pair,
                                           u32* turns, int copier) {
  using Half = PairHalf<Layout>;
  const Half own{cluster_rank()};
  for (int step = copier, parity = 0;; step += Barriers::COPIERS, parity ^= 1) {
    mbarrier_wait(barriers.begun(copier), parity);
    const u32 about = barriers.tile(step);
    const int index = load_shared_word(about + 12);
    if (index < 0) break;
    const u32 rank = load_shared_word(about + 16), others = load_shared_word(about + 20);
    u32* const counter = turns + index * (INDEX_ROWS / 16) + own.block() * 4;
    while (load_acquire(counter) < Half::SHARERS * rank) {
    }
    mbarrier_arrive(pair.turn(copier));
    mbarrier_wait(pair.done(copier), parity);
    red_inc_release(counter, Half::SHARERS * others);
  }
}
