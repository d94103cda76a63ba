// Which blocks of keys and tiles of queries attention's backward multiplies, and in which order.
//
// A work item is a block of BLOCK_K keys of one KV head: every tile of BLOCK_Q queries that
// sees it, of all query heads that share it. Several blocks of keys add to one tile of dQ.
//
// In any order: thread blocks draw pieces from a counter, the longest of a head first, or of all
// heads where there are few pieces a thread block, which then end together.
//
// In a fixed order (ORDERED) each block of keys has a rank at each tile. Heads are dealt out to
// teams of thread blocks; a team of `members` goes through a head in `rounds`, in round r its
// member i has the block of keys i * rounds + r. A tile is added to by the blocks of a round, then
// by those of the next. In a round the members visit different tiles at any time, and each tile is
// handed on from a member to the next, which comes to it `rounds` blocks of queries later: nobody
// waits, as long as handing on takes less than that.
//
//   without a mask   members start at tiles apart from one another and go round
//   causal           two heads in turns, so that all members have the same to do:
//
//        member 0   a B B B B         a: the blocks of keys from the last one, which have little
//        member 1   a a B B B         to do, each from its diagonal onwards; they start together
//        member 2   a a a B B         B: those from the first one, each from the last tile
//        member 3   a a a a B         backwards to its diagonal; they end together
//                   ------------> time
//
// Nobody waits for a visit that comes later in the order (round, a or B, query head, tiles as they
// are visited, member), and each thread block's visits are in that order: all that is needed is
// that thread blocks run at the same time.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/register_fence.cuh"

template <int BLOCK_Q, int BLOCK_K, bool ORDERED>
struct BackwardSizes {
  static constexpr int INDEX_ROWS = BLOCK_Q;  // a tile's index counts so many rows
  int batch, heads_q, group_size, seqlen_q, seqlen_k, rows_padded, causal;
  // Of a team over a head, where ORDERED; else above 1 for the first blocks of all heads first.
  int rounds;
  int own_key = 0;  // where this block's keys begin in a work item that a cluster shares

  // The same, but what follows from it is computed again, and not kept in registers until then.
  __device__ __forceinline__ BackwardSizes again() const {
    BackwardSizes made = *this;
    register_fence(made.seqlen_q, made.seqlen_k, made.rounds);
    return made;
  }

  __device__ __forceinline__ int heads_kv() const { return heads_q / group_size; }
  __device__ __forceinline__ int all_heads() const { return heads_kv() * batch; }
  __device__ __forceinline__ int blocks() const { return ceil_div(seqlen_k, BLOCK_K); }
  __device__ __forceinline__ int tiles() const { return ceil_div(seqlen_q, BLOCK_Q); }
  __device__ __forceinline__ int members() const { return ceil_div(blocks(), rounds); }
  // Of clusters, where thread blocks have their work items in common.
  __device__ __forceinline__ int teams() const { return cluster_count() / members(); }
  // Query i sees keys up to i + diagonal().
  __device__ __forceinline__ int diagonal() const { return seqlen_k - seqlen_q; }

  // Work items are numbered, where ORDERED each thread block's from 0.
  __device__ __forceinline__ int works() const {
    if (!ORDERED) return blocks() * all_heads();
    return causal ? 2 * rounds * ceil_div(all_heads(), 2 * teams())
                  : rounds * ceil_div(all_heads(), teams());
  }

  // How many blocks see, or add to, a tile of queries: block 0 adds zeros to those that see no key.
  __device__ __forceinline__ int turns(int tile) const {
    const int last_row = min(tile * BLOCK_Q + BLOCK_Q, seqlen_q) - 1;
    return causal ? max(min(last_row + diagonal(), seqlen_k - 1), 0) / BLOCK_K + 1 : blocks();
  }

  // The first tile that sees a block.
  __device__ __forceinline__ int first_tile(int block) const {
    if (!causal || (ORDERED && block == 0)) return 0;
    return max(block * BLOCK_K - diagonal(), 0) / BLOCK_Q;
  }

  // How many of the first `count` blocks belong to rounds before this one.
  __device__ __forceinline__ int before(int round, int count) const {
    return count / rounds * round + min(count % rounds, round);
  }
};

struct BackwardWorkItem {
  int block, head, batch;  // head: of keys
  int start;               // the first tile to be visited
  bool backwards;          // tiles are visited from there downwards
  bool exists = true;

  __device__ __forceinline__ explicit BackwardWorkItem(uint4 words)
      : block(words.x),
        head(words.y),
        batch(words.z),
        start(words.w & 0x7FFFFFFF),
        backwards(words.w >> 31) {}
  __device__ __forceinline__ uint4 words() const {
    return make_uint4(block, head, batch, start | static_cast<u32>(backwards) << 31);
  }

  template <int BLOCK_Q, int BLOCK_K>
  __device__ __forceinline__ BackwardWorkItem(int number,
                                              const BackwardSizes<BLOCK_Q, BLOCK_K, false>& sizes) {
    const int blocks = sizes.blocks(), heads = sizes.heads_kv();
    const bool across = sizes.rounds > 1;
    const int step = across ? sizes.all_heads() : blocks, after = number / step;
    const int within = number - after * step, all_heads = across ? within : after;
    block = across ? after : within;
    head = all_heads % heads, batch = all_heads / heads;
    start = sizes.first_tile(block);
    backwards = false;
  }

