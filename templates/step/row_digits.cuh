// Rows of x for products with int4 codes: whole numbers of two digits, which int8 tensor cores multiply
// with the codes as bytes. Three instructions make eight codes, where numbers of 16 bits take eleven.
//
//   codes          as bytes                          X, of 128 numbers whose greatest is 2^e and more
//   low nibbles    (word * 16) & 0xf0f0f0f0          x * 2^(13 - e), rounded: digits of base 256 are
//   high nibbles   word & 0xf0f0f0f0                 bytes -128 ... 127
//
// So an X is 1/16,384 of its group's greatest off at the most, and sums of a group's products, of which
// both digits have their own, are exact. They begin with the bits of 1.5 * 2^23, and are floats as they
// stand (quantize/digits.cuh).
//
//   a token's row    [2 digits: low, high][k + GAP] bytes, then of each group what a sum counts for, fp32
//   of eight bytes   numbers 0 4 1 5 2 6 3 7, as four low and four high nibbles of a word of codes are
//
// Digits of up to four tokens are the eight columns of a product: column 2t + d is digit d of token t, so
// that a lane has both digits of a token.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma_8bit.cuh"
#include "quantize/digits.cuh"

template <typename T>
struct RowDigits {
  static constexpr int GROUP = 128, GAP = 16;  // columns with a scale; bytes

  static __device__ __forceinline__ int pitch(int k) { return k + GAP; }
  static __device__ __forceinline__ int factors(int k) { return 2 * pitch(k); }
  static __device__ __forceinline__ int bytes(int k) {  // a multiple of 16
    return factors(k) + round_up(k / GROUP * 4, 16);
  }

  // A lane's four numbers from column `i` on, 4 * lane in a group, which a whole warp has. row: the
  // token's, shared memory.
  static __device__ __forceinline__ void store(u32 row, uint2 x, int i, int k) {
    const float2 low = unpack2<T>(x.x), high = unpack2<T>(x.y);
    const auto bits = [](float x) { return __float_as_uint(fabsf(x)); };
    const u32 most = max(max(bits(low.x), bits(low.y)), max(bits(high.x), bits(high.y)));
    const int exponent =
        max(static_cast<int>(__reduce_max_sync(FULL_MASK, most) >> 23) - 127, LEAST_EXPONENT);
    const float by = power_of_two(13 - exponent);
    const u32 first = __byte_perm(digits_of<2>(low.x, by), digits_of<2>(low.y, by), 0x5410);
    const u32 second = __byte_perm(digits_of<2>(high.x, by), digits_of<2>(high.y, by), 0x5410);
    const bool odd = threadIdx.x & 1;  // of the eight numbers of two lanes it has the high nibbles'
    const u32 others = __shfl_xor_sync(FULL_MASK, odd ? first : second, 1);
    const u32 a = odd ? others : first, b = odd ? second : others;
    store_shared_word(row + i, __byte_perm(a, b, 0x6240));
    store_shared_word(row + pitch(k) + i, __byte_perm(a, b, 0x7351));
    if (threadIdx.x % WARP_SIZE == 0)
      store_shared_word(row + factors(k) + i / GROUP * 4,
                        exponent > 127 ? 0x7fffffff  // an infinity, or a NaN
                                       : __float_as_uint(power_of_two(exponent - 17)));
  }
};

// A warp's part of a tile of codes as a stage of step/weight_ring.cuh has them, 16 rows of the weight,
// times the digits of up to four tokens. Of a group lane (g, t) has the 16 bytes of codes t of rows g and
// g + 8, columns 32t to 32t + 31, and digits of column g of the product.
template <typename T>
struct DigitsPart {
  static constexpr int GROUP = RowDigits<T>::GROUP;
  u32 low, high;                // a lane's codes of rows g and g + 8
  u32 low_scales, high_scales;  // of those rows
  u32 digits, factors;

  // d[0], d[1] += ..., of rows g and g + 8 and token t, of so many columns, whole groups.
  template <int MOST>
  __device__ __forceinline__ void multiply(float (&d)[4], int columns) const {
    if (columns == MOST)
      groups<MOST / GROUP>(d, 0);
    else
#pragma unroll 1
      for (int at = 0; at < columns; at += GROUP) groups<1>(d, at);
  }

 private:
  // So many groups from column `at` on; none waits for another.
  template <int COUNT>
  __device__ __forceinline__ void groups(float (&d)[4], int at) const {
    uint4 first[COUNT], second[COUNT], x[COUNT][2];
    float by[COUNT][2], sums[COUNT][4];
#pragma unroll
    for (int i = 0; i < COUNT; ++i, at += GROUP) {
      first[i] = load_shared_chunk(low ^ at / 2), second[i] = load_shared_chunk(high ^ at / 2);
      x[i][0] = load_shared_chunk(digits + at), x[i][1] = load_shared_chunk(digits + at + 16);
      const float own = __uint_as_float(load_shared_word(factors + at / 32));
      by[i][0] = own * load_shared_number<T>(low_scales + at / 64);
      by[i][1] = own * load_shared_number<T>(high_scales + at / 64);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = DIGITS_BEGIN;
    }
#pragma unroll
    for (int word = 0; word < 4; ++word)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const u32 one = word_of(first[i], word), two = word_of(second[i], word);
        const u32 a[4] = {one << 4 & HIGH_NIBBLES, two << 4 & HIGH_NIBBLES, one & HIGH_NIBBLES,
                          two & HIGH_NIBBLES};
        const uint4& own = x[i][word / 2];
        mma_m16n8k16<i8_pair>(sums[i], a, word_of(own, word % 2 * 2),
                              word_of(own, word % 2 * 2 + 1));
      }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float high_digit = sums[i][2 * j + 1] - DIGITS_BEGIN;
        d[j] = fmaf(by[i][j], fmaf(high_digit, 256.f, sums[i][2 * j] - DIGITS_BEGIN), d[j]);
      }
  }
};
