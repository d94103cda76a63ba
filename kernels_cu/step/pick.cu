/* The largest logit of each row, out of the largest of its tiles (step/stream.cu, HEAD), and the
   step's end: the tokens become these, and positions the next ones. A block has a row. sm_80 and
   later. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "step/largest.cuh"

constexpr int THREADS = ${threads}, WARPS = THREADS / WARP_SIZE;

extern "C" __global__ void __launch_bounds__(THREADS)
    step_pick(const u32* largest,      // [tiles, m, 2]: values, and columns
              const int* active,       // [m], what positions grow by
              i64* __restrict__ best,  // [m]
              i64* __restrict__ tokens, int* __restrict__ positions,  // [m]
              const int tiles, const int m,
              const bool advance) {  // else only best is written
  after_previous_kernel();
  __shared__ Largest of_warps[WARPS];
  const int row = blockIdx.x, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  Largest all;
#pragma unroll 4
  for (int tile = threadIdx.x; tile < tiles; tile += THREADS)
    all.see(Largest::loaded(largest, tile * m + row));
  all = all.of_lanes<WARP_SIZE>();
  if (lane == 0) of_warps[warp] = all;
  __syncthreads();
  if (warp > 0) return;
  all = lane < WARPS ? of_warps[lane] : Largest{};
  all = all.of_lanes<WARP_SIZE>();
  if (lane > 0) return;
  best[row] = all.column;
  if (!advance) return;
  tokens[row] = all.column;
  positions[row] += active[row];
}
