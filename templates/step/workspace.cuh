// Arrays one behind the other in the bytes of a workspace, each on 16 bytes.
#pragma once
#include "prelude.cuh"

struct Workspace {
  unsigned char* next;
  template <typename T>
  __device__ __forceinline__ T* take(int count) {
    T* const found = reinterpret_cast<T*>(next);
    next += round_up<i64>(static_cast<i64>(count) * sizeof(T), 16);
    return found;
  }
};
