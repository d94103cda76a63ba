// Some neighbouring elements of a row, 16 bytes or one element an access; fp32 when computed with.
#pragma once
#include "tile/vector.cuh"

template <typename T, bool WIDE>
struct Chunk {
  static constexpr int SIZE = WIDE ? 16 / sizeof(T) : 1;
  Vector<T> bits;

  __device__ __forceinline__ float get(int i) const { return bits.get(i); }
  __device__ __forceinline__ void set(int i, float value) { bits.set(i, value); }

  // Chunk `i` of a row.
  static __device__ __forceinline__ Chunk load(const T* row, int i) {
    Chunk made = {};
    if constexpr (WIDE)
      made.bits = load_vector(row + i * SIZE);
    else
      made.set(0, static_cast<float>(row[i]));
    return made;
  }
  __device__ __forceinline__ void store(T* row, int i) const {
    if constexpr (WIDE)
      store_vector(row + i * SIZE, bits);
    else
      row[i] = static_cast<T>(get(0));
  }
};
