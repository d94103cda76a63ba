/* The scale of a whole tensor: each block finds the greatest magnitude of what it has, the last one to
   end that of all, in one launch. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "tile/last_block.cuh"
#include "quantize/scale.cuh"

using elem_t = ${dtype};
using Codes = ${codes};
constexpr bool WIDE = ${wide};  // rows of x start on 16-byte boundaries, whole eights
constexpr int THREADS = ${threads};

constexpr int LANES = 16, WIDTH = LANES * 8, GROUPS = THREADS / LANES;  // of columns; of a block
constexpr int UNROLL = 4;                                               // loads under way

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_amax(const elem_t* __restrict__ x,  // [rows, columns]
                  float* __restrict__ scales,    // [1]
                  u32* workspace,                // [gridDim.x]
                  u32* counters,                 // [1], 0 before and after
                  const int rows, const int columns, const i64 x_stride,
                  const int groups,  // of WIDTH columns in a row
                  const int spans) {
  after_previous_kernel();
  __shared__ u32 warps[THREADS / WARP_SIZE];
  u32 most = 0;
  const i64 step = static_cast<i64>(gridDim.x) * GROUPS;
  for (i64 first = blockIdx.x * GROUPS + threadIdx.x / LANES; first < spans;
       first += step * UNROLL) {
    Eight eight[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const i64 span = first + i * step;
      const int row = span < spans ? static_cast<int>(span) / groups : 0;
      const int column = static_cast<int>(span - static_cast<i64>(row) * groups) * WIDTH;
      eight[i] = load_eight<WIDE>(x + row * x_stride, column + threadIdx.x % LANES * 8,
                                  span < spans ? columns : 0);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) most = max(most, magnitude(eight[i]));
  }
  most = block_most<THREADS>(most, warps);
  if (threadIdx.x == 0) workspace[blockIdx.x] = most;
  if (!last_block(counters, gridDim.x)) return;

  most = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += THREADS) most = max(most, __ldcg(workspace + i));
  most = block_most<THREADS>(most, warps);
  if (threadIdx.x == 0) scales[0] = scale_of<float, Codes>(most);
}
