// Which tile of queries the warpgroups of an attention kernel on sm_90 work on, and the mbarriers
// at which they meet: rings of Q, K and V, and the work items that have been announced.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/proxy_fence.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "tile/tile_copy.cuh"
#include "tile/tma_tile.cuh"

constexpr int SLOTS = 2;  // work items that have been announced

template <int STAGES>
struct Barriers {  // addresses
  u32 base;
  __device__ __forceinline__ u32 q_full(int stage) const { return base + stage * 16; }
  __device__ __forceinline__ u32 q_empty(int stage) const { return base + 8 + stage * 16; }
  __device__ __forceinline__ u32 work_full(int slot) const { return base + 32 + slot * 16; }
  __device__ __forceinline__ u32 work_empty(int slot) const { return base + 40 + slot * 16; }
  __device__ __forceinline__ u32 work(int slot) const { return base + 64 + slot * 16; }
  __device__ __forceinline__ u32 k_full(int stage) const { return base + 96 + stage * 32; }
  __device__ __forceinline__ u32 k_empty(int stage) const { return base + 104 + stage * 32; }
  __device__ __forceinline__ u32 v_full(int stage) const { return base + 112 + stage * 32; }
  __device__ __forceinline__ u32 v_empty(int stage) const { return base + 120 + stage * 32; }

  // For forms of attention: tiles that are cut, bias and mask.
  __device__ __forceinline__ u32 q_tail() const { return k_full(STAGES); }
  __device__ __forceinline__ u32 v_tail() const { return k_full(STAGES) + 8; }
  __device__ __forceinline__ u32 scores_full(int stage) const {
    return k_full(STAGES) + 16 + stage * 16;
  }
  __device__ __forceinline__ u32 scores_empty(int stage) const {
    return k_full(STAGES) + 24 + stage * 16;
  }

  // Of codes, which have no bias nor mask beside them.
  __device__ __forceinline__ u32 codes_full(int stage) const { return scores_full(stage); }
  __device__ __forceinline__ u32 codes_empty(int stage) const { return scores_empty(stage); }

  // By one thread; the others wait for it. `arrays`: 0, or how many come with each tile of scores.
  // WIDENING: 0, or warps that make K and V of codes.
  template <int Q_STAGES, int CONSUMERS, int WIDENING = 0, int CODE_STAGES = 0>
  __device__ __forceinline__ void begin(bool tails, int arrays) const {
#pragma unroll
    for (int stage = 0; stage < Q_STAGES; ++stage) {
      mbarrier_init(q_full(stage), tails ? WARP_SIZE : 1);
      mbarrier_init(q_empty(stage), CONSUMERS * 4 * (tails ? WARP_SIZE : 1));
    }
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      mbarrier_init(work_full(slot), 1);
      mbarrier_init(work_empty(slot), CONSUMERS * 4 + (WIDENING > 0 ? WIDENING : 1 + (arrays > 0)));
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(k_full(stage), WIDENING > 0 ? WIDENING : 1);
      mbarrier_init(v_full(stage), WIDENING > 0 ? WIDENING : tails ? WARP_SIZE : 1);
      mbarrier_init(k_empty(stage), CONSUMERS * 4);
      mbarrier_init(v_empty(stage), CONSUMERS * 4);
    }
    if (tails) mbarrier_init(q_tail(), 1), mbarrier_init(v_tail(), 1);
#pragma unroll
    for (int stage = 0; stage < 2 && arrays > 0; ++stage) {
      mbarrier_init(scores_full(stage), arrays);
      mbarrier_init(scores_empty(stage), CONSUMERS * 4);
    }
#pragma unroll
    for (int stage = 0; stage < CODE_STAGES; ++stage) {
      mbarrier_init(codes_full(stage), 1);
      mbarrier_init(codes_empty(stage), WIDENING);
    }
    mbarrier_init_fence();
  }
};

// Which tile of queries a work item is. Heads are taken in sections whose K and V fit into L2;
// within a section come the last tiles of all heads (the longest causal ones), then those before.
template <int BLOCK_Q>
struct WorkItem {
  int q0, head, batch;
  int part = 0;  // of its keys (parts.cuh)

  __device__ __forceinline__ explicit WorkItem(uint4 said)
      : q0(static_cast<int>(said.x)),
        head(static_cast<int>(said.y)),
        batch(static_cast<int>(said.z)),
        part(static_cast<int>(said.w)) {}

  __device__ __forceinline__ WorkItem(int number, int blocks_q, int heads_q, int all_heads,
                                      int section_heads) {
    const int section = number / (blocks_q * section_heads), first = section * section_heads;
    const int width = min(section_heads, all_heads - first);
    const int within = number - section * blocks_q * section_heads;
    q0 = (blocks_q - 1 - within / width) * BLOCK_Q;
    head = (first + within % width) % heads_q;
    batch = (first + within % width) / heads_q;
  }
};

// The number of a block's next work item, or one at or past `works`. The first is its own index.
// Each block draws until it gets too high a number, so that `works` are drawn in all, and the
// counter is 0 again when the last one has been. Nothing is drawn where each has one piece only.
__device__ __forceinline__ int draw_work(u32* counter, int works) {
  return works <= gridDim.x ? works : gridDim.x + atomicInc(counter, works - 1);
}

