// Parts of dQ (backward_sums.cuh) from shared to device memory, in turns.
//
// Two threads have every second tile each: while one waits until its additions are in place and
// makes that known to the whole GPU, which is several round trips to L2, the other has the next tile.
#pragma once
#include "device/bulk.cuh"
#include "device/tile_copy.cuh"
#include "device/turns.cuh"

// One thread's copies of a part of dQ: 64 rows of which each warp has 16, `columns` of HEAD_DIM.
template <int HEAD_DIM, int COLUMNS>
struct DQCopies {
  static constexpr int WARP_BYTES = 16 * COLUMNS * 4, ROW_BLOCK = 16 * HEAD_DIM;
  float* sums;  // of the part
  u32 staging;

  __device__ __forceinline__ void give(bool first) const {
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      float* const target = sums + warp * ROW_BLOCK;
      if (first) bulk_store(target, staging + warp * WARP_BYTES, WARP_BYTES);
      if (!first) bulk_add(target, staging + warp * WARP_BYTES, WARP_BYTES);
    }
  }
};

// Thread `copier` of two: its tiles, until one has no index. `part_of(index, part)` are the copies.
template <int PARTS, int STAGES, typename Barriers, typename PartOf>
__device__ __forceinline__ void copy_in_turns(const Barriers& barriers, u32* turns, int copier,
                                              const PartOf& part_of) {
  static_assert(STAGES == PARTS || STAGES == 1, "places of parts");
  for (int step = copier, parity = 0;; step += Barriers::COPIERS, parity ^= 1) {
    mbarrier_wait(barriers.begun(copier), parity);
    const u32 about = barriers.tile(step);
    const int index = load_shared_word(about + 12);
    if (index < 0) break;
    const int rank = load_shared_word(about + 16), others = load_shared_word(about + 20);
    turn_wait(turns + index, rank);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      mbarrier_wait(barriers.dq_full(copier, part), parity);
      part_of(index, part).give(rank == 0);
      if (part < PARTS - STAGES) bulk_wait_read(), mbarrier_arrive(barriers.dq_empty(0));
    }
    bulk_wait_read();
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) mbarrier_arrive(barriers.dq_empty(stage));
    bulk_wait();
    turn_done(turns + index, others);
  }
}
