// Four lanes that share rows of fragments (4g + t) trade words, so that each has neighbouring ones.
//
//   words of lane t before    block 0: a[t]    block 1: b[t]    block 2: c[t]    block 3: d[t]
//   of lanes 0, 1, 2, 3 after       a[0..3]          b[0..3]          c[0..3]          d[0..3]
//
// With eight columns of 16 bits a block, a lane then stores 16 bytes of a row at once.
#pragma once
#include "prelude.cuh"

// The lane whose number differs in bit `DISTANCE` gives y to those of the lower half, which give x.
template <int DISTANCE>
__device__ __forceinline__ void trade_words(u32& x, u32& y, int lane) {
  const bool upper = lane & DISTANCE;
  const u32 other = __shfl_xor_sync(FULL_MASK, upper ? x : y, DISTANCE);
  if (upper)
    x = other;
  else
    y = other;
}

// By whole warps.                                                     PTX ISA: shfl.sync.bfly.b32
__device__ __forceinline__ uint4 quad_transpose(const u32* words, int lane) {
  u32 w[4] = {words[0], words[1], words[2], words[3]};
  trade_words<1>(w[0], w[1], lane), trade_words<1>(w[2], w[3], lane);
  trade_words<2>(w[0], w[2], lane), trade_words<2>(w[1], w[3], lane);
  return make_uint4(w[0], w[1], w[2], w[3]);
}
