// Items (a token's choices, in order of tokens) sorted by expert, stably, in one launch: a counting
// sort over the whole grid. Each warp has 32 items at a time of a piece of the list; warps and blocks
// have the pieces in order.
//
//   0. clear    block     where there is one: sentinels everywhere, and items go over them
//   1. count    warp      counts[warp][expert], lanes of one expert found by match.any
//   2. scan     32 experts a warp: counts of the warps before, and the block's sums
//   3. join     the same  over the grid, not where there is one block: counts of the blocks before,
//                         and of all (device/grid_sums.cuh)
//   4. offsets  the same  sum of the experts before, each rounded up to whole tiles of block_size
//   5. place    warp      offset + blocks before + warps before + lanes before
//
// An item's place follows from what comes before it in the list, so it is the same in every run.
#pragma once
#include "device/grid_sums.cuh"

struct Grouping {
  int experts;     // ids from 0 to here are looked up in the map
  int groups;      // experts here: ids after the map
  int block_size;  // a group's places are a multiple of it
  int size_log2;   // of block_size, -1: it is no power of two
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

// The tile that a place is in.
__device__ __forceinline__ int tile_of(int place, const Grouping& how) {
  return how.size_log2 >= 0 ? place >> how.size_log2 : place / how.block_size;
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

// Shared memory of a block, and what it does with it. MOST: groups, a multiple of 32.
template <int THREADS, int MOST>
struct alignas(16) Regroup {
  static constexpr int WARPS = THREADS / WARP_SIZE, CHUNKS = MOST / WARP_SIZE;
  static constexpr int OWN = ceil_div(CHUNKS, WARPS);  // chunks of a warp, every WARPS-th
  static constexpr int HELD = MOST > 512 ? 64 : 128;   // items of a warp that stay here
  static constexpr u32 NOBODY = ~0u;
  static_assert(CHUNKS <= WARP_SIZE, "one warp scans the chunks' sums");
  int counts[WARPS][MOST];  // items of a warp; from phase 2 on its next item's rank in the block
  int before[MOST];         // items in blocks before this one
  int total[MOST];          // items
  int offset[MOST];         // from the chunk's first place to the group's
  int chunk[CHUNKS];        // places
  u32 held[WARPS][HELD];    // ids; then, if these are all, group << 16 | rank among the warp's

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

  // Phase 2, of one group; -1: of none. The sum.
  __device__ __forceinline__ int scan(int e) {
    int found[WARPS], sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) found[w] = e < 0 ? 0 : counts[w][e], sum += found[w];
    for (int w = 0, next = 0; w < WARPS && e >= 0; ++w) counts[w][e] = next, next += found[w];
    return sum;
  }

  // Phases 2 to 4. A lane has the first place of one chunk, the last one has the end of all in y.
  __device__ __forceinline__ int2 join(const GridSums<MOST>& sums, u32 (&left)[OWN],
                                       const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const bool alone = gridDim.x == 1;
    int sum[OWN];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int e = (warp + i * WARPS) * WARP_SIZE + lane;
      sum[i] = scan(e < how.groups ? e : -1);
      if (!alone && e < how.groups) sums.add(e, sum[i]);
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int c = warp + i * WARPS, e = c * WARP_SIZE + lane;
      if (c >= CHUNKS) break;
      uint2 found = {0, static_cast<u32>(sum[i])};
      if (!alone && e < how.groups) found = sums.get(e);
      __syncwarp();
      if (!alone && lane == 0) left[i] = sums.leave(c);
      total[e] = found.y, before[e] = found.x;
      const int used = kept(e, how);
      const int own = tile_of(used + how.block_size - 1, how) * how.block_size;
      const int upto = warp_scan(own);
      offset[e] = upto - own;
      if (lane == WARP_SIZE - 1) chunk[c] = upto;
    }
    __syncthreads();
    const int own = lane < CHUNKS ? chunk[lane] : 0, upto = warp_scan<CHUNKS>(own);
    return {upto - own, __shfl_sync(FULL_MASK, upto, CHUNKS - 1)};
  }

  // Phase 5, of one item of a group whose chunk begins at `start`; `rank`: among the block's.
  __device__ __forceinline__ int place(int item, int group, int rank, int start, const Groups& to,
                                       const Grouping& how) {
    rank += before[group];
    if (rank >= how.capacity) return -1;
    const int place = start + offset[group] + rank, tile = tile_of(place, how);
    to.sorted_token_ids[place] = item;
    if (tile * how.block_size == place) to.expert_ids[tile] = group;
    return place;
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
      if (c < CHUNKS && sums.is_last(__shfl_sync(FULL_MASK, left[i], 0)) && e < how.groups)
        sums.clear(e);
    }
  }

  // All of it, for a warp's items from `begin` to `end`; clear() has been called. `group(item)` is an
  // item's group or -1.
  template <typename Source>
  __device__ __forceinline__ void sort(int begin, int end, Source group, const Groups& to,
                                       const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const GridSums<MOST> sums = {to.counters};
    const bool all = end - begin <= HELD;
    u32 left[OWN] = {};
#pragma unroll 1
    for (int i = begin; i < end; i += WARP_SIZE) {
      const int item = i + lane, mine = item < end ? group(item) : -1, rank = take(mine);
      if (all) held[warp][item - begin] = mine < 0 ? NOBODY : mine << 16 | rank;
    }
    const int2 chunks = join(sums, left, how);
#pragma unroll 1
    for (int i = begin; i < end; i += WARP_SIZE) {
      const int item = i + lane;
      const u32 word = all ? held[warp][item - begin] : NOBODY;
      int mine = word == NOBODY ? -1 : word >> 16, rank = word & 0xffff;
      if (all)
        rank += mine < 0 ? 0 : counts[warp][mine];
      else
        mine = item < end ? group(item) : -1, rank = take(mine);
      const int start = __shfl_sync(FULL_MASK, chunks.x, max(mine, 0) / WARP_SIZE);
      if (item < end) to.inverse[item] = mine < 0 ? -1 : place(item, mine, rank, start, to, how);
    }
    finish(chunks, to, how);
    if (gridDim.x > 1) leave(sums, left, how);
  }
};

// The items of this warp: the `number` of all in equal pieces, each a multiple of `step`.
struct Share {
  int begin, end;
};
__device__ __forceinline__ Share share_of_warp(int number, int step, int warps) {
  const int warp = blockIdx.x * warps + threadIdx.x / WARP_SIZE;
  const i64 each = round_up(ceil_div(number, static_cast<int>(gridDim.x) * warps), step);
  return {static_cast<int>(min(warp * each, static_cast<i64>(number))),
          static_cast<int>(min((warp + 1) * each, static_cast<i64>(number)))};
}

// Tokens there are: what the device says, within what the host knows.
__device__ __forceinline__ int real_tokens(const int* num_tokens, int tokens) {
  return num_tokens == nullptr ? tokens : max(0, min(*num_tokens, tokens));
}
