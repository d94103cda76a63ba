// dQ in attention's backward on sm_90: the warpgroup that multiplies dS K of all keys of a block, a
// tile of queries behind those that make dS, and adds it to sums in L2.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/proxy_fence.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_products.cuh"
#include "tile/ring.cuh"
#include "attention/backward_sm90/products.cuh"
#include "attention/backward_sm90/sums.cuh"

// dQ of a tile is multiplied in parts of 64 queries and 64 columns; a part waits in shared memory,
// of which each warp has its own share, until the copy engine has added it, or is added from
// registers (DIRECT). DETERMINISTIC: other threads start the copies, in a fixed order, and who
// leads tells them. bias_gradient: see bias_gradient.cuh.
template <typename T, typename Layout, typename Tile, bool DETERMINISTIC, bool DIRECT,
          typename Barriers, typename Sizes, typename NextWork, typename BiasGradient>
__device__ __forceinline__ void multiply_dq(const Barriers& barriers, u32 shared,
                                            const Sizes& sizes, const NextWork& next_work,
                                            int& works_taken, int& step_number, float* dq_sum,
                                            int lane, int warp, bool leads,
                                            BiasGradient bias_gradient) {
  static_assert(!(DETERMINISTIC && DIRECT), "only copies are added in a fixed order");
  using KTile = typename Layout::KTile;
  using DSTile = typename Layout::DSTile;
  constexpr int PARTS = Layout::DQ_PARTS, STAGES = Layout::DQ_STAGES;
  constexpr int INDEX_BLOCKS = Sizes::INDEX_ROWS / 16;  // of a tile's index, 16 rows each
  constexpr int CHUNKS = 8, WIDTH = Layout::SUM_COLUMNS, K_STEPS = KTile::ROWS / 16;
  const u64 ds_operand = wgmma_tile(shared + Layout::DS, DSTile::PANEL_BYTES);
  const u64 keys_operand = wgmma_tile(shared, KTile::PANEL_BYTES);
  const bool signals = lane == 0;
  while (next_work() < sizes.works()) {
    const int taken = works_taken - 1;
    const u64 k_operand = keys_operand + taken % Layout::K_STAGES * (Layout::K_STAGE >> 4);
    mbarrier_wait(barriers.k_full(taken % Layout::K_STAGES), taken / Layout::K_STAGES % 2);
    for (bool last = false; !last; ++step_number) {
      const RingPlace<Layout::DS_STAGES> ds_ring = ring_place<Layout::DS_STAGES>(step_number);
      const int copier = step_number % Barriers::COPIERS;
      mbarrier_wait(barriers.ds_full(ds_ring.stage), ds_ring.parity);
      if (DETERMINISTIC && leads) mbarrier_arrive(barriers.begun(copier));
      const u64 ds_tile = ds_operand + (ds_ring.stage * Layout::DS_STAGE >> 4);
      const Tile tile(barriers.tile(step_number));
      last = tile.last;
      bias_gradient.add(barriers.tile(step_number),
                        shared + Layout::DS + ds_ring.stage * Layout::DS_STAGE);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int panel = part % Layout::DQ_ACROSS, block = part / Layout::DQ_ACROSS;
        float dq[1][CHUNKS][4];
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
          wgmma_shared<T, true, true>(
              dq[0], ds_tile + (block * DSTile::PANEL_BYTES + step * 2048 >> 4),
              k_operand + (panel * KTile::PANEL_BYTES + step * 2048 >> 4), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        __syncwarp();  // lanes have read what the tile is
        if (signals && part == PARTS - 1) mbarrier_arrive(barriers.ds_empty(ds_ring.stage));
        const auto sums = [&] {
          const i64 row_block = static_cast<i64>(tile.index) * INDEX_BLOCKS + block * 4 + warp;
          return dq_sum + fragment_place(row_block, panel * CHUNKS, WIDTH / 8, 0);
        };
        if constexpr (DIRECT) {
          give_sums(sums(), dq, lane, false);
        } else {
          const RingPlace<STAGES> place = ring_place<STAGES>(step_number * PARTS + part);
          const u32 staging =
              shared + Layout::DQ + place.stage * Layout::DQ_STAGE + warp * Layout::DQ_WARP_BYTES;
          if (DETERMINISTIC)
            mbarrier_wait(barriers.dq_empty(place.stage), place.parity ^ 1);
          else if (signals)
            bulk_wait_read<STAGES - 1>();
          __syncwarp();
          stage_fragments(staging, dq, lane);
          proxy_fence();
          __syncwarp();
          if (!signals) continue;
          if constexpr (DETERMINISTIC)
            mbarrier_arrive(barriers.dq_full(copier, part));
          else
            bulk_add(sums(), staging, Layout::DQ_WARP_BYTES);
        }
      }
    }
    bias_gradient.end();
    if (signals) mbarrier_arrive(barriers.k_empty(taken % Layout::K_STAGES));
  }
  if constexpr (DETERMINISTIC) {
    // There are no more tiles. (The last one has been read: nobody is two phases behind.)
    mbarrier_wait(barriers.dq_empty(STAGES - 1), step_number * PARTS / STAGES & 1 ^ 1);
    if (leads)
      for (int i = 0; i < Barriers::COPIERS; ++i) {
        store_shared_word(barriers.tile(step_number + i) + 12, -1);
        mbarrier_arrive(barriers.begun((step_number + i) % Barriers::COPIERS));
      }
  } else if (signals) {
    bulk_wait();
  }
}
