// Rotary position embedding: frequencies and angles in turns, sines and cosines.
//
// Pair i of `rotary_dim` columns turns by position * theta^(-2i / rotary_dim) radians. Frequencies
// are turns a token as fractions of 2^64, and angles fractions of 2^32 of a turn: whole turns,
// which fp32 would keep instead of the angle, fall off at the top. At position 2^31 an angle is
// right to 2^-29 of a turn.
#pragma once
#include "prelude.cuh"

constexpr i64 ROPE_LAST_POSITION = 0x7fffffff;
constexpr int ROPE_INDEX_BITS = 8;  // pairs are numbered below 2^8: rotary_dim up to 512

// Of a theta, a rotary_dim, and a scaling for long contexts; fractions of 2^64 unless said.
struct RopeFrequencies {
  u64 power[ROPE_INDEX_BITS];  // theta^(-2^(i+1) / rotary_dim)
  u64 first;                   // turns a token of pair 0: 1 / (2 pi)
  // Llama 3.1's: frequencies from `high` on stay, those up to `low` become `reduced` times as high,
  // and between them the factor rises to 1 with `slope` (a fraction of 2^63, for a difference
  // that was shifted left by `shift`). Without scaling, all are 0.
  u64 low, high, reduced, slope, shift;
};

__device__ __forceinline__ u64 rope_scaled(const RopeFrequencies& table, u64 frequency) {
  const u64 above = frequency > table.low ? frequency - table.low : 0;
  const u64 factor = table.reduced + 2 * __umul64hi(above << table.shift, table.slope);
  return frequency < table.high ? __umul64hi(frequency, factor) : frequency;
}

// Frequencies of N neighbouring pairs from a multiple of N on, of `pairs` in all; as few products
// deep as possible.
template <int N>
__device__ __forceinline__ void rope_frequencies(const RopeFrequencies& table, int first, int pairs,
                                                 u64 (&frequency)[N]) {
  frequency[0] = table.first;
#pragma unroll
  for (int bit = 0; bit < ROPE_INDEX_BITS; ++bit) {
    if ((1 << bit) < N || (1 << bit) >= pairs) continue;
    const u64 next = __umul64hi(frequency[0], table.power[bit]);
    frequency[0] = first >> bit & 1 ? next : frequency[0];
  }
#pragma unroll
  for (int bit = 0; (1 << bit) < N; ++bit) {
#pragma unroll
    for (int i = 0; i < (1 << bit); ++i) {
      frequency[(1 << bit) + i] = __umul64hi(frequency[i], table.power[bit]);
    }
  }
  if (table.high == 0) return;
#pragma unroll
  for (int i = 0; i < N; ++i) frequency[i] = rope_scaled(table, frequency[i]);
}

// Of a row: the id that stands there, int32 or int64 (1 or 2 words, as the strides count); 0 where
// there are none.
__device__ __forceinline__ i64 rope_position(const u32* positions, int words,
                                             const Strides& strides, u32 batch, u32 row) {
  if (positions == nullptr) return 0;
  const u32* id = positions + batch * strides.batch + row * strides.row;
  if (words == 1) return static_cast<i32>(id[0]);
  return static_cast<i64>(static_cast<u64>(id[1]) << 32 | id[0]);
}

// The length of a row's sines and cosines: a row at a position that is none becomes NaN.
__device__ __forceinline__ float rope_unit(bool somewhere) {
  return somewhere ? 1.f : __int_as_float(0x7fc00000);
}

// Angle at a position, in fractions of 2^32 of a turn.
__device__ __forceinline__ u32 rope_turns(u64 frequency, u32 position) {
  const u32 low = static_cast<u32>(frequency), high = static_cast<u32>(frequency >> 32);
  return position * high + __umulhi(position, low);
}

// Sine and cosine of fractions of 2^32 of a turn. Within 1e-7 for fp32, by polynomials on an eighth
// of a turn to either side of a multiple of a quarter; within 1e-6, which 16 bits do not show, by
// the special-function unit otherwise.
template <typename T>
__device__ __forceinline__ void sincos_turns(u32 turns, float& sine, float& cosine) {
  constexpr float RADIANS = 1.4629180792671596e-9f;  // 2 pi / 2^32
  if constexpr (sizeof(T) == 2) {
    const float angle = static_cast<float>(static_cast<i32>(turns)) * RADIANS;
    sine = __sinf(angle);
    cosine = __cosf(angle);
    return;
  }
  const u32 quarter = (turns + (1u << 29)) >> 30;
  const float x = static_cast<float>(static_cast<i32>(turns - (quarter << 30))) * RADIANS;
  const float z = x * x;
  float s = fmaf(z, -1.9495627e-4f, 8.3319787e-3f), c = fmaf(z, 2.4438443e-5f, -1.3887368e-3f);
  s = fmaf(x * z, fmaf(z, s, -1.6666651e-1f), x);
  c = fmaf(z * z, fmaf(z, c, 4.1666646e-2f), fmaf(z, -0.5f, 1.f));
  sine = quarter & 1 ? c : s;
  cosine = quarter & 1 ? s : c;
  if (quarter & 2) sine = -sine;
  if ((quarter + 1) & 2) cosine = -cosine;
}

// N neighbours of a table; on a 16-byte boundary, or one of N elements where N is less than four.
template <int N>
__device__ __forceinline__ void load_floats(const float* source, float* values) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(source + i);
      values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
    }
  } else if constexpr (N == 2) {
    const float2 two = *reinterpret_cast<const float2*>(source);
    values[0] = two.x, values[1] = two.y;
  } else {
    static_assert(N == 1, "whole accesses");
    values[0] = *source;
  }
}
