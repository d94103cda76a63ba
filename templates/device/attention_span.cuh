// What a piece of work is about where attention on Hopper has a form: the rows of its sequence, and
// the band of keys in tiles.
#pragma once
#include "device/attention_form.cuh"

// Tiles first .. end - 1 of keys, one at least, though it be masked whole.
template <int BLOCK_Q, int BLOCK_K, bool VARLEN>
struct FormSpan : BandTiles<BLOCK_K> {
  int q_start, k_start;  // first rows of the sequence in q and o, in k and v
  int seqlen_q, seqlen_k;

  __device__ __forceinline__ FormSpan(int q0, const SequenceRows<VARLEN>& queries,
                                      const SequenceRows<VARLEN>& keys, int left, int right)
      : BandTiles<BLOCK_K>(KeyBand(queries.length, keys.length, left, right), q0,
                           min(q0 + BLOCK_Q, queries.length) - 1),
        q_start(queries.start),
        k_start(keys.start),
        seqlen_q(queries.length),
        seqlen_k(keys.length) {
    this->end = max(this->end, this->first + 1);
  }
};
