// A warp's rows of a weight of codes on their way to its registers: by cp.async, to places that no
// other lane reads, so that nobody waits for anybody, and then 16 bytes a lane without bank conflicts.
// (What is in the registers then: quantize/weights.cuh.)
//
// A slot has a group, 128 of k, of 8 EIGHTS rows: 512 bytes for each eight of them and span of k.
// Scales come straight to registers, well ahead.
#pragma once
#include "ptx/cp_async.cuh"
#include "quantize/weights.cuh"

constexpr int GROUP = 128;  // of k, with a scale

template <typename Weights, typename T, int EIGHTS>
struct CodedRows {
  static constexpr int SPANS = GROUP / Weights::SPAN, CHUNK_BYTES = WARP_SIZE * 16;
  static constexpr int SLOT_BYTES = EIGHTS * SPANS * CHUNK_BYTES;
  const u8* codes[EIGHTS];
  int left;  // of k, from the lane's first on

  // From `group` on; output(i): the weight's output for row 8 i + lane / 4. Zeros from k = `end` on.
  template <typename Output>
  __device__ __forceinline__ void place(const u8* weight, int k, int group, const Output& output,
                                        int end) {
    const int bytes = k / 8 * Weights::BITS, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i)
      codes[i] = weight + static_cast<i64>(output(i)) * bytes + (group * SPANS * 4 + t) * 16;
    left = end - group * GROUP - t * Weights::CHUNK_K;
  }
  // Of the group `ahead` groups on; zeros beyond the end of k. `slot`: the lane's part of it. Of
  // PARTS warps each copies some.
  template <int PARTS = 1>
  __device__ __forceinline__ void copy(u32 slot, int ahead, int part = 0) const {
    static_assert(EIGHTS * SPANS % PARTS == 0, "equal parts");
#pragma unroll
    for (int i = 0; i < EIGHTS * SPANS; ++i) {
      if (i / (EIGHTS * SPANS / PARTS) != part) continue;
      const int span = ahead * SPANS + i % SPANS;
      cp_async_16(slot + i * CHUNK_BYTES, codes[i / SPANS] + span * 64,
                  span * Weights::SPAN < left ? 16 : 0);
    }
  }
};

// The scales of those rows, of GROUPS groups; 0 from group `end` on.
template <typename T, int EIGHTS, int GROUPS>
struct RowScales16 {
  T scales[GROUPS][EIGHTS];
  const T* from[EIGHTS];
  int left;  // groups that there are

  template <typename Output>
  __device__ __forceinline__ void place(const T* all, int end, int groups, int group,
                                        const Output& output) {
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) from[i] = all + (static_cast<i64>(output(i)) * groups + group);
    left = end - group;
  }
  __device__ __forceinline__ void load(int group) {
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i)
      scales[group][i] = group < left ? from[i][group] : static_cast<T>(0.f);
  }
};
