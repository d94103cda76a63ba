// Where rows of packed sequences lie in codes of attention. Codes of a head lie whole, one head behind
// the other: those of Q and K [heads, total, dim], each row where it is in q or k. Scales of K and V^T have
// a place for each SCALE_KEYS keys of a sequence, so a sequence begins at a multiple of SCALE_KEYS there:
//
//   first(i) = (cu_seqlens_k[i] + i * KEY_ROOM) rounded down to SCALE_KEYS
//
// which leaves at least MAX_TILE - 1 places behind its last key before the next one begins: zeros in V^T,
// so that a tile of keys has nothing of a neighbour. (fkjit/ops/attention/quantized/quantize_kernels.py
// has the same numbers.)
#pragma once
#include "attention/sequence_rows.cuh"

constexpr int SCALE_KEYS_LOG2 = 6, MAX_TILE = 192, KEY_ROOM = 256;
static_assert(KEY_ROOM - (1 << SCALE_KEYS_LOG2) >= MAX_TILE - 1, "a tile ends before the next one");

// The first place of a sequence in V^T, and, times SCALE_KEYS, in the scales of K. 0 without sequences.
template <bool PACKED>
__device__ __forceinline__ int first_place(const int* __restrict__ cu_seqlens_k, int sequence) {
  if (!PACKED) return 0;
  return (cu_seqlens_k[sequence] + sequence * KEY_ROOM) >> SCALE_KEYS_LOG2 << SCALE_KEYS_LOG2;
}
