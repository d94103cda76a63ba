// The largest of some numbers and where it stands, as torch.argmax: NaN is larger than all others, and
// of equal ones it is the first.
#pragma once
#include "prelude.cuh"

struct Largest {
  float value = NEG_INFINITY;
  int column = 0x7fffffff;

  __device__ __forceinline__ void see(float other, int at) {
    const bool same = other == value || (other != other && value != value);
    const bool more = other > value || (other != other && value == value);
    if (more || (same && at < column)) value = other, column = at;
  }
  __device__ __forceinline__ void see(const Largest& other) { see(other.value, other.column); }

  // Over LANES neighbouring lanes, to all of them. By whole warps.
  template <int LANES>
  __device__ __forceinline__ Largest of_lanes() const {
    Largest best = *this;
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
      best.see(__shfl_xor_sync(FULL_MASK, best.value, distance),
               __shfl_xor_sync(FULL_MASK, best.column, distance));
    return best;
  }

  __device__ __forceinline__ void store(u32* words, int i) const {
    words[2 * i] = __float_as_uint(value), words[2 * i + 1] = column;
  }
  static __device__ __forceinline__ Largest loaded(const u32* words, int i) {
    return {__uint_as_float(words[2 * i]), static_cast<int>(words[2 * i + 1])};
  }
};
