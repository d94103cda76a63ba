// Items (a token's choices, in order of tokens) sorted by expert, stably, in one launch: a counting
// sort over the whole grid. Each warp has 32 items at a time of a piece of the list; warps and blocks
// have the pieces in order.
//
//   0. clear    block     where there is one: sentinels everywhere, and items go over them
//   1. count    warp      counts[warp][expert], lanes of one expert found by match.any
//   2. scan     32 experts a warp: counts of the warps before, and the block's sums
//   3. order    block     where there are no more items than threads: items by expert, so that what a
//                         warp writes in the end is side by side
//   4. join     the same  over the grid, not where there is one block: counts of the blocks before,
//                         and of all (device/grid_sums.cuh)
//   5. offsets  the same  sum of the experts before, each rounded up to whole tiles of block_size
//   6. place    warp      offset + blocks before + warps before + lanes before
//
// An item's place follows from what comes before it in the list, so it is the same in every run.
#pragma once
#include "device/grid_sums.cuh"

struct Grouping {
  int experts;     // ids from 0 to here are looked up in the map
  int groups;      // experts here: ids after the map
  int block_size;  // a group's places are a multiple of it
  u32 inverse;     // of block_size: 1 << (31 + shift) divided by it, rounded up
  int shift;       // 1 << shift is the first power of two that is no less than block_size
  int capacity;    // items of a group, at most; later ones are dropped
  int places;      // of sorted_token_ids
  int sentinel;    // what stands in places of nobody
};

// Of a launch, all on the device.
struct Groups {
  const int* expert_map;  // [experts] or null: as they are
  int* sorted_token_ids;  // [places]
  int* expert_ids;        // [places / block_size]
  int* num_post_padded;   // [1]
  int* inverse;           // [items], -1: dropped
  int* offsets;           // [groups + 1]
  int* counts;            // [groups]
  u32* counters;          // of GridSums
};

// The group of an expert's id, or -1.
__device__ __forceinline__ int group_of(i64 id, const int* map, const Grouping& how) {
  if (id < 0 || id >= how.experts) return -1;
  const int group = map == nullptr ? static_cast<int>(id) : map[id];
  return group >= 0 && group < how.groups ? group : -1;
}

// The tile that a place is in.                                              PTX ISA: mul.hi.u32
__device__ __forceinline__ int tile_of(int place, const Grouping& how) {
  return static_cast<int>(__umulhi(2u * place, how.inverse) >> how.shift);
}

// Sums over the lanes up to this one, of which LANES count.               PTX ISA: shfl.sync.up.b32
template <int LANES = WARP_SIZE>
__device__ __forceinline__ int warp_scan(int x) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

// The items of this warp: the `number` of all in equal pieces, each a multiple of `step`.
struct Share {
  int begin, end;
  int each;  // items of a warp, but for the last ones
};
__device__ __forceinline__ Share share_of_warp(int number, int step, int warps) {
  const int warp = blockIdx.x * warps + threadIdx.x / WARP_SIZE;
  const i64 each = round_up(ceil_div(number, static_cast<int>(gridDim.x) * warps), step);
  return {static_cast<int>(min(warp * each, static_cast<i64>(number))),
          static_cast<int>(min((warp + 1) * each, static_cast<i64>(number))),
          static_cast<int>(each)};
}

// Shared memory of a block, and what it does with it. MOST: groups, a multiple of 32.
template <int THREADS, int MOST>
struct alignas(16) Regroup {
  static constexpr int WARPS = THREADS / WARP_SIZE, CHUNKS = MOST / WARP_SIZE;
  static constexpr int OWN = ceil_div(CHUNKS, WARPS);  // chunks of a warp, every WARPS-th
  static constexpr int HELD = MOST > 256 ? 64 : 128;   // items of a warp that stay here
  static constexpr bool ORDERED = MOST <= 512;         // there is room to put them in order
  static constexpr int BITS = 9;                       // of an item of the block
  static constexpr u32 NOBODY = ~0u;
  static_assert(THREADS <= 1 << BITS, "items of a block, one a thread");
  static_assert(CHUNKS <= WARP_SIZE, "one warp scans the chunks' sums");
  int counts[WARPS][MOST];  // items of a warp; from phase 2 on its next item's rank in the block
  int before[MOST];         // items in blocks before this one
  int total[MOST];          // items
  int offset[MOST];         // from the chunk's first place to the group's
  int chunk[CHUNKS];        // items of the block
  int places[CHUNKS];
  int first[ORDERED ? MOST : 1];  // from the chunk's first item of the block to the group's
  // Ids; then, if these are all, group << 16 | rank among the warp's; in order, group << 18 | rank in
  // the block << 9 | number in the block.
  u32 held[WARPS][HELD];

