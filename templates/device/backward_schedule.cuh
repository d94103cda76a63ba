// Which blocks of keys and tiles of queries attention's backward multiplies, and in which order.
//
// A piece of work is a block of BLOCK_K keys of one KV head: every tile of BLOCK_Q queries that
// sees it, of all query heads that share it. Several blocks add to one tile of dQ. Where they have
// to do so in a fixed order (ORDERED), each has a rank there, and the order of visits is such that
// its turn has come when it arrives:
//
//   causal           each block starts at its diagonal; a tile is passed on from the last block
//                    that it sees to the first
//   all at once      blocks start at tiles apart from one another and go round; a tile is passed on
//                    to the block before, the first one's to the last
//   otherwise        from the first block to the last
//
// Nobody waits for a block that queues behind one that waits: work is dealt out in turn, so where
// all blocks of a head run at once, each is on a multiprocessor of its own; where they do not, they
// start in the order of their ranks.
#pragma once
#include "prelude.cuh"

template <int BLOCK_Q, int BLOCK_K, bool ORDERED>
struct BackwardSizes {
  int batch, heads_q, group_size, seqlen_q, seqlen_k, rows_padded, causal;

  __device__ __forceinline__ int heads_kv() const { return heads_q / group_size; }
  __device__ __forceinline__ int blocks() const { return ceil_div(seqlen_k, BLOCK_K); }
  __device__ __forceinline__ int tiles() const { return ceil_div(seqlen_q, BLOCK_Q); }
  __device__ __forceinline__ int works() const { return blocks() * heads_kv() * batch; }
  // Query i sees keys up to i + diagonal().
  __device__ __forceinline__ int diagonal() const { return seqlen_k - seqlen_q; }
  __device__ __forceinline__ bool at_once() const { return ORDERED && blocks() <= gridDim.x; }

  // The number of the next piece of work of a thread block. `counter` is 0 before the launch and
  // after it: each thread block draws until it gets too high a number, so `works` are drawn in all.
  __device__ __forceinline__ int next(int number, u32* counter) const {
    return ORDERED ? number + gridDim.x : gridDim.x + atomicInc(counter, works() - 1);
  }

  // Whether the blocks of a head are dealt out from the last to the first, which has most to do: so
  // it is every other time round, that each multiprocessor may get its share; always, where a block
  // could queue behind one that waits for it.
  __device__ __forceinline__ bool backwards(int all_heads) const {
    return !at_once() || all_heads * blocks() / gridDim.x % 2;
  }

  // How many blocks add to a tile of queries.
  __device__ __forceinline__ int turns(int tile) const {
    const int last_row = min(tile * BLOCK_Q + BLOCK_Q, seqlen_q) - 1;
    return causal ? min(last_row + diagonal(), seqlen_k - 1) / BLOCK_K + 1 : blocks();
  }
};

struct BackwardWork {
  int block, head, batch;  // head: of keys
  int start;               // the first tile of queries; those before it come at the end of a round

  __device__ __forceinline__ explicit BackwardWork(uint4 words)
      : block(words.x), head(words.y), batch(words.z), start(words.w) {}
  __device__ __forceinline__ uint4 words() const { return make_uint4(block, head, batch, start); }

  template <int BLOCK_Q, int BLOCK_K, bool ORDERED>
  __device__ __forceinline__ BackwardWork(int number,
                                          const BackwardSizes<BLOCK_Q, BLOCK_K, ORDERED>& sizes) {
    const int blocks = sizes.blocks(), heads = sizes.heads_kv(), all_heads = number / blocks;
    block = number % blocks;
    if (ORDERED && sizes.causal && sizes.backwards(all_heads)) block = blocks - 1 - block;
    head = all_heads % heads, batch = all_heads / heads;
    start = 0;
    if (sizes.causal) start = max(block * BLOCK_K - sizes.diagonal(), 0) / BLOCK_Q;
    if (!sizes.causal && sizes.at_once())
      start = static_cast<int>(static_cast<i64>(block) * sizes.tiles() / blocks);
  }

  // How many blocks add to a tile before this one does.
  template <typename Sizes>
  __device__ __forceinline__ int rank(int tile, const Sizes& sizes) const {
    if (sizes.causal) return sizes.turns(tile) - 1 - block;
    if (!sizes.at_once()) return block;
    // The last block that starts at the tile or before it, then those before that one.
    const i64 blocks = sizes.blocks(), starts = (tile + 1) * blocks;
    const int newest = static_cast<int>(min(ceil_div<i64>(starts, sizes.tiles()), blocks)) - 1;
    return newest - block + (block <= newest ? 0 : static_cast<int>(blocks));
  }
};

// The tiles of a piece of work, of one query head after the other.
struct BackwardWalk {
  int tile = 0, head = 0;
  int left = 0;  // tiles still to come, this one included

  BackwardWalk() = default;
  template <typename Sizes>
  __device__ __forceinline__ BackwardWalk(const BackwardWork& work, const Sizes& sizes)
      : tile(work.start),
        head(work.head * sizes.group_size),
        left((sizes.tiles() - first(work, sizes)) * sizes.group_size) {}

  template <typename Sizes>
  __device__ static __forceinline__ int first(const BackwardWork& work, const Sizes& sizes) {
    return sizes.causal ? work.start : 0;
  }
  template <typename Sizes>
  __device__ __forceinline__ void advance(const BackwardWork& work, const Sizes& sizes) {
    --left;
    if (++tile == sizes.tiles()) tile = first(work, sizes);
    if (tile == work.start) ++head;
  }
  // Among the tiles of all heads, of rows_padded rows each.
  template <int BLOCK_Q, int BLOCK_K, bool ORDERED>
  __device__ __forceinline__ int index(
      const BackwardWork& work, const BackwardSizes<BLOCK_Q, BLOCK_K, ORDERED>& sizes) const {
    return (work.batch * sizes.heads_q + head) * (sizes.rows_padded / BLOCK_Q) + tile;
  }
};
