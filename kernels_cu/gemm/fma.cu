/* A product with its epilogue in fp32 FMAs: exact products, sums in fp32. Every architecture.

     out = activation(scale * x weight^T + bias) [* up] + residual           [m, n]

   A block has a tile of BLOCK_M rows by BLOCK_N outputs and walks along k in steps of BLOCK_K; its
   tiles come through a ring in shared memory (cp.async; on sm_75 by way of registers), [k][outer]
   whatever their layout in memory: what lies [outer][k] is transposed in registers on its way
   (gemm/transposing_copy.cuh). A thread has 4 GM rows by 4 GN outputs of sums, and the order of its
   products spares the registers' banks (gemm/thread_product.cuh). With 8 x 16 sums it reads 6 chunks
   of 16 bytes for 128 FMAs: even at four cycles a read of a warp, four warps take 96 cycles of
   shared memory while their FMAs take 128.

   Two blocks of four warps an SM, or one of eight: enough, since a thread's FMAs are independent of
   each other.

   Where tiles are fewer than SMs, SPLIT blocks share the k of each: they leave their sums in
   `workspace`, and the last of them adds these up in the order of k (the same bits every time).

   With GATE each warp's outputs are half gate, half up (gemm/operand_copy.cuh). */
#include "prelude.cuh"
#include "ptx/memory.cuh"
#include "ptx/pdl.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "gemm/groups.cuh"
#include "gemm/operand_copy.cuh"
#include "gemm/pairs.cuh"
#include "gemm/thread_product.cuh"
#include "gemm/tile_walk.cuh"
#include "gemm/transposing_copy.cuh"
#include "tile/last_block.cuh"

constexpr int BLOCK_M = ${block_m}, BLOCK_N = ${block_n}, BLOCK_K = ${block_k};
constexpr int WARP_M = ${warp_m}, WARP_N = ${warp_n};  // of the tile, a warp's
constexpr int STAGES = ${stages};                      // tiles of both operands in shared memory
constexpr int MIN_BLOCKS = ${min_blocks};              // of an SM: caps the registers
constexpr bool GATE = ${gate}, PRE = ${pre}, RESIDUAL = ${residual};
constexpr bool ALIGNED = ${aligned};  // rows of x and weight start on 16-byte boundaries
constexpr bool X_K_MAJOR = ${x_k_major}, WEIGHT_K_MAJOR = ${weight_k_major};
constexpr int SPLIT = ${split};            // blocks that share a tile's k
constexpr bool LONG_K = ${long_k};         // sums of runs of k are added up in shared memory
constexpr int GROUP_ROWS = ${group_rows};  // rows of x whose tiles are taken together
constexpr int GUARD = ${guard};            // bytes between tiles: 0 except where memory is checked
using Activation = ${activation};

constexpr int WARPS_N = BLOCK_N / WARP_N, THREADS = BLOCK_M / WARP_M * WARPS_N * WARP_SIZE;
constexpr int OUT_COLUMNS = GATE ? BLOCK_N / 2 : BLOCK_N;
constexpr int LANES_M = 8, LANES_N = 4;  // of a warp
constexpr int GM = WARP_M / (4 * LANES_M), GN = WARP_N / (4 * LANES_N);
constexpr int GROUPS = GATE ? GN / 2 : GN;  // of four columns of out
static_assert(GM >= 1 && GN >= (GATE ? 2 : 1), "a thread has sums, of gate and up if there are");

// Sums are made of runs of so many k, where there is room for them and their totals: the error grows
// with the square root of a run, and of how many there are. Short runs want registers; long ones, of a
// tile that has none left, a place in shared memory for each thread's totals.
constexpr bool IN_RUNS = GM * GN * 16 <= 32, IN_LONG_RUNS = LONG_K && !IN_RUNS;
constexpr int RUN = IN_RUNS ? 128 : 1024;

// An operand's tiles, and what brings them.
template <bool K_MAJOR, int OUTER, typename Order>
struct Operand {
  using Tile = TransposedFloats<OUTER, BLOCK_K>;
  using Copy = TransposingCopy<Tile, THREADS, ALIGNED, Order>;
};
template <int OUTER, typename Order>
struct Operand<false, OUTER, Order> {
  using Tile = FloatTile<OUTER, BLOCK_K>;
  using Copy = OperandCopy<fp32, Tile, false, THREADS, ALIGNED, Order>;
};
using X = Operand<X_K_MAJOR, BLOCK_M, RowsInOrder>;
using Weight = Operand<WEIGHT_K_MAJOR, BLOCK_N, OutputOrder<GATE, WARP_N>>;
using Order = GroupedOrder<Groups::${groups}, BLOCK_M>;
using XTile = X::Tile;
using WeightTile = Weight::Tile;
using XReader = FloatReader<XTile, LANES_M>;
using WeightReader = FloatReader<WeightTile, LANES_N>;
using Product = ThreadProduct<GM, GN, XReader, WeightReader, BLOCK_K>;
using Pairs = EpiloguePairs<Activation, GATE, PRE, RESIDUAL, fp32, fp32>;
constexpr int WEIGHT_OFFSET = XTile::BYTES + GUARD;  // in a stage
constexpr int STAGE_BYTES = WEIGHT_OFFSET + WeightTile::BYTES + GUARD;

