/* The router of a mixture of experts: the top_k of a token's experts, and their weights.

   LANES neighbouring lanes have a token and all of its logits in their registers
   (moe/route.cuh): one read of the logits, softmax and choice by shuffles, no shared memory.
   Lane k keeps the k-th choice, so a token's choices are written side by side. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "moe/route.cuh"

using logit_t = ${dtype};
constexpr int LANES = ${lanes};    // of a warp on one token
constexpr int VALUES = ${values};  // logits of a lane
constexpr bool PLAIN = ${plain};   // softmax of one group of experts, in whole chunks
constexpr int THREADS = ${threads};

constexpr int TOKENS = THREADS / LANES;  // of a block
// Grids between these, a few blocks an SM, are slower where the next kernel's blocks come in early,
// if there is much to choose.
constexpr int FEW_BLOCKS = 160, MANY_BLOCKS = 1024;
static_assert(WARP_SIZE % LANES == 0 && THREADS % WARP_SIZE == 0, "whole tokens in whole warps");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_route(const logit_t* __restrict__ logits,  // [tokens, experts]
              const float* __restrict__ bias,      // [experts] or null: 0
              float* __restrict__ topk_weights,    // [tokens, top_k]
              int* __restrict__ topk_ids,          // [tokens, top_k]
              const i64 row_stride, const int tokens, const Routing how) {
  after_previous_kernel(how.top_k <= 2 || gridDim.x <= FEW_BLOCKS || gridDim.x >= MANY_BLOCKS);
  const int lane = threadIdx.x % LANES;
  const i64 token = static_cast<i64>(blockIdx.x) * TOKENS + threadIdx.x / LANES;
  const i64 row = token < tokens ? token : tokens - 1;  // shuffles need every lane
  const Choice mine =
      route_token<PLAIN, logit_t, LANES, VALUES>(logits + row * row_stride, bias, lane, how);
  if (token >= tokens || lane >= how.top_k) return;
  topk_weights[token * how.top_k + lane] = mine.weight;
  topk_ids[token * how.top_k + lane] = mine.id;
}
