// Parts of dQ (sums.cuh) from shared to device memory, in turns.
//
// Two threads have every second tile each: while one waits until its additions are in place and
// makes that known to the whole GPU, which is several round trips to L2, the other has the next
// tile.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "tile/ordered.cuh"
#include "tile/tile_copy.cuh"
#include "attention/backward/sum_fragments.cuh"

// One thread's copies of a part of dQ: 64 rows of which each warp has 16, COLUMNS of WIDTH.
template <int WIDTH, int COLUMNS>
struct DQCopies {
  static constexpr int WARP_BYTES = 16 * COLUMNS * 4, ROW_BLOCK = 16 * WIDTH;
  float* sums;  // of the part
  u32 staging;

  static constexpr int RUNS = WIDTH == COLUMNS ? 1 : 4, RUN_BYTES = 4 * WARP_BYTES / RUNS;

  __device__ __forceinline__ void give(bool first) const {
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      float* const target = sums + run * ROW_BLOCK;
      if (first) bulk_store(target, staging + run * RUN_BYTES, RUN_BYTES);
      if (!first) bulk_add(target, staging + run * RUN_BYTES, RUN_BYTES);
    }
  }
};

// Where the parts of a tile's dQ are; `index`: that of the tile, which counts so many rows.
template <typename Layout, int INDEX_ROWS>
struct DQParts {
  using Copies = DQCopies<Layout::SUM_COLUMNS, Layout::DQ_COLUMNS>;
  float* sums;
  u32 shared;

  __device__ __forceinline__ Copies operator()(int index, int part) const {
    const i64 row_block =
        static_cast<i64>(index) * (INDEX_ROWS / 16) + part / Layout::DQ_ACROSS * 4;
    const int column_block = part % Layout::DQ_ACROSS * (Layout::DQ_COLUMNS / 8);
    const i64 place = fragment_place(row_block, column_block, Layout::SUM_COLUMNS / 8, 0);
    return {sums + place, shared + Layout::DQ + part % Layout::DQ_STAGES * Layout::DQ_STAGE};
  }
};

// Thread `copier` of two: its tiles, until one has no index. `part_of(index, part)` are the copies.
template <typename Layout, typename Barriers, typename PartOf>
__device__ __forceinline__ void copy_ordered(const Barriers& barriers, u32* turns, int copier,
                                             const PartOf& part_of) {
  constexpr int PARTS = Layout::DQ_PARTS, STAGES = Layout::DQ_STAGES, RUNS = PartOf::Copies::RUNS;
  static_assert(STAGES == PARTS || STAGES == 1, "places of parts");
  for (int step = copier, parity = 0;; step += Barriers::COPIERS, parity ^= 1) {
    mbarrier_wait(barriers.begun(copier), parity);
    const u32 about = barriers.tile(step);
    const int index = load_shared_word(about + 12);
    if (index < 0) break;
    const int rank = load_shared_word(about + 16), others = load_shared_word(about + 20);
    ordered_wait(turns + index, rank);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      mbarrier_wait(barriers.dq_full(copier, part), parity);
      part_of(index, part).give(rank == 0);
      if (STAGES == 1) bulk_wait_read(), mbarrier_arrive(barriers.dq_empty(0));
    }
    if (STAGES > 1) {
      bulk_wait_read<RUNS>(), mbarrier_arrive(barriers.dq_empty(0));
      bulk_wait_read(), mbarrier_arrive(barriers.dq_empty(1));
    }
    bulk_wait();
    ordered_done(turns + index, others);
  }
}
