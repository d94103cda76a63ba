// Which query rows of which head a block works on, from its index in a 1-D grid. Blocks of one head
// are neighbours (they share K and V in L2), those with the longest causal rows first:
//
//   index = (blocks_q - 1 - q0 / BLOCK_Q) + blocks_q * (head + heads_q * batch)
#pragma once
#include "prelude.cuh"

template <int BLOCK_Q>
struct QueryBlock {
  int q0;  // first row
  int head, batch;

  __device__ __forceinline__ QueryBlock(int index, int seqlen_q, int heads_q) {
    const int blocks_q = ceil_div(seqlen_q, BLOCK_Q);
    q0 = (blocks_q - 1 - index % blocks_q) * BLOCK_Q;
    head = index / blocks_q % heads_q;
    batch = index / blocks_q / heads_q;
  }
};
