// Sixteen bytes of neighbouring elements, as one load or store: 4 of fp32, 8 of fp16 or bf16.
//
//   Vector<fp16> x = load_vector(p);      // p on a 16-byte boundary
//   x.set(3, 2.f * x.get(3));             // elements by constant index, in fp32
//   store_vector(q, x);
#pragma once
#include "prelude.cuh"

template <typename T>
struct Vector {
  static constexpr int SIZE = 16 / sizeof(T);
  uint4 bits;

  // Element `i`, a constant after unrolling: registers cannot be indexed by a variable.
  __device__ __forceinline__ float get(int i) const {
    return static_cast<float>(reinterpret_cast<const T*>(&bits)[i]);
  }
  __device__ __forceinline__ void set(int i, float value) {
    reinterpret_cast<T*>(&bits)[i] = static_cast<T>(value);
  }
};

template <typename T>
__device__ __forceinline__ Vector<T> load_vector(const T* source) {
  return {*reinterpret_cast<const uint4*>(source)};
}

// For what is read once: it is the first to leave the caches.        PTX ISA: ld.global.cs
template <typename T>
__device__ __forceinline__ Vector<T> load_vector_once(const T* source) {
  return {__ldcs(reinterpret_cast<const uint4*>(source))};
}

template <typename T>
__device__ __forceinline__ void store_vector(T* target, const Vector<T>& x) {
  *reinterpret_cast<uint4*>(target) = x.bits;
}

// For what nobody reads soon.                                         PTX ISA: st.global.cs
template <typename T>
__device__ __forceinline__ void store_vector_once(T* target, const Vector<T>& x) {
  __stcs(reinterpret_cast<uint4*>(target), x.bits);
}
