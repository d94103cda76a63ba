// Items (a token's choices, in order of tokens) sorted by expert, stably, in one launch: a counting
// sort over the whole grid. Each warp has 32 items at a time of a piece of the list; warps and blocks
// have the pieces in order.
//
//   1. count    warp      counts[warp][expert], lanes of one expert found by match.any
//   2. scan     block     counts of the warps before, for each expert; the block's sums into `table`
//   3. barrier  grid      not where there is one block
//   4. join     block     sums over the table's rows: those before this block, and all. A large table
//                         is summed up by columns, each by one warp of the grid, with a second
//                         barrier behind it: all blocks would read all of it.
//   5. offsets  block     sum of the experts before, each rounded up to whole tiles of block_size
//   6. place    warp      offset + blocks before + warps before + lanes before
//
// An item's place follows from what comes before it in the list, so it is the same in every run.
#pragma once
#include "device/grid_barrier.cuh"

struct Grouping {
  int experts;     // ids from 0 to here are looked up in the map
  int groups;      // experts here: ids after the map
  int block_size;  // a group's places are a multiple of it
  int capacity;    // items of a group, at most; later ones are dropped
  int places;      // of sorted_token_ids
  int sentinel;    // what stands in places of nobody
  int twice;       // whether the grid sums up the table together
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
  int* table;             // [blocks + 1, groups]
  u32* counters;          // [4] of the barriers
};

// The group of an expert's id, or -1.
__device__ __forceinline__ int group_of(i64 id, const int* map, const Grouping& how) {
  if (id < 0 || id >= how.experts) return -1;
  const int group = map == nullptr ? static_cast<int>(id) : map[id];
  return group >= 0 && group < how.groups ? group : -1;
}

// Sums over the lanes up to this one.                                     PTX ISA: shfl.sync.up.b32
__device__ __forceinline__ int warp_scan(int x) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

// Shared memory of a block, and what it does with it. MOST: groups, a multiple of 32.
template <int THREADS, int MOST>
struct Regroup {
  static constexpr int WARPS = THREADS / WARP_SIZE, CHUNKS = MOST / WARP_SIZE;
  static constexpr int ROWS = 8;  // of the table that a lane has under way
  static_assert(CHUNKS <= WARP_SIZE, "one warp scans the chunks' sums");
  int counts[WARPS][MOST];  // items of a warp; from phase 2 on its next item's rank in the block
  int before[MOST];         // items in blocks before this one
  int total[MOST];          // items
  int offset[MOST];         // place of the first item
  int chunk[CHUNKS];

  // Before any counting, by every thread; a warp's counts are its own until phase 2.
  __device__ __forceinline__ void clear(int groups) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    for (int e = lane; e < groups; e += WARP_SIZE) counts[warp][e] = 0;
    for (int e = threadIdx.x; e < groups; e += THREADS) before[e] = 0, total[e] = 0;
    __syncwarp();
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

