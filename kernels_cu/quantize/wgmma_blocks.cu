/* A product of e4m3 codes with scales of blocks on sm_90 (sm_90a): a scale for 128 columns of a row of
   x, and one for 128 by 128 of the weight.

     out = act(scale * x weight^T + bias) [* up] + residual           [m, n]

   As wgmma.cu, which has the other scales, but for the loop over k. Every 128 of k what tensor cores
   have summed is multiplied with two scales and added up in fp32: a fourth of the products' clocks, in
   which the other consumer's products run, if nothing else stands between two steps of one. So

     - scales come to shared memory beside the operands, by warps of the producer's warpgroup;
     - descriptors and barriers are counted on from step to step, and the next stage is asked for
       before sums are promoted.

   A consumer has 64 rows of a tile. With BLOCK_N of 256 it multiplies them with 128 outputs after the
   other, since there are registers for sums of 128 beside those of all in fp32. With GATE these are
   those of gate and of up, or with BLOCK_N of 128 half as many of each. With CODED out is e4m3 with a
   scale for 128 columns. With groups there is a weight for each expert (gemm/groups.cuh).

   Source: the promotion of sums is that of the DeepSeek-V3 report (2024), section 3.3.2. */
#include "prelude.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/pdl.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bytes.cuh"
#include "tile/ring.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "gemm/groups.cuh"
#include "gemm/store_fragments.cuh"
#include "quantize/scaled_sums.cuh"
//% if coded
#include "quantize/coded_rows.cuh"
//% endif

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
constexpr bool GATE = ${gate}, RESIDUAL = ${residual};
constexpr int BLOCK_M = ${block_m}, BLOCK_N = ${block_n};
constexpr int STAGES = ${stages};
constexpr bool CODED = ${coded};  // out is codes and scales
constexpr int GUARD = ${guard};   // bytes between arrays: 0 except where memory is checked

constexpr bool WIDE = BLOCK_N == 256;
constexpr int TIMES = WIDE ? 2 : 1;  // products of a step of a consumer, one by one
constexpr int WARPGROUP = 128, CONSUMERS = BLOCK_M / 64, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int BLOCK_K = 128, N = 128 / 8, PART = BLOCK_N / 2;
constexpr int OUT_COLUMNS = GATE ? PART : BLOCK_N;
using Scales = BlockScales<1, GATE && !WIDE>;
constexpr int SCALE_WARPS = 3;  // of the producer's warpgroup, each for one of three stages
static_assert(CONSUMERS == 2, "64 rows a consumer");
static_assert(BLOCK_N == 128 || WIDE, "a scale of the weight for each product");
static_assert(!CODED || (GATE && WIDE), "128 columns share a scale");
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                  (1 + CONSUMERS) * registers_at_start(THREADS),
              "more would be waited for forever");

// Shared memory: tiles of x, tiles of the weight, scales, barriers.
struct Ring : RingBarriers<Ring, STAGES> {
  static constexpr int A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K;
  static constexpr int SCALES_BYTES = BLOCK_M * 4 + 16, OF_B = STAGES * (A_BYTES + GUARD);
  static constexpr int OF_SCALES = OF_B + STAGES * (B_BYTES + GUARD);
  static constexpr int BARRIERS = OF_SCALES + STAGES * (SCALES_BYTES + GUARD);
  static constexpr int RELEASES = 4 * CONSUMERS;  // of a stage, by warps
  __device__ __forceinline__ u32 a(int stage) const { return base + stage * (A_BYTES + GUARD); }
  __device__ __forceinline__ u32 b(int stage) const {
    return base + OF_B + stage * (B_BYTES + GUARD);
  }
  __device__ __forceinline__ u32 scales(int stage) const {
    return base + OF_SCALES + stage * (SCALES_BYTES + GUARD);
  }
};
using Place = RingPlace<STAGES>;
using Order = GroupedOrder<Groups::${groups}, BLOCK_M>;
// Steps that the second consumer waits for ahead: at an expert's short k one multiplies while the
// other is at its epilogue.
constexpr int SKEW = Order::GROUPED ? 2 : 0;
static_assert(!Order::GROUPED || Order::OF_ROWS, "experts have rows of x");

// What a consumer counts on from step to step. Descriptors' low halves, in units of 16 bytes.
struct Cursor {
  u32 a, b, scales, full;
  int stage = 0, parity = 0;

