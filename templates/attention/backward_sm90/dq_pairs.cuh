// dQ of two thread blocks of a cluster that have neighbouring keys: each adds the other's half of a
// tile to its own before it goes to device memory, whose additions are half as many then (L2 makes so
// many a second, and with 64 keys a block they are what everybody waits for).
//
//   block 0   its keys' part of the other's half ---+   +---> added to its own half, to `dq_sum`
//   block 1   ............................... the same, the other way
//
// A half is the queries of a row block where a tile has two, else panels of 64 columns. A warp gives to
// the same warp of the other block, by way of shared memory there.
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

// Barriers of a warp's place: what the other one gives is there; the other's place is free.
struct PairBarriers {
  u32 base;
  static constexpr int BYTES = 4 * 16;

  __device__ __forceinline__ u32 given(int warp) const { return base + warp * 16; }
  __device__ __forceinline__ u32 free(int warp) const { return base + warp * 16 + 8; }
  __device__ __forceinline__ void init() const {
#pragma unroll
    for (int warp = 0; warp < 4; ++warp)
      mbarrier_init(given(warp), 1), mbarrier_init(free(warp), 1);
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
                                                   float* dq_sum, u32* turns, int lane, int warp) {
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
  const u32 place = shared + Layout::DQ + warp * Layout::DQ_WARP_BYTES + lane * 16;
  const u32 place_there = cluster_address(place, rank ^ 1);
  const u32 given_there = cluster_address(pair.given(warp), rank ^ 1);
  int parity = 0;
  while (next_work() < sizes.works()) {
    const int taken = works_taken - 1;
    mbarrier_wait(barriers.k_full(0), taken & 1);
    for (bool last = false; !last; ++step_number) {
      const RingPlace<Layout::DS_STAGES> ds_ring = ring_place<Layout::DS_STAGES>(step_number);
      mbarrier_wait(barriers.ds_full(ds_ring.stage), ds_ring.parity);
      const u64 ds_tile = ds_operand + (ds_ring.stage * Layout::DS_STAGE >> 4);
      const Tile tile(barriers.tile(step_number));
      last = tile.last;
      const int row_block = tile.index * INDEX_BLOCKS + own.block() * 4 + warp;
      const RowTurns<Half::SHARERS> rows(turns, barriers.tile(step_number), row_block);
      const auto multiply = [&](float(&dq)[1][CHUNKS][4], const Half& half, int part) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
          wgmma_shared<T, true, true>(
              dq[0], ds_tile + (half.block() * DSTile::PANEL_BYTES + step * 2048 >> 4),
              k_operand + (half.panel(part) * KTile::PANEL_BYTES + step * 2048 >> 4), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
      };
#pragma unroll 1
      for (int part = 0; part < Half::PARTS; ++part, parity ^= 1) {
        float dq[1][CHUNKS][4];
        if (signals) mbarrier_expect(pair.given(warp), Layout::DQ_WARP_BYTES);
        multiply(dq, others, part);
        mbarrier_wait(pair.free(warp), parity ^ 1);
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n)
          cluster_send_floats(place_there + n * WARP_SIZE * 16, dq[0][n], given_there);
        multiply(dq, own, part);
        __syncwarp();  // lanes have read what the tile is
        if (signals && part == Half::PARTS - 1) mbarrier_arrive(barriers.ds_empty(ds_ring.stage));
        mbarrier_wait(pair.given(warp), parity);
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n) {
          float given[4];
          load_shared_floats(given, place + n * WARP_SIZE * 16);
#pragma unroll
          for (int i = 0; i < 4; ++i) dq[0][n][i] += given[i];
        }
        register_fence(dq[0]);
        __syncwarp();  // all lanes have read
        if (signals) cluster_arrive_at(pair.free(warp), rank ^ 1);
        if (ORDERED && part == 0) rows.wait(signals);
        float* const sums = dq_sum + fragment_place(row_block, own.panel(part) * CHUNKS,
                                                    Layout::SUM_COLUMNS / 8, 0);
        give_sums(sums, dq, lane, ORDERED && rows.rank == 0);
      }
      if (ORDERED) rows.leave(signals);
    }
    if (signals) mbarrier_arrive(barriers.k_empty(0));
  }
}
