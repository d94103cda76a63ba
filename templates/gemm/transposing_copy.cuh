// An operand of fp32 that lies [outer][k] on its way into tiles [k][outer] in shared memory: a
// thread's part of every tile, one after the other along k. It goes through registers, where the
// next tile waits: a thread reads four k of ROWS neighbouring rows, and writes ROWS neighbours of
// each k at once.
//
//   four lanes read 64 bytes of a row       and write     k 0-3   k 4-7   k 8-11   k 12-15
//     k 0-3   k 4-7   k 8-11   k 12-15      at chunk        c      c ^ 2    c ^ 4    c ^ 6
//
// The swizzle (TransposedFloats) lets eight lanes, two chunks of outers by four of k, write to all
// banks; readers, who take eight chunks of one k, find them within the same 128 bytes. Copies by
// cp.async, 4 bytes each, need no registers, but a sixth of the kernel's time.
#pragma once
#include "ptx/register_fence.cuh"
#include "gemm/float_tile.cuh"
#include "gemm/operand_copy.cuh"

// ALIGNED: rows in memory start on 16-byte boundaries. Elements past the end of k become zero; past
// the last row it may be anything that is there. Column i of the tile is output, or row of x,
// Order::output(i).
template <typename Tile, int THREADS, bool ALIGNED, typename Order>
struct TransposingCopy {
  static constexpr int BLOCK_K = Tile::ROWS, LANES_K = BLOCK_K / 4;
  static constexpr int ROWS = Tile::COLUMNS * LANES_K / THREADS;  // of a thread
  static constexpr int COPIES = ROWS;                             // chunks
  static_assert(ROWS == 2 || ROWS == 4, "a pair or a chunk of every k");

  const fp32* source;  // of this thread's first element of the next tile
  int stride;          // bytes from one row in memory to the next
  u32 place;           // of the first element, bytes into a tile
  int outer_left;      // from the first row on; may be negative
  uint4 next[COPIES];  // copy(): the next tile

  // The tiles that begin at `outer`, of `outers`.
  __device__ __forceinline__ TransposingCopy(const fp32* operand, i64 row_stride, int outer,
                                             int outers)
      : stride(static_cast<int>(row_stride * sizeof(fp32))) {
    const int first = threadIdx.x / LANES_K * ROWS, k = threadIdx.x % LANES_K * 4;
    const i64 mine = outer + Order::output(first);
    source = operand + (mine + (Order::is_up(first) ? outers : 0)) * row_stride + k;
    place = Tile::offset(k, first / 4) + first % 4 * sizeof(fp32);
    outer_left = outers - static_cast<int>(mine);
  }

  // The first tile is asked for.
  __device__ __forceinline__ void begin(int k) { fetch(next, k); }

  // The next tile -> the tile at `tile`; the one after it is asked for. `k_left`: of k, from this
  // tile on.
  __device__ __forceinline__ void copy(u32 tile, int k_left) {
    store(tile, next);
    if (k_left > BLOCK_K) fetch(next, k_left - BLOCK_K);
  }

  // The next tile -> registers, and from there to the tile at `tile`.
  __device__ __forceinline__ void fetch(uint4 (&rows)[COPIES], int k_left) {
    const int left = k_left - static_cast<int>(threadIdx.x) % LANES_K * 4;
    if (ALIGNED && k_left >= BLOCK_K) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) rows[i] = *reinterpret_cast<const uint4*>(row(i));
    } else {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) rows[i] = fetch_chunk<ALIGNED>(row(i), left);
    }
    source += BLOCK_K;
  }
  __device__ __forceinline__ void store(u32 tile, const uint4 (&rows)[COPIES]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 to = tile + place + k * Tile::ROW_BYTES;
      if constexpr (ROWS == 4) {
        store_shared_chunk(
            to, {word(rows[0], k), word(rows[1], k), word(rows[2], k), word(rows[3], k)});
      } else {
        store_shared_pair(to, word(rows[0], k), word(rows[1], k));
      }
    }
  }

 private:
  // In place of a row past the end comes the last one: nobody looks at what becomes of it.
  __device__ __forceinline__ const fp32* row(int i) const {
    const i64 bytes = static_cast<i64>(anew(stride)) * min(i, outer_left - 1);
    return reinterpret_cast<const fp32*>(reinterpret_cast<const char*>(source) + bytes);
  }
  __device__ __forceinline__ static u32 word(const uint4& chunk, int i) {
    return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
  }
};
