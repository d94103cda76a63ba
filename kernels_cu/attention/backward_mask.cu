/* A mask of bytes as bits, for attention's backward on sm_90 (backward_sm90/mask.cuh). A warp has
   a tile of BLOCK_Q queries and BLOCK_K keys, a lane four of these: it reads them of one query after
   the other, at once where rows allow it. Queries past the last one are like that one, keys past the
   last one are hidden. Every architecture. */
#include "prelude.cuh"

constexpr int BLOCK_Q = ${block_q}, THREADS = ${threads};
constexpr int BLOCK_K = 4 * WARP_SIZE, WORDS = BLOCK_Q / 32;

// 1 in each byte that is not 0, of a lane's keys in a row of the mask.
__device__ __forceinline__ u32 seen(const u8* keys, int keys_left, bool in_words) {
  u32 bytes = 0;
  if (in_words && keys_left >= 4) {
    bytes = *reinterpret_cast<const u32*>(keys);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < keys_left) bytes |= static_cast<u32>(keys[i]) << 8 * i;
  }
  return __vsetne4(bytes, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) attention_backward_mask(
    const u8* __restrict__ mask,  // [batch, heads, rows, seqlen_k] strides in bytes, 0 hides a key
    u32* __restrict__ mask_bits,  // [batch, heads, tiles, blocks * BLOCK_K, WORDS] contiguous
    const Strides mask_strides, const int works,  // batch * heads * tiles * blocks
    const int heads, const int rows, const int tiles, const int blocks, const int seqlen_k) {
  const int work = (blockIdx.x * THREADS + threadIdx.x) / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  if (work >= works) return;
  const int key = work % blocks * BLOCK_K + 4 * lane, of_head = work / blocks / tiles;
  const int q0 = work / blocks % tiles * BLOCK_Q;
  const i64 batch = of_head / heads, head = of_head % heads;
  mask += batch * mask_strides.batch + head * mask_strides.head + key;
  mask_bits += (static_cast<i64>(work) * BLOCK_K + 4 * lane) * WORDS;
  const bool in_words = (reinterpret_cast<u64>(mask) | mask_strides.row) % 4 == 0;
#pragma unroll 1
  for (int word = 0; word < WORDS; ++word) {
    u32 packed[4];  // byte i: eight queries of key i
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      packed[part] = 0;
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        const i64 row = min(q0 + word * 32 + part * 8 + q, rows - 1);
        packed[part] |= seen(mask + row * mask_strides.row, seqlen_k - key, in_words) << q;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // the bytes of one key together
      const u32 pair = i | (i + 4) << 4;
      mask_bits[i * WORDS + word] = __byte_perm(__byte_perm(packed[0], packed[1], pair),
                                                __byte_perm(packed[2], packed[3], pair), 0x5410);
    }
  }
}
