// Batches in which some sequences have one new token and others more, in one launch on sm_90.
//
//   blocks 0 .. D - 1   first their shares of the keys of single tokens (mixed/single_tokens.cuh),
//                       then tiles of the other sequences, as all blocks
//   blocks D ..         tiles at once
//
// Single tokens wait for memory, tiles for the tensor cores: so either kind has SMs of its own, and
// neither waits for what the other uses. D is in proportion to the work: as many blocks decode as
// keys of single tokens are of all keys that SMs go through. Who decodes has more of the memory then
// than it would have with all SMs, is done early, and helps. All of it is worked out here, of lengths
// that are read here: a captured graph follows other batches.
#pragma once
#include "ptx/pdl.cuh"
#include "tile/reduce.cuh"
#include "attention/decode/schedule.cuh"
#include "attention/pages.cuh"
#include "attention/sequence_rows.cuh"
#include "attention/sm90/producer.cuh"

// Tiles of the sequences with more than one new token, sequence after sequence, and D.
struct MixedWorkItems : AttentionWorkItems {
  static constexpr bool FIRST_DRAWN = true;  // blocks that decode come later
  const int* cu_seqlens_q;
  int max_seqlen_q, rows;  // of a tile
  int decoding_blocks;     // D

  // `crew`: blocks that decode together (decode/schedule.cuh). `weight`: how long an SM takes for a
  // key of a tile, where one for a key of a single token's KV head is 1. By whole warps.
  __device__ __forceinline__ MixedWorkItems(int blocks, int heads, int queries_per_key, int batches,
                                            int heads_together, int, u32* drawn, int tile_rows,
                                            const int* ends, int most_queries,
                                            const PagedKeys& keys, int window_left, int crew,
                                            float weight)
      : AttentionWorkItems(blocks, heads, queries_per_key, batches, min(heads_together, heads), 0,
                           drawn),
        cu_seqlens_q(ends),
        max_seqlen_q(most_queries),
        rows(tile_rows) {
    after_previous_kernel();
    float tile_keys = 0.f, token_keys = 0.f, tiles_here = 0.f;
    for (int first = 0; first < batch; first += WARP_SIZE) {
      const int number = first + threadIdx.x % WARP_SIZE, queries = queries_of(number);
      if (queries == 0) continue;
      const int seen = min(keys(number).length, window_left + queries), tiles = tiles_of(queries);
      tiles_here += static_cast<float>(tiles);
      tile_keys += static_cast<float>(tiles) * (static_cast<float>(seen) - 0.5f * queries);
      if (queries == 1) token_keys += static_cast<float>(seen);
    }
    count = static_cast<int>(lanes_sum<WARP_SIZE>(tiles_here)) * heads_q;
    const float decoded = lanes_sum<WARP_SIZE>(token_keys) * (heads_q / group_size);
    const float filled = lanes_sum<WARP_SIZE>(tile_keys) * heads_q * weight;
    decoding_blocks = share(gridDim.x, crew, decoded, filled);
  }

  // Whole crews: of what is not, tiles get the rest.
  static __device__ __forceinline__ int share(int blocks, int crew, float decoded, float filled) {
    const int most = blocks / crew;
    if (filled == 0.f) return most * crew;
    const int part = static_cast<int>(blocks * decoded / (decoded + filled)) / crew;
    return min(max(part, 1), most) * crew;
  }

  __device__ __forceinline__ int queries_of(int number) const {
    return number < batch ? SequenceRows<true>(cu_seqlens_q, number, max_seqlen_q).length : 0;
  }
  __device__ __forceinline__ int tiles_of(int queries) const {
    return queries > 1 ? ceil_div(queries, rows) : 0;
  }

  // Each block draws until it gets too high a number: then the counter is 0 again.
  __device__ __forceinline__ int draw() const { return atomicInc(counters, count + gridDim.x - 1); }

  // By a whole warp: the sequence of a number is looked for among 32 at a time.
  template <typename Item>
  __device__ __forceinline__ Item item(int number) const {
    int before = 0;
    for (int first = 0; first < batch; first += WARP_SIZE) {
      const int tiles = tiles_of(queries_of(first + threadIdx.x % WARP_SIZE));
      const int up_to = before + inclusive_sum(tiles) * heads_q;
      const u32 beyond = __ballot_sync(FULL_MASK, up_to > number);
      if (beyond != 0) {
        const int lane = __ffs(beyond) - 1, own = __shfl_sync(FULL_MASK, tiles, lane);
        const int within = number - (__shfl_sync(FULL_MASK, up_to, lane) - own * heads_q);
        Item found(within, own, heads_q, heads_q, section_heads);
        found.batch = first + lane;
        return found;
      }
      before = __shfl_sync(FULL_MASK, up_to, WARP_SIZE - 1);
    }
    return Item(0, 1, heads_q, heads_q, heads_q);  // there is none
  }
};
