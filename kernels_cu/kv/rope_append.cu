/* The rotary embedding of q and k, and the append of k and v to the pages of a KV cache, in one
   pass: what rope and then kv_append would leave, to the bit.

   Tokens have q's heads, then k's, then v's. A thread has the pairs of one token at the same place
   of several heads (rope/rows.cuh) and computes their angles once, or reads cosines and sines
   from a table; q is written to out_q, k and v to the token's slot, as in append.cu, and k nowhere
   else. Columns behind `rotary_dim`, and all of v, do not turn.

   Memory-bound: each element is read and written once. out_q may be q. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "kv/place.cuh"
#include "kv/rope.cuh"
#include "rope/angle.cuh"
#include "rope/rows.cuh"
//% if storage == "fp8"
#include "kv/e4m3.cuh"
//% endif

using elem_t = ${dtype};
using stored_t = ${kept};
constexpr bool SCALED = ${scaled};
constexpr bool VECTOR = ${vector};            // 16-byte accesses
constexpr bool INTERLEAVED = ${interleaved};  // pairs are neighbours
constexpr int THREADS = ${threads};
constexpr int UNROLL = ${unroll};  // heads under way in a thread

constexpr int BLOCKS = 640 / THREADS;  // of an SM; ptxas, left to itself, spills for more
using Pairs = RopePairs<elem_t, VECTOR, INTERLEAVED>;
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rope_kv_append(
    const elem_t* q,                       // [tokens, heads_q, head_dim]    strides in elements
    const elem_t* __restrict__ k,          // [tokens, heads_k, head_dim]
    const elem_t* __restrict__ v,          // [tokens, heads_k, head_dim]
    elem_t* out_q,                         // as q, may be q
    stored_t* __restrict__ k_pages,        // [pages, page_size, heads_k, head_dim], in any order
    stored_t* __restrict__ v_pages,        // the same
    const float* __restrict__ k_scale,     // [heads_k], where SCALED
    const float* __restrict__ v_scale,     // [heads_k]
    const int* __restrict__ slot_mapping,  // [tokens], or [tokens, 2]: low and high half of an i64
    const u32* __restrict__ positions,     // [tokens] int32 or int64, stride in words
                                           //% if tabled
    const float* __restrict__ table,  // [table_rows, rotary_dim]: cosines of all pairs, then sines
    const i64 table_rows, const i64 table_stride,
    //% else
    const RopeFrequencies frequencies,
    //% endif
    const int slot_step, const int position_step,
    const int position_words,  // 1 of int32, 2 of int64
    const int q_token, const int q_head, const int out_token, const int out_head, const int k_token,
    const int k_head, const int v_token, const int v_head, const int k_page_step,
    const int k_head_step, const int k_token_step,  // within k_pages
    const int v_page_step, const int v_head_step, const int v_token_step, const u32 num_slots,
    const int page_log2, const int tokens, const int heads_q, const int heads_k, const int head_dim,
    const int rotary_dim, const int lanes_log2, const int inner_log2, const int per_place) {
  after_previous_kernel();
  const RopePlace place = rope_place<THREADS>(lanes_log2, inner_log2, per_place, true);
  const int token = place.token, lane = place.lane;
  if (token >= tokens || lane * Pairs::WIDTH >= rotary_dim / 2) return;
  const int slot = slot_mapping[wide(token, slot_step)];

  auto head_of = [&](int head) -> RopeHead<elem_t, stored_t> {
    if (head < heads_q) {
      return {q + wide(token, q_token) + wide(head, q_head),
              out_q + wide(token, out_token) + wide(head, out_head), nullptr, Divisor(1.f), true};
    }
    head -= heads_q;
    const bool values = head >= heads_k;
    if (values) head -= heads_k;
    const PagedPool pool{values ? v_page_step : k_page_step, values ? v_head_step : k_head_step,
                         values ? v_token_step : k_token_step, num_slots, page_log2};
    stored_t* pages = values ? v_pages : k_pages;
    return {values ? v + wide(token, v_token) + wide(head, v_head)
                   : k + wide(token, k_token) + wide(head, k_head),
            nullptr, pool.has(slot) ? pages + pool.offset(slot, head) : nullptr,
            Divisor(SCALED ? (values ? v_scale : k_scale)[head] : 1.f), !values};
  };

  float cosine[Pairs::WIDTH], sine[Pairs::WIDTH];
  auto angles = [&] {
    const i64 position = rope_position(positions, position_words, {0, 0, position_step}, 0, token);
    //% if tabled
    const bool inside = position >= 0 && position < table_rows;
    const float* entry = table + (inside ? position : 0) * table_stride;
    //% else
    const bool inside = position >= 0 && position <= ROPE_LAST_POSITION;
    //% endif
    const float unit = rope_unit(inside);
#pragma unroll
    for (int group = 0; group < Pairs::GROUPS; ++group) {
      const int first = Pairs::first(group, lane, rotary_dim), at = group * Pairs::GROUP;
      //% if tabled
      load_floats<Pairs::GROUP>(entry + first, cosine + at);
      load_floats<Pairs::GROUP>(entry + rotary_dim / 2 + first, sine + at);
      //% else
      u64 frequency[Pairs::GROUP];
      rope_frequencies(frequencies, first, rotary_dim / 2, frequency);
#pragma unroll
      for (int i = 0; i < Pairs::GROUP; ++i) {
        sincos_turns<elem_t>(rope_turns(frequency[i], position), sine[at + i], cosine[at + i]);
      }
      //% endif
    }
#pragma unroll
    for (int i = 0; i < Pairs::WIDTH; ++i) {
      cosine[i] *= unit;
      sine[i] *= unit;
    }
  };

  const int heads = heads_q + 2 * heads_k, step = place.head_slots;
  const int end = min_of(heads, place.head + step * per_place);
  bool begun = false;
  for (int head = place.head; head < end; head += UNROLL * step) {
    Pairs x[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (head + i * step < end) x[i].load(head_of(head + i * step).source, lane, rotary_dim);
    }
    if (!begun) angles();
    begun = true;
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (head + i * step >= end) continue;
      const RopeHead<elem_t, stored_t> one = head_of(head + i * step);
      if (one.turns) x[i].turn(cosine, sine);
      one.store(Pairs::column(0, lane, rotary_dim), x[i].x);
      one.store(Pairs::column(1, lane, rotary_dim), x[i].y);
    }
  }

  if (rotary_dim == head_dim) return;
  for (int head = place.head; head < end; head += step) {
    const RopeHead<elem_t, stored_t> one = head_of(head);
    if (one.source == one.target) continue;
#pragma unroll 1
    for (int i = rotary_dim + lane * Pairs::WIDTH; i < head_dim; i += rotary_dim / 2) {
      typename Pairs::Access x;
      read(x, one.source + i);
      one.store(i, x);
    }
  }
}