// sums += more;  more = 0
__device__ __forceinline__ void add_to(float (&sums)[GM][GN][4][4], float (&more)[GM][GN][4][4]) {
#pragma unroll
  for (int i = 0; i < GM * GN * 16; ++i) {
    float& from = more[i / (16 * GN)][i / 16 % GN][i / 4 % 4][i % 4];
    sums[i / (16 * GN)][i / 16 % GN][i / 4 % 4][i % 4] += from;
    from = 0.f;
  }
}

// Of a tile's k what this block multiplies.
__device__ __forceinline__ Depth part_of(const Depth& whole) {
  if (SPLIT == 1) return whole;
  const i64 steps = ceil_div(whole.count, BLOCK_K);
  const int begin = static_cast<int>(steps * blockIdx.y / SPLIT) * BLOCK_K;
  const int end = static_cast<int>(steps * (blockIdx.y + 1) / SPLIT) * BLOCK_K;
  return {whole.first + begin, min(whole.count, end) - begin};
}

constexpr int CHUNKS = GM * GN * 4;  // of four sums, of a thread

__device__ __forceinline__ float (&chunk_of(float (&acc)[GM][GN][4][4], int i))[4] {
  return acc[i / (4 * GN)][i / 4 % GN][i % 4];
}

// A thread's totals in shared memory, chunk by chunk; nobody else looks at them.
struct Totals {
  u32 place;  // of this thread's first chunk

  __device__ __forceinline__ explicit Totals(u32 from) : place(from + threadIdx.x * 16) {}
  __device__ __forceinline__ u32 chunk(int i) const { return place + i * THREADS * 16; }

  // totals = 0
  __device__ __forceinline__ void clear() const {
    const float zero[4] = {};
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) store_shared_floats(chunk(i), zero);
  }

  // more += totals
  __device__ __forceinline__ void add_to(float (&more)[GM][GN][4][4]) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      float total[4], (&own)[4] = chunk_of(more, i);
      load_shared_floats(total, chunk(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) own[j] += total[j];
    }
  }

  // totals += more;  more = 0
  __device__ __forceinline__ void take(float (&more)[GM][GN][4][4]) const {
    add_to(more);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      store_shared_floats(chunk(i), chunk_of(more, i));
#pragma unroll
      for (float& sum : chunk_of(more, i)) sum = 0.f;
    }
  }
};

// Where the blocks that share a tile leave their sums, part by part of k; each thread its own.
struct Parts {
  static constexpr int PART = CHUNKS * THREADS;  // chunks
  float4* tile;                                  // this thread's first chunk of the first part

  __device__ __forceinline__ explicit Parts(float* workspace)
      : tile(reinterpret_cast<float4*>(workspace) + static_cast<i64>(blockIdx.x) * SPLIT * PART +
             threadIdx.x) {}

  __device__ __forceinline__ void leave(float (&acc)[GM][GN][4][4]) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      __stcg(tile + blockIdx.y * PART + i * THREADS,
             reinterpret_cast<const float4&>(chunk_of(acc, i)));
  }

  // The sums of all parts, in the order of k. Loads do not wait for each other, as far as registers
  // allow.
  __device__ __forceinline__ void column(float4 (&sums)[4 * GM], int n) const {
    constexpr int AT_ONCE = SPLIT <= 4 ? SPLIT : 1;
#pragma unroll
    for (int i = 0; i < 4 * GM; ++i) sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll AT_ONCE
    for (int part = 0; part < SPLIT; ++part)
#pragma unroll
      for (int i = 0; i < 4 * GM; ++i) {
        const int chunk = (i / 4 * GN + n) * 4 + i % 4;
        const float4 more = __ldcg(tile + part * PART + chunk * THREADS);
        sums[i].x += more.x, sums[i].y += more.y, sums[i].z += more.z, sums[i].w += more.w;
      }
  }
};

