// A warp's part of a tile of int4 codes, as a stage of step/weight_ring.cuh has them: 16 rows of the
// weight, PART columns, times up to eight rows of x.
//
// Of a group of 128 columns, which has a scale of its own for each row, lane (g, t) has the 16 bytes of
// codes t of rows g and g + 8 (quantize/weights.cuh): columns 32t to 32t + 31, which eight products take
// by fours. x is read in the same order, 16 bytes for two of them. Lanes t = 2 and 3 take these pairs in
// another order, so that the four lanes' 16 bytes, 64 bytes apart, are in different banks:
//
//   pair          0   1   2   3
//   t = 0, 1      0   1   2   3     of the 16 bytes of x, and of the words of codes
//   t = 2, 3      1   0   3   2
#pragma once
#include "ptx/memory.cuh"
#include "quantize/weights.cuh"

template <typename T>
struct CodedPart {
  using Weights = Int4Weights<T>;
  static constexpr int GROUP = Weights::SPAN;
  u32 low, high;                // a lane's codes of rows g and g + 8
  u32 low_scales, high_scales;  // of those rows
  u32 x;                        // of the lane's token
  bool turned;                  // see above

  // d += ..., of so many columns, whole groups.
  __device__ __forceinline__ void multiply(float (&d)[4], int columns) const {
#pragma unroll 1
    for (int at = 0; at < columns; at += GROUP) {
      const uint4 first = codes(low ^ at / 2), second = codes(high ^ at / 2);
      float sums[2][4] = {};
#pragma unroll
      for (int pair = 0; pair < Weights::STEPS / 2; ++pair) {
        const uint4 own = load_shared_chunk(x + at * sizeof(T) + (turned ? pair ^ 1 : pair) * 16);
        u32 a[4];
        weight_fragment<Weights>(a, first, second, 2 * pair);
        mma_m16n8k16<T>(sums[0], a, own.x, own.y);
        weight_fragment<Weights>(a, first, second, 2 * pair + 1);
        mma_m16n8k16<T>(sums[1], a, own.z, own.w);
      }
      const float by[2] = {load_shared_number<T>(low_scales + at / 64),
                           load_shared_number<T>(high_scales + at / 64)};
#pragma unroll
      for (int i = 0; i < 4; ++i) d[i] += by[i / 2] * (sums[0][i] + sums[1][i]);
    }
  }

 private:
  __device__ __forceinline__ uint4 codes(u32 address) const {
    const uint4 c = load_shared_chunk(address);
    return turned ? make_uint4(c.y, c.x, c.w, c.z) : c;
  }
};
