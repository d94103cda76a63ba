// What a call of attention may have beside q, k and v: the scalars of it, the sequence and the keys
// of a block, rules that are there or not. Kernels rendered without a form include none of it.
#pragma once
#include "attention/score.cuh"
#include "attention/sequence_rows.cuh"

// A kernel's argument, by value (fkjit/signature.py knows its layout).
struct AttentionForm {
  Strides bias, mask;  // of [batch, heads_q, seqlen_q, seqlen_k]; 0 where broadcast
  int window_left;     // query i sees keys from i + seqlen_k - seqlen_q - window_left
  int window_right;    // to i + seqlen_k - seqlen_q + window_right
  int alibi_batch_stride;
  int total_q;  // rows of packed q, o and lse
  float softcap;
  float softmax_scale;
};

// A rule where a template has it, else none: both are made from the same arguments.
template <bool PRESENT, typename Rule>
struct RuleIf : Rule {
  using Rule::Rule;
};
template <typename Rule>
struct RuleIf<false, Rule> : Unchanged {
  template <typename... Arguments>
  __device__ __forceinline__ explicit RuleIf(const Arguments&...) {}
};

// An array of scores as it is, or Held.
template <bool HELD, typename Array, int M, int N>
struct HeldIf : Held<Array, M, N> {
  using Held<Array, M, N>::Held;
};
template <typename Array, int M, int N>
struct HeldIf<false, Array, M, N> : Array {
  using Array::Array;
};

// Tiles of BLOCK_K keys that rows q_first .. q_last of a band see something of, first .. end - 1;
// and of those the ones that each of these rows sees whole, first_whole .. end_whole - 1.
template <int BLOCK_K>
struct BandTiles {
  int first, end, first_whole, end_whole;

  __device__ __forceinline__ BandTiles(const KeyBand& band, int q_first, int q_last) {
    first = band.first(q_first) / BLOCK_K;
    end = ceil_div(max(band.end(q_last), 0), BLOCK_K);
    first_whole = ceil_div(band.first(q_last), BLOCK_K);
    end_whole = max(band.end(q_first), 0) / BLOCK_K;
  }

  __device__ __forceinline__ bool is_whole(int tile) const {
    return first_whole <= tile && tile < end_whole;
  }
};
