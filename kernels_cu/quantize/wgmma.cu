/* A product of codes on sm_90 (sm_90a): TMA brings tiles of bytes, wgmma multiplies e4m3 or int8.

     out = act(scale * x weight^T + bias) [* up] + residual           [m, n]

   The grid is as large as the GPU; a block (or a cluster of two) works through one tile after another,
   in an order that keeps operands in L2 (gemm/tile_order.cuh). A warp of the first warpgroup is the
   producer: it asks TMA for 128 bytes of k of both operands, stage after stage of a ring, and is tiles
   ahead of the others. CONSUMERS warpgroups have 64 rows of a tile each, or, with PINGPONG, each every
   other tile, whole: one multiplies while another is at its epilogue. Blocks of a cluster have tiles
   below one another; each fetches half of the weight's tile and has TMA write it into both.

     BLOCKS     scales of 128 of k: what they are summed to is multiplied and added up in fp32
     otherwise  scales of rows, or of a tensor, at the end

   INTERVAL: the tensor core's e4m3 sums have 13 bits of fraction; after so many steps of 128 of k
   they are added up in fp32. 0: never. int8 sums are exact.

   With GATE a tile has as many rows of gate as of up, so that a thread has both sums of an element.

   With groups there is a weight for each expert, with scales of its own (gemm/groups.cuh).

   Source: the promotion of sums is that of the DeepSeek-V3 report (2024), section 3.3.2. */
#include "prelude.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/pdl.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bytes.cuh"
#include "tile/pingpong.cuh"
#include "tile/ring.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "gemm/groups.cuh"
#include "gemm/store_fragments.cuh"
#include "quantize/scaled_sums.cuh"

using sum_t = ${sum};
using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
constexpr bool EXACT = ${exact};  // int8, summed in int; else e4m3 in float
constexpr bool GATE = ${gate}, RESIDUAL = ${residual};
constexpr bool BLOCKS = ${blocks};     // scales of 128 of k
constexpr int INTERVAL = ${interval};  // steps of k that are summed by tensor cores; 0: all
constexpr int BLOCK_M = ${block_m}, BLOCK_N = ${block_n};
constexpr bool PINGPONG = ${pingpong};  // consumers take turns
constexpr int STAGES = ${stages};
constexpr int CLUSTER = ${cluster};  // blocks that share a tile of the weight
constexpr int GUARD = ${guard};      // bytes between tiles: 0 except where memory is checked

constexpr bool TWICE = BLOCK_M == 256;  // a consumer has two blocks of 64 rows, one by one
constexpr int WARPGROUP = 128, CONSUMERS = PINGPONG || TWICE ? 2 : BLOCK_M / 64;
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int BLOCKS_OF_64 = PINGPONG ? BLOCK_M / 64 : 1;           // rows of a consumer
constexpr int RELEASES = 4 * CLUSTER * (PINGPONG ? 1 : CONSUMERS);  // of a stage, by warps
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 24;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
constexpr int BLOCK_K = 128, N = BLOCK_N / 8, PART = BLOCK_N / 2;
constexpr int OUT_COLUMNS = GATE ? PART : BLOCK_N;
constexpr int STEPS = INTERVAL > 0 ? INTERVAL : 1;  // divides
constexpr u16 ALL_BLOCKS = CLUSTER > 1 ? 3 : 0;
static_assert(BLOCK_M % 64 == 0 && CONSUMERS >= 2 && CONSUMERS <= 3, "64 rows a consumer");
static_assert(!PINGPONG || INTERVAL == 0, "no registers for sums in fp32 beside those of a tile");
static_assert(!BLOCKS || INTERVAL == 1, "a scale is of one step");
constexpr int TIMES = TWICE ? 2 : 1;
static_assert(!TWICE || BLOCKS, "sums of both blocks come to the same registers");
static_assert(!EXACT || INTERVAL == 0, "sums of int8 are exact");
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                  (1 + CONSUMERS) * registers_at_start(THREADS),
              "more would be waited for forever");

// Shared memory: tiles of x, tiles of the weight, barriers.
struct Ring : RingBarriers<Ring, STAGES> {
  static constexpr int A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K;
  static constexpr int BARRIERS = STAGES * (A_BYTES + B_BYTES + 2 * GUARD);
  __device__ __forceinline__ u32 a(int stage) const { return base + stage * (A_BYTES + GUARD); }
  __device__ __forceinline__ u32 b(int stage) const {
    return base + STAGES * (A_BYTES + GUARD) + stage * (B_BYTES + GUARD);
  }
  // This warp needs a stage no more.
  __device__ __forceinline__ void release(int stage, int lane) const {
    if (CLUSTER == 1) {
      if (lane == 0) mbarrier_arrive(empty(stage));
    } else if (lane < CLUSTER) {
      cluster_arrive_at(empty(stage), lane);
    }
  }
};
using Place = RingPlace<STAGES>;
using Order = GroupedOrder<Groups::${groups}, BLOCK_M * CLUSTER>;
static_assert(!Order::GROUPED || (Order::OF_ROWS && CLUSTER == 1), "experts have rows of x");

