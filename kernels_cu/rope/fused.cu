/* Rotary position embedding of q and k in one pass, sines and cosines computed here.

   Angles are integers, fractions of a turn (rope/angle.cuh), so that they are as accurate at
   position 2^31 - 1 as at 1; frequencies are products of the powers of theta that the call passes.
   A thread computes them for its pairs of one token, and turns the same pairs of several heads:
   rope/rows.cuh has the tiling. Pairs are either halves of the rotated columns (GPT-NeoX,
   Llama) or neighbours (GPT-J); columns behind `rotary_dim` are copied.

   Memory-bound: each element is read and written once, in fp32 between, rounded once. Outputs may
   be the inputs. Every architecture. RoFormer: Su et al. 2021. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "rope/angle.cuh"
#include "rope/rows.cuh"

using elem_t = ${dtype};
constexpr bool VECTOR = ${vector};            // 16-byte accesses
constexpr bool INTERLEAVED = ${interleaved};  // pairs are neighbours
constexpr int THREADS = ${threads};
constexpr int UNROLL = ${unroll};  // heads under way in a thread

constexpr int BLOCKS = 640 / THREADS;  // of an SM; ptxas, left to itself, spills for more
using Pairs = RopePairs<elem_t, VECTOR, INTERLEAVED>;
static_assert(THREADS % WARP_SIZE == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rope_fused(
    const elem_t* q,       // [batch, length, heads_q, head_dim]  strides in elements
    const elem_t* k,       // [batch, length, heads_k, head_dim]
    elem_t* out_q,         // as q, may be q
    elem_t* out_k,         // as k, may be k
    const u32* positions,  // [batch, length] int32 or int64, strides in words; null: none
    const RopeFrequencies frequencies, const Strides q_strides, const Strides k_strides,
    const Strides out_q_strides, const Strides out_k_strides, const Strides position_strides,
    const int position_words,         // 1 of int32, 2 of int64
    const i64 start, const int step,  // position = start + step * row + positions[batch, row]
    const int tokens,                 // batch * length
    const int length, const int heads_q,
    const int heads,  // heads_q + heads_k
    const int head_dim, const int rotary_dim, const int lanes_log2, const int inner_log2,
    const int per_place, const bool heads_first,
    const float direction) {  // -1 turns back
  after_previous_kernel();
  const RopePlace place = rope_place<THREADS>(lanes_log2, inner_log2, per_place, heads_first);
  if (place.token >= tokens || place.lane * Pairs::WIDTH >= rotary_dim / 2) return;
  const u32 batch = place.token < length ? 0 : place.token / length;
  const u32 row = place.token - batch * length;
  const RopeHeads<elem_t> token = {{q, out_q, q_strides, out_q_strides, batch, row},
                                   {k, out_k, k_strides, out_k_strides, batch, row},
                                   static_cast<u32>(heads_q),
                                   rotary_dim,
                                   head_dim};
  auto angles = [&](float (&cosine)[Pairs::WIDTH], float (&sine)[Pairs::WIDTH]) {
    const i64 position =
        start + step * row + rope_position(positions, position_words, position_strides, batch, row);
    const float unit = rope_unit(position >= 0 && position <= ROPE_LAST_POSITION);
#pragma unroll
    for (int group = 0; group < Pairs::GROUPS; ++group) {
      u64 frequency[Pairs::GROUP];
      const int first = Pairs::first(group, place.lane, rotary_dim);
      rope_frequencies(frequencies, first, rotary_dim / 2, frequency);
#pragma unroll
      for (int i = 0; i < Pairs::GROUP; ++i) {
        const int at = group * Pairs::GROUP + i;
        sincos_turns<elem_t>(rope_turns(frequency[i], position), sine[at], cosine[at]);
        cosine[at] *= unit;
        sine[at] *= direction * unit;
      }
    }
  };
  const int stride = place.head_slots, end = min_of(heads, place.head + stride * per_place);
  turn_heads<Pairs, UNROLL>(token, place.lane, place.head, stride, end, angles);
  if (rotary_dim < head_dim) copy_rest<Pairs>(token, place.lane, place.head, stride, end);
}
