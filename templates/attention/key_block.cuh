// Which keys of which KV head a block works on, from its index in a 1-D grid. Blocks of one head
// are neighbours (they share its queries in L2); with a causal mask those seen by most queries come
// first:
//
//   index = k0 / BLOCK_K + blocks_k * (head + heads_kv * batch)
#pragma once
#include "prelude.cuh"

template <int BLOCK_K>
struct KeyBlock {
  int k0;  // first key
  int head, batch;

  __device__ __forceinline__ KeyBlock(int index, int seqlen_k, int heads_kv) {
    const int blocks_k = ceil_div(seqlen_k, BLOCK_K);
    k0 = index % blocks_k * BLOCK_K;
    head = index / blocks_k % heads_kv;
    batch = index / blocks_k / heads_kv;
  }
};
