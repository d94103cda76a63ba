// How a KV cache keeps numbers: as they are, or as int8 or fp8 (e4m3.cuh), divided by a
// scale. SIZE neighbours of one token and head are one access on either side.
//
//   Elements<bf16, 8> x = load_elements<8>(k);        // k on a 16-byte boundary
//   store_elements(page, Quantized<i8>::encode(x, Divisor(scale)));
//   x = Quantized<i8>::decode<bf16>(load_elements<8>(page), scale);
#pragma once
#include "prelude.cuh"

template <int BYTES>
struct StorageWord;
template <>
struct StorageWord<1> {
  using type = u8;
};
template <>
struct StorageWord<2> {
  using type = u16;
};
template <>
struct StorageWord<4> {
  using type = u32;
};
template <>
struct StorageWord<8> {
  using type = uint2;
};
template <>
struct StorageWord<16> {
  using type = uint4;
};

template <typename T, int SIZE>
struct Elements {
  using Word = typename StorageWord<SIZE * sizeof(T)>::type;
  Word word;

  // By constant index: registers cannot be indexed by a variable.
  __device__ __forceinline__ T& operator[](int i) { return reinterpret_cast<T*>(&word)[i]; }
  __device__ __forceinline__ const T& operator[](int i) const {
    return reinterpret_cast<const T*>(&word)[i];
  }
};

template <int SIZE, typename T>
__device__ __forceinline__ Elements<T, SIZE> load_elements(const T* source) {
  return {*reinterpret_cast<const typename Elements<T, SIZE>::Word*>(source)};
}

template <typename T, int SIZE>
__device__ __forceinline__ void store_elements(T* target, const Elements<T, SIZE>& x) {
  *reinterpret_cast<typename Elements<T, SIZE>::Word*>(target) = x.word;
}

// x / by, rounded once where the quotient is below LARGE: a product with 1 / by, which may miss the
// next number by a place, less what it has too much. What is beyond is cut off anyway. -0 stays -0.
//                                Source: Markstein, "Computation of elementary functions on the IBM
//                                RISC System/6000 processor" (1990), theorem 8.5
struct Divisor {
  static constexpr float LARGE = 65536.f;
  float by, inverse;

  __device__ __forceinline__ explicit Divisor(float divisor)
      : by(divisor), inverse(1.f / divisor) {}

  __device__ __forceinline__ float operator()(float x) const {
    const float quotient = x * inverse, excess = fmaf(quotient, by, -x);
    return fabsf(quotient) < LARGE ? fmaf(-excess, inverse, quotient) : quotient;
  }
};

// As they are; the scale is 1.
template <typename S>
struct Quantized {
  template <int SIZE>
  static __device__ __forceinline__ Elements<S, SIZE> encode(const Elements<S, SIZE>& x,
                                                             const Divisor&) {
    return x;
  }
  template <typename T, int SIZE>
  static __device__ __forceinline__ Elements<T, SIZE> decode(const Elements<S, SIZE>& x, float) {
    return x;
  }
};

// 1.5 * 2^23: a small number added to it is rounded to a whole one, which the low bits then are. At
// full rate, where the conversions between int and float have a quarter of it.
constexpr float ROUNDER = 12582912.f;
constexpr int ROUNDER_BITS = 0x4b400000;

// Rounded to the nearest, ties to even; -127 to 127, whatever is beyond; NaN becomes -127.
template <>
struct Quantized<i8> {
  template <typename T, int SIZE>
  static __device__ __forceinline__ Elements<i8, SIZE> encode(const Elements<T, SIZE>& x,
                                                              const Divisor& scaled) {
    Elements<i8, SIZE> codes;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      const float cut = fminf(fmaxf(scaled(static_cast<float>(x[i])), -127.f), 127.f);
      codes[i] = static_cast<i8>(__float_as_int(cut + ROUNDER));
    }
    return codes;
  }
  template <typename T, int SIZE>
  static __device__ __forceinline__ Elements<T, SIZE> decode(const Elements<i8, SIZE>& codes,
                                                             float scale) {
    Elements<T, SIZE> x;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      const int raised = ROUNDER_BITS + codes[i];  // the bits of ROUNDER + code
      x[i] = static_cast<T>((__int_as_float(raised) - ROUNDER) * scale);
    }
    return x;
  }
};
