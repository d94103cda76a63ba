// Items (a token's choices, in order of tokens) sorted by expert, stably, in one launch: a counting
// sort over the whole grid. Each warp has 32 items at a time of a piece of the list; warps and
// blocks have the pieces in order.
//
//   0. clear    block     where there is one: sentinels everywhere, and items go over them
//   1. count    warp      counts[warp][expert], lanes of one expert found by match.any
//   2. scan     64 experts a warp: counts of the warps before, and the block's sums
//   3. join     the same  over the grid, not where there is one block: counts of the blocks before,
//                         and of all (tile/grid_sums.cuh)
//   4. offsets  the same  sum of the experts before, each rounded up to whole tiles of block_size
//   5. place    warp      offset + blocks before + warps before + lanes before
//
// With few experts and no more than 128 items a warp, counts of a warp are bytes, and every warp
// scans those of all: so all sixteen tell the other blocks at once, and while these are awaited the
// block puts its items in order of experts, so that what a warp writes in the end is side by side.
//
// An item's place follows from what comes before it in the list, so it is the same in every run.
#pragma once
#include "tile/grid_sums.cuh"
#include "moe/grouping.cuh"

// Shared memory of a block, and what it does with it. MOST: groups, a multiple of 64.
template <int THREADS, int MOST>
struct alignas(16) Regroup {
  static constexpr int WARPS = THREADS / WARP_SIZE, CHUNK = 2 * WARP_SIZE, CHUNKS = MOST / CHUNK;
  static constexpr int OWN = ceil_div(CHUNKS, WARPS);  // chunks of a warp, every WARPS-th
  static constexpr int HELD = MOST > 256 ? 64 : 128;   // items of a warp that stay here
  static constexpr int ROUNDS = HELD / WARP_SIZE;
  static constexpr bool ORDERED = MOST <= 256;  // few enough that every warp goes over all of them
  static constexpr int PAIRS = ORDERED ? CHUNKS : 1, QUADS = ORDERED ? ceil_div(WARPS, 4) : 1;
  static constexpr int BITS = 11;  // of an item of the block
  static constexpr u32 NOBODY = ~0u;
  static_assert(WARPS * HELD <= 1 << BITS || !ORDERED, "group, rank and number are a word");
  static_assert(CHUNKS * CHUNK == MOST && CHUNKS <= WARP_SIZE, "one warp scans the chunks' sums");
  using Sums = GridSums<MOST>;
  int counts[WARPS][MOST];  // items of a warp; from phase 2 on its next item's rank in the block
  u32 quads[QUADS][ORDERED ? MOST : 4];  // the same for items in order: a byte each of four warps
  alignas(16) int total[MOST];           // items
  // Items in blocks before this one; from the chunk's first place to the group's.
  alignas(16) int2 base[MOST];
  int places[CHUNKS];
  // Ids; then, if these are all, group << 16 | rank among the warp's; in order, group << 22 | rank
  // in the block << 11 | number in the block.
  u32 held[WARPS][HELD];

  // Phase 0. A warp's counts are its own until phase 2.
  __device__ __forceinline__ void clear(const Groups& to, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    if (ORDERED && gridDim.x > 1) {
#pragma unroll
      for (int e = lane; e < MOST; e += WARP_SIZE) bytes()[e * 4] = 0;
    }
#pragma unroll 1
    for (int e = lane; e < how.groups; e += WARP_SIZE) counts[warp][e] = 0;
    if (gridDim.x == 1) nobody_from(0, threadIdx.x, THREADS, to, how);
    __syncwarp();
  }
  // This warp's bytes, of which every fourth is its own.
  __device__ __forceinline__ u8* bytes() {
    const int warp = threadIdx.x / WARP_SIZE;
    return reinterpret_cast<u8*>(quads[ORDERED ? warp / 4 : 0]) + warp % 4;
  }

