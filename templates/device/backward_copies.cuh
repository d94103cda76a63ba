// The thread that brings parts of dQ (backward_sums.cuh) from shared to device memory.
#pragma once
#include "device/backward_tile.cuh"
#include "device/bulk.cuh"
#include "device/tensor_rows.cuh"
#include "device/tma.cuh"
#include "device/turns.cuh"

// What a tile of queries is to the block of keys that is at it: words in shared memory.
struct BackwardTurn {
  u32 address;
  // So many come before, so many in all.
  __device__ __forceinline__ int rank() const { return load_shared_word(address); }
  __device__ __forceinline__ int others() const { return load_shared_word(address + 4); }
  __device__ __forceinline__ bool last() const { return rank() + 1 == others(); }
  // Of dq, see tensor_rows.cuh.
  __device__ __forceinline__ int row() const { return load_shared_word(address + 8); }
  __device__ __forceinline__ int head() const { return load_shared_word(address + 12); }
  __device__ __forceinline__ int place() const { return load_shared_word(address + 16); }
};

// One thread's copies of a part of dQ: 64 rows of which each warp has 16, `columns` of HEAD_DIM.
template <int HEAD_DIM, int COLUMNS>
struct DQCopies {
  static constexpr int WARP_BYTES = 16 * COLUMNS * 4, ROW_BLOCK = 16 * HEAD_DIM;
  float* sums;  // of the part
  u32 staging;

  __device__ __forceinline__ void load(u32 barrier) const {
    mbarrier_expect(barrier, 4 * WARP_BYTES);
#pragma unroll
    for (int warp = 0; warp < 4; ++warp)
      bulk_load(staging + warp * WARP_BYTES, sums + warp * ROW_BLOCK, WARP_BYTES, barrier);
  }
  __device__ __forceinline__ void give(bool first) const {
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      float* const target = sums + warp * ROW_BLOCK;
      if (first) bulk_store(target, staging + warp * WARP_BYTES, WARP_BYTES);
      if (!first) bulk_add(target, staging + warp * WARP_BYTES, WARP_BYTES);
    }
  }
  // dQ in 16 bits, to rows from `row` of the tile on and columns from `column` on.
  template <bool PACKED>
  __device__ __forceinline__ void finish(const TensorMap& map, BackwardTurn turn, int row,
                                         int column) const {
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      const int from = row + warp * 16, first = turn.row() + from, head = turn.head();
      const TensorRows<PACKED> to(first, PACKED ? turn.place() - from : turn.place());
      tma_store(map, staging + warp * WARP_BYTES, column, to.row, head, to.batch);
    }
    tma_commit();
  }
};

// All PARTS of a tile, one tile after the other; where ORDERED, in turns. `part_of(index, part)` are
// the copies of a part, `finish(copies, turn, part)` is called where they are dQ. Whether the tile is
// the last one of a piece of work.
template <bool ORDERED, int PARTS, typename Barriers>
struct DQThread {
  const Barriers& barriers;
  u32* turns;
  u32 about = 0;  // the tile before: its turn ends when its additions are in place

  __device__ __forceinline__ void finish_turn() {
    if (!ORDERED || about == 0) return;
    bulk_wait();
    turn_done(turns + load_shared_word(about + 12), BackwardTurn{about + 16}.others());
    about = 0;
  }

  template <typename PartOf, typename Finish>
  __device__ __forceinline__ bool tile(int step, const PartOf& part_of, const Finish& finish) {
    // Others wait for the end of a turn: now, where there is nothing else to do, else when the
    // warpgroup that multiplies may go on.
    if (ORDERED && !mbarrier_test(barriers.begun(), step & 1)) finish_turn();
    mbarrier_wait(barriers.begun(), step & 1);
    const BackwardTurn turn{barriers.tile(step) + 16};
    const int index = load_shared_word(barriers.tile(step) + 12);
    const bool last = ORDERED && turn.last(), first = ORDERED && turn.rank() == 0;
    for (int part = 0; part < PARTS; ++part)
      if (!last || first) mbarrier_arrive(barriers.dq_ready(part));
    finish_turn();
    if (ORDERED) turn_wait(turns + index, turn.rank());
    for (int part = 0; part < PARTS; ++part)
      if (last && !first) part_of(index, part).load(barriers.dq_ready(part));
    for (int part = 0; part < PARTS; ++part) {
      mbarrier_wait(barriers.dq_full(part), step & 1);
      if (last)
        finish(part_of(index, part), turn, part);
      else
        part_of(index, part).give(first);
    }
    bulk_wait_read();
    about = barriers.tile(step);
    return load_shared_word(about + 8);
  }
};
