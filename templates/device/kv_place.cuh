// Where a token lies in a paged KV cache, and which part of it a thread has.
//
// A slot is a page times the tokens of a page, plus the token's place in the page. Pages are
// [num_pages, page_size, heads, head_dim] or [num_pages, heads, page_size, head_dim]; in elements,
// `Strides` has the step from page to page (batch), head to head and token to token (row).
#pragma once
#include "prelude.cuh"

struct PagedPool {
  Strides strides;
  u32 slots;      // of all pages
  int page_log2;  // a page has 1 << page_log2 tokens

  // Slots below 0, and those that there are not, belong to no token.
  __device__ __forceinline__ bool has(int slot) const { return static_cast<u32>(slot) < slots; }

  __device__ __forceinline__ i64 offset(int slot, int head) const {
    const int page = slot >> page_log2, token = slot & ((1 << page_log2) - 1);
    return page * strides.batch + token * strides.row + head * strides.head;
  }
};

// A block has `group` tokens at a time, `lanes` threads to each; a token wider than a block is
// in `pieces`. The thread's access is the same one of each of its tokens.
struct Lanes {
  int member;  // of the block's tokens, the thread's; >= group where it has none
  int column;  // access within a token
  i64 first;   // the first token of the thread; the next one is `group` further

  __device__ __forceinline__ Lanes(int lanes, int pieces, int group, int unroll) {
    member = threadIdx.x / lanes;
    column = (blockIdx.x % pieces) * lanes + threadIdx.x - member * lanes;
    first = static_cast<i64>(blockIdx.x / pieces) * group * unroll + member;
  }
};