  // Sentinels into the places from `begin` on, a whole tile's first, and no group to their tiles:
  // what the `thread`-th of so many does of it.
  __device__ __forceinline__ void nobody_from(int begin, int thread, int threads, const Groups& to,
                                              const Grouping& how) {
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

  // The same where counts are bytes. Lanes of one group find one another by bits in a word of it,
  // which takes less time than match where there are many groups; it is 0 before and after.
  __device__ __forceinline__ int take_in_order(int group) {
    const int lane = threadIdx.x % WARP_SIZE;
    u32* marks = reinterpret_cast<u32*>(counts[threadIdx.x / WARP_SIZE]);
    u8* mine = bytes();
    if (group >= 0) atomicOr(marks + group, 1u << lane);
    __syncwarp();
    const u32 alike = group < 0 ? 0 : marks[group], earlier = alike & ((1u << lane) - 1);
    const int rank = group < 0 ? 0 : mine[group * 4] + __popc(earlier);
    __syncwarp();
    if (group >= 0 && earlier == 0) mine[group * 4] = rank + __popc(alike), marks[group] = 0;
    __syncwarp();
    return rank;
  }

  // Places of group e that are taken.
  __device__ __forceinline__ int kept(int e, const Grouping& how) const {
    return min(total[e], how.capacity);
  }
  __device__ __forceinline__ int room(int items, const Grouping& how) const {
    return tile_of(min(items, how.capacity) + how.block_size - 1, how) * how.block_size;
  }

  // Phase 2.
  __device__ __forceinline__ void scan(const Sums& sums, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int c = warp + i * WARPS, e = c * CHUNK + lane * 2;
      if (c * CHUNK >= how.groups) break;
      int2 found[WARPS], sum = {0, 0}, next = {0, 0};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        found[w] = {e < how.groups ? counts[w][e] : 0, e + 1 < how.groups ? counts[w][e + 1] : 0};
        sum.x += found[w].x, sum.y += found[w].y;
      }
      if (gridDim.x > 1) {
#pragma unroll 1
        for (int turn = 0; turn < Sums::GROUP; ++turn)
          sums.add(e, {static_cast<u32>(sum.x), static_cast<u32>(sum.y)}, turn);
      }
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        *reinterpret_cast<int2*>(&counts[w][e]) = next;
        next.x += found[w].x, next.y += found[w].y;
      }
      total[e] = sum.x, total[e + 1] = sum.y;
    }
  }

  // Phases 4 and 5.
  __device__ __forceinline__ void join(const Sums& sums, u32 (&left)[OWN], const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int c = warp + i * WARPS, e = c * CHUNK + lane * 2;
      if (c * CHUNK >= how.groups) break;
      uint4 found = {0, 0, 0, 0};
      if (gridDim.x > 1) {
        found = sums.get(e);
        __syncwarp();
        if (lane == 0) left[i] = sums.leave(c);
      } else {
        found.z = total[e], found.w = total[e + 1];
      }
      const int one = room(found.z, how), two = room(found.w, how), upto = warp_scan(one + two);
      *reinterpret_cast<int2*>(&total[e]) = {static_cast<int>(found.z), static_cast<int>(found.w)};
      *reinterpret_cast<int4*>(&base[e]) = {static_cast<int>(found.x), upto - one - two,
                                            static_cast<int>(found.y), upto - two};
      if (lane == WARP_SIZE - 1) places[c] = upto;
    }
    __syncthreads();
  }

  // A lane has where one chunk begins, and in y where the last one ends.
  __device__ __forceinline__ int2 scan_chunks(const Grouping& how) const {
    if (CHUNKS == 1) return {0, places[0]};
    const int lane = threadIdx.x % WARP_SIZE;
    const int own = lane * CHUNK < how.groups ? places[lane] : 0, upto = warp_scan<CHUNKS>(own);
    return {upto - own, __shfl_sync(FULL_MASK, upto, CHUNKS - 1)};
  }
  // Of the chunk of a group, or of -1. All lanes of the warp call it.
  static __device__ __forceinline__ int start_of(int2 chunks, int group) {
    return CHUNKS == 1 ? 0 : __shfl_sync(FULL_MASK, chunks.x, max(group, 0) / CHUNK);
  }

  // What stands beside the items: offsets and counts, and where there are several blocks sentinels.
  // The last warps do it: the first ones have read the sums.
  __device__ __forceinline__ void finish(int2 chunks, const Groups& to, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = WARPS - 1 - threadIdx.x / WARP_SIZE;
    const int end = chunks.y;
    if (blockIdx.x == 0 && threadIdx.x == THREADS - 1)
      to.offsets[how.groups] = end, *to.num_post_padded = end;
    if (gridDim.x == 1) {
#pragma unroll 1
      for (int first = warp * WARP_SIZE; first < how.groups; first += THREADS) {
        const int start = start_of(chunks, first), e = first + lane;
        if (e < how.groups) to.offsets[e] = start + base[e].y, to.counts[e] = kept(e, how);
      }
      return;
    }
#pragma unroll 1
    for (int e = blockIdx.x + warp * gridDim.x; e < how.groups; e += gridDim.x * WARPS) {
      const int begin = start_of(chunks, e) + base[e].y, used = kept(e, how);
      if (lane == 0) to.offsets[e] = begin, to.counts[e] = used;
#pragma unroll 1
      for (int i = used + lane; i < room(used, how); i += WARP_SIZE)
        to.sorted_token_ids[begin + i] = how.sentinel;
    }
    const bool few = how.places - end <= static_cast<int>(gridDim.x) * WARP_SIZE;
    if (few && warp != 1) return;  // one warp of each block is enough: the others are done
    const int width = few ? WARP_SIZE : THREADS;
    nobody_from(end, blockIdx.x * width + threadIdx.x % width, gridDim.x * width, to, how);
  }

  // Behind all of it: whoever was the last to read a chunk's sums clears them.
  __device__ __forceinline__ void leave(const Sums& sums, const u32 (&left)[OWN],
                                        const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int c = warp + i * WARPS;
      if (c * CHUNK < how.groups && sums.is_last(__shfl_sync(FULL_MASK, left[i], 0)))
        sums.clear(c * CHUNK + lane * 2);
    }
  }

  // Phase 6, of an item of a group whose chunk begins at `start`; `rank`: in the block. -1:
  // dropped.
  __device__ __forceinline__ int place(int group, int rank, int start, const Grouping& how) const {
    const int2 from = base[group];
    return from.x + rank < how.capacity ? start + from.y + from.x + rank : -1;
  }
  static __device__ __forceinline__ void put(int item, int group, int place, const Groups& to,
                                             const Grouping& how) {
    if (place < 0) return;
    const int tile = tile_of(place, how);
    to.sorted_token_ids[place] = item;
    if (tile * how.block_size == place) to.expert_ids[tile] = to.name(group, how);
  }

  // The sum of the first `warps` bytes of a group's counts.        PTX ISA: dp4a
  __device__ __forceinline__ int of_warps(int warps, int group) const {
    u32 sum = 0;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const int first = warps - q * 4;
      const u32 mask = first <= 0 ? 0 : first >= 4 ? ~0u : (1u << first * 8) - 1;
      sum = __dp4a(quads[q][group] & mask, 0x01010101u, sum);
    }
    return sum;
  }

  // Phases 2 and 3 of items in order, each a word as in count(); `each`: items of a warp. How many
  // the block has. A lane scans 2 * PAIRS groups side by side.
  __device__ __forceinline__ int order(const Sums& sums, u32 (&items)[ROUNDS], int each,
                                       const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    constexpr int SIDE = 2 * PAIRS;
    int own[SIDE], sum = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SIDE; ++i) own[i] = of_warps(WARPS, lane * SIDE + i);
