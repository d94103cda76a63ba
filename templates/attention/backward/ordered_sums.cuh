// Blocks of keys that add to dQ in a fixed order (backward_dkdv.cu).
//
// A thread block draws a number, and blocks of keys are numbered so that those of one head come in
// their order, a section of heads beside one another; each goes through its tiles of queries from
// the last one backwards. A tile is added to by its blocks of keys in their order:
//
//   block 0   4 3 2 1 0              the first one stores, the others add
//   block 1     4 3 2 1              (with a causal mask it does not see tile 0)
//   block 2       4 3 2
//           ------------> time
//
// Whoever waits for a block has a higher number than that, and numbers are drawn by thread blocks
// that run: nobody waits for a block that has not begun.
#pragma once
#include "ptx/atomic.cuh"
#include "attention/key_block.cuh"

// The number that this thread block has drawn, by way of a word of shared memory; the counter is 0
// before and after the launch.
__device__ __forceinline__ int draw_number(u32* counter, u32 word) {
  if (threadIdx.x == 0) store_shared_word(word, atom_inc_relaxed(counter, gridDim.x));
  __syncthreads();
  const int number = load_shared_word(word);
  __syncthreads();
  return number;
}

// The index of KeyBlock for a number.
template <int BLOCK_K>
__device__ __forceinline__ int abreast_index(int number, int seqlen_k, int heads_abreast) {
  const int blocks = ceil_div(seqlen_k, BLOCK_K), heads = gridDim.x / blocks;
  const int first = number / (heads_abreast * blocks) * heads_abreast;
  const int width = min(heads_abreast, heads - first), within = number - first * blocks;
  return (first + within % width) * blocks + within / width;
}

// By one thread: until so many blocks have added to a tile.
__device__ __forceinline__ void wait_for_turn(const u32* counter, u32 rank) {
  while (load_acquire(counter) != rank) {
  }
}
