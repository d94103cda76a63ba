// Few rows of x as whole numbers, which int8 tensor cores multiply with codes as bytes: those of int8 as
// they are, and of int4 two instructions make operands of eight, where numbers of 16 bits take seven.
//
//   codes           as bytes                                       beside them
//   int8            a word has four                                X = x * 2^(21 - e)
//   int4, low       (word & 0x0f0f0f0f) ^ 0x08080808: code + 8     X = x * 2^(21 - e)   0 4 1 5 of eight
//   int4, high      word & 0xf0f0f0f0: 16 * code                   X = x * 2^(17 - e)   2 6 3 7
//
// 2^e is the greatest power of two in a warp's part of a row, so |X| < 2^22, and X is exact where x has
// no bit below 2^(e - 21), or 2^(e - 17). Three digits of X to the base 256 are bytes -128 ... 127:
// those of X + 0x808080, less 128 each. A group's sums of each digit are exact, and below 2^21; they
// begin with the bits of 1.5 * 2^23, less what the 8 of low nibbles adds, so that they are floats as
// they stand.
//
// Digits of two rows of x are columns of the product, of which a lane has two (ptx/mma.cuh): columns
// 2t and 2t + 1 are digit 2 - t of both, t < 3.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma_8bit.cuh"
#include "quantize/weights.cuh"

constexpr float DIGITS_BEGIN = 12582912.f;  // 1.5 * 2^23
constexpr u32 DIGITS_BEGIN_BITS = 0x4b400000;
constexpr int LEAST_EXPONENT = -100;  // below it x counts in steps of 2^-121
constexpr u32 LOW_NIBBLES = 0x0f0f0f0f, HIGH_NIBBLES = 0xf0f0f0f0, EIGHTS_OF_BYTES = 0x08080808;

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<u32>(127 + exponent) << 23);
}

// Bits of a number as its digits, so many.
template <int DIGITS>
__device__ __forceinline__ u32 digits_of(float x, float by) {
  constexpr u32 HALVES = 0x808080 & ((1u << 8 * DIGITS) - 1);
  const u32 bits = __float_as_uint(fmaf(x, by, DIGITS_BEGIN));
  return (bits - (DIGITS_BEGIN_BITS - HALVES)) ^ HALVES;
}

// Digits 0, 1 and 2 of four numbers.
__device__ __forceinline__ void transpose_digits(u32 (&to)[3], u32 a, u32 b, u32 c, u32 d) {
  const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  to[0] = __byte_perm(ab, cd, 0x5410), to[1] = __byte_perm(ab, cd, 0x7632);
  to[2] = __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
}

// Operands of product `i` of a group, of rows g (low) and g + 8 (high).
template <typename Weights, int SPANS>
__device__ __forceinline__ void byte_fragment(u32 (&a)[4], const uint4 (&low)[SPANS],
                                              const uint4 (&high)[SPANS], int i) {
  if constexpr (Weights::BITS == 4) {
    const u32 own = word_of(low[0], i), other = word_of(high[0], i);
    a[0] = and_xor(own, LOW_NIBBLES, EIGHTS_OF_BYTES), a[2] = own & HIGH_NIBBLES;
    a[1] = and_xor(other, LOW_NIBBLES, EIGHTS_OF_BYTES), a[3] = other & HIGH_NIBBLES;
  } else {
    a[0] = word_of(low[i / 2], i % 2 * 2), a[2] = word_of(low[i / 2], i % 2 * 2 + 1);
    a[1] = word_of(high[i / 2], i % 2 * 2), a[3] = word_of(high[i / 2], i % 2 * 2 + 1);
  }
}

template <typename Weights, typename T, int GROUPS>
struct DigitsOfX {
  static constexpr bool HALVED = Weights::BITS == 4;  // nibbles, of which high ones count 16 times
  static constexpr int SPANS = 128 / Weights::SPAN;   // of a group
  static constexpr int ROWS = 2, DIGIT_BYTES = GROUPS * 128;
  static constexpr int SCRATCH_BYTES = 3 * DIGIT_BYTES;  // of a warp, while x is loaded
  static constexpr int BASES_BYTES = GROUPS * 64;        // of a warp, as long as x is used
  static constexpr int CHUNKS = ceil_div(GROUPS * 16, WARP_SIZE);  // of eight numbers, of a lane
  u32 x[GROUPS][8];  // B: two words of one product after the other
  float by[2];       // what the lane's sums are to be multiplied with