// Both operands' next 128 of k. By one thread.
__device__ __forceinline__ void fetch(const Ring& ring, int stage, const TensorMap& x_map,
                                      const TensorMap& weight_map, int row, int column, int expert,
                                      int n, int k, int rank) {
  const u32 full = ring.full(stage);
  mbarrier_expect(full, Ring::A_BYTES + Ring::B_BYTES);
  tma_load(ring.a(stage), x_map, full, k, row, 0, 0);
  const u32 b = ring.b(stage), second = b + PART * BLOCK_K;
  const int further = GATE ? n + column : column + PART;
  if constexpr (CLUSTER == 1) {
    tma_load(b, weight_map, full, k, column, expert, 0);
    if (GATE) tma_load(second, weight_map, full, k, further, expert, 0);
  } else {
    tma_load_multicast(rank == 0 ? b : second, weight_map, full, k, rank == 0 ? column : further, 0,
                       0, ALL_BLOCKS);
  }
}

// `rows`: blocks of 64 below one another.
template <typename Sum, int M, int COUNT>
__device__ __forceinline__ void multiply_stage(Sum (&acc)[M][COUNT][4], u32 rows, u32 b, bool add) {
  constexpr int BLOCK = 64 * BLOCK_K / 16;  // in units of a descriptor
  const u64 x = wgmma_tile(rows, 0), weight = wgmma_tile(b, 0);
#pragma unroll
  for (int block = 0; block < M; ++block) register_fence(acc[block]);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_K / 32; ++i)  // 32 bytes, two units
#pragma unroll
    for (int block = 0; block < M; ++block)
      wgmma_bytes(acc[block], x + block * BLOCK + 2 * i, weight + 2 * i, add || i > 0);
  wgmma_commit();
}

