// Where a token lies in a paged KV cache, and which part of it a thread has.
//
// A slot is a page times the tokens of a page, plus the token's place in the page. Pages are
// [num_pages, page_size, heads, head_dim] or [num_pages, heads, page_size, head_dim]. Steps are in
// elements and below 2^31, so that an offset is a 32-bit product or two.
#pragma once
#include "prelude.cuh"

__device__ __forceinline__ i64 wide(int a, int b) { return static_cast<i64>(a) * b; }

struct PagedPool {
  int page_step, head_step, token_step;
  u32 slots;      // of all pages
  int page_log2;  // a page has 1 << page_log2 tokens

  // Slots below 0, and those that there are not, belong to no token.
  __device__ __forceinline__ bool has(int slot) const { return static_cast<u32>(slot) < slots; }

  __device__ __forceinline__ i64 offset(int slot, int head) const {
    const int page = slot >> page_log2, token = slot & ((1 << page_log2) - 1);
    return wide(page, page_step) + wide(token, token_step) + wide(head, head_step);
  }
};

// A block has `group` tokens at a time, `lanes` threads to each; where a token is wider than a
// block, blocks of y = 2 * i and 2 * i + 1 have its keys' and its values' i-th piece. The thread's
// access is the same one of each of its tokens. Integers are divided by a product with 1 / divisor
// in fp32: exact below 2^22, since a quotient of x + 1/2 is at least 1 / (2 * divisor) away from a
// whole one.
struct Lanes {
  int member;  // of the block's tokens, the thread's; >= group where it has none
  int column;  // access within a token
  int head;    // of that
  int first;   // the first token of the thread; the next one is `group` further

  __device__ __forceinline__ Lanes(int lanes, float lanes_inverse, float head_inverse, int group,
                                   int unroll) {
    member = quotient(threadIdx.x, lanes_inverse);
    column = (blockIdx.y >> 1) * lanes + threadIdx.x - member * lanes;
    head = quotient(column, head_inverse);
    first = blockIdx.x * group * unroll + member;
  }

  static __device__ __forceinline__ int quotient(int x, float inverse) {
    return static_cast<int>((static_cast<float>(x) + 0.5f) * inverse);
  }

  static __device__ __forceinline__ bool values() { return blockIdx.y & 1; }
};
