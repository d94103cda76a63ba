/* Chosen experts in, the same choices sorted by expert out: stable, padded to tiles of block_size, in
   one launch over the whole grid (moe/groups.cuh). Blocks wait for one another: launched
   cooperatively. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "moe/groups.cuh"

using id_t = ${id_type};
constexpr int THREADS = ${threads};
constexpr int MOST = ${most};  // groups

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_regroup(const id_t* __restrict__ topk_ids,         // [tokens, top_k]
                const int* __restrict__ expert_map,        // [experts] or null: as they are
                const int* __restrict__ num_tokens,        // [1] or null: all of them
                int* __restrict__ sorted_token_ids,        // [places]
                int* __restrict__ expert_ids,              // [places / block_size]
                int* __restrict__ num_tokens_post_padded,  // [1]
                int* __restrict__ inverse,                 // [tokens, top_k]
                int* __restrict__ offsets,                 // [groups + 1]
                int* __restrict__ counts,                  // [groups]
                u32* counters,                             // see GridSums
                const int tokens, const int top_k, const Grouping how) {
  after_previous_kernel(false);
  __shared__ Regroup<THREADS, MOST> block;
  const Groups to = {expert_map, sorted_token_ids, expert_ids, num_tokens_post_padded,
                     inverse,    offsets,          counts,     counters};
  const int items = real_tokens(num_tokens, tokens) * top_k;
  const Share mine = share_of_warp(items, 1, THREADS / WARP_SIZE, how);
  const auto group = [&](int item) { return group_of(topk_ids[item], expert_map, how); };
  block.clear(to, how);
  let_next_kernel();
  block.sort(mine, group, to, how);
#pragma unroll 1
  for (int i = items + blockIdx.x * THREADS + threadIdx.x; i < tokens * top_k;
       i += gridDim.x * THREADS)
    inverse[i] = -1;
}