#pragma unroll
    for (int i = 0; i < SIDE; i += 2) {
      if ((lane * SIDE + i) / CHUNK * CHUNK >= how.groups) continue;  // nobody reads these
      const uint2 pair = {static_cast<u32>(own[i]), static_cast<u32>(own[i + 1])};
#pragma unroll
      for (int turn = 0; turn < Sums::GROUP; turn += WARPS)
        sums.add(lane * SIDE + i, pair, turn + warp);
    }
#pragma unroll
    for (int i = 0; i < SIDE; ++i) sum += own[i];
    const int upto = warp_scan(sum);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      if (r * WARP_SIZE >= each) break;
      const int group = items[r] == NOBODY ? 0 : items[r] >> 16;
      int first = __shfl_sync(FULL_MASK, upto - sum, group / SIDE);
#pragma unroll
      for (int i = 0; i + 1 < SIDE; ++i) {
        const int before = __shfl_sync(FULL_MASK, own[i], group / SIDE);
        if (i < group % SIDE) first += before;
      }
      if (items[r] == NOBODY) continue;
      const u32 rank = of_warps(warp, group) + (items[r] & 0xffff);
      items[r] = group << 16 | rank;
      held[0][first + rank] = (group << BITS | rank) << BITS | (warp * each + r * WARP_SIZE + lane);
    }
    __syncthreads();
    return __shfl_sync(FULL_MASK, upto, WARP_SIZE - 1);
  }

  // Phases 1 to 3 of items in order; `items`: this lane's, each a word as in count(). How many the
  // block has.
  template <typename Source>
  __device__ __forceinline__ int count_in_order(const Sums& sums, u32 (&items)[ROUNDS],
                                                const Share& mine, Source group,
                                                const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      items[r] = NOBODY;
      if (r * WARP_SIZE >= mine.each) continue;
      const int item = mine.begin + r * WARP_SIZE + lane;
      const int e = item < mine.end ? group(item) : -1, rank = take_in_order(e);
      if (e >= 0) items[r] = e << 16 | rank;
    }
    return order(sums, items, mine.each, how);
  }

  // Phase 5 of the same; `early`: the first of the block's items for this thread.
  __device__ __forceinline__ void place_in_order(const u32 (&items)[ROUNDS], u32 early, int there,
                                                 const Share& mine, int2 chunks, const Groups& to,
                                                 const Grouping& how) const {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll 1
    for (int i = threadIdx.x; i - lane < there; i += THREADS) {
      const u32 word = i < THREADS ? early : i < there ? held[0][i] : NOBODY;
      const int e = word == NOBODY ? -1 : word >> 2 * BITS, start = start_of(chunks, e);
      if (e < 0) continue;
      const int rank = word >> BITS & ((1 << BITS) - 1), number = word & ((1 << BITS) - 1);
      put(blockIdx.x * WARPS * mine.each + number, e, place(e, rank, start, how), to, how);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      if (r * WARP_SIZE >= mine.each) continue;
      const int item = mine.begin + r * WARP_SIZE + lane;
      const int e = items[r] == NOBODY ? -1 : items[r] >> 16, start = start_of(chunks, e);
      if (item < mine.end) to.inverse[item] = e < 0 ? -1 : place(e, items[r] & 0xffff, start, how);
    }
  }

  // Phase 1 of any number of items. A word is group << 16 | rank among the warp's.
  template <typename Source>
  __device__ __forceinline__ void count(const Share& mine, Source group) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll 1
    for (int i = mine.begin; i < mine.end; i += WARP_SIZE) {
      const int e = i + lane < mine.end ? group(i + lane) : -1, rank = take(e);
      if (mine.each <= HELD) held[warp][i + lane - mine.begin] = e < 0 ? NOBODY : e << 16 | rank;
    }
  }

  // Phase 5 of the same: as in count(), unless they were held.
  template <typename Source>
  __device__ __forceinline__ void place_all(const Share& mine, Source group, int2 chunks,
                                            const Groups& to, const Grouping& how) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const bool all = mine.each <= HELD;
