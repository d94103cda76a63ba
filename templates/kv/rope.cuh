// The way of a rotary embedding's pairs into the pages of a KV cache.
#pragma once
#include "kv/storage.cuh"
#include "rope/pairs.cuh"

template <typename T>
__device__ __forceinline__ Elements<T, Vector<T>::SIZE> elements(const Vector<T>& x) {
  return {x.bits};
}
template <typename T>
__device__ __forceinline__ Elements<T, 1> elements(const Element<T>& x) {
  Elements<T, 1> one;
  one[0] = x.value;
  return one;
}

// One head of one token: what is read of it, and where it goes. Heads of q to a row of their own
// kind, those of k and v to a page (`stored`), divided by their scale; nowhere where both are null.
template <typename T, typename S>
struct RopeHead {
  const T* source;
  T* target;
  S* stored;
  Divisor scale;
  bool turns;

  template <typename Access>
  __device__ __forceinline__ void store(int column, const Access& x) const {
    if (target != nullptr) write(target + column, x);
    if (stored != nullptr)
      store_elements(stored + column, Quantized<S>::encode(elements(x), scale));
  }
};
