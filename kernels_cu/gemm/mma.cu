/* A product with its epilogue on tensor cores by mma.sync, for every GPU that has them (sm_75+).

     out = activation(scale * x weight^T + bias) [* up] + residual           [m, n]

   A block has a tile of BLOCK_M rows by BLOCK_N outputs, and walks along k in steps of BLOCK_K. Its
   warps share the tile, WARP_M x WARP_N each, whose sums never leave registers until they have gone
   through the epilogue. Blocks take tiles in an order that keeps operands in L2
   (gemm/tile_order.cuh).

     ASYNC      operands travel through a ring of STAGES tiles filled by cp.async; one barrier a
                tile keeps the ring. Fragments are in registers twice: while 16 of k multiply,
                ldmatrix brings the next 16, across the border of tiles too.
     otherwise  (sm_75 has no cp.async, and rows without 16-byte boundaries cannot use it) the next
                tile waits in registers while this one multiplies; two tiles in shared memory.

   Bytes from shared memory bound the shape of a warp's tile: 64x64 asks for 4 KB and 16 of k, and
   eight warps of it in 128x256 take some 60 % of what shared memory gives while mma.sync runs at
   sm_90's best. The copies into the ring come on top.

   fp32 is rounded to tf32 between shared memory and the products (gemm/tf32_product.cuh), 8 k at a
   time in place of 16.

   With groups there is a weight, or an output, for each expert (gemm/groups.cuh).

   With GATE each warp's outputs are half gate, half up (gemm/operand_copy.cuh). */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/pdl.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "gemm/groups.cuh"
#include "gemm/operand_copy.cuh"
#include "gemm/store_fragments.cuh"
#include "gemm/tile_walk.cuh"
#include "gemm/tf32_product.cuh"
#include "gemm/warp_product.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
constexpr int BLOCK_M = ${block_m}, BLOCK_N = ${block_n}, BLOCK_K = ${block_k};
constexpr int WARP_M = ${warp_m}, WARP_N = ${warp_n};  // of the tile, a warp's
constexpr int STAGES = ${stages};                      // tiles of both operands in shared memory
constexpr int MIN_BLOCKS = ${min_blocks};              // of an SM: caps the registers
constexpr int MMA_K = ${mma_k};                        // of 16-bit types: 16, or sm_75's 8
constexpr bool GATE = ${gate}, PRE = ${pre}, RESIDUAL = ${residual};
constexpr bool ALIGNED = ${aligned};  // rows of x and weight start on 16-byte boundaries
constexpr bool X_K_MAJOR = ${x_k_major}, WEIGHT_K_MAJOR = ${weight_k_major};
constexpr int GROUP_ROWS = ${group_rows};  // rows of x whose tiles are taken together
constexpr int GUARD = ${guard};            // bytes between tiles: 0 except where memory is checked
using Activation = ${activation};

constexpr int WARPS_N = BLOCK_N / WARP_N, THREADS = BLOCK_M / WARP_M * WARPS_N * WARP_SIZE;
constexpr int OUT_COLUMNS = GATE ? BLOCK_N / 2 : BLOCK_N;
constexpr int M = WARP_M / 16, N = WARP_N / 8;  // mma blocks of a warp
constexpr bool ASYNC = ALIGNED && MMA_K == 16;
static_assert(STAGES >= 2, "one tile is filled while another is read");

using Order = GroupedOrder<Groups::${groups}, BLOCK_M>;
using XTile = OperandTile<elem_t, X_K_MAJOR, BLOCK_M, BLOCK_K>::Type;
using WeightTile = OperandTile<elem_t, WEIGHT_K_MAJOR, BLOCK_N, BLOCK_K>::Type;
using XCopy = OperandCopy<elem_t, XTile, X_K_MAJOR, THREADS, ALIGNED, RowsInOrder>;
using WeightCopy =
    OperandCopy<elem_t, WeightTile, WEIGHT_K_MAJOR, THREADS, ALIGNED, OutputOrder<GATE, WARP_N>>;
using Product = WarpProduct<elem_t, MMA_K, M, N, XTile, X_K_MAJOR, WeightTile, WEIGHT_K_MAJOR>;
constexpr int STEPS = BLOCK_K / Product::STEP_K;  // in a tile
static_assert(STEPS >= 2 && STEPS % 2 == 0, "fragments take turns in two places");
constexpr int WEIGHT_OFFSET = XTile::BYTES + GUARD;  // in a stage
constexpr int STAGE_BYTES = WEIGHT_OFFSET + WeightTile::BYTES + GUARD;

template <bool VALUE_>
struct Constant {
  static constexpr bool VALUE = VALUE_;
};

// Both operands' next tiles into a stage; unless SURE, as far as there are such tiles.
template <bool SURE = false>
__device__ __forceinline__ void copy_tiles(XCopy& x, WeightCopy& weight, u32 stage, int k_left) {
  if (!SURE && k_left <= 0) return;
  x.copy<SURE>(stage, k_left);
  weight.copy<SURE>(stage + WEIGHT_OFFSET, k_left);
}

// The stage behind this one in the ring.
__device__ __forceinline__ u32 next_stage(u32 stage, u32 ring) {
  return stage == ring + (STAGES - 1) * STAGE_BYTES ? ring : stage + STAGE_BYTES;
}

