// A piece of a row in the registers of LANES threads: VECTORS vectors of SIZE elements in each,
// which are read and written as pairs of floats.
//
//   WIDE   16-byte accesses: vector i of thread t has the columns (i * LANES + t) * SIZE and on. Rows
//          start on 16-byte boundaries and are whole vectors long.
//   else   one element an access: element k of vector i is column (i * SIZE + k) * LANES + t. Rows
//          start anywhere and have any length.
//
// What lies past the end of the row reads as zero and is not written.
#pragma once
#include "ptx/math.cuh"
#include "ptx/register_fence.cuh"

template <typename T, int LANES_, int VECTORS_, int SIZE_, bool WIDE_>
struct Row {
  static constexpr int LANES = LANES_, VECTORS = VECTORS_, SIZE = SIZE_;
  static constexpr bool WIDE = WIDE_;
  static constexpr int PAIRS = SIZE / 2, WORDS = SIZE * sizeof(T) / 4;  // of a vector
  static constexpr int CAPACITY = LANES * VECTORS * SIZE;
  static_assert(WORDS % 4 == 0, "whole 16-byte accesses");
  uint4 bits[VECTORS][WORDS / 4];

  static __device__ __forceinline__ int column(int thread, int i, int k) {
    return WIDE ? (i * LANES + thread) * SIZE + k : (i * SIZE + k) * LANES + thread;
  }
  // Whether the row has element k of vector i; the same for all k where WIDE.
  static __device__ __forceinline__ bool has(int thread, int i, int k, int columns) {
    return column(thread, i, WIDE ? 0 : k) < columns;
  }

  // Word `w` of vector i, a constant after unrolling: registers cannot be indexed by a variable.
  __device__ __forceinline__ u32& word(int i, int w) {
    uint4& four = bits[i][w / 4];
    return w % 4 == 0 ? four.x : w % 4 == 1 ? four.y : w % 4 == 2 ? four.z : four.w;
  }
  // Elements 2 * pair and 2 * pair + 1 of vector i.
  __device__ __forceinline__ float2 get(int i, int pair) {
    if constexpr (sizeof(T) == 4)
      return {__uint_as_float(word(i, 2 * pair)), __uint_as_float(word(i, 2 * pair + 1))};
    else
      return unpack2<T>(word(i, pair));
  }
  __device__ __forceinline__ void set(int i, int pair, float x, float y) {
    if constexpr (sizeof(T) == 4)
      word(i, 2 * pair) = __float_as_uint(x), word(i, 2 * pair + 1) = __float_as_uint(y);
    else
      word(i, pair) = pack2<T>(x, y);
  }
  __device__ __forceinline__ void fill(float x) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) set(i, pair, x, x);
  }

  // Element by element, rounded once.
  __device__ __forceinline__ void add(Row& other) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const float2 a = get(i, pair), b = other.get(i, pair);
        set(i, pair, a.x + b.x, a.y + b.y);
      }
  }

  // Keep 16-bit elements packed from here on: the compiler would keep the floats that it has made
  // of them, in twice the registers, rather than make them again.
  __device__ __forceinline__ void stay_packed() {
    if (sizeof(T) == 4) return;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int w = 0; w < WORDS; ++w) register_fence(word(i, w));
  }

  // Vector i of `row` into vector `slot` of these.
  __device__ __forceinline__ void load_one(const T* row, int thread, int columns, int i, int slot) {
    if (WIDE) {
      const uint4* source = reinterpret_cast<const uint4*>(row + column(thread, i, 0));
#pragma unroll
      for (int j = 0; j < WORDS / 4; ++j) {
        bits[slot][j] = make_uint4(0, 0, 0, 0);
        if (has(thread, i, 0, columns)) bits[slot][j] = source[j];
      }
      return;
    }
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair)
      set(slot, pair, load_element(row, thread, columns, i, 2 * pair),
          load_element(row, thread, columns, i, 2 * pair + 1));
  }
  __device__ __forceinline__ void load(const T* row, int thread, int columns) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) load_one(row, thread, columns, i, i);
  }

  __device__ __forceinline__ void store(T* row, int thread, int columns) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (WIDE) {
        uint4* target = reinterpret_cast<uint4*>(row + column(thread, i, 0));
#pragma unroll
        for (int j = 0; j < WORDS / 4; ++j)
          if (has(thread, i, 0, columns)) target[j] = bits[i][j];
        continue;
      }
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const float2 x = get(i, pair);
        store_element(row, thread, columns, i, 2 * pair, x.x);
        store_element(row, thread, columns, i, 2 * pair + 1, x.y);
      }
    }
  }

 private:
  static __device__ __forceinline__ float load_element(const T* row, int thread, int columns, int i,
                                                       int k) {
    return has(thread, i, k, columns) ? static_cast<float>(row[column(thread, i, k)]) : 0.f;
  }
  static __device__ __forceinline__ void store_element(T* row, int thread, int columns, int i,
                                                       int k, float x) {
    if (has(thread, i, k, columns)) row[column(thread, i, k)] = static_cast<T>(x);
  }
};