// Sums that are in this thread's registers.
struct Own {
  const float (&acc)[GM][GN][4][4];
  __device__ __forceinline__ void column(float4 (&sums)[4 * GM], int n) const {
#pragma unroll
    for (int i = 0; i < 4 * GM; ++i) {
      const float (&x)[4] = acc[i / 4][n][i % 4];
      sums[i] = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
};

// Sums::column(n): of each of a thread's rows the four sums of its group n of columns. `row`,
// `column`: of the thread's first sum in out.
template <typename Sums>
__device__ __forceinline__ void store_sums(const Sums& sums_of, const Pairs& epilogue,
                                           const fp32* __restrict__ bias, fp32* __restrict__ out,
                                           i64 out_stride, int row, int rows, int column) {
  const BiasPairs<fp32> bias_of(bias, epilogue.n, GATE);
  const bool aligned = has_whole_chunks(out, out_stride);
#pragma unroll
  for (int n = 0; n < GROUPS; ++n) {
    const int first = column + n * 4 * LANES_N;
    const float2 own[2] = {bias_of(first), bias_of(first + 2)};
    float2 own_up[2] = {};
    if (GATE) own_up[0] = bias_of.up(first), own_up[1] = bias_of.up(first + 2);
    float4 every[4 * GM], every_up[4 * GM];
    sums_of.column(every, n);
    sums_of.column(every_up, GATE ? n + GROUPS : n);
#pragma unroll
    for (int i = 0; i < 4 * GM; ++i) {
      const int r = row + i / 4 * 4 * LANES_M + i % 4;
      if (r >= rows) continue;
      const float4 sums = every[i], up = every_up[i];
      const float2 low = epilogue({sums.x, sums.y}, own[0], {up.x, up.y}, own_up[0], r, first);
      const float2 high = epilogue({sums.z, sums.w}, own[1], {up.z, up.w}, own_up[1], r, first + 2);
      const float y[4] = {low.x, low.y, high.x, high.y};
      fp32* target = out + r * out_stride + first;
      if (aligned) {
        store_global4<true>(target, y, epilogue.n - first);
      } else {
        store_global4<false>(target, y, epilogue.n - first);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_fma(const fp32* __restrict__ x,         // [m, k], or [k, m] unless X_K_MAJOR
               const fp32* __restrict__ weight,    // [n, k] (with GATE [2 n, k]), or its transpose
               const fp32* __restrict__ bias,      // [n] or [2 n], or null
               const fp32* __restrict__ residual,  // [m, n], or null
               fp32* __restrict__ out,             // [m, n]
               fp32* __restrict__ pre,             // [m, n] or [m, 2 n], or null
               //% if groups != "NONE"
               const int* __restrict__ offsets,  // [experts + 1], see gemm/groups.cuh
               //% endif
               float* __restrict__ workspace,  // [gridDim.x, SPLIT, BLOCK_M, BLOCK_N], or null
               u32* __restrict__ counters,     // [gridDim.x], 0 before and after, or null
               //% if groups != "NONE"
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
  const int y = lane / LANES_N, x_place = lane % LANES_N;
  after_previous_kernel();
  Order order{m, ceil_div(n, OUT_COLUMNS), GROUP_ROWS / BLOCK_M};
  //% if groups != "NONE"
  order.offsets = offsets, order.experts = experts;
  //% endif
  const GroupedTile tile = order(blockIdx.x);
  if (order.is_beyond(tile)) return;
  const int row = tile.row, column = tile.column * OUT_COLUMNS;
  const Depth depth = part_of(order.depth(blockIdx.x, k));
  const i64 weights = (WEIGHT_K_MAJOR ? (GATE ? 2 * n : n) : k) * weight_stride;

  X::Copy x_copy(x + (X_K_MAJOR ? depth.first : depth.first * x_stride), x_stride, row, tile.end);
  Weight::Copy weight_copy(order.own(weight, tile.expert, weights) +
                               (WEIGHT_K_MAJOR ? depth.first : depth.first * weight_stride),
                           weight_stride, column, n);
  const Product product{XReader(warp_row, y), WeightReader(warp_output, x_place)};
  float acc[GM][GN][4][4] = {}, totals[GM][GN][4][4] = {};
  const Totals long_totals(ring + STAGES * STAGE_BYTES);
  if (IN_LONG_RUNS) long_totals.clear();
  int steps = 0;  // since sums were added to the totals
  const auto multiply = [&](u32 stage) {
    product.multiply(acc, stage, stage + WEIGHT_OFFSET);
    if ((!IN_RUNS && !IN_LONG_RUNS) || ++steps < RUN / BLOCK_K) return;
    steps = 0;
    if (IN_RUNS) {
      add_to(totals, acc);
    } else {
      long_totals.take(acc);
    }
  };
#if __CUDA_ARCH__ >= 800
  walk_async<STAGES, STAGE_BYTES, WEIGHT_OFFSET>(x_copy, weight_copy, ring, depth.count, multiply);
#else
  walk_staged<STAGE_BYTES, WEIGHT_OFFSET>(x_copy, weight_copy, ring, depth.count, multiply);
#endif

  if (IN_RUNS) add_to(acc, totals);
  if (IN_LONG_RUNS) long_totals.add_to(acc);
  const Pairs epilogue(residual, pre, residual_stride, scale, n);
  const int before = Order::OF_K ? tile.expert * m : 0;  // rows of out
  const auto store = [&](const auto& sums) {
    store_sums(sums, epilogue, order.own(bias, tile.expert, GATE ? 2 * n : n), out, out_stride,
               before + row + warp_row + 4 * y, before + tile.end,
               column + (GATE ? warp_output / 2 : warp_output) + 4 * x_place);
  };
  if constexpr (SPLIT == 1) {
    store(Own{acc});
  } else {
    const Parts parts(workspace);
    parts.leave(acc);
    __syncthreads();
    if (last_block(counters + blockIdx.x, SPLIT)) store(parts);
  }
}
