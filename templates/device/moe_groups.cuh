// Items (a token's choices, in order of tokens) sorted by expert, stably, in one launch: a counting
// sort over the whole grid. Each warp has 32 items at a time of a piece of the list; warps and blocks
// have the pieces in order.
//
//   0. clear    block     where there is one: sentinels everywhere, and items go over them
//   1. count    warp      counts[warp][expert], lanes of one expert found by match.any
//   2. scan     block     counts of the warps before, for each expert; the block's sums into `table`
//   3. barrier  grid      not where there is one block
//   4. join     block     sums over the table's row of each expert: of the blocks before this one, and
//                         of all. Of a large table each row is summed up by one warp of the grid, with
//                         a second barrier behind it: all blocks would read all of it.
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
  int size_log2;   // of block_size, -1: it is no power of two
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
  int* table;             // [groups, blocks], rows of whole 16 bytes; behind it, where it is large,
                          // [blocks + 1, groups]: the sums of the blocks before
  u32* counters;          // [4] of the barriers
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

// Sums over the warp, in every lane.                            PTX ISA: redux.sync.add, shfl.sync.bfly
__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(FULL_MASK, x);
#else
#pragma unroll
  for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
    x += __shfl_xor_sync(FULL_MASK, x, distance);
  return x;
#endif
}
// Of the first `number` of four.
__device__ __forceinline__ int sum_before(const int4& x, int number) {
  return (number > 0 ? x.x : 0) + (number > 1 ? x.y : 0) + (number > 2 ? x.z : 0) +
         (number > 3 ? x.w : 0);
}

// Shared memory of a block, and what it does with it. MOST: groups, a multiple of 32.
template <int THREADS, int MOST>
struct alignas(16) Regroup {
  static constexpr int WARPS = THREADS / WARP_SIZE, CHUNKS = MOST / WARP_SIZE;
  static constexpr int ROWS = 4, QUADS = 2;  // of the table, that a lane has under way
  static_assert(CHUNKS <= WARP_SIZE, "one warp scans the chunks' sums");
  int counts[WARPS][MOST];  // items of a warp; from phase 2 on its next item's rank in the block
  int before[MOST];         // items in blocks before this one
  int total[MOST];          // items
  int offset[MOST + 1];     // place of the first item; behind the groups: the end of all
  int chunk[CHUNKS];

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

  // Phase 2.
  __device__ __forceinline__ void scan(int groups, int* table) {
    __syncthreads();
#pragma unroll 1
    for (int e = threadIdx.x; e < groups; e += THREADS) {
      int found[WARPS], sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) found[w] = counts[w][e];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) counts[w][e] = sum, sum += found[w];
      if (gridDim.x == 1)
        total[e] = sum, before[e] = 0;
      else
        table[e * row_size() + blockIdx.x] = sum;
    }
  }

  // Of the table.
  static __device__ __forceinline__ int row_size() {
    return round_up(static_cast<int>(gridDim.x), 4);
  }

  // Phase 4: a warp has ROWS rows at a time, a lane QUADS times four blocks of each. The numbers
  // behind the last block are anybody's.
  __device__ __forceinline__ void join(int groups, const int* table) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int quads = row_size() / 4;
#pragma unroll 1
    for (int e = warp * ROWS; e < groups; e += WARPS * ROWS) {
      int all[ROWS] = {}, early[ROWS] = {};
#pragma unroll 1
      for (int first = lane; first - lane < quads; first += QUADS * WARP_SIZE) {
        int4 four[ROWS][QUADS] = {};
#pragma unroll
        for (int i = 0; i < ROWS * QUADS; ++i) {
          const int row = e + i / QUADS, quad = first + i % QUADS * WARP_SIZE;
          if (row < groups && quad < quads)
            four[i / QUADS][i % QUADS] = reinterpret_cast<const int4*>(table)[row * quads + quad];
        }
#pragma unroll
        for (int i = 0; i < ROWS * QUADS; ++i) {
          const int4 x = four[i / QUADS][i % QUADS];
          const int block = (first + i % QUADS * WARP_SIZE) * 4;
          all[i / QUADS] += sum_before(x, gridDim.x - block);
          early[i / QUADS] += sum_before(x, blockIdx.x - block);
        }
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        all[i] = warp_sum(all[i]), early[i] = warp_sum(early[i]);
        if (lane == i && e + i < groups) total[e + i] = all[i], before[e + i] = early[i];
      }
    }
  }

  // The other way: sums of the blocks before go behind the table, and the sum of all behind them.
  __device__ __forceinline__ void sum_rows(int groups, int* table) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, size = row_size();
    int* sums = table + groups * size;
