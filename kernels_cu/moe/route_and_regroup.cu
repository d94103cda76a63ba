/* The router of a mixture of experts and the sorting of its choices by expert, in one launch: route.cu
   and regroup.cu with nothing but registers and shared memory between them.

   Every warp has a piece of the tokens, chooses for them as route.cu does, 32 / LANES tokens at a
   time, and sorts its choices with all the other warps of the grid (moe/groups.cuh). The first
   ones of a warp stay in shared memory; more are read again. Blocks wait for one another: launched
   cooperatively. Every architecture. */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "moe/groups.cuh"
#include "moe/route.cuh"
//% if staged
#include "moe/staged.cuh"
//% endif

using logit_t = ${dtype};
constexpr int LANES = ${lanes};    // of a warp on one token
constexpr int VALUES = ${values};  // logits of a lane
constexpr bool PLAIN = ${plain};   // softmax of one group of experts, in whole chunks
constexpr int THREADS = ${threads};
constexpr bool STAGED = ${staged};  // rows come through shared memory

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int TOKENS = WARP_SIZE / LANES;                        // of a warp at a time
constexpr int MOST = LANES * VALUES < 64 ? 64 : LANES * VALUES;  // groups

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_route_and_regroup(const logit_t* __restrict__ logits,  // [tokens, experts]
                          const float* __restrict__ bias,      // [experts] or null: 0
                          const int* __restrict__ expert_map,  // [experts] or null: as they are
                          const int* __restrict__ num_tokens,  // [1] or null: all of them
                          float* __restrict__ topk_weights,    // [tokens, top_k]
                          int* topk_ids,                       // [tokens, top_k], read again
                          int* __restrict__ sorted_token_ids,  // [places]
                          int* __restrict__ expert_ids,        // [places / block_size]
                          int* __restrict__ num_tokens_post_padded,  // [1]
                          int* __restrict__ inverse,                 // [tokens, top_k]
                          int* __restrict__ offsets,                 // [groups + 1]
                          int* __restrict__ counts,                  // [groups]
                          u32* counters,                             // see GridSums
                          const i64 row_stride, const int tokens, const Routing how,
                          const Grouping grouping) {
  after_previous_kernel(STAGED);  // an SM has room for one block of these: the next do not crowd it
  __shared__ Regroup<THREADS, MOST> block;
  const Groups to = {expert_map, sorted_token_ids, expert_ids, num_tokens_post_padded,
                     inverse,    offsets,          counts,     counters};
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / WARP_SIZE, top_k = how.top_k;
  const int slot = threadIdx.x % WARP_SIZE / LANES;  // which of the warp's tokens
  const int all = real_tokens(num_tokens, tokens);
  const Share mine = share_of_warp(all, TOKENS, WARPS, grouping);
  //% if staged
  using Staged = StagedRows<logit_t, VALUES>;
  extern __shared__ uint4 rows[];  // [WARPS][Staged::WORDS]
  const Staged staged = {rows + warp * Staged::WORDS};
  if (mine.begin < mine.end)
    staged.ask(logits, row_stride, mine.begin, mine.end - 1, how.group_size);
  //% endif
  block.clear(to, grouping);

#pragma unroll 1
  for (int at = mine.begin; at < mine.end; at += TOKENS) {
    const int token = at + slot, row = min(token, mine.end - 1);  // shuffles need every lane
    const logit_t* source = logits + row * row_stride;
    //% if staged
    cp_async_wait<0>();
    __syncwarp();
    const Choice choice = route_staged(staged, slot, source, lane, how);
    __syncwarp();
    if (at + TOKENS < mine.end)
      staged.ask(logits, row_stride, at + TOKENS, mine.end - 1, how.group_size);
    //% else
    const Choice choice = route_token<PLAIN, logit_t, LANES, VALUES>(source, bias, lane, how);
    //% endif
    if (token >= mine.end || lane >= top_k) continue;
    const int item = token * top_k + lane, early = item - mine.begin * top_k;
    topk_weights[item] = choice.weight;
    topk_ids[item] = choice.id;
    if (early < block.HELD) block.held[warp][early] = choice.id;
  }
  __syncwarp();

  let_next_kernel();
  const Share items = {mine.begin * top_k, mine.end * top_k, mine.each * top_k};
  const auto group = [&](int item) {
    const int early = item - items.begin;
    return group_of(early < block.HELD ? block.held[warp][early] : topk_ids[item], expert_map,
                    grouping);
  };
  block.sort(items, group, to, grouping);

#pragma unroll 1
  for (int i = all * top_k + blockIdx.x * THREADS + threadIdx.x; i < tokens * top_k;
       i += gridDim.x * THREADS)
    topk_weights[i] = 0.f, topk_ids[i] = -1, inverse[i] = -1;
}
