// Numbers that blocks of a launch hand to one another without a barrier: each word says itself whether
// it has come. Beside the number it has a tag, another one each time that the word is written, and
// whoever wants it reads until the tag is the one he waits for: a trip to L2 for the writer and one for
// the reader, where a barrier of the grid takes several more.
//
//   32 bits   a number of 16 bits (the upper half) and a tag of 16
//   64 bits   a float and, in the upper half, a tag of 32
//
// Words are written and read whole, so nothing has to be ordered: there are no fences. A word may be
// written again once all who read it are known to have done so: which they are where everybody's later
// numbers are waited for in between. Tags follow one another, so that an old one never looks new.
#pragma once
#include "ptx/atomic.cuh"

template <typename T>
__device__ __forceinline__ u32 tagged(T x, u32 tag) {
  return static_cast<u32>(*reinterpret_cast<const u16*>(&x)) << 16 | (tag & 0xffff);
}
__device__ __forceinline__ u64 tagged(float x, u32 tag) {
  return static_cast<u64>(tag) << 32 | __float_as_uint(x);
}

template <typename T>
__device__ __forceinline__ T number(u32 word) {
  const u16 bits = word >> 16;
  return *reinterpret_cast<const T*>(&bits);
}
__device__ __forceinline__ float number(u64 word) {
  return __uint_as_float(static_cast<u32>(word));
}

__device__ __forceinline__ bool has_come(u64 word, u32 tag) { return word >> 32 == tag; }
__device__ __forceinline__ bool has_come(uint4 w, u32 tag) {
  return (((w.x ^ tag) | (w.y ^ tag) | (w.z ^ tag) | (w.w ^ tag)) & 0xffff) == 0;
}

// Words that are waited for together: all are read again, at once, until the last one has come, so that
// it is one trip however many there are. load(i): the i-th; there(i): whether it is wanted at all.
template <int COUNT, typename Word, typename Load, typename There>
__device__ __forceinline__ void await(Word (&words)[COUNT], u32 tag, const Load& load,
                                      const There& there) {
  bool all;
  do {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (there(i)) words[i] = load(i);
    all = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) all = all && (!there(i) || has_come(words[i], tag));
  } while (!all);
}

// Four numbers of 16 bits, side by side.
__device__ __forceinline__ uint2 numbers(uint4 words) {
  return make_uint2(__byte_perm(words.x, words.y, 0x7632), __byte_perm(words.z, words.w, 0x7632));
}
