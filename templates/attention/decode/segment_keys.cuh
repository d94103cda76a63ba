// The keys of a segment that one group of warps takes, every GROUPS-th step of KEYS, and their way to
// the group's ring of STAGES steps.
#pragma once
#include "ptx/cp_async.cuh"
#include "attention/decode/copy.cuh"
#include "attention/decode/schedule.cuh"

template <typename Tile, typename T, int GROUPS, int GROUP_THREADS, int STAGES>
struct SegmentKeys {
  static constexpr int KEYS = Tile::ROWS, STAGE_BYTES = 2 * Tile::BYTES;
  PageList pages;
  HeadPages<T> k, v;
  int first, end, seen;  // keys of the segment; those before `seen` are seen by none
  int group, steps;      // the group's own

  __device__ __forceinline__ SegmentKeys() {}  // to be assigned

  // From base_key on, where the units of a sequence begin.
  __device__ __forceinline__ SegmentKeys(const Segment& segment, const PageList& of_sequence,
                                         const HeadPages<T>& keys, const HeadPages<T>& values,
                                         int base_key, int length, int unit_log2, int first_seen,
                                         int of_warps)
      : pages(of_sequence),
        k(keys),
        v(values),
        first(base_key + ((segment.unit - segment.head_begin) << unit_log2)),
        end(min(length, base_key + ((segment.end - segment.head_begin) << unit_log2))),
        seen(first_seen),
        group(of_warps) {
    const int all = ceil_div(max(end - first, 0), KEYS);
    steps = group < all ? (all - 1 - group) / GROUPS + 1 : 0;
  }

  __device__ __forceinline__ int key(int step) const {
    return first + (step * GROUPS + group) * KEYS;
  }
  // Of this lane's key; a page before a window may be somebody else's now.
  __device__ __forceinline__ int page(int step) const {
    const int at = key(step) + threadIdx.x % WARP_SIZE % KEYS;
    return seen <= at && at < end ? pages.page(at) : -1;
  }
  __device__ __forceinline__ void fetch(u32 ring, int step, int page, int page_log2,
                                        u32 num_pages) const {
    const u32 stage = ring + step % STAGES * STAGE_BYTES;
    copy_step<Tile, GROUP_THREADS>(stage, stage + Tile::BYTES, k, v, threadIdx.x % GROUP_THREADS,
                                   page, page_log2, num_pages, key(step));
  }
  // Steps FIRST .. LAST - 1, as far as there are any; each is a group of copies. before(its first key).
  template <int FIRST, int LAST, typename Before>
  __device__ __forceinline__ void fetch_first(u32 ring, const int (&page)[STAGES], int page_log2,
                                              u32 num_pages, Before before) const {
#pragma unroll
    for (int step = FIRST; step < LAST; ++step) {
      before(key(step));
      if (step < steps) fetch(ring, step, page[step], page_log2, num_pages);
      cp_async_commit();
    }
  }
  template <int FIRST, int LAST>
  __device__ __forceinline__ void fetch_first(u32 ring, const int (&page)[STAGES], int page_log2,
                                              u32 num_pages) const {
    fetch_first<FIRST, LAST>(ring, page, page_log2, num_pages, [](int) {});
  }
  __device__ __forceinline__ void look_up(int (&of)[STAGES]) const {
#pragma unroll
    for (int step = 0; step < STAGES; ++step) of[step] = page(step);
  }
};
