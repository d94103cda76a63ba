// A mask of bytes as attention's backward on sm_90 reads it, which has keys as rows: bits, made
// beforehand (attention/backward_mask.cu).
//
//   bits [.., tiles of queries, keys in whole blocks][BLOCK_Q / 32]    bit i of word w of a key: query
//                                                                      32 w + i of the tile sees it
//
// So a block of keys beside a tile is a run of bytes, which travels with what rows bring along.
#pragma once
#include "ptx/memory.cuh"
#include "tile/tile_copy.cuh"

template <int BLOCK_Q, int BLOCK_K>
struct MaskBits {
  static constexpr int WORDS = BLOCK_Q / 32, BYTES = BLOCK_K * WORDS * 4;  // of a key, of a tile

  // Scores of keys that a query does not see become -inf. `key`, `query`: the first of the warp's.
  template <int N>
  __device__ __forceinline__ static void hide(float (&s)[1][N][4], u32 bits, int lane, int key,
                                              int query) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 of_key = bits + (key + lane / 4 + half * 8) * WORDS * 4 + query / 8;
#pragma unroll
      for (int word = 0; word < N / 4; ++word) {
        const u32 seen = static_cast<u32>(load_shared_word(of_key + word * 4)) >> lane % 4 * 2;
#pragma unroll
        for (int n = 4 * word; n < 4 * word + 4; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (!(seen >> (n % 4 * 8 + i) & 1)) s[0][n][2 * half + i] = NEG_INFINITY;
      }
    }
  }
};