  __device__ __forceinline__ Cursor(const Ring& ring, int row)
      : a((ring.a(0) + row * BLOCK_K) / 16),
        b(ring.b(0) / 16),
        scales(ring.scales(0)),
        full(ring.full(0)) {}
  __device__ __forceinline__ void advance() {
    const bool last = ++stage == STAGES;
    a += (Ring::A_BYTES + GUARD) / 16 - (last ? STAGES * (Ring::A_BYTES + GUARD) / 16 : 0);
    b += (Ring::B_BYTES + GUARD) / 16 - (last ? STAGES * (Ring::B_BYTES + GUARD) / 16 : 0);
    scales += Ring::SCALES_BYTES + GUARD - (last ? STAGES * (Ring::SCALES_BYTES + GUARD) : 0);
    full += 16 - (last ? STAGES * 16 : 0);
    if (last) stage = 0, parity ^= 1;
  }
  // The stage `count` steps on is there.
  __device__ __forceinline__ void wait_ahead(const Ring& ring, int count) const {
    const int ahead = stage + count;
    mbarrier_wait(ring.full(ahead >= STAGES ? ahead - STAGES : ahead),
                  ahead >= STAGES ? parity ^ 1 : parity);
  }
  // This warp needs the stage no more.
  __device__ __forceinline__ void release(int lane) const {
    if (lane == 0) mbarrier_arrive(full + 8);
  }
};

// Both operands' next 128 of k. By one thread.
__device__ __forceinline__ void fetch(const Ring& ring, int stage, const TensorMap& x_map,
                                      const TensorMap& weight_map, int row, int column, int expert,
                                      int n, int k) {
  const u32 full = ring.full(stage), b = ring.b(stage);
  mbarrier_expect(full, Ring::A_BYTES + Ring::B_BYTES);
  tma_load(ring.a(stage), x_map, full, k, row, 0, 0);
  tma_load(b, weight_map, full, k, column, expert, 0);
  if (GATE) tma_load(b + PART * BLOCK_K, weight_map, full, k, n + column, expert, 0);
}

// A tile's scales in global memory, as a warp copies them: those of its rows and its outputs.
struct TileScales {
  static constexpr int EACH = BLOCK_M / WARP_SIZE;
  const float *of_rows, *of_outputs;
  int lane, row, last, steps;

  __device__ __forceinline__ TileScales(const float* x_scales, const float* scales, int row, int m,
                                        int column, int n, int steps)
      : of_rows(x_scales), lane(threadIdx.x % WARP_SIZE), row(row), last(m - 1), steps(steps) {
    const int further = GATE ? n + min(column, n - 1) : min(column + 128, n - 1);
    of_outputs =
        scales + static_cast<i64>((lane == 0 ? min(column, n - 1) : further) / 128) * steps;
  }
  __device__ __forceinline__ void copy(u32 to, u32 full, u32 empty, int parity, int step) const {
    float values[EACH], own = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      values[i] =
          __ldg(of_rows + (static_cast<i64>(min(row + lane + i * WARP_SIZE, last)) * steps + step));
    if (lane < 2) own = __ldg(of_outputs + step);
    mbarrier_wait(empty, parity);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      store_shared_word(to + (lane + i * WARP_SIZE) * 4, __float_as_uint(values[i]));
    if (lane < 2) store_shared_word(to + (BLOCK_M + lane) * 4, __float_as_uint(own));
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
  }
};

__device__ __forceinline__ float load_shared_float(u32 address) {
  return __uint_as_float(load_shared_word(address));
}