// Step STEP of the tile in `stage`: its fragments are there already; those of the next step are
// asked for, the first step asks for a later tile too, and the last step but one waits for the next
// tile. SURE: both are there, the later one whole; then there is no branch, and instructions mix.
template <int STEP, bool SURE>
__device__ __forceinline__ void step_async(float (&acc)[M][N][4], Product::Fragments (&f)[2],
                                           const Product& product, XCopy& x, WeightCopy& weight,
                                           u32 stage, u32 next, u32 filled, int k_left) {
  constexpr bool LAST = STEP == STEPS - 1;
  if (!LAST) {
    product.load(f[(STEP + 1) % 2], stage, stage + WEIGHT_OFFSET, STEP + 1);
    if (STEP == 0) copy_tiles<SURE>(x, weight, filled, k_left - (STAGES - 1) * BLOCK_K);
  } else if (SURE || k_left > BLOCK_K) {
    product.load(f[0], next, next + WEIGHT_OFFSET, 0);
  }
  Product::multiply(acc, f[STEP % 2]);
  if (STEP == STEPS - 2) {
    cp_async_commit();
    cp_async_wait<STAGES - 2>();
    __syncthreads();
  }
  if constexpr (!LAST)
    step_async<STEP + 1, SURE>(acc, f, product, x, weight, stage, next, filled, k_left);
}

__device__ __forceinline__ void multiply_async(float (&acc)[M][N][4], const Product& product,
                                               XCopy& x, WeightCopy& weight, u32 ring, int k) {
  // 1. The first tiles are on their way.
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; ++tile) {
    copy_tiles(x, weight, ring + tile * STAGE_BYTES, k - tile * BLOCK_K);
    cp_async_commit();
  }
  cp_async_wait<STAGES - 2>();
  __syncthreads();
  Product::Fragments f[2];
  product.load(f[0], ring, ring + WEIGHT_OFFSET, 0);

  // 2. Every tile; in its last step but one all warps have what they need of it, so that the stage
  //    may be filled from the next tile's first step on.
  u32 stage = ring, filled = ring + (STAGES - 1) * STAGE_BYTES;
  int k_left = k;
  const auto walk = [&](auto sure, int until) {
#pragma unroll 1
    for (; k_left > until; k_left -= BLOCK_K) {
      const u32 next = next_stage(stage, ring);
      step_async<0, sure.VALUE>(acc, f, product, x, weight, stage, next, filled, k_left);
      filled = stage, stage = next;
    }
  };
  if (x.whole && weight.whole) walk(Constant<true>{}, STAGES * BLOCK_K - 1);
  walk(Constant<false>{}, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_mma(const elem_t* __restrict__ x,        // [m, k], or [k, m] unless X_K_MAJOR
               const elem_t* __restrict__ weight,   // [n, k] (with GATE [2 n, k]), or its transpose
               const elem_t* __restrict__ bias,     // [n] or [2 n], or null
               const out_t* __restrict__ residual,  // [m, n], or null
               out_t* __restrict__ out,             // [m, n]
               elem_t* __restrict__ pre,            // [m, n] or [m, 2 n], or null
               //% if groups != "NONE"
               const int* __restrict__ offsets,  // [experts + 1], see gemm/groups.cuh
               const int experts,
               //% endif
               const int m, const int n, const int k, const i64 x_stride, const i64 weight_stride,
               const i64 out_stride,
               const i64 residual_stride,  // elements from a row to the next, < 2^29
               const float scale) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 ring = shared_address(shared_memory);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int warp_row = warp / WARPS_N * WARP_M, warp_output = warp % WARPS_N * WARP_N;
  after_previous_kernel();
  Order order{m, ceil_div(n, OUT_COLUMNS), GROUP_ROWS / BLOCK_M};
  //% if groups != "NONE"
  order.offsets = offsets, order.experts = experts;
  //% endif
  const GroupedTile tile = order(blockIdx.x);
  if (order.is_beyond(tile)) return;
  const int row = tile.row, column = tile.column * OUT_COLUMNS;
  const Depth depth = order.depth(blockIdx.x, k);
  const i64 weights = (WEIGHT_K_MAJOR ? (GATE ? 2 * n : n) : k) * weight_stride;

  XCopy x_copy(Order::OF_K ? x + depth.first * x_stride : x, x_stride, row, tile.end);
  WeightCopy weight_copy(
      Order::OF_K ? weight + depth.first * weight_stride : order.own(weight, tile.expert, weights),
      weight_stride, column, n);
  const Product product(lane, warp_row, warp_output);
  float acc[M][N][4] = {};
  if constexpr (ASYNC) {
    if (!Order::OF_K || depth.count > 0)
      multiply_async(acc, product, x_copy, weight_copy, ring, depth.count);
  } else {
    walk_staged<STAGE_BYTES, WEIGHT_OFFSET>(x_copy, weight_copy, ring, depth.count, [&](u32 stage) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        Product::Fragments f;
        product.load(f, stage, stage + WEIGHT_OFFSET, step);
        Product::multiply(acc, f);
      }
    });
  }

  const EpiloguePairs<Activation, GATE, PRE, RESIDUAL, elem_t, out_t> epilogue(
      residual, pre, residual_stride, scale, n);
  const int before = Order::OF_K ? tile.expert * m : 0;  // rows of out
  store_fragments(acc, epilogue, order.own(bias, tile.expert, GATE ? 2 * n : n), out, out_stride,
                  lane, before + row + warp_row, before + tile.end,
                  column + (GATE ? warp_output / 2 : warp_output));
}
