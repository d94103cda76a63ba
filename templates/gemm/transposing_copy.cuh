// An operand of 32-bit elements that lies [outer][k] on its way into tiles [k][outer] in shared
// memory: a thread's part of every tile, one after the other along k. As OperandCopy
// (gemm/operand_copy.cuh), but element by element, whose addresses need no more than an element's
// alignment:
//
//   lane = 8 row + k     a warp reads 32 bytes of each of four rows, and writes four neighbours of
//                        each of eight k: no two to one bank, where the tile's rows are four floats
//                        longer than a multiple of 32
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/register_fence.cuh"
#include "gemm/operand_copy.cuh"

template <typename T, typename Tile, int THREADS, typename Order>
struct TransposingCopy {
  static constexpr int BLOCK_K = Tile::ROWS, OUTER = Tile::COLUMNS;
  static constexpr int LANES_K = 8, ROWS_A_PASS = THREADS / LANES_K, PASSES = OUTER / ROWS_A_PASS;
  static constexpr int ELEMENTS = PASSES * (BLOCK_K / LANES_K);  // of a thread
  static constexpr int COPIES = ELEMENTS / 4;                    // in chunks
  static_assert(sizeof(T) == 4 && OUTER % ROWS_A_PASS == 0 && ELEMENTS % 4 == 0, "whole passes");
  static_assert(!Order::is_up(ROWS_A_PASS - 1), "a pass is of gate, or of up");

  const T* source;  // of this thread's first element of the next tile
  i64 up;           // elements from a gate's row to that of its up
  int stride;       // bytes from one row in memory to the next
  u32 place;        // of the first element, bytes into a tile
  int outer_left;   // from the first element on; may be negative
  bool whole;       // of the block: all rows are there

  // The tiles that begin at `outer`, of `outers`.
  __device__ __forceinline__ TransposingCopy(const T* operand, i64 row_stride, int outer,
                                             int outers)
      : up(outers * row_stride), stride(static_cast<int>(row_stride * sizeof(T))) {
    const int row = threadIdx.x / LANES_K, k = threadIdx.x % LANES_K;
    const i64 mine = outer + Order::output(row);
    source = operand + mine * row_stride + k;
    place = k * Tile::ROW_BYTES + row * 4;
    outer_left = outers - static_cast<int>(mine);
    whole = outers - outer >= Order::output(OUTER - 1) + 1;
  }

  // The next tile -> the tile at `tile`, asynchronously. `k_left`: of k, from this tile on.
  __device__ __forceinline__ void copy(u32 tile, int k_left) {
    if (whole && k_left >= BLOCK_K) {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) cp_async_4(tile + target(i), row_on(pass(i)) + first_k(i));
    } else {
      copy_some(tile, k_left);
    }
    source += BLOCK_K;
  }

  // The next tile -> registers, and from there to the tile at `tile`.
  __device__ __forceinline__ void fetch(uint4 (&elements)[COPIES], int k_left) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const T* from = existing_row(pass(i)) + first_k(i);
      word(elements, i) = first_k(i) < left(k_left) ? *reinterpret_cast<const u32*>(from) : 0;
    }
    source += BLOCK_K;
  }
  __device__ __forceinline__ void store(u32 tile, uint4 (&elements)[COPIES]) const {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) store_shared_word(tile + target(i), word(elements, i));
  }

 private:
  __device__ __forceinline__ static constexpr int pass(int i) { return i / (BLOCK_K / LANES_K); }
  __device__ __forceinline__ static constexpr int first_k(int i) {
    return i % (BLOCK_K / LANES_K) * LANES_K;
  }
  __device__ __forceinline__ static u32& word(uint4 (&elements)[COPIES], int i) {
    return reinterpret_cast<u32*>(elements)[i];
  }
  __device__ __forceinline__ u32 target(int i) const {
    return place + first_k(i) * Tile::ROW_BYTES + pass(i) * ROWS_A_PASS * 4;
  }
  // Of k, from this thread's first on.
  __device__ __forceinline__ static int left(int k_left) { return k_left - threadIdx.x % LANES_K; }

  // The first element of a pass; the stride is taken anew, since products of it would stay in
  // registers through the main loop.
  __device__ __forceinline__ const T* row_on(int p) const {
    return rows_on(Order::output(p * ROWS_A_PASS), p);
  }
  // In place of a row past the end comes the last one: nobody looks at what becomes of it.
  __device__ __forceinline__ const T* existing_row(int p) const {
    return rows_on(min(Order::output(p * ROWS_A_PASS), anew(outer_left) - 1), p);
  }
  __device__ __forceinline__ const T* rows_on(int rows, int p) const {
    const i64 bytes = static_cast<i64>(anew(stride)) * rows;
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(source) + bytes) +
           (Order::is_up(p * ROWS_A_PASS) ? up : 0);
  }

  // A tile of which rows or k are missing: zeros for k, so that they add nothing.
  __device__ __forceinline__ void copy_some(u32 tile, int k_left) const {
#pragma unroll 1
    for (int p = 0; p < PASSES; ++p) {
      const T* from = existing_row(p);
#pragma unroll
      for (int k = 0; k < BLOCK_K; k += LANES_K) {
        const bool there = k < left(k_left);
        cp_async_4(tile + place + k * Tile::ROW_BYTES + p * ROWS_A_PASS * 4,
                   there ? from + k : from, there);
      }
    }
  }
};