// Products of 128 of k. a, b: descriptors' low halves.
__device__ __forceinline__ void multiply_step(float (&acc)[N][4], u32 a, u32 b) {
  register_fence(acc);
  wgmma_fence();
  constexpr u64 HIGH = (1ull << 62) | (static_cast<u64>(1024 >> 4) << 32);  // see wgmma_tile
#pragma unroll
  for (int i = 0; i < BLOCK_K / 32; ++i)
    wgmma_bytes(acc, HIGH | (a + 2 * i), HIGH | (b + 2 * i), i > 0);
  wgmma_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) quantized_wgmma_blocks(
    const __grid_constant__ TensorMap x_map,       // [m, k] codes, boxes of BLOCK_M rows
    const __grid_constant__ TensorMap weight_map,  // [n, k] (with GATE [2 n, k]) codes, of experts
    const float* __restrict__ x_scales,            // [m, ceil(k / 128)]
    const float* __restrict__ scales,              // [ceil(n / 128), ceil(k / 128)], with GATE 2 n
    const elem_t* __restrict__ bias,               // [n] or [2 n], or null
    const out_t* __restrict__ residual,            // [m, n], or null
    //% if coded
    u8* __restrict__ out,            // [m, n]
    float* __restrict__ out_scales,  // [m, n / 128]
    //% else
    out_t* __restrict__ out,  // [m, n]
    //% endif
    //% if groups != "NONE"
    const int* __restrict__ offsets,  // [experts + 1], see gemm/groups.cuh
    const int experts,
    //% endif
    const int m, const int n, const int k, const i64 out_stride, const i64 residual_stride,
    const float scale,
    const int group_rows) {  // of tiles that are taken together
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const Ring ring{shared_address(shared_memory)};
  const int warp = __shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0), warpgroup = warp / 4;
  const int lane = threadIdx.x % WARP_SIZE;
  if (threadIdx.x == 0) ring.begin(Ring::RELEASES, 2);  // operands, and scales
  __syncthreads();
  after_previous_kernel();
  Order order{m, ceil_div(n, OUT_COLUMNS), group_rows};
  //% if groups != "NONE"
  order.offsets = offsets, order.experts = experts;
  //% endif
  const int steps = ceil_div(k, BLOCK_K), outputs = GATE ? 2 * n : n;
  const i64 expert_scales = static_cast<i64>(ceil_div(outputs, 128)) * steps;
  const int first = blockIdx.x, stride = gridDim.x;

  if (warpgroup == 0) {
    // ---- producers
    fewer_registers<PRODUCER_REGISTERS>();
    Place place;
    int turn = 0;
    if (warp == 0 && elect_one()) tma_prefetch(x_map), tma_prefetch(weight_map);
    for (int number = first; number < order.count(); number += stride) {
      const GroupedTile tile = order(number);
      if (order.is_beyond(tile)) break;
      const int row = tile.row, column = tile.column * OUT_COLUMNS;
      const TileScales of_tile(x_scales, Order::own(scales, tile.expert, expert_scales), row, m,
                               column, n, steps);
#pragma unroll 1
      for (int step = 0; step < steps; ++step, place.advance()) {
        const u32 full = ring.full(place.stage), empty = ring.empty(place.stage);
        if (warp == 0) {
          mbarrier_wait(empty, place.parity ^ 1);
          if (elect_one())
            fetch(ring, place.stage, x_map, weight_map, row, column, tile.expert, n,
                  step * BLOCK_K);
        } else if (warp == 1 + turn) {
          of_tile.copy(ring.scales(place.stage), full, empty, place.parity ^ 1, step);
        }
        turn = turn == SCALE_WARPS - 1 ? 0 : turn + 1;
      }
    }
    __syncwarp();
  } else {
    // ---- consumers
    more_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, warp_row = warp % 4 * 16 + consumer * 64;
    using Pairs = EpiloguePairs<Activation, GATE, false, RESIDUAL, elem_t, out_t>;
    const Pairs pairs(residual, nullptr, residual_stride, scale, n);
    const ScaledPairs<Pairs, false, true> epilogue(pairs, {x_scales, 0, m}, {scales, 0, n});
    Cursor at(ring, consumer * 64);
    const u32 own_row = (warp_row + lane / 4) * 4;
    for (int number = first; number < order.count(); number += stride) {
      const GroupedTile tile = order(number);
      if (order.is_beyond(tile)) break;
      const int row = tile.row + warp_row, column = tile.column * OUT_COLUMNS;
      if (Order::OF_ROWS && tile.row + consumer * 64 >= tile.end) {  // no row of it is this one's
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          mbarrier_wait(at.full, at.parity);
          at.release(lane);
          at.advance();
        }
        continue;
      }
      float acc[N][4], total[TIMES][N][4];
#pragma unroll
      for (int i = 0; i < TIMES * N * 4; ++i) total[i / (N * 4)][i / 4 % N][i % 4] = 0.f;

      if (SKEW > 0 && consumer == 1) at.wait_ahead(ring, min(SKEW, steps - 1));

      // 1. Products, 128 of k after the other.
      bool ready = mbarrier_test(at.full, at.parity);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        if (!ready) mbarrier_wait(at.full, at.parity);
#pragma unroll
        for (int time = 0; time < TIMES; ++time) {
          multiply_step(acc, at.a, at.b + (WIDE ? time * (128 * BLOCK_K / 16) : 0));
          Scales by;
#pragma unroll
          for (int i = 0; i < 2; ++i)
            by.of_rows[i] = load_shared_float(at.scales + own_row + i * 32);
#pragma unroll
          for (int i = 0; i < Scales::COUNT; ++i)
            by.of_outputs[i] = load_shared_float(at.scales + (BLOCK_M + i + (WIDE ? time : 0)) * 4);
          __syncwarp();  // all lanes have their scales
          wgmma_wait<0>();
          if (time == TIMES - 1) {
            at.release(lane);
            at.advance();
            ready = mbarrier_test(at.full, at.parity);
          }
          register_fence(acc);
          add_scaled(total[time], acc, by);
        }
      }

      // 2. The way out.
      const elem_t* const own_bias = Order::own(bias, tile.expert, outputs);
      //% if coded
      store_coded_rows(reinterpret_cast<float (&)[1][2 * N][4]>(total), epilogue, own_bias, out,
                       out_scales, lane, row, tile.end, column);
      //% else
      if constexpr (GATE && WIDE) {
        store_fragments(reinterpret_cast<float (&)[1][2 * N][4]>(total), epilogue, own_bias, out,
                        out_stride, lane, row, tile.end, column);
      } else {
#pragma unroll
        for (int time = 0; time < TIMES; ++time)
          store_fragments(reinterpret_cast<float (&)[1][N][4]>(total[time]), epilogue, own_bias,
                          out, out_stride, lane, row, tile.end, column + time * 128);
      }
      //% endif
    }
  }
}
