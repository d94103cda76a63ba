/* Keys and values of new tokens go into the pages of a KV cache: token t of k and v to slot_mapping[t],
   nowhere where that is below 0. With other storage than the tokens' own they are divided by the
   scale of their head and rounded to e4m3 or int8.

   Blocks of even y have the keys, those of odd y the values: one stream in, one out, as in a copy. A
   thread has the same SIZE elements of up to UNROLL tokens, and asks for all of them before it knows
   the slots, so that the two do not wait for each other. Two tokens of the same slot are written in
   no order, mixed: the caller sees to it that there are none.

   Any strides of tokens, heads and pages; a head's elements lie beside each other. SIZE elements
   are 16 bytes where every head begins on a multiple of them, else one. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "kv/place.cuh"
#include "kv/storage.cuh"
//% if storage == "fp8"
#include "kv/e4m3.cuh"
//% endif

using elem_t = ${dtype};
using stored_t = ${kept};
constexpr bool SCALED = ${scaled};
constexpr int SIZE = ${size};  // elements of an access
constexpr int THREADS = ${threads};
constexpr int UNROLL = ${unroll};  // tokens of a thread
constexpr int FEW_TOKENS = 256;    // with more the next kernel's blocks would be in the way

static_assert(THREADS % WARP_SIZE == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS) kv_append(
    const elem_t* __restrict__ k,          // [tokens, heads, head_dim]    strides in elements
    const elem_t* __restrict__ v,          // [tokens, heads, head_dim]
    stored_t* __restrict__ k_pages,        // [pages, page_size, heads, head_dim], in any order
    stored_t* __restrict__ v_pages,        // the same
    const float* __restrict__ k_scale,     // [heads], where SCALED
    const float* __restrict__ v_scale,     // [heads]
    const int* __restrict__ slot_mapping,  // [tokens], or [tokens, 2]: low and high half of an i64
    const int slot_step,                   // 1 or 2
    const int tokens, const int k_token, const int k_head, const int v_token, const int v_head,
    const int k_page_step, const int k_head_step, const int k_token_step,  // within k_pages
    const int v_page_step, const int v_head_step, const int v_token_step, const u32 num_slots,
    const int page_log2, const int columns,
    const int head_columns,  // accesses of a token, of a head
    const int lanes, const int group, const float lanes_inverse, const float head_inverse) {
  after_previous_kernel(tokens <= FEW_TOKENS);
  const Lanes here(lanes, lanes_inverse, head_inverse, group, UNROLL);
  if (here.member >= group || here.column >= columns) return;
  const int head = here.head;
  const int dim = (here.column - head * head_columns) * SIZE;
  const bool values = here.values();
  const int token_step = values ? v_token : k_token;
  const elem_t* const source = (values ? v + wide(head, v_head) : k + wide(head, k_head)) + dim;
  stored_t* const pages = (values ? v_pages : k_pages) + dim;

  Elements<elem_t, SIZE> x[UNROLL];
  int slot[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const int token = here.first + i * group;
    slot[i] = -1;
    if (token >= tokens) continue;
    slot[i] = slot_mapping[wide(token, slot_step)];
    x[i] = load_elements<SIZE>(source + wide(token, token_step));
  }

  const Divisor scale(SCALED ? (values ? v_scale : k_scale)[head] : 1.f);
  const PagedPool pool{values ? v_page_step : k_page_step, values ? v_head_step : k_head_step,
                       values ? v_token_step : k_token_step, num_slots, page_log2};
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (!pool.has(slot[i])) continue;
    store_elements(pages + pool.offset(slot[i], head), Quantized<stored_t>::encode(x[i], scale));
  }
}