  // Phase 0. A warp's counts are its own until phase 2.
  __device__ __forceinline__ void clear(const Groups& to, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll 1
    for (int e = lane; e < how.groups; e += WARP_SIZE) counts[warp][e] = 0;
    if (gridDim.x == 1) nobody_from(0, to, how);
    __syncwarp();
  }

  // Sentinels into the places from `begin` on, a whole tile's first, and no group to their tiles.
  __device__ __forceinline__ void nobody_from(int begin, const Groups& to, const Grouping& how) {
    const int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
#pragma unroll 1
    for (int i = begin + thread; i < how.places; i += threads)
      to.sorted_token_ids[i] = how.sentinel;
#pragma unroll 1
    for (int i = tile_of(begin, how) + thread; i < tile_of(how.places, how); i += threads)
      to.expert_ids[i] = -1;
  }

  // A lane's rank among the warp's items of its group so far; they count from now on. -1: no item.
  // PTX ISA: match.any.sync
  __device__ __forceinline__ int take(int group) {
    const int lane = threadIdx.x % WARP_SIZE;
    int* mine = counts[threadIdx.x / WARP_SIZE];
    const u32 alike = __match_any_sync(FULL_MASK, group), earlier = alike & ((1u << lane) - 1);
    const int rank = group < 0 ? 0 : mine[group] + __popc(earlier);
    __syncwarp();
    if (group >= 0 && earlier == 0) mine[group] = rank + __popc(alike);
    __syncwarp();
    return rank;
  }

  // Places of group e that are taken.
  __device__ __forceinline__ int kept(int e, const Grouping& how) const {
    return min(total[e], how.capacity);
  }

