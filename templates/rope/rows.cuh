// Which heads of which tokens a thread of a rotary embedding has, and its way through them.
//
// 2^lanes_log2 threads have the pairs of one head; together they are a place. A place has several
// heads of one token, q's and then k's, which share its sines and cosines:
//
//   block   head_slots x token_slots places
//   place   heads  first, first + head_slots, first + 2 * head_slots …   `per_place` of them
#pragma once
#include "rope/pairs.cuh"

struct RopePlace {
  int lane, head, token;
  int head_slots;
};

// Places beside each other, 2^inner_log2 of them, have heads of one token where `heads_first`, and
// tokens of one head otherwise: whichever lie closer together in memory.
template <int THREADS>
__device__ __forceinline__ RopePlace rope_place(int lanes_log2, int inner_log2, int per_place,
                                                bool heads_first) {
  const int slot = threadIdx.x >> lanes_log2, slots = THREADS >> lanes_log2;
  const int inner = slot & ((1 << inner_log2) - 1), outer = slot >> inner_log2;
  const int outer_slots = slots >> inner_log2;
  const int head_slots = heads_first ? 1 << inner_log2 : outer_slots;
  const int token_slots = heads_first ? outer_slots : 1 << inner_log2;
  return {static_cast<int>(threadIdx.x) & ((1 << lanes_log2) - 1),
          static_cast<int>(blockIdx.y) * head_slots * per_place + (heads_first ? inner : outer),
          static_cast<int>(blockIdx.x) * token_slots + (heads_first ? outer : inner), head_slots};
}

// The rows of one token in an array and in what is written: that of head i is i * heads away.
template <typename T>
struct RopeToken {
  const T* source;
  T* target;
  i64 source_heads, target_heads;

  __device__ __forceinline__ RopeToken(const T* x, T* out, const Strides& strides,
                                       const Strides& out_strides, u32 batch, u32 row)
      : source(x + batch * strides.batch + row * strides.row),
        target(out + batch * out_strides.batch + row * out_strides.row),
        source_heads(strides.head),
        target_heads(out_strides.head) {}
};

// The heads of one token: q's, then k's.
template <typename T>
struct RopeHeads {
  RopeToken<T> q, k;
  u32 heads_q;
  int rotary_dim, head_dim;

  // Unsigned numbers: a product with 64 bits is half as long.
  __device__ __forceinline__ const T* source(u32 head) const {
    const bool of_q = head < heads_q;
    const T* first = of_q ? q.source : k.source;
    return first + (of_q ? head : head - heads_q) * (of_q ? q.source_heads : k.source_heads);
  }
  __device__ __forceinline__ T* target(u32 head) const {
    const bool of_q = head < heads_q;
    T* first = of_q ? q.target : k.target;
    return first + (of_q ? head : head - heads_q) * (of_q ? q.target_heads : k.target_heads);
  }
};

// Turn heads head, head + step … below `end`, by the angles that `angles(cosine, sine)` sets. That
// is called once, with the first UNROLL heads on their way.
template <typename Pairs, int UNROLL, typename T, typename Angles>
__device__ __forceinline__ void turn_heads(const RopeHeads<T>& heads, int lane, int head, int step,
                                           int end, Angles angles) {
  Pairs x[UNROLL];
  float cosine[Pairs::WIDTH], sine[Pairs::WIDTH];
  for (bool begun = false; head < end; head += UNROLL * step) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (head + i * step < end) {
        x[i].load(heads.source(head + i * step), lane, heads.rotary_dim);
      }
    }
    if (!begun) angles(cosine, sine);
    begun = true;
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (head + i * step < end) {
        x[i].turn(cosine, sine);
        x[i].store(heads.target(head + i * step), lane, heads.rotary_dim);
      }
    }
  }
}

// Copy the columns of the same heads that do not turn; in place there is nothing to do.
template <typename Pairs, typename T>
__device__ __forceinline__ void copy_rest(const RopeHeads<T>& heads, int lane, int head, int step,
                                          int end) {
  for (; head < end; head += step) {
    const T* from = heads.source(head);
    T* to = heads.target(head);
    if (from == to) continue;
#pragma unroll 1
    for (int i = heads.rotary_dim + lane * Pairs::WIDTH; i < heads.head_dim;
         i += heads.rotary_dim / 2) {  // as many columns as the lanes have
      typename Pairs::Access x;
      read(x, from + i);
      write(to + i, x);
    }
  }
}