//% if cluster > 1
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1) quantized_wgmma(
    //% else
extern "C" __global__ void __launch_bounds__(THREADS, 1) quantized_wgmma(
    //% endif
    const __grid_constant__ TensorMap x_map,       // [m, k] codes, boxes of BLOCK_M rows
    const __grid_constant__ TensorMap weight_map,  // [n, k] (with GATE [2 n, k]) codes
    const float* __restrict__ x_scales,            // [m], [1], or of BLOCKS [m, ceil(k / 128)]
    const float* __restrict__ scales,    // [n], [1], or of BLOCKS [ceil(n / 128), ceil(k / 128)]
    const elem_t* __restrict__ bias,     // [n] or [2 n], or null
    const out_t* __restrict__ residual,  // [m, n], or null
    out_t* __restrict__ out,             // [m, n]
    //% if groups != "NONE"
    const int* __restrict__ offsets,  // [experts + 1], see gemm/groups.cuh
    const int experts,
    //% endif
    const int m, const int n, const int k,
    const int x_scale_step,  // 0: one for all rows
    const int scale_step, const i64 out_stride, const i64 residual_stride, const float scale,
    const int group_rows) {  // of tiles that are taken together
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const Ring ring{shared_address(shared_memory)};
  const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0);
  const int rank = CLUSTER == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) ring.begin(RELEASES, 1);
  __syncthreads();
  if (CLUSTER > 1) meet_cluster();  // both blocks' barriers are there
  after_previous_kernel();
  Order order{m, ceil_div(n, OUT_COLUMNS), group_rows};
  //% if groups != "NONE"
  order.offsets = offsets, order.experts = experts;
  //% endif
  const int steps = ceil_div(k, BLOCK_K);
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  Place place;

  if (warpgroup == 0) {
    // ---- producer
    fewer_registers<PRODUCER_REGISTERS>();
    if (__shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0) == 0) {
      if (elect_one()) tma_prefetch(x_map), tma_prefetch(weight_map);
      for (int number = first; number < order.count(); number += stride) {
        const GroupedTile tile = order(number);
        if (order.is_beyond(tile)) break;
        const int row = tile.row + rank * BLOCK_M, column = tile.column * OUT_COLUMNS;
        for (int step = 0; step < steps; ++step, place.advance()) {
          mbarrier_wait(ring.empty(place.stage), place.parity ^ 1);
          if (elect_one())
            fetch(ring, place.stage, x_map, weight_map, row, column, tile.expert, n, step * BLOCK_K,
                  rank);
        }
      }
    }
    __syncwarp();
  } else {
    // ---- consumers
    more_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, lane = threadIdx.x % WARP_SIZE;
    const int consumer_row = PINGPONG ? 0 : consumer * 64;  // TWICE: and 128 further on
    const int warp_row = consumer_row + threadIdx.x / WARP_SIZE % 4 * 16;
    using Sums = float (&)[1][N][4];
    using Pairs = EpiloguePairs<Activation, GATE, false, RESIDUAL, elem_t, out_t>;
    ScaledPairs<Pairs, EXACT, BLOCKS> epilogue(Pairs(residual, nullptr, residual_stride, scale, n),
                                               {x_scales, x_scale_step, m},
                                               {scales, scale_step, GATE ? 2 * n : n});
    const PingPong<CONSUMERS> turns(consumer, PINGPONG);
    int position = 0, turn = 0;  // in the ring; tiles
    for (int number = first; number < order.count(); number += stride, ++turn) {
      const GroupedTile tile = order(number);
      if (order.is_beyond(tile)) break;
      if (PINGPONG) {
        place = ring_place<STAGES>(position);
        position += steps;
        if (turn % CONSUMERS != consumer) continue;
        turns.wait();
      }
      const int row = tile.row + rank * BLOCK_M + warp_row, column = tile.column * OUT_COLUMNS;
      const int outputs = GATE ? 2 * n : n;
      const float* const own_scales =
          Order::own(scales, tile.expert, BLOCKS ? ceil_div(outputs, BLOCK_K) * steps : outputs);
      epilogue.of_weight.scales = own_scales;
      if (Order::OF_ROWS && tile.row + consumer_row >= tile.end) {  // no row of it is this one's
        for (int step = 0; step < steps; ++step, place.advance()) {
          mbarrier_wait(ring.full(place.stage), place.parity);
          ring.release(place.stage, lane);
        }
        continue;
      }
      sum_t acc[BLOCKS_OF_64][N][4];
      float total[TIMES][1][N][4];
#pragma unroll
      for (int i = 0; i < TIMES * N * 4; ++i) total[i / (N * 4)][0][i / 4 % N][i % 4] = 0.f;

      // 1. Products, 128 of k after the other.
      int last = 0;
      for (int step = 0; step < steps; ++step) {
        BlockScales<1, GATE> by[TIMES];
#pragma unroll
        for (int i = 0; i < (BLOCKS ? TIMES : 0); ++i)
          by[i].load(x_scales, own_scales, row + i * 128 + lane / 4, m, column, n, step, steps);
        mbarrier_wait(ring.full(place.stage), place.parity);
        const u32 a = ring.a(place.stage) + consumer_row * BLOCK_K, b = ring.b(place.stage);
        if constexpr (INTERVAL == 0) {
          multiply_stage(acc, a, b, step > 0);
          if (step > 0) {
            wgmma_wait<1>();
            ring.release(last, lane);
          }
          last = place.stage;
        } else if constexpr (TWICE) {
#pragma unroll
          for (int i = 0; i < TIMES; ++i) {
            const bool there = tile.row + consumer_row + i * 128 < tile.end;
            if (there) {
              multiply_stage(acc, a + i * 128 * BLOCK_K, b, false);
              wgmma_wait<0>();
            }
            if (i == TIMES - 1) ring.release(place.stage, lane);
            if (!there) continue;
            register_fence(acc[0]);
            add_scaled<GATE>(total[i], reinterpret_cast<Sums>(acc), by[i]);
          }
        } else {
          multiply_stage(acc, a, b, step % STEPS > 0);
          wgmma_wait<0>();
          ring.release(place.stage, lane);
          register_fence(acc[0]);
          if (BLOCKS)
            add_scaled<GATE>(total[0], reinterpret_cast<Sums>(acc), by[0]);
          else if (step % STEPS == STEPS - 1 || step == steps - 1)
            add_sums(total[0], reinterpret_cast<Sums>(acc));
        }
        place.advance();
      }
      if constexpr (INTERVAL == 0) {
        turns.pass();
        wgmma_wait<0>();
        ring.release(last, lane);
      }

      // 2. Scales, and the way out.
#pragma unroll
      for (int block = 0; block < BLOCKS_OF_64 * TIMES; ++block) {
        if (INTERVAL == 0) register_fence(acc[block]);
        store_fragments(
            INTERVAL > 0 ? total[TWICE ? block : 0] : reinterpret_cast<Sums>(acc[block]), epilogue,
            Order::own(bias, tile.expert, GATE ? 2 * n : n), out, out_stride, lane,
            row + block * (TWICE ? 128 : 64), tile.end, column);
      }
    }
    turns.end(turn % CONSUMERS);
  }
  if (CLUSTER > 1) meet_cluster();  // the other one writes here no more
}