  // Phase 2. `ordered`: phase 3 follows.
  __device__ __forceinline__ void scan(const GridSums<MOST>& sums, bool ordered,
                                       const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int c = warp + i * WARPS, e = c * WARP_SIZE + lane;
      if (c * WARP_SIZE >= how.groups) break;
      int found[WARPS], sum = 0, next = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) found[w] = e < how.groups ? counts[w][e] : 0, sum += found[w];
      if (gridDim.x > 1 && e < how.groups) sums.add(e, sum);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) counts[w][e] = next, next += found[w];
      total[e] = sum;
      if (!ordered) continue;
      const int upto = warp_scan(sum);
      first[e] = upto - sum;
      if (lane == WARP_SIZE - 1) chunk[c] = upto;
    }
  }

  // Phase 3, of an item of a group, or -1; `number`: of the item in the block, `rank`: in its warp.
  __device__ __forceinline__ void order(int group, int rank, int number, const Grouping& how) {
    const int warp = threadIdx.x / WARP_SIZE;
    __syncthreads();
    const int start = __shfl_sync(FULL_MASK, scan_chunks(chunk, how).x, max(group, 0) / WARP_SIZE);
    if (group < 0) return;
    rank += counts[warp][group];
    held[0][start + first[group] + rank] = (group << BITS | rank) << BITS | number;
  }

  // A lane has where one chunk begins, and in y where the last one ends.
  static __device__ __forceinline__ int2 scan_chunks(const int* sizes, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int own = lane * WARP_SIZE < how.groups ? sizes[lane] : 0, upto = warp_scan<CHUNKS>(own);
    return {upto - own, __shfl_sync(FULL_MASK, upto, CHUNKS - 1)};
  }

  // Phases 4 and 5.
  __device__ __forceinline__ void join(const GridSums<MOST>& sums, u32 (&left)[OWN],
                                       const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int c = warp + i * WARPS, e = c * WARP_SIZE + lane;
      if (c * WARP_SIZE >= how.groups) break;
      uint2 found = {0, static_cast<u32>(total[e])};
      if (gridDim.x > 1 && e < how.groups) found = sums.get(e);
      __syncwarp();
      if (gridDim.x > 1 && lane == 0) left[i] = sums.leave(c);
      total[e] = found.y, before[e] = found.x;
      const int used = kept(e, how);
      const int own = tile_of(used + how.block_size - 1, how) * how.block_size;
      const int upto = warp_scan(own);
      offset[e] = upto - own;
      if (lane == WARP_SIZE - 1) places[c] = upto;
    }
    __syncthreads();
  }

  // What stands beside the items: offsets and counts, and where there are several blocks sentinels.
  __device__ __forceinline__ void finish(int2 chunks, const Groups& to, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, end = chunks.y;
    if (blockIdx.x == 0 && threadIdx.x == 0)
      to.offsets[how.groups] = end, *to.num_post_padded = end;
    if (gridDim.x == 1) {
#pragma unroll 1
      for (int c = warp; c * WARP_SIZE < how.groups; c += WARPS) {
        const int start = __shfl_sync(FULL_MASK, chunks.x, c), e = c * WARP_SIZE + lane;
        if (e < how.groups) to.offsets[e] = start + offset[e], to.counts[e] = kept(e, how);
      }
      return;
    }
#pragma unroll 1
    for (int e = blockIdx.x + warp * gridDim.x; e < how.groups; e += gridDim.x * WARPS) {
      const int begin = __shfl_sync(FULL_MASK, chunks.x, e / WARP_SIZE) + offset[e];
      const int used = kept(e, how), tiles = tile_of(used + how.block_size - 1, how);
      if (lane == 0) to.offsets[e] = begin, to.counts[e] = used;
#pragma unroll 1
      for (int i = used + lane; i < tiles * how.block_size; i += WARP_SIZE)
        to.sorted_token_ids[begin + i] = how.sentinel;
    }
    nobody_from(end, to, how);
  }

  // Behind all of it: whoever was the last to read a chunk's sums clears them.
  __device__ __forceinline__ void leave(const GridSums<MOST>& sums, const u32 (&left)[OWN],
                                        const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int c = warp + i * WARPS, e = c * WARP_SIZE + lane;
      if (c * WARP_SIZE < how.groups && sums.is_last(__shfl_sync(FULL_MASK, left[i], 0)) &&
          e < how.groups)
        sums.clear(e);
    }
  }

  // Phase 6, of an item of a group whose chunk begins at `start`; `rank`: in the block. -1: dropped.
  __device__ __forceinline__ int place(int group, int rank, int start, const Grouping& how) const {
    rank += before[group];
    return rank < how.capacity ? start + offset[group] + rank : -1;
  }
  static __device__ __forceinline__ void put(int item, int group, int place, const Groups& to,
                                             const Grouping& how) {
    if (place < 0) return;
    const int tile = tile_of(place, how);
    to.sorted_token_ids[place] = item;
    if (tile * how.block_size == place) to.expert_ids[tile] = group;
  }

  // Phase 6, of the block's items in order; `begin`: its first one.
  __device__ __forceinline__ void place_in_order(int begin, int starts, const Groups& to,
                                                 const Grouping& how) const {
    const bool there = threadIdx.x < scan_chunks(chunk, how).y;
    const u32 word = there ? held[0][threadIdx.x] : 0;
    const int e = word >> 2 * BITS, rank = word >> BITS & ((1 << BITS) - 1);
    const int start = __shfl_sync(FULL_MASK, starts, e / WARP_SIZE);
    if (there) put(begin + (word & ((1 << BITS) - 1)), e, place(e, rank, start, how), to, how);
  }

  // All of it, for a warp's items; clear() has been called. `group(item)` is an item's group or -1.
  template <typename Source>
  __device__ __forceinline__ void sort(const Share& mine, Source group, const Groups& to,
                                       const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const GridSums<MOST> sums = {to.counters};
    const bool all = mine.each <= HELD;
    const bool ordered = ORDERED && gridDim.x > 1 && mine.each <= WARP_SIZE;
    u32 left[OWN] = {}, last = NOBODY;
#pragma unroll 1
    for (int i = mine.begin; i < mine.end; i += WARP_SIZE) {
      const int e = i + lane < mine.end ? group(i + lane) : -1, rank = take(e);
      last = e < 0 ? NOBODY : e << 16 | rank;
      if (all && !ordered) held[warp][i + lane - mine.begin] = last;
    }
    scan(sums, ordered, how);
    if (ordered)
      order(last == NOBODY ? -1 : last >> 16, last & 0xffff, warp * mine.each + lane, how);
    join(sums, left, how);
    const int2 chunks = scan_chunks(places, how);
    if (ordered) place_in_order(blockIdx.x * WARPS * mine.each, chunks.x, to, how);
#pragma unroll 1
    for (int i = mine.begin; i < mine.end; i += WARP_SIZE) {
      const u32 word = ordered ? last : all ? held[warp][i + lane - mine.begin] : NOBODY;
      int e = word == NOBODY ? -1 : word >> 16, rank = word & 0xffff;
      if (all)
        rank += e < 0 ? 0 : counts[warp][e];
      else
        e = i + lane < mine.end ? group(i + lane) : -1, rank = take(e);
      const int start = __shfl_sync(FULL_MASK, chunks.x, max(e, 0) / WARP_SIZE);
      if (i + lane >= mine.end) continue;
      const int at = e < 0 ? -1 : place(e, rank, start, how);
      to.inverse[i + lane] = at;
      if (!ordered) put(i + lane, e, at, to, how);
    }
    finish(chunks, to, how);
    if (gridDim.x > 1) leave(sums, left, how);
  }
};

// Tokens there are: what the device says, within what the host knows.
__device__ __forceinline__ int real_tokens(const int* num_tokens, int tokens) {
  return num_tokens == nullptr ? tokens : max(0, min(*num_tokens, tokens));
}
