// What becomes of a tile's sums in a product of a decode step: [TOKENS][ROWS] of each block that
// has a part of k, in its shared memory. A block of a cluster has every CLUSTER-th row of out; four
// columns of a row are a thread's.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/reduce.cuh"

// Four neighbouring 16-bit elements, on 8 bytes.
template <typename T>
__device__ __forceinline__ float4 unpack_four(uint2 bits) {
  const float2 low = unpack2<T>(bits.x), high = unpack2<T>(bits.y);
  return make_float4(low.x, low.y, high.x, high.y);
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

// Four pairs, one half of each in a, the other in b, turned as RoPE does.
__device__ __forceinline__ void turn_four(float4& a, float4& b, const float4& cosines,
                                          const float4& sines) {
  const auto turn = [](float& x, float& y, float cosine, float sine) {
    const float turned = x * cosine - y * sine;
    y = y * cosine + x * sine, x = turned;
  };
  turn(a.x, b.x, cosines.x, sines.x), turn(a.y, b.y, cosines.y, sines.y);
  turn(a.z, b.z, cosines.z, sines.z), turn(a.w, b.w, cosines.w, sines.w);
}

template <int ROWS, int TOKENS, int CLUSTER, bool CENTERED>
struct StreamSums {
  static constexpr int PITCH = ROWS + 4;  // floats: lanes of a fragment meet 32 banks
  static constexpr int BYTES = TOKENS * PITCH * 4;
  static constexpr int BEHIND = CENTERED ? 2 : 0;  // rows behind x's, which every block takes
  static constexpr int OWN = (TOKENS - 8 * BEHIND) / CLUSTER + BEHIND;  // rows that a block takes
  static constexpr int PARTS_BYTES = CLUSTER > 1 ? CLUSTER * OWN * ROWS * 4 : 0;
  float *own, *parts;  // [TOKENS][PITCH] of this block's k; [CLUSTER][OWN][ROWS] of all of k
  int rank;

  // What comes to this block, of m rows of x.
  __device__ __forceinline__ int bytes(int m) const {
    return CLUSTER * (ceil_div(m - rank, CLUSTER) + BEHIND) * ROWS * 4;
  }

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

  // By THREADS threads, when all have stored: each row to the block that takes it, where it counts
  // on `barrier`. No fence, which would wait for all of memory: the barrier says what has come.
  template <int THREADS>
  __device__ __forceinline__ void send(u32 barrier, int m, int x_rows, int thread) const {
    constexpr int QUADS = ROWS / 4;
    for (int i = thread; i < (m + BEHIND * CLUSTER) * QUADS; i += THREADS) {
      const int item = i / QUADS, place = i % QUADS * 4, extra = item - m;
      const bool behind = BEHIND > 0 && extra >= 0;
      const int row = behind ? x_rows + extra / CLUSTER * 8 : item;
      const int at = behind ? OWN - BEHIND + extra / CLUSTER : item / CLUSTER;
      const int taker = (behind ? extra : item) % CLUSTER;
      const float4 x = *reinterpret_cast<const float4*>(own + row * PITCH + place);
      const u32 there = shared_address(parts + (rank * OWN + at) * ROWS + place);
      cluster_send_floats(cluster_address(there, taker), {x.x, x.y, x.z, x.w},
                          cluster_address(barrier, taker));
    }
  }

  // Four neighbouring rows of the weight for a token, from all parts of k in their order.
  __device__ __forceinline__ float4 of(int token, int row) const {
    if (CLUSTER > 1) return total(token / CLUSTER, row);
    return *reinterpret_cast<const float4*>(own + token * PITCH + row);
  }
  // The same of a row behind x's.
  __device__ __forceinline__ float4 behind(int number, int x_rows, int row) const {
    return CLUSTER > 1 ? total(OWN - BEHIND + number, row) : of(x_rows + 8 * number, row);
  }

 private:
  __device__ __forceinline__ float4 total(int at, int row) const {
    const float* const first = parts + at * ROWS + row;
    float4 sum = *reinterpret_cast<const float4*>(first);
#pragma unroll
    for (int rank = 1; rank < CLUSTER; ++rank)
      add_four(sum, *reinterpret_cast<const float4*>(first + rank * OWN * ROWS));
    return sum;
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