  // Phase 2.
  __device__ __forceinline__ void scan(int groups, int* table) {
    __syncthreads();
    for (int e = threadIdx.x; e < groups; e += THREADS) {
      int found[WARPS], sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) found[w] = counts[w][e];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) counts[w][e] = sum, sum += found[w];
      if (gridDim.x == 1)
        total[e] = sum;
      else
        table[blockIdx.x * groups + e] = sum;
    }
  }

  // Phase 4. Sums of integers, in whatever order warps add them.
  __device__ __forceinline__ void join(int groups, const int* table) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    for (int e = lane; e < groups; e += WARP_SIZE) {
      int all = 0, early = 0;
#pragma unroll 8
      for (int block = warp; block < gridDim.x; block += WARPS) {
        const int count = __ldcg(table + block * groups + e);
        all += count;
        if (block < blockIdx.x) early += count;
      }
      if (all > 0) atomicAdd(total + e, all);
      if (early > 0) atomicAdd(before + e, early);
    }
  }

  // The other way: a column's sums of the rows before take the place of its rows, and the sum of all
  // stands behind them.
  __device__ __forceinline__ void sum_columns(int groups, int* table) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    for (int e = blockIdx.x * WARPS + warp; e < groups; e += gridDim.x * WARPS) {
      int sum = 0;
      for (int first = 0; first < gridDim.x; first += ROWS * WARP_SIZE) {
        int own[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          const int row = first + i * WARP_SIZE + lane;
          own[i] = row < gridDim.x ? __ldcg(table + row * groups + e) : 0;
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          const int row = first + i * WARP_SIZE + lane, upto = warp_scan(own[i]);
          if (row < gridDim.x) table[row * groups + e] = sum + upto - own[i];
          sum += __shfl_sync(FULL_MASK, upto, WARP_SIZE - 1);
        }
      }
      if (lane == 0) table[gridDim.x * groups + e] = sum;
    }
  }
  __device__ __forceinline__ void read_sums(int groups, const int* table) {
    for (int e = threadIdx.x; e < groups; e += THREADS) {
      before[e] = __ldcg(table + blockIdx.x * groups + e);
      total[e] = __ldcg(table + gridDim.x * groups + e);
    }
  }

  // Phases 3 and 4; what grid_leave is to be told.
  __device__ __forceinline__ uint2 meet(const Groups& to, const Grouping& how) {
    uint2 left = {};
    left.x = grid_barrier(to.counters, gridDim.x);
    if (how.twice) {
      sum_columns(how.groups, to.table);
      left.y = grid_barrier(to.counters + 2, gridDim.x);
      read_sums(how.groups, to.table);
    } else {
      join(how.groups, to.table);
    }
    return left;
  }
  __device__ __forceinline__ void leave(uint2 left, const Groups& to, const Grouping& how) {
    grid_leave(to.counters, gridDim.x, left.x);
    if (how.twice) grid_leave(to.counters + 2, gridDim.x, left.y);
  }

  // Places of group e that are taken, and those that it has.
  __device__ __forceinline__ int kept(int e, const Grouping& how) const {
    return min(total[e], how.capacity);
  }
  __device__ __forceinline__ int padded(int e, const Grouping& how) const {
    return round_up(kept(e, how), how.block_size);
  }

  // Phase 5.
  __device__ __forceinline__ void set_offsets(const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    __syncthreads();
    for (int c = warp; c < CHUNKS; c += WARPS) {
      const int e = c * WARP_SIZE + lane, own = e < how.groups ? padded(e, how) : 0;
      const int sum = warp_scan(own);
      offset[e] = sum - own;
      if (lane == WARP_SIZE - 1) chunk[c] = sum;
    }
    __syncthreads();
    const int own = lane < CHUNKS ? chunk[lane] : 0, earlier = warp_scan(own) - own;
    for (int c = warp; c < CHUNKS; c += WARPS)
      offset[c * WARP_SIZE + lane] += __shfl_sync(FULL_MASK, earlier, c);
    __syncthreads();
  }

  // Phase 6, of one item; -1: it has no group.
  __device__ __forceinline__ int place(int group, const Grouping& how) {
    const int taken = take(group);
    if (group < 0) return -1;
    const int rank = before[group] + taken;
    return rank < how.capacity ? offset[group] + rank : -1;
  }

  // What stands beside the items: sentinels, the experts of tiles, offsets and counts.
  __device__ __forceinline__ void finish(const Groups& to, const Grouping& how) {
    for (int e = blockIdx.x; e < how.groups; e += gridDim.x) {
      const int begin = offset[e], used = begin + kept(e, how), end = begin + padded(e, how);
      for (int i = used + threadIdx.x; i < end; i += THREADS) to.sorted_token_ids[i] = how.sentinel;
      for (int i = begin / how.block_size + threadIdx.x; i < end / how.block_size; i += THREADS)
        to.expert_ids[i] = e;
      if (threadIdx.x == 0) to.offsets[e] = begin, to.counts[e] = used - begin;
    }
    const int end = offset[how.groups - 1] + padded(how.groups - 1, how);
    const int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
    for (int i = end + thread; i < how.places; i += threads) to.sorted_token_ids[i] = how.sentinel;
    for (int i = end / how.block_size + thread; i < how.places / how.block_size; i += threads)
      to.expert_ids[i] = -1;
    if (thread == 0) to.offsets[how.groups] = end, *to.num_post_padded = end;
  }

  // All of it, for a warp's items from `begin` to `end`; clear() has been called. `group(item)` is an
  // item's group or -1, and `first` that of item begin + lane (-1 from `end` on).
  template <typename Source>
  __device__ __forceinline__ void sort(int begin, int end, int first, Source group,
                                       const Groups& to, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE;
    take(first);
    for (int item = begin + WARP_SIZE; item < end; item += WARP_SIZE)
      take(item + lane < end ? group(item + lane) : -1);
    scan(how.groups, to.table);
    const uint2 left = gridDim.x > 1 ? meet(to, how) : uint2{};
    set_offsets(how);
    for (int i = begin; i < end; i += WARP_SIZE) {
      const int item = i + lane;
      const int place = this->place(i == begin ? first : item < end ? group(item) : -1, how);
      if (item >= end) continue;
      if (place >= 0) to.sorted_token_ids[place] = item;
      to.inverse[item] = place;
    }
    finish(to, how);
    if (gridDim.x > 1) leave(left, to, how);
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
