// What a work item is about where attention on sm_90 has a form: the rows of its sequence, the
// band of keys in tiles, which rules its scores meet and how.
#pragma once
#include "attention/features.cuh"
#include "attention/sm90/page_boxes.cuh"
#include "attention/sm90/work.cuh"

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

template <int BLOCK_Q, int BLOCK_K, bool VARLEN>
struct SpanOf<FormSpan<BLOCK_Q, BLOCK_K, VARLEN>> {
  static constexpr bool PAGED = false, PARTED = false;
  const int *cu_seqlens_q, *cu_seqlens_k;
  int max_seqlen_q, max_seqlen_k;
  const AttentionForm& form;

  __device__ __forceinline__ FormSpan<BLOCK_Q, BLOCK_K, VARLEN> operator()(
      const WorkItem<BLOCK_Q>& place) const {
    return {place.q0, SequenceRows<VARLEN>(cu_seqlens_q, place.batch, max_seqlen_q),
            SequenceRows<VARLEN>(cu_seqlens_k, place.batch, max_seqlen_k), form.window_left,
            form.window_right};
  }
};

// The same with keys in pages.
template <int BLOCK_Q, int BLOCK_K>
struct PagedSpan : FormSpan<BLOCK_Q, BLOCK_K, true> {
  PageBoxes pages;
};

template <int BLOCK_Q, int BLOCK_K>
struct SpanOf<PagedSpan<BLOCK_Q, BLOCK_K>> {
  static constexpr bool PAGED = true, PARTED = false;
  const int* cu_seqlens_q;
  PagedKeys keys;
  int box_log2, max_seqlen_q;
  const AttentionForm& form;

  __device__ __forceinline__ PagedSpan<BLOCK_Q, BLOCK_K> operator()(
      const WorkItem<BLOCK_Q>& place) const {
    const SequencePages pages = keys(place.batch);
    return {{place.q0, SequenceRows<true>(cu_seqlens_q, place.batch, max_seqlen_q),
             SequenceRows<true>(0, pages.length), form.window_left, form.window_right},
            {pages, box_log2}};
  }
};

template <bool SOFTCAP, bool SCORE_MOD, bool BIAS, bool MASK, int HEAD_DIM_V>
struct ScoreWay {
  // Scores keep their own units, which softmax_scale_log2 takes care of, unless a rule wants
  // natural ones.
  static constexpr bool NATURAL = SOFTCAP || SCORE_MOD || BIAS;
  // All of a warp's scores are capped at once where registers allow it, else one by one.
  static constexpr bool CAP_WARP = SOFTCAP && HEAD_DIM_V <= 128 && !(BIAS && MASK);
  static constexpr bool CAP_EACH = SOFTCAP && !CAP_WARP;
  static constexpr bool RULES = CAP_EACH || SCORE_MOD || BIAS || MASK;  // one by one
};

// The rules of a tile of scores that are applied one by one; where its bias and mask are stands in
// `place`, which changes from tile to tile.
template <typename Way, bool BIAS, bool MASK, typename Scores, typename Mod, typename Place>
__device__ __forceinline__ auto tile_rules(const AttentionForm& form, const Mod& mod,
                                           const Place& place) {
  return score_rules(RuleIf<Way::CAP_EACH, SoftCap<false>>(form.softcap, form.softmax_scale),
                     PerScore<Mod>(mod, mod.seqlen_q, mod.seqlen_k),
                     RuleIf<BIAS, typename Scores::AddBias>(place),
                     RuleIf<MASK, typename Scores::Hide>(place));
}