#pragma unroll 1
    for (int i = mine.begin; i < mine.end; i += WARP_SIZE) {
      const u32 word = all ? held[warp][i + lane - mine.begin] : NOBODY;
      int e = word == NOBODY ? -1 : word >> 16, rank = word & 0xffff;
      if (all)
        rank += e < 0 ? 0 : counts[warp][e];
      else
        e = i + lane < mine.end ? group(i + lane) : -1, rank = take(e);
      const int start = start_of(chunks, e);
      if (i + lane >= mine.end) continue;
      const int at = e < 0 ? -1 : place(e, rank, start, how);
      to.inverse[i + lane] = at;
      if (e >= 0) put(i + lane, e, at, to, how);
    }
  }

  // All of it, for a warp's items; clear() has been called. `group(item)` is an item's group or -1.
  template <typename Source>
  __device__ __forceinline__ void sort(const Share& mine, Source group, const Groups& to,
                                       const Grouping& how) {
    const Sums sums = {to.counters};
    const bool worth = MOST <= 128 || mine.each > 2 * WARP_SIZE;  // many groups take time to scan
    const bool ordered = ORDERED && worth && gridDim.x > 1 && mine.each <= HELD;
    u32 left[OWN] = {}, items[ROUNDS], early = NOBODY;
    int there = 0;
    if (ordered) {
      there = count_in_order(sums, items, mine, group, how);
      if (threadIdx.x < there) early = held[0][threadIdx.x];
    } else {
      count(mine, group);
      scan(sums, how);
    }
    join(sums, left, how);
    const int2 chunks = scan_chunks(how);
    if (ordered)
      place_in_order(items, early, there, mine, chunks, to, how);
    else
      place_all(mine, group, chunks, to, how);
    finish(chunks, to, how);
    if (gridDim.x > 1) leave(sums, left, how);
  }
};
