// Sixteen rows of a warp on their way to codes: lane (g, t) has rows g and g + 8, and of each 32 columns
// eight neighbours, 32 j + 8 t + e. They stay as they are, or (ROTATE) are multiplied with the Hadamard
// matrix of quantize/hadamard.cuh by mma.sync.
//
// A Hadamard matrix is a product of one factor for each bit of the column. Those of e0, t and e1 are
// the k and n of m16n8k16, so that lanes trade nothing: a lane's pairs of numbers are A as they were
// loaded, and D has the same columns. e2 and j are sums and differences of what a lane has.
//
//   k, n      bit 0   e0      bits 1, 2   t      bit 3   e1: a word of A, a product of its own in D
//
// Signs come with B: of neighbouring ones in a column's bits j ... t1 t0 e2 e1 e0.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "quantize/hadamard.cuh"

constexpr u32 BOTH_SIGNS = 0x80008000;

// A pair of ones with these signs.
template <typename T>
__device__ __forceinline__ u32 signed_ones(bool low, bool high) {
  constexpr u32 ONES = SAME_TYPE<T, bf16> ? 0x3f803f80 : 0x3c003c00;
  return ONES ^ (low ? 0x8000 : 0) ^ (high ? 0x80000000 : 0);
}

template <typename T, int HEAD_DIM, bool ROTATE>
struct SixteenRows {
  static constexpr int CHUNKS = HEAD_DIM / 32, PART = CHUNKS < 4 ? CHUNKS : 4;
  static constexpr float NORM = ROTATE ? HADAMARD_NORM<HEAD_DIM> : 1.f;
  float y[CHUNKS][2][2][4];  // by j, e2, e1: D of ptx/mma.cuh

  // What `load(half, j)` has of rows g and g + 8, half a row of 256 at a time for registers' sake. What
  // is rotated is not normalized yet.
  template <typename Load>
  __device__ __forceinline__ void take(const Load& load) {
#pragma unroll
    for (int first = 0; first < CHUNKS; first += PART) {
      uint4 x[2][PART];
#pragma unroll
      for (int i = 0; i < 2 * PART; ++i) x[i / PART][i % PART] = load(i / PART, first + i % PART);
#pragma unroll
      for (int j = 0; j < PART; ++j) {
        if (ROTATE)
          multiply(y[first + j], x[0][j], x[1][j], first + j);
        else
          unpack(y[first + j], x[0][j], x[1][j]);
      }
      if (CHUNKS > PART) __syncwarp();  // or all would be loaded at once
    }
    if (!ROTATE) return;
#pragma unroll
    for (int distance = 1; distance < 2 * CHUNKS; distance *= 2)
#pragma unroll
      for (int i = 0; i < 2 * CHUNKS; ++i)
        if ((i & distance) == 0)
          add_and_subtract(y[i / 2][i % 2], y[(i + distance) / 2][(i + distance) % 2]);
  }
  // Normalized; LESS a mean in row g (low) and in row g + 8. `means`: the lane's first in shared
  // memory, of numbers that were rotated alike and are not normalized.
  template <bool LESS>
  __device__ __forceinline__ void normalize(u32 means, bool low, bool high) {
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) {
      float (&d)[4] = y[i / 4][i / 2 % 2][i % 2];
      float2 mean = {};
      if (LESS) mean = load_shared_pair(means + (i / 4 * 32 + i % 4 * 2) * 4);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (LESS && (c < 2 ? low : high)) d[c] -= c % 2 == 0 ? mean.x : mean.y;
        d[c] *= NORM;
      }
    }
  }
  // The products of rows g and g + 8 with the lane's part of `means`, before they are normalized.
  __device__ __forceinline__ float2 products(u32 means) const {
    float2 sums = {};
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) {
      const float (&d)[4] = y[i / 4][i / 2 % 2][i % 2];
      const float2 mean = load_shared_pair(means + (i / 4 * 32 + i % 4 * 2) * 4);
      sums.x = fmaf(d[1], mean.y, fmaf(d[0], mean.x, sums.x));
      sums.y = fmaf(d[3], mean.y, fmaf(d[2], mean.x, sums.y));
    }
    return {sums.x * (NORM * NORM), sums.y * (NORM * NORM)};
  }
  // Columns 32 j + 8 t + e of row g, or of row g + 8.
  __device__ __forceinline__ Eight row_of(int half, int j) const {
    Eight some;
#pragma unroll
    for (int e = 0; e < 8; ++e) some[e] = y[j][e / 4][e / 2 % 2][half * 2 + e % 2];
    return some;
  }

 private:
  __device__ __forceinline__ static u32 word(const uint4& chunk, int i) {
    return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
  }
  __device__ __forceinline__ static void unpack(float (&y)[2][2][4], const uint4& low,
                                                const uint4& high) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = unpack2<T>(word(i % 2 == 0 ? low : high, i / 2));
      float (&d)[4] = y[i / 4][i / 2 % 2];
      d[i % 2 * 2] = pair.x, d[i % 2 * 2 + 1] = pair.y;
    }
  }
  // By the factors of e0, t and e1.
  __device__ __forceinline__ static void multiply(float (&y)[2][2][4], const uint4& low,
                                                  const uint4& high, int j) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const bool ends = t == 3;  // t0 and t1
    const u32 ones =
        signed_ones<T>(__popc(2 * t & g) % 2 != ends, __popc((2 * t + 1) & g) % 2 != ends);
#pragma unroll
    for (int e2 = 0; e2 < 2; ++e2) {
      const u32 turned = (e2 == 1 ? t % 2 * BOTH_SIGNS : 0) ^
                         (j % 2 == 1 ? t / 2 * BOTH_SIGNS : 0) ^ (is_turned(j) ? BOTH_SIGNS : 0);
      const u32 a[4] = {word(low, 2 * e2), word(high, 2 * e2), word(low, 2 * e2 + 1),
                        word(high, 2 * e2 + 1)};
      const u32 b0 = ones ^ turned, b1 = b0 ^ 0x80000000 ^ (e2 == 1 ? BOTH_SIGNS : 0);
#pragma unroll
      for (int e1 = 0; e1 < 2; ++e1) {
        float (&d)[4] = y[e2][e1];
        d[0] = d[1] = d[2] = d[3] = 0.f;
        mma_m16n8k16<T>(d, a, b0, e1 == 0 ? b1 : b1 ^ BOTH_SIGNS);
      }
    }
  }
  __device__ __forceinline__ static void add_and_subtract(float (&one)[2][4],
                                                          float (&other)[2][4]) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float a = one[c / 4][c % 4], b = other[c / 4][c % 4];
      one[c / 4][c % 4] = a + b, other[c / 4][c % 4] = a - b;
    }
  }
};
