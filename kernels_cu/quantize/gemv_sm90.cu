/* out = act(scale * x . weight + bias) + residual for up to eight rows of x and a weight of int4
   codes, with a scale for 128 of k, on sm_90: as gemv.cu, whose operands it has, but the copy engine
   brings the weight.

   The grid is as large as the GPU; a block takes TILE outputs after TILE outputs, BATCH such tiles
   together, and of a batch one part of k after another. A warp of its own, the producer, asks TMA for
   a tile's part, STAGES tiles ahead: boxes of 64 bytes by eight rows, one span of k after another, so
   that lanes of two rows read 128 neighbouring bytes. The other warps share k: each has the same GROUPS
   of 128 of each part, and x for them stays in registers until the part changes.

   A group's sums begin with what raised codes 0 give, negated (quantize/weights.cuh), and are
   multiplied with its scale in fp32. What the warps have is added up in shared memory in their order,
   for a batch of tiles at a time: the same bits every time.

   Scales of a row take whole chunks of 16 bytes, which TMA wants: k is a multiple of 1024. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/gemv.cuh"
#include "ptx/bulk.cuh"
#include "ptx/elect.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "quantize/weights.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
using Weights = ${weights};
constexpr bool GATE = ${gate};
constexpr int TILE = ${tile_rows};  // outputs of the weight
constexpr int WARPS = ${warps};     // that multiply
constexpr int GROUPS = ${groups};   // of k, of a warp
constexpr int STAGES = ${stages};
constexpr int BATCH = ${batch};  // tiles whose sums are added up together
constexpr int RESIDENT = ${resident};
constexpr int GUARD = ${guard};  // bytes between arrays: 0 except where memory is checked

constexpr int HALVES = GATE ? 2 : 1, OUTPUTS = TILE / HALVES, GROUP = 128;
constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + WARP_SIZE;
constexpr int PART = WARPS * GROUPS;  // groups that a tile's stage has
constexpr int SPANS = GROUP / Weights::SPAN, HALF = TILE / 2, SPAN_BYTES = HALF * 64;
constexpr int HALF_BYTES = PART * SPANS * SPAN_BYTES;  // of codes: eight rows
constexpr int SCALES_BYTES = PART * 2;                 // of a row
constexpr int STAGE_BYTES = 2 * (HALF_BYTES + HALF * SCALES_BYTES);
constexpr bool RAISES = Weights::RAISES && sizeof(out_t) == 2;  // it costs some bits of fp32
constexpr int X_CHUNKS = GROUP / 4 / 8;                         // of a lane, of a group
constexpr int LANES_SUMS = WARP_SIZE * 4;  // of a warp, four a lane, as D of ptx/mma.cuh has them
constexpr int SUMS = WARPS * LANES_SUMS;   // of a tile
static_assert(TILE == 16, "an operand of sixteen rows");
static_assert(HALF * SCALES_BYTES % 128 == 0, "where TMA may write");
static_assert(PART * SPANS <= 256, "a box");

// Shared memory: stages of codes and scales, bases of warps, sums of a batch, barriers.
struct Memory : RingBarriers<Memory, STAGES> {
  static constexpr int BASES = STAGES * (STAGE_BYTES + GUARD), OF_BASES = WARPS * GROUPS * 64;
  static constexpr int OF_SUMS = BASES + OF_BASES + GUARD;
  static constexpr int BARRIERS = OF_SUMS + BATCH * SUMS * 4 + GUARD;
  __device__ __forceinline__ u32 stage(int i) const { return base + i * (STAGE_BYTES + GUARD); }
  __device__ __forceinline__ u32 bases(int warp) const {
    return base + BASES + warp * (GROUPS * 64);
  }
};
using Place = RingPlace<STAGES>;

// The lane's numbers of row lane / 4 of x in a warp's groups; zeros where x has no such row, and
// beyond the end of k.
struct Token {
  uint4 x[GROUPS][X_CHUNKS];

  // `bases`: shared memory, of the warp.
  __device__ __forceinline__ void load(const elem_t* from, i64 stride, int m, int first, int k,
                                       u32 bases) {
    const int row = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
    load_token<Weights>(x, from + min(row, m - 1) * stride, first, k, row < m);
    if constexpr (RAISES) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        float sums[4] = {};
#pragma unroll
        for (int step = 0; step < 2 * X_CHUNKS; ++step)
          multiply_step(
              sums, {Weights::BASES[0], Weights::BASES[0], Weights::BASES[1], Weights::BASES[1]}, i,
              step);
        const u32 low = __float_as_uint(-sums[0]), high = __float_as_uint(-sums[1]);
        if (row == 0) store_shared_chunk(bases + i * 64 + t * 16, make_uint4(low, high, low, high));
      }
      __syncwarp();
    }
  }
  __device__ __forceinline__ void multiply_step(float (&d)[4], const u32 (&a)[4], int group,
                                                int step) const {
    const uint4& own = x[group][step / 2];
    mma_m16n8k16<elem_t>(d, a, step % 2 == 0 ? own.x : own.z, step % 2 == 0 ? own.y : own.w);
  }
};

// A lane's scales of a row, of its two groups: as one word.
__device__ __forceinline__ void load_scales(elem_t (&x)[GROUPS], u32 address) {
  static_assert(GROUPS == 2, "scales in a word");
  const u32 both = load_shared_word(address);
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const u16 bits = static_cast<u16>(both >> i * 16);
    x[i] = reinterpret_cast<const elem_t&>(bits);
  }
}

// What a lane has of a stage: codes of rows lane / 4 and 8 further on, and their scales.
struct Operands {
  uint4 low[GROUPS][SPANS], high[GROUPS][SPANS];
  elem_t scales[GROUPS][2];

  __device__ __forceinline__ void load(u32 stage, int warp, int lane) {
    const u32 codes = stage + warp * (GROUPS * SPANS * SPAN_BYTES) + lane * 16;
    const u32 own = stage + 2 * HALF_BYTES + lane / 4 * SCALES_BYTES + warp * (GROUPS * 2);
#pragma unroll
    for (int i = 0; i < GROUPS * SPANS; ++i) {
      low[i / SPANS][i % SPANS] = load_shared_chunk(codes + i * SPAN_BYTES);
      high[i / SPANS][i % SPANS] = load_shared_chunk(codes + HALF_BYTES + i * SPAN_BYTES);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      elem_t both[GROUPS];
      load_scales(both, own + half * (HALF * SCALES_BYTES));
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) scales[i][half] = both[i];
    }
  }
};

// The products of a lane's operands, with their scales. `bases`: the lane's.
__device__ __forceinline__ void multiply(float (&d)[4], const Operands& own, const Token& token,
                                         u32 bases) {
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    float sums[4] = {};
    if constexpr (RAISES) {
      const uint4 begin = load_shared_chunk(bases + j * 64);
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[c] = __uint_as_float(word_of(begin, c));
    }
#pragma unroll
    for (int step = 0; step < SPANS * Weights::STEPS; ++step) {
      u32 a[4];
      weight_fragment<Weights, RAISES>(a, own.low[j][step / Weights::STEPS],
                                       own.high[j][step / Weights::STEPS], step % Weights::STEPS);
      token.multiply_step(sums, a, j, step);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) d[c] += static_cast<float>(own.scales[j][c / 2]) * sums[c];
  }
}

// What a lane has left there.
__device__ __forceinline__ void add_shared_floats(float (&d)[4], u32 address) {
  float before[4];
  load_shared_floats(before, address);
#pragma unroll
  for (int c = 0; c < 4; ++c) d[c] += before[c];
}

// The producer: for tile after tile of each batch, and part after part of it, codes and scales of its
// eight first outputs and of eight others: the next ones, or those of up. By a whole warp.
__device__ __forceinline__ void bring(const Memory& memory, const TensorMap& codes,
                                      const TensorMap& scales, int first_tile, int end_tile, int n,
                                      int parts) {
  Place place;
  for (int first = first_tile; first < end_tile; first += BATCH)
    for (int part = 0; part < parts; ++part)
#pragma unroll 1
      for (int tile = first; tile < min(first + BATCH, end_tile); ++tile, place.advance()) {
        const u32 full = memory.full(place.stage), to = memory.stage(place.stage);
        mbarrier_wait(memory.empty(place.stage), place.parity ^ 1);
        if (elect_one()) {
          mbarrier_expect(full, STAGE_BYTES);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = tile * OUTPUTS + half * (GATE ? n : HALF);
            tma_load(to + half * HALF_BYTES, codes, full, 0, row, part * (PART * SPANS), 0);
            tma_load(to + 2 * HALF_BYTES + half * (HALF * SCALES_BYTES), scales, full, part * PART,
                     row, 0, 0);
          }
        }
        __syncwarp();
      }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantized_gemv_sm90(const __grid_constant__ TensorMap codes_map,   // of weight, see above
                        const __grid_constant__ TensorMap scales_map,  // of [n, k / 128]
                        const elem_t* __restrict__ x,                  // [m, k]
                        const u8* __restrict__ weight,       // [n, k] codes; with GATE 2 n for n
                        const elem_t* __restrict__ bias,     // [n], with GATE [2 n], or null
                        const out_t* __restrict__ residual,  // [m, n] or null
                        out_t* __restrict__ out,             // [m, n]
                        const int m,                         // 1..8
                        const int n, const int k, const i64 x_stride, const i64 out_stride,
                        const i64 residual_stride, const float scale) {
  extern __shared__ __align__(128) char dynamic[];
  const Memory memory{shared_address(dynamic)};
  float* const all_sums = reinterpret_cast<float*>(dynamic + Memory::OF_SUMS);
  const i64 all = ceil_div(n, OUTPUTS);
  const int first_tile = static_cast<int>(all * blockIdx.x / gridDim.x);
  const int end_tile = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  const int groups = k / GROUP, parts = ceil_div(groups, PART);
  const int warp = __shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0);
  const int lane = threadIdx.x % WARP_SIZE;

  // 1. Barriers; the first tile's lines come to L2, which reads nothing yet.
  if (threadIdx.x == 0) memory.begin(WARPS, 1);
  if (warp == WARPS) {
    const i64 row_bytes = static_cast<i64>(k) * Weights::BITS / 8;
    if (lane < TILE && first_tile < end_tile)
      bulk_prefetch(weight + weight_output<TILE, HALVES>(first_tile * OUTPUTS, lane, n) * row_bytes,
                    min(groups, PART) * (GROUP / 8 * Weights::BITS));
    if (elect_one()) tma_prefetch(codes_map), tma_prefetch(scales_map);
  }
  __syncthreads();
  after_previous_kernel();
  if (warp == WARPS) {
    bring(memory, codes_map, scales_map, first_tile, end_tile, n, parts);
    return;
  }

  const Epilogue<Activation, GATE, elem_t, out_t> epilogue = {
      bias, residual, nullptr, residual_stride, scale, n};
  Token token;
  Place place;
  for (int first = first_tile; first < end_tile; first += BATCH) {
    const int count = min(BATCH, end_tile - first);

    // 2. Products: tile after tile, for each part of k.
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const int group = part * PART + warp * GROUPS;
      const bool there = group < groups;  // all of the warp's groups, or none
      if (parts > 1 || first == first_tile)
        token.load(x, x_stride, m, group, k, memory.bases(warp));
      u32 to = memory.base + Memory::OF_SUMS + (warp * LANES_SUMS + lane * 4) * 4;
#pragma unroll 1
      for (int i = 0; i < count; ++i, to += SUMS * 4) {
        Operands own;
        mbarrier_wait(memory.full(place.stage), place.parity);
        if (there) own.load(memory.stage(place.stage), warp, lane);
        __syncwarp();
        release(place, memory.empty(place.stage), lane == 0);
        float d[4] = {};
        if (there) multiply(d, own, token, memory.bases(warp) + lane % 4 * 16);
        if (part > 0) add_shared_floats(d, to);
        store_shared_floats(to, d);
      }
    }

    // 3. Sums of all warps in their order.
    named_barrier_wait<CONSUMERS>(1);
#pragma unroll 1
    for (int i = threadIdx.x; i < m * count * OUTPUTS; i += CONSUMERS) {
      const int row = i / OUTPUTS % m, tile = i / OUTPUTS / m, column = i % OUTPUTS;
      const int lane_of = column % 8 * 4 + row / 2, place_of = column / 8 * 2 + row % 2;
      const float* const sums = all_sums + tile * SUMS + lane_of * 4 + place_of;
      float total[2] = {};
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total[half] += sums[w * LANES_SUMS + half * 2];
      const int output = (first + tile) * OUTPUTS + column;
      if (output < n)
        out[row * out_stride + output] =
            static_cast<out_t>(epilogue(total[0], total[1], row, output));
    }
    named_barrier_wait<CONSUMERS>(1);
  }
}
