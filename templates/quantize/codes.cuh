// Eight neighbouring numbers of a row, and the codes that stand for them: number = code * scale.
//
//   e4m3   a byte each, to the nearest, ties to even; -0 stays -0              -448 ... 448
//   int8   a byte each                                                         -127 ... 127
//   int4   a word for all eight, as products want them in pairs:                 -7 ... 7
//
//     bits    0-3   4-7   8-11  12-15 | 16-19 20-23 24-27 28-31
//     number   0     2     4     6    |  1     3     5     7
//
// (word >> 4 j) & 0x000f000f are numbers 2 j and 2 j + 1, in the halves of a pair of 16 bits.
#pragma once
#include "kv/e4m3.cuh"

struct Eight {
  Elements<float, 4> low, high;

  // By constant index: registers cannot be indexed by a variable.
  __device__ __forceinline__ float& operator[](int i) { return i < 4 ? low[i] : high[i - 4]; }
};

// A code of a byte.
template <typename Byte>
struct ByteCodes {
  static constexpr int BITS = 8;
  using Word = uint2;  // of eight codes

  static __device__ __forceinline__ Word encode(const Eight& x, const Divisor& scaled) {
    const auto low = Quantized<Byte>::template encode<float, 4>(x.low, scaled);
    const auto high = Quantized<Byte>::template encode<float, 4>(x.high, scaled);
    return make_uint2(low.word, high.word);
  }
  static __device__ __forceinline__ Eight decode(Word codes, float scale) {
    const Elements<Byte, 4> low = {codes.x}, high = {codes.y};
    return {Quantized<Byte>::template decode<float, 4>(low, scale),
            Quantized<Byte>::template decode<float, 4>(high, scale)};
  }
};

template <typename Byte, __nv_fp8_interpretation_t KIND>
struct FloatCodes : ByteCodes<Byte> {
  static constexpr float GREATEST = 448.f;  // of e4m3; e5m2 has its scales (quantize/e5m2.cuh)

  // Of numbers that are divided already.
  static __device__ __forceinline__ uint2 encode_scaled(Eight x) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = __nv_cvt_float2_to_fp8x2({x[2 * i], x[2 * i + 1]}, __NV_SATFINITE, KIND);
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
};
using Fp8Codes = FloatCodes<e4m3, __NV_E4M3>;
struct Int8Codes : ByteCodes<i8> {
  static constexpr float GREATEST = 127.f;
};

struct Int4Codes {
  static constexpr int BITS = 4;
  static constexpr float GREATEST = 7.f;
  using Word = u32;

  static __device__ __forceinline__ int bit(int i) { return i / 2 * 4 + i % 2 * 16; }

  static __device__ __forceinline__ Word encode(Eight x, const Divisor& scaled) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float cut = fminf(fmaxf(scaled(x[i]), -GREATEST), GREATEST);
      word |= (__float_as_uint(cut + ROUNDER) & 15) << bit(i);
    }
    return word;
  }
  static __device__ __forceinline__ Eight decode(Word codes, float scale) {
    Eight x;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = static_cast<float>(static_cast<int>(codes << (28 - bit(i))) >> 28) * scale;
    return x;
  }
};

// Numbers `column` to `column` + 7 of a row of `columns`; zeros for those it has not. WIDE: rows
// start on 16-byte boundaries and are whole eights.
template <bool WIDE, typename T>
__device__ __forceinline__ Eight load_eight(const T* row, int column, int columns) {
  Eight x = {};
  if constexpr (WIDE) {
    if (column >= columns) return x;
    constexpr int SIZE = 16 / sizeof(T);
#pragma unroll
    for (int first = 0; first < 8; first += SIZE) {
      const auto some = load_elements<SIZE>(row + column + first);
#pragma unroll
      for (int i = 0; i < SIZE; ++i) x[first + i] = static_cast<float>(some[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < columns) x[i] = static_cast<float>(row[column + i]);
  }
  return x;
}

// The codes of eight numbers to where those of a row begin. Words of int4 are whole always.
template <typename Codes, bool WIDE>
__device__ __forceinline__ void store_codes(u8* row, int column, int columns,
                                            typename Codes::Word codes) {
  using Word = typename Codes::Word;
  if constexpr (WIDE || Codes::BITS == 4) {
    if (column < columns) *reinterpret_cast<Word*>(row + column * Codes::BITS / 8) = codes;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < columns) row[column + i] = (i < 4 ? codes.x : codes.y) >> i % 4 * 8;
  }
}

// The other way, where `column` is one of the row's.
template <typename Codes, bool WIDE>
__device__ __forceinline__ typename Codes::Word load_codes(const u8* row, int column, int columns) {
  using Word = typename Codes::Word;
  if constexpr (WIDE || Codes::BITS == 4) {
    return *reinterpret_cast<const Word*>(row + column * Codes::BITS / 8);
  } else {
    Word codes = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < columns)
        (i < 4 ? codes.x : codes.y) |= static_cast<u32>(row[column + i]) << i % 4 * 8;
    return codes;
  }
}
