/* A product of codes by mma.sync: e4m3 (sm_89 and later) or int8 (sm_80 and later) for x and weight.

     out = act(scale * x weight^T + bias) [* up] + residual           [m, n]

   A block has a tile of BLOCK_M rows by BLOCK_N outputs, 128 bytes of k a step, which travel through a
   ring of STAGES by cp.async. To copies, swizzles and ldmatrix two bytes are an element of 16 bits
   (ptx/mma_8bit.cuh).

     BLOCKS     scales of 128 of k: what they are summed to is multiplied and added up in fp32
     otherwise  scales of rows, or of a tensor, at the end

   INTERVAL: e4m3 sums are added up in fp32 after so many steps; 0: never. int8 sums are exact.
   With GATE each warp's outputs are half gate, half up (gemm/operand_copy.cuh). */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma_8bit.cuh"
#include "ptx/pdl.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "gemm/operand_copy.cuh"
#include "gemm/store_fragments.cuh"
#include "gemm/tile_order.cuh"
#include "gemm/warp_product.cuh"
#include "quantize/scaled_sums.cuh"

using pair_t = ${pair};  // of codes: e4m3_pair, i8_pair
using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
constexpr bool EXACT = ${exact};  // int8, summed in int
constexpr bool GATE = ${gate}, RESIDUAL = ${residual};
constexpr bool BLOCKS = ${blocks};     // scales of 128 of k
constexpr int INTERVAL = ${interval};  // steps of k that are summed by tensor cores; 0: all
constexpr int BLOCK_M = ${block_m}, BLOCK_N = ${block_n};
constexpr int WARP_M = ${warp_m}, WARP_N = ${warp_n};  // of the tile, a warp's
constexpr int STAGES = ${stages};
constexpr int GUARD = ${guard};  // bytes between tiles: 0 except where memory is checked

constexpr int BLOCK_K = 64;                         // pairs: 128 of k
constexpr int STEPS = INTERVAL > 0 ? INTERVAL : 1;  // divides
constexpr int WARPS_N = BLOCK_N / WARP_N, THREADS = BLOCK_M / WARP_M * WARPS_N * WARP_SIZE;
constexpr int OUT_COLUMNS = GATE ? BLOCK_N / 2 : BLOCK_N;
constexpr int M = WARP_M / 16, N = WARP_N / 8;  // mma blocks of a warp
// Data-centre GPUs make products of e4m3 out of those of fp16, which takes registers.
constexpr int FRAGMENTS = __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 ? 1 : 2;  // under way
static_assert(!BLOCKS || INTERVAL == 1, "a scale is of one step");
static_assert(!EXACT || INTERVAL == 0, "sums of int8 are exact");

using XTile = SwizzledTile<BLOCK_M, BLOCK_K>;
using WeightTile = SwizzledTile<BLOCK_N, BLOCK_K>;
using XCopy = OperandCopy<pair_t, XTile, true, THREADS, true, RowsInOrder>;
using WeightCopy = OperandCopy<pair_t, WeightTile, true, THREADS, true, OutputOrder<GATE, WARP_N>>;
using Product = WarpProduct<pair_t, 16, M, N, XTile, true, WeightTile, true>;
constexpr int WEIGHT_OFFSET = XTile::BYTES + GUARD;  // in a stage
constexpr int STAGE_BYTES = WEIGHT_OFFSET + WeightTile::BYTES + GUARD;

__device__ __forceinline__ void zero(float (&acc)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M * N * 4; ++i) acc[i / (N * 4)][i / 4 % N][i % 4] = 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    quantized_mma(const u8* __restrict__ x,            // [m, k] codes
                  const float* __restrict__ x_scales,  // [m], [1], or of BLOCKS [m, ceil(k / 128)]
                  const u8* __restrict__ weight,       // [n, k] codes; with GATE 2 n for n
                  const float* __restrict__ scales,  // [n], [1], or [ceil(n / 128), ceil(k / 128)]
                  const elem_t* __restrict__ bias,   // [n] or [2 n], or null
                  const out_t* __restrict__ residual,  // [m, n], or null
                  out_t* __restrict__ out,             // [m, n]
                  const int m, const int n,
                  const int k,             // a multiple of 16
                  const int x_scale_step,  // 0: one for all rows
                  const int scale_step, const i64 out_stride, const i64 residual_stride,
                  const float scale, const int group_rows) {  // of tiles that are taken together
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 ring = shared_address(shared_memory);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int warp_row = warp / WARPS_N * WARP_M, warp_output = warp % WARPS_N * WARP_N;
  after_previous_kernel();
  const TileOrder order{ceil_div(m, BLOCK_M), ceil_div(n, OUT_COLUMNS), group_rows};
  const TilePlace tile = order(blockIdx.x);
  const int row = tile.row * BLOCK_M, column = tile.column * OUT_COLUMNS;
  const int pairs = k / 2, steps = ceil_div(pairs, BLOCK_K);
  const int lane_row = row + warp_row + lane / 4;
  const int first_column = column + (GATE ? warp_output / 2 : warp_output);

  // 1. The first stages.
  XCopy x_copy(reinterpret_cast<const pair_t*>(x), pairs, row, m);
  WeightCopy weight_copy(reinterpret_cast<const pair_t*>(weight), pairs, column, n);
  const auto copy = [&](int step) {
    if (step >= steps) return;
    const u32 stage = ring + step % STAGES * STAGE_BYTES;
    x_copy.copy(stage, pairs - step * BLOCK_K);
    weight_copy.copy(stage + WEIGHT_OFFSET, pairs - step * BLOCK_K);
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    copy(i);
    cp_async_commit();
  }

  // 2. Products; a stage is filled again behind the barrier that says all warps are done with it.
  const Product product(lane, warp_row, warp_output);
  float total[M][N][4], acc[M][N][4];
  zero(total), zero(acc);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    BlockScales<M, GATE> by;
    const auto load_scales = [&] {
      by.load(x_scales, scales, lane_row, m, first_column, n, step, steps);
    };
    if (BLOCKS && FRAGMENTS > 1) load_scales();  // early, where there are registers for them
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    copy(step + STAGES - 1);
    cp_async_commit();
    const u32 stage = ring + step % STAGES * STAGE_BYTES;
#pragma unroll FRAGMENTS
    for (int i = 0; i < BLOCK_K / Product::STEP_K; ++i) {
      Product::Fragments f;
      product.load(f, stage, stage + WEIGHT_OFFSET, i);
      Product::multiply(acc, f);
    }
    if (INTERVAL > 0 && (step % STEPS == STEPS - 1 || step == steps - 1)) {
      if (BLOCKS && FRAGMENTS == 1) load_scales();
      if (BLOCKS)
        add_scaled<GATE>(total, acc, by);
      else
        add_sums(total, acc);
      zero(acc);
    }
  }

  // 3. Scales, and the way out.
  using Pairs = EpiloguePairs<Activation, GATE, false, RESIDUAL, elem_t, out_t>;
  const ScaledPairs<Pairs, EXACT, BLOCKS> epilogue(
      Pairs(residual, nullptr, residual_stride, scale, n), {x_scales, x_scale_step, m},
      {scales, scale_step, GATE ? 2 * n : n});
  store_fragments(INTERVAL > 0 ? total : acc, epilogue, bias, out, out_stride, lane, row + warp_row,
                  m, first_column);
}