  // The rows' numbers from group `first` on, zeros where there are none. By a whole warp.
  __device__ __forceinline__ void load(const T* from, i64 stride, int m, int first, int k,
                                       u32 scratch, u32 bases) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < GROUPS * 8; ++i) x[i / 8][i % 8] = 0;
    by[0] = by[1] = 0.f;
    uint4 own[ROWS][CHUNKS];
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS; ++i) {
      const int row = i / CHUNKS, chunk = i % CHUNKS * WARP_SIZE + lane,
                at = first * 128 + chunk * 8;
      own[row][i % CHUNKS] = make_uint4(0, 0, 0, 0);
      load_chunk_if(own[row][i % CHUNKS], from + row * stride + at,
                    row < m && chunk < GROUPS * 16 && at < k);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (row >= m) break;
      const int exponent = store_digits(own[row], scratch, lane);
      by[row] = exponent > 127 ? __uint_as_float(0x7fffffff)  // an infinity, or a NaN
                               : power_of_two(exponent - 21 + 8 * (2 - min(t, 2)));
      __syncwarp();
      if (g % 2 == row && g < 6)
        load_digits(scratch + (2 - g / 2) * DIGIT_BYTES + t * Weights::CHUNK_K);
      __syncwarp();
    }
    store_bases(bases, g, t);
  }

  // Sums of a group, in units of the last digit. low, high: codes of rows g and g + 8. `bases`: the
  // lane's.
  __device__ __forceinline__ void multiply(float (&sums)[4], const uint4 (&low)[SPANS],
                                           const uint4 (&high)[SPANS], int group, u32 bases) const {
    float d[4];
    load_shared_floats(d, bases + group * 64);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 a[4];
      byte_fragment<Weights>(a, low, high, i);
      mma_m16n8k16<i8_pair>(d, a, x[group][2 * i], x[group][2 * i + 1]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[c] = d[c] - DIGITS_BEGIN;
  }

 private:
  // A row's digits to `scratch`, eight bytes for eight numbers; the exponent of its greatest.
  __device__ __forceinline__ static int store_digits(const uint4 (&own)[CHUNKS], u32 scratch,
                                                     int lane) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = unpack2<T>(word_of(own[i], j));
        most = max(most, max(__float_as_uint(fabsf(pair.x)), __float_as_uint(fabsf(pair.y))));
      }
    }
    const int exponent =
        max(static_cast<int>(__reduce_max_sync(FULL_MASK, most) >> 23) - 127, LEAST_EXPONENT);
    const float low = power_of_two(21 - exponent);
    const float high = HALVED ? power_of_two(17 - exponent) : low;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      u32 each[8], of_low[3], of_high[3];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = unpack2<T>(word_of(own[i], j));
        each[2 * j] = digits_of<3>(pair.x, j % 2 == 0 ? low : high);
        each[2 * j + 1] = digits_of<3>(pair.y, j % 2 == 0 ? low : high);
      }
      constexpr int A = HALVED ? 4 : 1, B = HALVED ? 1 : 2, C = HALVED ? 5 : 3;
      transpose_digits(of_low, each[0], each[A], each[B], each[C]);
      constexpr int D = HALVED ? 2 : 4, E = HALVED ? 6 : 5, F = HALVED ? 3 : 6;
      transpose_digits(of_high, each[D], each[E], each[F], each[7]);
      const int chunk = i * WARP_SIZE + lane;
      if (chunk < GROUPS * 16)
#pragma unroll
        for (int digit = 0; digit < 3; ++digit)
          store_shared_pair(scratch + digit * DIGIT_BYTES + chunk * 8, of_low[digit],
                            of_high[digit]);
    }
    return exponent;
  }
  __device__ __forceinline__ void load_digits(u32 scratch) {
#pragma unroll
    for (int i = 0; i < GROUPS * 2; ++i) {
      const uint4 some = load_shared_chunk(scratch + i / 2 * 128 + i % 2 * (HALVED ? 16 : 64));
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i / 2][i % 2 * 4 + j] = word_of(some, j);
    }
  }
  // What sums begin with.
  __device__ __forceinline__ void store_bases(u32 bases, int g, int t) const {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      float d[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (HALVED)
          mma_m16n8k16<i8_pair>(d, {EIGHTS_OF_BYTES, EIGHTS_OF_BYTES, 0, 0}, x[i][2 * j],
                                x[i][2 * j + 1]);
      const u32 even = DIGITS_BEGIN_BITS - __float_as_uint(d[0]);
      const u32 odd = DIGITS_BEGIN_BITS - __float_as_uint(d[1]);
      if (g == 0) store_shared_chunk(bases + i * 64 + t * 16, make_uint4(even, odd, even, odd));
    }
    __syncwarp();
  }
};