#pragma unroll 1
    for (int e = blockIdx.x + warp * gridDim.x; e < groups; e += gridDim.x * WARPS) {
      int sum = 0;
#pragma unroll 1
      for (int first = 0; first < gridDim.x; first += 4 * WARP_SIZE) {
        const int block = first + lane * 4, here = gridDim.x - block;
        const int4 x = here > 0 ? *reinterpret_cast<const int4*>(table + e * size + block) : int4{};
        const int own = sum_before(x, here), upto = warp_scan(own), begin = sum + upto - own;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (i < here) sums[(block + i) * groups + e] = begin + sum_before(x, i);
        sum += __shfl_sync(FULL_MASK, upto, WARP_SIZE - 1);
      }
      if (lane == 0) sums[gridDim.x * groups + e] = sum;
    }
  }
  __device__ __forceinline__ void read_sums(int groups, const int* table) {
    const int* sums = table + groups * row_size();
#pragma unroll 1
    for (int e = threadIdx.x; e < groups; e += THREADS) {
      before[e] = __ldcg(sums + blockIdx.x * groups + e);
      total[e] = __ldcg(sums + gridDim.x * groups + e);
    }
  }

  // Phases 3 and 4; what grid_leave is to be told.
  __device__ __forceinline__ uint2 meet(const Groups& to, const Grouping& how) {
    uint2 left = {};
    left.x = grid_barrier(to.counters, gridDim.x);
    if (how.twice) {
      sum_rows(how.groups, to.table);
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

  // Places of group e that are taken.
  __device__ __forceinline__ int kept(int e, const Grouping& how) const {
    return min(total[e], how.capacity);
  }

  // Phase 5.
  __device__ __forceinline__ void set_offsets(const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    __syncthreads();
#pragma unroll 1
    for (int c = warp; c < CHUNKS; c += WARPS) {
      const int e = c * WARP_SIZE + lane;
      const int used = e < how.groups ? kept(e, how) : 0;
      const int own = tile_of(used + how.block_size - 1, how) * how.block_size;
      const int sum = warp_scan(own);
      offset[e] = sum - own;
      if (lane == WARP_SIZE - 1) chunk[c] = sum;
    }
    __syncthreads();
    const int own = lane < CHUNKS ? chunk[lane] : 0, upto = warp_scan(own);
#pragma unroll 1
    for (int c = warp; c < CHUNKS; c += WARPS)
      offset[c * WARP_SIZE + lane] += __shfl_sync(FULL_MASK, upto - own, c);
    if (threadIdx.x == WARP_SIZE - 1) offset[MOST] = upto;
    __syncthreads();
  }

  // Phase 6, of one item of a group; `rank`: among the block's.
  __device__ __forceinline__ int place(int item, int group, int rank, const Groups& to,
                                       const Grouping& how) {
    rank += before[group];
    if (rank >= how.capacity) return -1;
    const int place = offset[group] + rank, tile = tile_of(place, how);
    to.sorted_token_ids[place] = item;
    if (tile * how.block_size == place) to.expert_ids[tile] = group;
    return place;
  }

  // What stands beside the items: offsets and counts, and where there are several blocks sentinels.
  __device__ __forceinline__ void finish(const Groups& to, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int end = offset[how.groups];
    if (blockIdx.x == 0 && threadIdx.x == 0)
      to.offsets[how.groups] = end, *to.num_post_padded = end;
    if (gridDim.x == 1) {
#pragma unroll 1
      for (int e = threadIdx.x; e < how.groups; e += THREADS)
        to.offsets[e] = offset[e], to.counts[e] = kept(e, how);
      return;
    }
#pragma unroll 1
    for (int e = blockIdx.x + warp * gridDim.x; e < how.groups; e += gridDim.x * WARPS) {
      const int begin = offset[e], used = kept(e, how);
      if (lane == 0) to.offsets[e] = begin, to.counts[e] = used;
      for (int i = begin + used + lane; i < offset[e + 1]; i += WARP_SIZE)
        to.sorted_token_ids[i] = how.sentinel;
    }
    nobody_from(end, to, how);
  }

  // All of it, for a warp's items from `begin` to `end`; clear() has been called. `group(item)` is an
  // item's group or -1, and `first` that of item begin + lane (-1 from `end` on).
  template <typename Source>
  __device__ __forceinline__ void sort(int begin, int end, int first, Source group,
                                       const Groups& to, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int rank = take(first);
#pragma unroll 1
    for (int item = begin + WARP_SIZE; item < end; item += WARP_SIZE)
      take(item + lane < end ? group(item + lane) : -1);
    scan(how.groups, to.table);
    const uint2 left = gridDim.x > 1 ? meet(to, how) : uint2{};
    set_offsets(how);
#pragma unroll 1
    for (int i = begin; i < end; i += WARP_SIZE) {
      const int item = i + lane, mine = i == begin ? first : item < end ? group(item) : -1;
      int earlier = rank + (mine < 0 ? 0 : counts[warp][mine]);
      if (end - begin > WARP_SIZE) earlier = take(mine);
      if (item < end) to.inverse[item] = mine < 0 ? -1 : place(item, mine, earlier, to, how);
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
