// What becomes of a tile's sums in a product of a decode step: [TOKENS][ROWS] of each block that
// has a part of k, in its shared memory. A block of a cluster has every CLUSTER-th row of out; four
// columns of a row are a thread's.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "tile/reduce.cuh"

// Four neighbouring 16-bit elements, on 8 bytes.
template <typename T>
__device__ __forceinline__ float4 unpack_four(uint2 bits) {
  const float2 low = unpack2<T>(bits.x), high = unpack2<T>(bits.y);
  return make_float4(low.x, low.y, high.x, high.y);
}
template <typename T>
__device__ __forceinline__ float4 load_four(const T* source) {
  return unpack_four<T>(*reinterpret_cast<const uint2*>(source));
}
template <typename T>
__device__ __forceinline__ uint2 pack_four(const float4& x) {
  return make_uint2(pack2<T>(x.x, x.y), pack2<T>(x.z, x.w));
}
// The first `left` of four, on their alignment.
template <typename T>
__device__ __forceinline__ void store_four(T* target, const float4& x, int) {
  *reinterpret_cast<uint2*>(target) = pack_four<T>(x);
}
__device__ __forceinline__ void store_four(float* target, const float4& x, int left) {
  if (left >= 4) {
    *reinterpret_cast<float4*>(target) = x;
  } else {
    target[0] = x.x;
    if (left > 1) target[1] = x.y;
    if (left > 2) target[2] = x.z;
  }
}
__device__ __forceinline__ void add_four(float4& a, const float4& b, float times = 1.f) {
  a.x += b.x * times, a.y += b.y * times, a.z += b.z * times, a.w += b.w * times;
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

// Of each row of x what its norm needs, from what the product before this one left of its `parts`,
// all as wide, in their order. RMSNorm: sums of squares -> factors[row] = rstd. LayerNorm (CENTERED):
// pairs of a sum and of squares of distances from the part's own mean -> rstd, and the mean in
// `means`. By a warp, for who reads them after the block has met. A row's parts are asked for at
// once: each is a way to L2.                    Chan, Golub, LeVeque (1979), for merging moments
template <bool CENTERED>
__device__ __forceinline__ void row_factors(float* factors, float* means, const float* moments,
                                            int parts, int m, int columns, float eps, int lane) {
  constexpr int BATCH = CENTERED ? 16 : 32, WORDS = CENTERED ? 2 : 1;
  const float of_part = static_cast<float>(columns) / parts;
  for (int row = lane; row < m; row += WARP_SIZE) {
    float mean = 0.f, squares = 0.f;
    for (int first = 0; first < parts; first += BATCH) {
      float x[BATCH][WORDS];
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
#pragma unroll
        for (int word = 0; word < WORDS; ++word)
          x[i][word] = first + i < parts ? moments[((first + i) * m + row) * WORDS + word] : 0.f;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (CENTERED && first + i < parts) {
          const float before = first + i, apart = x[i][0] / of_part - mean;
          mean += apart / (before + 1.f);
          squares += apart * apart * of_part * (before / (before + 1.f));
        }
        squares += x[i][WORDS - 1];
      }
    }
    if (CENTERED) means[row] = mean;
    factors[row] = 1.f / sqrtf(squares / columns + eps);
  }
}

// The other side: of four columns of a row, `there` or zeros, what their tile of COLUMNS leaves, by
// COLUMNS / 4 neighbouring lanes; whole warps come here. `writes`: one lane of each row there is.
template <bool CENTERED, int COLUMNS>
__device__ __forceinline__ void leave_moments(float* at, const float4& x, bool writes) {
  constexpr int LANES = COLUMNS / 4;
  if (CENTERED) {
    const float sum = lanes_sum<LANES>(x.x + x.y + x.z + x.w), mean = sum / COLUMNS;
    const float a = x.x - mean, b = x.y - mean, c = x.z - mean, d = x.w - mean;
    const float squares = lanes_sum<LANES>(a * a + b * b + c * c + d * d);
    if (writes) at[0] = sum, at[1] = squares;
  } else {
    const float squares = lanes_sum<LANES>(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
    if (writes) at[0] = squares;
  }
}
