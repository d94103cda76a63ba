// What becomes of a tile's sums in a product of a decode step: [TOKENS][ROWS] of each block that has
// a part of k, in its shared memory. A block of a cluster has every CLUSTER-th row of out; four
// columns of a row are a thread's.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "tile/reduce.cuh"

// Four neighbouring 16-bit elements, on 8 bytes.
template <typename T>
__device__ __forceinline__ float4 load_four(const T* source) {
  const uint2 bits = *reinterpret_cast<const uint2*>(source);
  const float2 low = unpack2<T>(bits.x), high = unpack2<T>(bits.y);
  return make_float4(low.x, low.y, high.x, high.y);
}
template <typename T>
__device__ __forceinline__ uint2 pack_four(const float4& x) {
  return make_uint2(pack2<T>(x.x, x.y), pack2<T>(x.z, x.w));
}
__device__ __forceinline__ void add_four(float4& a, const float4& b) {
  a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w;
}

template <int ROWS, int TOKENS, int CLUSTER>
struct StreamSums {
  static constexpr int PITCH = ROWS + 4;  // floats: lanes of a fragment meet 32 banks
  static constexpr int BYTES = TOKENS * PITCH * 4;
  float* own;

  // Of a warp of the warpgroup: acc[block][n] are rows 64 block + 16 warp + ..., tokens 8 n + ....
  template <int N>
  __device__ __forceinline__ void store(const float (&acc)[ROWS / 64][N][4], int warp,
                                        int lane) const {
    float* const at = own + lane % 4 * 2 * PITCH + warp * 16 + lane / 4;
#pragma unroll
    for (int block = 0; block < ROWS / 64; ++block)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          at[(n * 8 + j % 2) * PITCH + block * 64 + j / 2 * 8] = acc[block][n][j];
  }

  // Four neighbouring rows of the weight for a token, from all parts of k in their order.
  __device__ __forceinline__ float4 of(int token, int row) const {
    const float* const at = own + token * PITCH + row;
    if (CLUSTER == 1) return *reinterpret_cast<const float4*>(at);
    float4 total = cluster_load_floats(at, 0);
#pragma unroll
    for (int rank = 1; rank < CLUSTER; ++rank) add_four(total, cluster_load_floats(at, rank));
    return total;
  }
};

// Of each row its rstd: 1 / sqrt(mean of squares + eps), of what the product before this one left
// of its tiles. By a warp, for who reads `factors` after the block has met.
__device__ __forceinline__ void row_factors(float* factors, const float* squares, int parts, int m,
                                            int columns, float eps, int lane) {
  for (int row = lane; row < m; row += WARP_SIZE) {
    float total = 0.f;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) total += squares[part * m + row];
    factors[row] = 1.f / sqrtf(total / columns + eps);
  }
}