  template <int BLOCK_Q, int BLOCK_K>
  __device__ __forceinline__ BackwardWorkItem(int number,
                                              const BackwardSizes<BLOCK_Q, BLOCK_K, true>& sizes) {
    const int members = sizes.members(), member = cluster_index() % members;
    const int step = sizes.causal ? number / 2 : number;  // in turns: one of each head
    const int round = step % sizes.rounds, heads = sizes.heads_kv();
    int turn = step / sizes.rounds;
    backwards = sizes.causal && number % 2;
    if (sizes.causal) turn = 2 * turn + number % 2;
    const int all_heads = turn * sizes.teams() + cluster_index() / members;
    block = member * sizes.rounds + round;
    exists = block < sizes.blocks() && all_heads < sizes.all_heads();
    if (sizes.causal && !backwards) block = sizes.blocks() - 1 - block;
    head = all_heads % heads, batch = all_heads / heads;
    if (!sizes.causal)
      start = static_cast<u32>(member) * sizes.tiles() / active(round, sizes);
    else
      start = backwards ? sizes.tiles() - 1 : sizes.first_tile(block);
  }

  // How many members have a block in a round.
  template <typename Sizes>
  __device__ static __forceinline__ int active(int round, const Sizes& sizes) {
    return ceil_div(sizes.blocks() - round, sizes.rounds);
  }

  // The number of the next work item of a thread block, -1 being before the first. `counter` is
  // 0 before the launch and after it: each thread block draws until it gets too high a number, so
  // `works` are drawn in all.
  template <int BLOCK_Q, int BLOCK_K>
  __device__ static __forceinline__ int next(int number, u32* counter,
                                             const BackwardSizes<BLOCK_Q, BLOCK_K, false>& sizes) {
    return number < 0 ? blockIdx.x : gridDim.x + atomicInc(counter, sizes.works() - 1);
  }
  template <int BLOCK_Q, int BLOCK_K>
  __device__ static __forceinline__ int next(int number, u32*,
                                             const BackwardSizes<BLOCK_Q, BLOCK_K, true>& sizes) {
    do ++number;
    while (number < sizes.works() && !BackwardWorkItem(number, sizes.again()).exists);
    return number;
  }

  // How many blocks add to a tile before this one does.
  template <typename Sizes>
  __device__ __forceinline__ int rank(int tile, const Sizes& sizes) const {
    const int blocks = sizes.blocks(), seen = sizes.turns(tile), rounds = sizes.rounds;
    const int from = sizes.causal && !backwards ? blocks - 1 - block : block;
    const int round = from % rounds, member = from / rounds;
    if (backwards) return sizes.before(round, seen) + member;
    if (sizes
            .causal) {  // the blocks that see the tile are `first` and those after it, from the last
      const int first = blocks - seen;
      return sizes.before(round, blocks) - sizes.before(round, first) + member -
             ceil_div(max(first - round, 0), rounds);
    }
    // The last member that starts at the tile or before it, then those before that one.
    const int members = active(round, sizes);
    const u32 starts = static_cast<u32>(tile + 1) * members, tiles = sizes.tiles();
    const int newest = min(static_cast<int>((starts - 1) / tiles), members - 1);
    return sizes.before(round, blocks) + newest - member + (member <= newest ? 0 : members);
  }
};

// The tiles of a work item, of one query head after the other.
struct BackwardWalk {
  int tile = 0, head = 0;
  int left = 0;  // tiles still to come, this one included

  BackwardWalk() = default;
  __device__ __forceinline__ explicit BackwardWalk(uint4 words)
      : tile(words.x), head(words.y), left(words.z) {}
  __device__ __forceinline__ uint4 words() const { return make_uint4(tile, head, left, 0); }

  template <typename Sizes>
  __device__ __forceinline__ BackwardWalk(const BackwardWorkItem& work, const Sizes& sizes)
      : tile(work.start),
        head(work.head * sizes.group_size),
        left((sizes.tiles() - sizes.first_tile(work.block)) * sizes.group_size) {}

  template <typename Sizes>
  __device__ __forceinline__ void advance(const BackwardWorkItem& work, const Sizes& sizes) {
    const int tiles = sizes.tiles(), first = sizes.first_tile(work.block);
    --left;
    tile += work.backwards ? -1 : 1;
    if (tile == tiles) tile = first;
    if (tile < first) tile = tiles - 1;
    if (tile == work.start) ++head;
  }
  // Among the tiles of all heads, of rows_padded rows each.
  template <int BLOCK_Q, int BLOCK_K, bool ORDERED>
  __device__ __forceinline__ int index(
      const BackwardWorkItem& work, const BackwardSizes<BLOCK_Q, BLOCK_K, ORDERED>& sizes) const {
    return (work.batch * sizes.heads_q + head) * (sizes.rows_padded / BLOCK_Q) + tile;
  }
};
