/* out = act(scale * x . weight + bias) + residual for up to eight rows of x and a weight of int4 or
   int8 codes, with a scale for 128 of k: codes are streamed once and become numbers in the registers
   in which they are multiplied (quantize/weights.cuh).

   The grid is as large as the GPU; a block takes one tile of TILE outputs after another. Its warps
   share k: each has the same GROUPS of 128 of all tiles, so that its part of x stays in registers.
   (Where k is longer, it comes in several parts, and so does x.) What a lane will multiply it copies
   itself by cp.async, to a place for each group that nobody else reads: no barrier, no bank conflict.
   A place is filled with the next tile's codes as soon as those of this one are multiplied.

   A group's sums are multiplied with its scale in fp32. Codes of int4 stay raised in bf16 where out
   has 16 bits (quantize/weights.cuh): what that adds to a group's sums depends on x alone, is made
   once, and subtracted. Other products are exact. What the warps have is added up in shared memory
   in their order, for BATCH tiles at a time: the same bits every time.

   Before the previous kernel is over a block asks for lines of its weight, to L2: that reads nothing.

   sm_80 and later. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/gemv.cuh"
#include "ptx/pdl.cuh"
#include "quantize/coded_weight.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
using Weights = ${weights};
constexpr bool GATE = ${gate};
constexpr int PREFETCH = __CUDA_ARCH__ >= 900 ? 32 << 10 : 0;  // bytes, where launches overlap
constexpr int TILE = ${tile_rows};                             // outputs of the weight
constexpr int WARPS = ${warps};
constexpr int GROUPS = ${groups};  // of k, of a warp
// Blocks of a multiprocessor, at least; other GPUs' code wants some registers more.
constexpr int RESIDENT = __CUDA_ARCH__ == 900 ? ${resident} : 1;

constexpr int HALVES = GATE ? 2 : 1, OUTPUTS = TILE / HALVES, THREADS = 32 * WARPS;
constexpr int EIGHTS = TILE / 8, PRODUCTS = TILE / 16;
using Rows = CodedRows<Weights, elem_t, EIGHTS>;
using Scales = RowScales16<elem_t, EIGHTS, GROUPS>;
constexpr int SPANS = Rows::SPANS, SLOT_BYTES = Rows::SLOT_BYTES;
constexpr bool RAISES = Weights::RAISES && sizeof(out_t) == 2;  // it costs some bits of fp32
constexpr int X_CHUNKS = GROUP / 4 / 8;                         // of a lane, of a group
constexpr int PITCH = TILE + 4;               // of sums: lanes of a fragment meet 32 banks
constexpr int SUMS = WARPS * TOKENS * PITCH;  // of a tile
constexpr int BATCH = ${batch};               // tiles whose sums are added up together
static_assert(TILE % 16 == 0, "whole operands of sixteen rows");

// A warp's way through tiles of outputs and parts of k.
struct Place {
  int tile, part;
  __device__ __forceinline__ void advance(int parts) {
    if (++part == parts) part = 0, ++tile;
  }
  __device__ __forceinline__ int group() const {
    return (part * WARPS + static_cast<int>(threadIdx.x) / WARP_SIZE) * GROUPS;
  }
};

// A sum of even and of odd steps, so that two products are under way.
constexpr int CHAINS = GROUPS > 2 ? 1 : 2;  // where there are registers
__device__ __forceinline__ float whole(const float (&parts)[CHAINS][4], int i) {
  return CHAINS == 1 ? parts[0][i] : parts[0][i] + parts[CHAINS - 1][i];
}

// The lane's numbers of row lane / 4 of x in a warp's groups; zeros where x has no such row.
struct Token {
  uint4 x[GROUPS][X_CHUNKS];
  u32 bases;  // in shared memory: what raised codes 0 give, of the tokens whose sums the lane has

  __device__ __forceinline__ void load(const elem_t* from, i64 stride, int m, int first, int k) {
    const int row = threadIdx.x % WARP_SIZE / 4;
    load_token<Weights>(x, from + min(row, m - 1) * stride, first, k, row < m);
    if constexpr (RAISES) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        float sums[CHAINS][4] = {};
#pragma unroll
        for (int step = 0; step < 2 * X_CHUNKS; ++step)
          multiply_step(
              sums, {Weights::BASES[0], Weights::BASES[0], Weights::BASES[1], Weights::BASES[1]}, i,
              step);
        if (row == 0)
          store_shared_pair(bases + i * 32, __float_as_uint(whole(sums, 0)),
                            __float_as_uint(whole(sums, 1)));
      }
      __syncwarp();
    }
  }
  __device__ __forceinline__ void multiply_step(float (&d)[CHAINS][4], const u32 (&a)[4], int group,
                                                int step) const {
    const uint4& own = x[group][step / 2];
    mma_m16n8k16<elem_t>(d[step % CHAINS], a, step % 2 == 0 ? own.x : own.z,
                         step % 2 == 0 ? own.y : own.w);
  }
};

// A group's products, without its scales. The same steps as those of its bases, so that of codes 0
// nothing is left. `slot`: the lane's part.
__device__ __forceinline__ void multiply(float (&sums)[PRODUCTS][4], u32 slot, const Token& token,
                                         int group) {
  constexpr int EIGHT = SPANS * Rows::CHUNK_BYTES;
#pragma unroll
  for (int i = 0; i < PRODUCTS; ++i) {
    float parts[CHAINS][4] = {};
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
      const u32 at = slot + i * 2 * EIGHT + span * Rows::CHUNK_BYTES;
      const uint4 low = load_shared_chunk(at), high = load_shared_chunk(at + EIGHT);
#pragma unroll
      for (int step = 0; step < Weights::STEPS; ++step) {
        u32 a[4];
        weight_fragment<Weights, RAISES>(a, low, high, step);
        token.multiply_step(parts, a, group, span * Weights::STEPS + step);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i][j] = whole(parts, j);
  }
  if constexpr (RAISES) {
    const float2 bases = load_shared_pair(token.bases + group * 32);
#pragma unroll
    for (int i = 0; i < PRODUCTS * 4; ++i) sums[i / 4][i % 4] -= i % 2 == 0 ? bases.x : bases.y;
  }
}

// To L2, lines of the tiles from `first` on: rows lie one after another.
__device__ __forceinline__ void prefetch(const u8* weight, int first, int end, int n, int k) {
  const i64 bytes = static_cast<i64>(k) * Weights::BITS / 8;
  const i64 from = first * OUTPUTS * bytes;
  const i64 most = min(min(end * OUTPUTS, n) * bytes - from, static_cast<i64>(PREFETCH / HALVES));
  for (int half = 0; half < HALVES; ++half)
    for (int i = threadIdx.x * 128; i < most; i += THREADS * 128)
      prefetch_l2(weight + from + half * n * bytes + i);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantized_gemv(const elem_t* __restrict__ x,        // [m, k]
                   const u8* __restrict__ weight,       // [n, k] codes; with GATE 2 n for n
                   const elem_t* __restrict__ scales,   // [n, ceil(k / 128)], the same
                   const elem_t* __restrict__ bias,     // [n], with GATE [2 n], or null
                   const out_t* __restrict__ residual,  // [m, n] or null
                   out_t* __restrict__ out,             // [m, n]
                   const int m,                         // 1..8
                   const int n, const int k, const i64 x_stride, const i64 out_stride,
                   const i64 residual_stride, const float scale) {
  const i64 all = ceil_div(n, OUTPUTS);
  const int first_tile = static_cast<int>(all * blockIdx.x / gridDim.x);
  const int tiles = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  prefetch(weight, first_tile, tiles, n, k);
  after_previous_kernel();
  extern __shared__ __align__(128) char dynamic[];
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const u32 ring = shared_address(dynamic) + warp * (GROUPS * SLOT_BYTES) + lane * 16;
  float* const all_sums = reinterpret_cast<float*>(dynamic + WARPS * GROUPS * SLOT_BYTES);
  const int groups = ceil_div(k, GROUP);
  const int parts = ceil_div(groups, WARPS * GROUPS);

  // 1. The first tile's codes and scales.
  Place at = {first_tile, 0};
  Rows rows;
  Scales by;
  const auto place = [&] {
    const auto output = [=](int i) {
      return weight_output<TILE, HALVES>(at.tile * OUTPUTS, i * 8 + lane / 4, n);
    };
    rows.place(weight, k, at.group(), output, at.tile < tiles ? k : 0);
    by.place(scales, groups, groups, at.group(), output);
  };
  place();
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    rows.copy(ring + i * SLOT_BYTES, i);
    cp_async_commit();
    by.load(i);
  }
  Token token;
  token.bases = shared_address(all_sums + BATCH * SUMS) + warp * (GROUPS * 32) + lane % 4 * 8;
  bool another = true;  // part of x

  // 2. Tile after tile.
  const Epilogue<Activation, GATE, elem_t, out_t> epilogue = {
      bias, residual, nullptr, residual_stride, scale, n};
  float d[PRODUCTS][4] = {};
  int batch = 0, first = first_tile * OUTPUTS;  // tiles whose sums wait, and their first output
#pragma unroll 1
  while (at.tile < tiles) {
    if (another) token.load(x, x_stride, m, at.group(), k);
    another = parts > 1;
    at.advance(parts);
    place();
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      cp_async_wait<GROUPS - 1>();
      float own[PRODUCTS][4];
      multiply(own, ring + i * SLOT_BYTES, token, i);
      rows.copy(ring + i * SLOT_BYTES, i);
      cp_async_commit();
#pragma unroll
      for (int j = 0; j < PRODUCTS * 4; ++j)
        d[j / 4][j % 4] += static_cast<float>(by.scales[i][j / 2]) * own[j / 4][j % 4];
      by.load(i);  // the next tile's
    }
    if (at.part != 0) continue;

    // 3. The warps' sums, and every few tiles those of all warps in their order.
    float* const to = all_sums + batch * SUMS + (warp * TOKENS + lane % 4 * 2) * PITCH + lane / 4;
#pragma unroll
    for (int i = 0; i < PRODUCTS * 4; ++i) {
      if (lane % 4 * 2 + i % 2 < m)
        to[i % 2 * PITCH + i / 4 * 16 + i / 2 % 2 * 8] = d[i / 4][i % 4];
      d[i / 4][i % 4] = 0.f;
    }
    if (++batch < BATCH && at.tile < tiles) continue;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < m * batch * OUTPUTS; i += THREADS) {
      const int row = i / OUTPUTS % m, place = i / OUTPUTS / m, column = i % OUTPUTS;
      const float* const sums = all_sums + place * SUMS + row * PITCH + column;
      float total[2] = {};
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total[half] += sums[w * TOKENS * PITCH + half * OUTPUTS];
      const int output = first + place * OUTPUTS + column;
      if (output < n)
        out[row * out_stride + output] =
            static_cast<out_t>(epilogue(total[0], total[1], row, output));
    }
    first += batch * OUTPUTS, batch = 0;
    __syncthreads();
  }
}
