/* dweight and dbias out of the parts that norm/backward.cu or norm/weight_partials.cu left: sums of
   columns, always in the same order. A block has 32 columns; its warps take the parts in turns, and
   the first warp adds what they found. blockIdx.y: 0 dweight, 1 dbias. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"

using weight_t = ${weight_dtype};
constexpr int WARPS = ${warps};
constexpr int UNDERWAY = 8;  // loads of a thread

extern "C" __global__ void __launch_bounds__(WARPS* WARP_SIZE)
    norm_sum_parts(const float* __restrict__ dweight_parts,  // [parts, columns] or null
                   const float* __restrict__ dbias_parts,    // [parts, columns] or null
                   weight_t* __restrict__ dweight,           // [columns], null where its parts are
                   weight_t* __restrict__ dbias,             // the same
                   const int parts, const int columns) {
  after_previous_kernel();
  __shared__ float found[WARPS][WARP_SIZE];
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int column = blockIdx.x * WARP_SIZE + lane;
  const float* source = blockIdx.y == 0 ? dweight_parts : dbias_parts;
  weight_t* target = blockIdx.y == 0 ? dweight : dbias;
  if (source == nullptr) return;

  float sums[UNDERWAY] = {};
  if (column < columns) {
    for (int part = warp; part < parts; part += WARPS * UNDERWAY)
#pragma unroll
      for (int i = 0; i < UNDERWAY; ++i)
        if (part + i * WARPS < parts)
          sums[i] += source[static_cast<i64>(part + i * WARPS) * columns + column];
  }
  float mine = 0.f;
#pragma unroll
  for (int i = 0; i < UNDERWAY; ++i) mine += sums[i];
  found[warp][lane] = mine;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += found[i][lane];
  target[column] = static_cast<weight_t>(sum);
}
