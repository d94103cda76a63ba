// A warp's 16 rows of dQ, N blocks of 8 columns as wgmma leaves them, and their sums in device
// memory (sum_fragments.cuh): `sums` is the place of lane 0's four floats of the first block.
//
//   first     the first one to come stores instead of adding: nobody has to set sums to 0
//   last      where turns are taken, the last one adds the sums to its own registers and has dQ
//   between   from registers (DIRECT), 16 bytes a lane, or from shared memory by the copy engine
#pragma once
#include "device/backward_tile.cuh"
#include "device/bulk.cuh"
#include "device/reread.cuh"
#include "device/sum_fragments.cuh"
#include "device/tile_copy.cuh"
#include "device/tma.cuh"

// What a tile of queries is to the block of keys that is at it: words in shared memory, loaded when
// they are needed, for want of registers.
struct BackwardTurn {
  u32 address;
  // So many come before, so many in all.
  __device__ __forceinline__ int rank() const { return load_shared_word(address); }
  __device__ __forceinline__ int others() const { return load_shared_word(address + 4); }
  __device__ __forceinline__ bool last() const { return rank() + 1 == others(); }
  // Of dq.
  __device__ __forceinline__ int row() const { return load_shared_word(address + 8); }
  __device__ __forceinline__ int head() const { return load_shared_word(address + 12); }
  __device__ __forceinline__ int batch() const { return load_shared_word(address + 16); }
};

// What others have added, from L2.
// PTX ISA: ld.relaxed.gpu
template <int N>
__device__ __forceinline__ void take_sums(float (&d)[1][N][4], const float* sums, int lane) {
  const u64 mine = __cvta_generic_to_global(sums + lane * 4);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float4 sum;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
                 : "l"(mine + n * WARP_SIZE * 16)
                 : "memory");
    d[0][n][0] += sum.x, d[0][n][1] += sum.y, d[0][n][2] += sum.z, d[0][n][3] += sum.w;
  }
}

// A warp's dQ times `scale`, rounded, to rows from `row` of the tile on and columns from `column` on,
// by way of shared memory.
template <typename T, int N>
__device__ __forceinline__ void store_sums(const TensorMap& map, const float (&d)[1][N][4],
                                           float scale, int column, int row, BackwardTurn turn,
                                           u32 staging) {
  const int lane = thread_index_again() % WARP_SIZE;  // or else addresses stay in registers
  stage_rows<T, SwizzledTile<16, 8 * N>>(d, scale, lane, staging);
  proxy_fence();
  __syncwarp();
  if (lane > 0) return;
  tma_store(map, staging, column, turn.row() + row, turn.head(), turn.batch());
  tma_commit();
}

// From registers.
template <int N>
__device__ __forceinline__ void give_sums(float* sums, const float (&d)[1][N][4], bool first,
                                          int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float* const target = sums + (n * WARP_SIZE + lane) * 4;
    if (first)
      *reinterpret_cast<float4*>(target) =
          make_float4(d[0][n][0], d[0][n][1], d[0][n][2], d[0][n][3]);
    else
      add_fragment(target, d[0][n]);
  }
}

// By way of shared memory, by one thread of the warp; it is to be read before it is written again.
template <int N>
__device__ __forceinline__ void give_sums_staged(float* sums, const float (&d)[1][N][4], bool first,
                                                 int lane, u32 staging) {
#pragma unroll
  for (int n = 0; n < N; ++n) store_shared_floats(staging + (n * WARP_SIZE + lane) * 16, d[0][n]);
  proxy_fence();
  __syncwarp();
  if (lane == 0 && first) bulk_store(sums, staging, N * WARP_SIZE * 16);
  if (lane == 0 && !first) bulk_add(sums, staging, N * WARP_SIZE * 16);
}
