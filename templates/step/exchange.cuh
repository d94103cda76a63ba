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

// Words that all blocks wait for are there several times, and a block reads one of these: an L2 slice gives
// one block after the other the line that they all want.
template <int COPIES, typename Word>
struct Copies {
  Word* first;
  int size;  // of one

  __device__ __forceinline__ void store(int i, Word word) const {
#pragma unroll
    for (int copy = 0; copy < COPIES; ++copy) store_word(first + copy * size + i, word);
  }
  // Two words as one of 64 bits.
  __device__ __forceinline__ void store_pair(int i, u64 pair) const {
#pragma unroll
    for (int copy = 0; copy < COPIES; ++copy)
      store_word(reinterpret_cast<u64*>(first + copy * size + i), pair);
  }
  __device__ __forceinline__ const Word* own() const {  // of this block
    return first + blockIdx.x % COPIES * size;
  }
};

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
// Bits in which tags are not `tag`; those of words of 32 bits are the lower 16.
__device__ __forceinline__ u32 tags_apart(u64 word, u32 tag) {
  return static_cast<u32>(word >> 32) ^ tag;
}
__device__ __forceinline__ u32 tags_apart(uint4 w, u32 tag) {
  return (w.x ^ tag) | (w.y ^ tag) | (w.z ^ tag) | (w.w ^ tag);
}
__device__ __forceinline__ bool has_come(uint4 w, u32 tag) {
  return (tags_apart(w, tag) & 0xffff) == 0;
}

// Words that are waited for together: those that have not come are read again, at once, so that it is one
// trip however many there are. Those that have come are not: all blocks read the same lines, and an L2
// slice gives them one after the other. at(i): where the i-th is; there(i): whether it is wanted at all.
template <int COUNT, typename Word, typename At, typename There>
__device__ __forceinline__ void await(Word (&words)[COUNT], u32 tag, const At& at,
                                      const There& there) {
  u32 missing = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) missing |= there(i) ? 1u << i : 0, words[i] = Word();
  while (missing) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) load_words_if(words[i], at(i), missing >> i & 1);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) missing &= ~((has_come(words[i], tag) ? 1u : 0u) << i);
  }
}

// Four numbers of 16 bits, side by side.
__device__ __forceinline__ uint2 numbers(uint4 words) {
  return make_uint2(__byte_perm(words.x, words.y, 0x7632), __byte_perm(words.z, words.w, 0x7632));
}