// What comes next is announced whole: divisions are left to the thread that has time for them.
template <int STAGES, int BLOCK_Q>
__device__ __forceinline__ void announce(const Barriers<STAGES>& barriers, int slot,
                                         const WorkItem<BLOCK_Q>& place) {
  store_shared_chunk(barriers.work(slot),
                     make_uint4(place.q0, place.head, place.batch, place.part));
  mbarrier_arrive(barriers.work_full(slot));
}

// What has been announced, to one thread or (WHOLE_WARP) by its first lane to all of a warp.
template <int BLOCK_Q, bool WHOLE_WARP, bool PARTED = false, int STAGES>
__device__ __forceinline__ WorkItem<BLOCK_Q> next_work(const Barriers<STAGES>& barriers,
                                                       RingPlace<SLOTS>& slot) {
  uint4 said = {};
  if (!WHOLE_WARP || threadIdx.x % WARP_SIZE == 0) {
    mbarrier_wait(barriers.work_full(slot.stage), slot.parity);
    said = load_shared_chunk(barriers.work(slot.stage));
    mbarrier_arrive(barriers.work_empty(slot.stage));
  }
  slot.advance();
  if (WHOLE_WARP) {
    said.x = __shfl_sync(FULL_MASK, said.x, 0);
    said.y = __shfl_sync(FULL_MASK, said.y, 0);
    said.z = __shfl_sync(FULL_MASK, said.z, 0);
    if (PARTED) said.w = __shfl_sync(FULL_MASK, said.w, 0);
  }
  return WorkItem<BLOCK_Q>(said);
}

// The keys that a tile of queries sees, in tiles first .. end - 1, without a form of attention; one
// tile at least, though it be masked whole.
template <int BLOCK_Q, int BLOCK_K>
struct CausalSpan {
  static constexpr int first = 0, q_start = 0, k_start = 0;
  int seqlen_q, seqlen_k;
  int first_hidden;  // query row i of the block sees keys 0 .. min(seqlen_k, first_hidden + i) - 1
  int end, unmasked;

  __device__ __forceinline__ CausalSpan(int q0, int queries, int keys_, bool causal)
      : seqlen_q(queries), seqlen_k(keys_) {
    first_hidden = causal ? q0 + seqlen_k - seqlen_q + 1 : seqlen_k;
    const int last_row = min(BLOCK_Q, seqlen_q - q0) - 1;
    const int keys = min(seqlen_k, causal ? first_hidden + last_row : seqlen_k);
    end = ceil_div(max(keys, 1), BLOCK_K);
    unmasked = max(min(seqlen_k, first_hidden), 0) / BLOCK_K;
  }

  __device__ __forceinline__ bool is_whole(int tile) const { return tile < unmasked; }

  // Keys of a tile that a row of the block sees, or fewer than none.
  __device__ __forceinline__ int visible(int tile, int row, bool causal) const {
    return min(seqlen_k, causal ? first_hidden + row : seqlen_k) - tile * BLOCK_K;
  }
};

// Which keys a work item sees.
template <typename Span>
struct SpanOf;
template <int BLOCK_Q, int BLOCK_K>
struct SpanOf<CausalSpan<BLOCK_Q, BLOCK_K>> {
  static constexpr bool PAGED = false, PARTED = false;
  int seqlen_q, seqlen_k;
  int causal;

  __device__ __forceinline__ CausalSpan<BLOCK_Q, BLOCK_K> operator()(
      const WorkItem<BLOCK_Q>& place) const {
    return {place.q0, seqlen_q, seqlen_k, causal != 0};
  }
};

// Zeros in place of a tile's rows from `rows` on, when the tile has come: `tail` and its parity are
// this warp's own.
template <typename Tile>
__device__ __forceinline__ void clear_rows(u32 shared, int rows, int lane, u32 tail, int& parity) {
  mbarrier_wait(tail, parity);
  parity ^= 1;
  for (int i = max(rows, 0) * Tile::CHUNKS + lane; i < Tile::ROWS * Tile::CHUNKS; i += WARP_SIZE)
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel)
      store_shared_chunk(shared + panel * Tile::PANEL_BYTES + i * 16, make_uint4(0, 0, 0, 0));
  proxy_fence();
}

// A tile of which the first `rows` rows are wanted. What lies behind the last row of a tensor comes
// as zeros by itself: one thread asks. Behind a packed sequence (CUT) is the next one, or anything:
// a whole warp makes zeros of it, and all of its lanes arrive at `full`; `tail` and its parity are
// that warp's own.
template <typename Tile, bool CUT>
__device__ __forceinline__ void tma_load_rows(u32 shared, const TensorMap& map, u32 full, u32 tail,
                                              int& parity, int row, int head, int batch, int rows) {
  const int lane = CUT ? threadIdx.x % WARP_SIZE : 0;
  const bool whole = !CUT || rows >= Tile::ROWS;
  if (lane == 0) tma_load_tile<Tile>(shared, map, whole ? full : tail, row, head, batch);
  if (whole) {
    if (lane > 0) mbarrier_arrive(full);
    return;
  }
  clear_rows<Tile>(shared, rows, lane, tail, parity);
  mbarrier_arrive(full);
}
