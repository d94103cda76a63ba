// dQ in attention's backward on Hopper: the warpgroup that multiplies dS K of all keys of a block, a
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

// Way: BackwardOperands, and where and how. dQ of a tile is multiplied in PARTS of 64 queries and 64
// columns, ACROSS of them beside each other; it waits at AT in STAGES parts, of which each warp has
// its own, until the copy engine has added it, or is added from registers (DIRECT). DETERMINISTIC:
// other threads start the copies, in a fixed order, and who leads tells them.
template <typename T, typename Way, typename Barriers, typename Sizes, typename NextWork>
__device__ __forceinline__ void multiply_dq(const Barriers& barriers, u32 shared,
                                            const Sizes& sizes, const NextWork& next_work,
                                            int& works_taken, int& step_number, float* dq_sum,
                                            int lane, int warp, bool leads) {
  using KTile = typename Way::KTile;
  using DSTile = typename Way::DSTile;
  constexpr int CHUNKS = 8, HEAD_DIM = KTile::COLUMNS, K_STEPS = KTile::ROWS / 16;
  const u64 ds_operand = wgmma_tile(shared + Way::DS_AT, DSTile::PANEL_BYTES);
  const u64 keys_operand = wgmma_tile(shared, KTile::PANEL_BYTES);
  const bool signals = lane == 0;
  while (next_work() < sizes.works()) {
    const int taken = works_taken - 1;
    const u64 k_operand = keys_operand + taken % 2 * (Way::K_STAGE >> 4);
    mbarrier_wait(barriers.k_full(taken % 2), taken / 2 % 2);
    for (bool last = false; !last; ++step_number) {
      const RingPlace<Way::DS_STAGES> ds_ring = ring_place<Way::DS_STAGES>(step_number);
      const int copier = step_number % Barriers::COPIERS;
      mbarrier_wait(barriers.ds_full(ds_ring.stage), ds_ring.parity);
      if (Way::DETERMINISTIC && leads) mbarrier_arrive(barriers.begun(copier));
      const u64 ds_tile = ds_operand + (ds_ring.stage * Way::DS_STAGE >> 4);
      const typename Way::NumberedTile tile(barriers.tile(step_number));
      last = tile.last;
#pragma unroll
      for (int part = 0; part < Way::PARTS; ++part) {
        const int panel = part % Way::ACROSS, block = part / Way::ACROSS;
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
        if (signals && part == Way::PARTS - 1) mbarrier_arrive(barriers.ds_empty(ds_ring.stage));
        const auto sums = [&] {
          const i64 row_block = static_cast<i64>(tile.index) * Way::INDEX_BLOCKS + block * 4 + warp;
          return dq_sum + fragment_place(row_block, panel * CHUNKS, HEAD_DIM / 8, 0);
        };
        if constexpr (Way::DIRECT) {
          give_sums(sums(), dq, lane);
        } else {
          const RingPlace<Way::STAGES> place =
              ring_place<Way::STAGES>(step_number * Way::PARTS + part);
          const u32 staging = shared + Way::AT + place.stage * Way::STAGE + warp * Way::WARP_BYTES;
          if (Way::DETERMINISTIC)
            mbarrier_wait(barriers.dq_empty(place.stage), place.parity ^ 1);
          else if (signals)
            bulk_wait_read<Way::STAGES - 1>();
          __syncwarp();
          stage_fragments(staging, dq, lane);
          proxy_fence();
          __syncwarp();
          if (!signals) continue;
          if constexpr (Way::DETERMINISTIC)
            mbarrier_arrive(barriers.dq_full(copier, part));
          else
            bulk_add(sums(), staging, Way::WARP_BYTES);
        }
      }
    }
    if (signals) mbarrier_arrive(barriers.k_empty(taken % 2));
  }
  if constexpr (Way::DETERMINISTIC) {
    // There are no more tiles. (The last one has been read: nobody is two phases behind.)
    mbarrier_wait(barriers.dq_empty(Way::STAGES - 1),
                  step_number * Way::PARTS / Way::STAGES & 1 ^ 1);
    if (leads)
      for (int i = 0; i < Barriers::COPIERS; ++i) {
        store_shared_word(barriers.tile(step_number + i) + 12, -1);
        mbarrier_arrive(barriers.begun((step_number + i) % Barriers::COPIERS));
      }
  } else if (signals) {
    bulk_wait();
  }
}
