// Where the warpgroups of attention's backward meet: who waits for what, as addresses in shared
// memory.
//
//   work      which piece comes next, announced by the thread that loads tiles
//   k, v      K and V of a work item, K of two if it has two places; empty when multiplied
//   q, do     tiles of Q (with lse and delta) and dO; empty when dK, or dV, has been multiplied
//   ds        dS of a tile, from two warpgroups for the third
//   begun     the third is at the next tile of the one or the other thread that copies dQ
//   bias      the tile of a bias; empty when scores have it added
//   dq        parts of dQ in shared memory; full for one of these threads, which say when a place is
//             empty again
#pragma once
#include "ptx/mbarrier.cuh"

// TAKERS: threads that take work items.
template <typename Layout, int TAKERS>
struct BackwardBarriers {
  static constexpr int Q_STAGES = Layout::Q_STAGES, DO_STAGES = Layout::DO_STAGES;
  static constexpr int DS_STAGES = Layout::DS_STAGES, DQ_STAGES = Layout::DQ_STAGES;
  static constexpr int DQ_PARTS = Layout::DQ_PARTS;
  static constexpr int READERS = Layout::SHARED_TILES ? 16 : 8;  // warps that multiply a tile
  static constexpr int SLOTS = 2;                    // work items that have been announced
  static constexpr int K_STAGES = Layout::K_STAGES;  // K of work items
  static constexpr int COPIERS = 2;                  // threads that copy dQ: of every second tile
  static constexpr int TILES = 8;  // descriptions of tiles: more than are under way
  static constexpr int TILE_BYTES = 48;
  static constexpr int WORK = 80, Q = WORK + SLOTS * 16, DO = Q + Q_STAGES * 16;
  static constexpr int DS = DO + DO_STAGES * 16, DQ = DS + DS_STAGES * 16;
  static constexpr int BIAS = DQ + (DQ_STAGES + COPIERS * DQ_PARTS) * 8;
  static constexpr int NOTES = 320, BYTES = NOTES + TILES * TILE_BYTES + 48;
  static_assert(BIAS + 16 <= NOTES, "barriers before notes");
  u32 base;

  __device__ __forceinline__ u32 v_full() const { return base; }
  __device__ __forceinline__ u32 v_empty() const { return base + 8; }
  __device__ __forceinline__ u32 begun(int copier) const { return base + 16 + copier * 8; }
  __device__ __forceinline__ u32 k_full(int stage) const { return base + 32 + stage * 16; }
  __device__ __forceinline__ u32 k_empty(int stage) const { return base + 40 + stage * 16; }
  __device__ __forceinline__ u32 work(int slot) const { return base + 64 + slot * 4; }
  __device__ __forceinline__ u32 work_full(int slot) const { return base + WORK + slot * 16; }
  __device__ __forceinline__ u32 work_empty(int slot) const { return base + WORK + 8 + slot * 16; }
  __device__ __forceinline__ u32 q_full(int stage) const { return base + Q + stage * 16; }
  __device__ __forceinline__ u32 q_empty(int stage) const { return base + Q + 8 + stage * 16; }
  __device__ __forceinline__ u32 do_full(int stage) const { return base + DO + stage * 16; }
  __device__ __forceinline__ u32 do_empty(int stage) const { return base + DO + 8 + stage * 16; }
  __device__ __forceinline__ u32 ds_full(int stage) const { return base + DS + stage * 16; }
  __device__ __forceinline__ u32 ds_empty(int stage) const { return base + DS + 8 + stage * 16; }
  __device__ __forceinline__ u32 dq_empty(int stage) const { return base + DQ + stage * 8; }
  __device__ __forceinline__ u32 dq_full(int copier, int part) const {
    return base + DQ + (DQ_STAGES + copier * DQ_PARTS + part) * 8;
  }
  __device__ __forceinline__ u32 bias_full() const { return base + BIAS; }
  __device__ __forceinline__ u32 bias_empty() const { return base + BIAS + 8; }
  // What the thread that loads tells the others of a tile.
  __device__ __forceinline__ u32 tile(int number) const {
    return base + NOTES + number % TILES * TILE_BYTES;
  }
  __device__ __forceinline__ u32 note() const { return base + NOTES + TILES * TILE_BYTES; }

  // With a form (features.cuh) one more for each piece that is announced.
  __device__ __forceinline__ u32 keys(int slot) const { return base + BYTES + slot * 16; }

  // By one thread, before all meet.
  __device__ __forceinline__ void init() const {
    mbarrier_init(v_full(), 1), mbarrier_init(v_empty(), 8);
#pragma unroll
    for (int stage = 0; stage < K_STAGES; ++stage)
      mbarrier_init(k_full(stage), 1), mbarrier_init(k_empty(stage), 12);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
      mbarrier_init(work_full(slot), 1), mbarrier_init(work_empty(slot), TAKERS);
#pragma unroll
    for (int stage = 0; stage < Q_STAGES; ++stage)
      mbarrier_init(q_full(stage), 2), mbarrier_init(q_empty(stage), READERS);
#pragma unroll
    for (int stage = 0; stage < DO_STAGES; ++stage)
      mbarrier_init(do_full(stage), 1), mbarrier_init(do_empty(stage), READERS);
#pragma unroll
    for (int stage = 0; stage < DS_STAGES; ++stage)
      mbarrier_init(ds_full(stage), 8), mbarrier_init(ds_empty(stage), 4);
#pragma unroll
    for (int stage = 0; stage < DQ_STAGES; ++stage) mbarrier_init(dq_empty(stage), 1);
#pragma unroll
    for (int copier = 0; copier < COPIERS; ++copier) {
      mbarrier_init(begun(copier), 1);
#pragma unroll
      for (int part = 0; part < DQ_PARTS; ++part) mbarrier_init(dq_full(copier, part), 4);
    }
    if (Layout::BIAS_BYTES > 0) mbarrier_init(bias_full(), 1), mbarrier_init(bias_empty(), 8);
    mbarrier_init_fence();
  }
};
