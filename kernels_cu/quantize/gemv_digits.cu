/* out = act(scale * x . weight + bias) + residual for one or two rows of x and a weight of int4 or int8
   codes, with a scale for 128 of k: x becomes whole numbers of three digits, and tensor cores multiply
   bytes (quantize/digits.cuh), so that a code costs a quarter of an instruction, or none.

   The grid is as large as the GPU; a block takes TILE outputs after TILE outputs, neighbours or (SPREAD)
   all blocks' tiles beside each other, whichever memory brings faster. Its warps share k:
   each has the same GROUPS of 128 of all tiles, so that its part of x stays in registers. (Where k is
   longer, it comes in several parts, and so does x, for BATCH tiles at a time.) What a lane will
   multiply it copies itself by cp.async, DEPTH tiles ahead, to places that nobody else reads.

   A group's sums are multiplied with its scale in fp32. What the warps have is added up in shared
   memory in their order, for BATCH tiles at a time: the same bits every time.

   Before the previous kernel is over a block asks for lines of its weight, to L2: that reads nothing.

   Two scales of a row are a word: k is a multiple of 256. sm_80 and later. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/gemv.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "quantize/digits.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
using Weights = ${weights};
constexpr bool GATE = ${gate};
// Bytes of each of the first two tiles, where launches overlap.
constexpr int PREFETCH = __CUDA_ARCH__ >= 900 ? 32 << 10 : 0;
constexpr int WARPS = ${warps};
constexpr int GROUPS = ${groups};            // of k, of a warp
constexpr int DEPTH = ${depth};              // tiles under way
constexpr bool SPREAD = Weights::BITS == 4;  // a block's tiles are a grid apart
constexpr int BATCH = ${batch};              // tiles whose sums are added up together

constexpr int TILE = 16, HALVES = GATE ? 2 : 1, OUTPUTS = TILE / HALVES, THREADS = 32 * WARPS;
using Digits = DigitsOfX<Weights, elem_t, GROUPS>;
constexpr int SPANS = Digits::SPANS, CHUNK_BYTES = WARP_SIZE * 16;
constexpr int CODES_BYTES = 2 * GROUPS * SPANS * CHUNK_BYTES;
constexpr int WORDS = GROUPS / 2, SCALES_BYTES = TILE * WORDS * 4;
constexpr int PASSES = ceil_div(TILE * WORDS, WARP_SIZE);  // of scales
constexpr int SLOT_BYTES = CODES_BYTES + SCALES_BYTES;     // a tile's part, of a warp
constexpr int SUMS = WARP_SIZE * 4;                        // of a tile, of a warp: four a lane
static_assert(GROUPS % 2 == 0, "scales in words");
static_assert(BATCH <= WARPS, "a warp for each tile's sums");

// Shared memory: slots, and of each warp bases and the digits of a row; two batches of sums.
struct Memory {
  static constexpr int BASES = WARPS * DEPTH * SLOT_BYTES;
  static constexpr int SCRATCH = BASES + WARPS * Digits::BASES_BYTES;
  static constexpr int OF_SUMS = SCRATCH + WARPS * Digits::SCRATCH_BYTES;
};

// What a lane copies of one tile after another: codes of rows lane / 4 and 8 further on, a word of scales.
struct Source {
  const u8* codes[2];
  const elem_t* scales[PASSES];
  i64 codes_step, scales_step;  // from a tile to the next
  int outputs_step, rows, left,
      scales_left;  // outputs, spans of the lane, and groups that there are

  __device__ __forceinline__ void place(const u8* all, const elem_t* all_scales, int tile,
                                        int group, int n, int k) {
    const int lane = threadIdx.x % WARP_SIZE, first = tile * OUTPUTS, groups = k / 128;
    const i64 row_bytes = k / 8 * Weights::BITS;
    outputs_step = OUTPUTS * (SPREAD ? gridDim.x : 1);
    codes_step = row_bytes * outputs_step, scales_step = static_cast<i64>(groups) * outputs_step;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      codes[half] = all + (first + lane / 4 + half * (GATE ? n : 8)) * row_bytes +
                    group * (SPANS * 64) + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int at = i * WARP_SIZE + lane, row = at / WORDS;
      scales[i] = all_scales +
                  (first + row % OUTPUTS + row / OUTPUTS * n) * static_cast<i64>(groups) + group +
                  at % WORDS * 2;
    }
    rows = n - first;
    left = ceil_div(k - lane % 4 * Weights::CHUNK_K, Weights::SPAN) - group * SPANS;
    scales_left = groups - group;
  }
  // A tile's codes and scales to `slot`, zeros for what there is not; and on to the next tile.
  __device__ __forceinline__ void copy(u32 slot) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = lane / 4 + half * (GATE ? 0 : 8) < rows;
#pragma unroll
      for (int i = 0; i < GROUPS * SPANS; ++i)
        cp_async_16(slot + (i * 2 + half) * CHUNK_BYTES + lane * 16, codes[half] + i * 64,
                    there && i < left ? 16 : 0);
      codes[half] += codes_step;
    }
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int at = i * WARP_SIZE + lane;
      if (at < TILE * WORDS)
        cp_async_4(slot + CODES_BYTES + at * 4, scales[i],
                   at / WORDS % OUTPUTS < rows && at % WORDS * 2 < scales_left);
      scales[i] += scales_step;
    }
    rows -= outputs_step;
  }
};

// A tile's sums of a warp, with scales. `slot`, `bases`: the warp's.
__device__ __forceinline__ void multiply(float (&d)[4], const Digits& x, u32 slot, u32 bases,
                                         int lane) {
#pragma unroll
  for (int i = 0; i < GROUPS; i += 2) {
    u32 scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      scales[half] =
          load_shared_word(slot + CODES_BYTES + ((half * 8 + lane / 4) * WORDS + i / 2) * 4);
    const float2 low = unpack2<elem_t>(scales[0]), high = unpack2<elem_t>(scales[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint4 codes[2][SPANS];
#pragma unroll
      for (int span = 0; span < SPANS; ++span)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          codes[half][span] = load_shared_chunk(
              slot + (((i + j) * SPANS + span) * 2 + half) * CHUNK_BYTES + lane * 16);
      float sums[4];
      x.multiply(sums, codes[0], codes[1], i + j, bases + lane % 4 * 16);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 by = c < 2 ? low : high;
        d[c] = fmaf(j == 0 ? by.x : by.y, sums[c], d[c]);
      }
    }
  }
}

// All warps' sums of a tile, by one of them: the lane's four, the same of four lanes: digits are added
// up as well.
__device__ __forceinline__ void add_warps(float (&d)[4], u32 sums, int lane) {
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    float own[4];
    load_shared_floats(own, sums + (warp * SUMS + lane * 4) * 4);
#pragma unroll
    for (int c = 0; c < 4; ++c) d[c] += own[c];
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int c = 0; c < 4; ++c) d[c] += __shfl_xor_sync(FULL_MASK, d[c], step);
}

// To L2, lines of a tile: rows lie one after another.
__device__ __forceinline__ void prefetch(const u8* weight, int tile, int n, int k) {
  const i64 bytes = k / 8 * Weights::BITS, from = tile * OUTPUTS * bytes;
  const i64 most = min(static_cast<i64>(min(OUTPUTS, n - tile * OUTPUTS)) * bytes,
                       static_cast<i64>(PREFETCH / HALVES));
  for (int half = 0; half < HALVES; ++half)
    for (int i = threadIdx.x * 128; i < most; i += THREADS * 128)
      prefetch_l2(weight + from + half * n * bytes + i);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    quantized_gemv_digits(const elem_t* __restrict__ x,        // [m, k]
                          const u8* __restrict__ weight,       // [n, k] codes; with GATE 2 n for n
                          const elem_t* __restrict__ scales,   // [n, k / 128], the same
                          const elem_t* __restrict__ bias,     // [n], with GATE [2 n], or null
                          const out_t* __restrict__ residual,  // [m, n] or null
                          out_t* __restrict__ out,             // [m, n]
                          const int m,                         // 1..2
                          const int n, const int k, const i64 x_stride, const i64 out_stride,
                          const i64 residual_stride, const float scale) {
  const int all = ceil_div(n, OUTPUTS), grid = gridDim.x, block = blockIdx.x;
  const int first_tile = SPREAD ? block : static_cast<int>(static_cast<i64>(all) * block / grid);
  const int step = SPREAD ? grid : 1;
  const int tiles = SPREAD
                        ? ceil_div(all - block, grid)
                        : static_cast<int>(static_cast<i64>(all) * (block + 1) / grid) - first_tile;
  const auto tile_of = [=](int i) { return first_tile + i * step; };
#pragma unroll 1
  for (int i = 0; PREFETCH > 0 && i < min(2, tiles); ++i) prefetch(weight, tile_of(i), n, k);
  after_previous_kernel();
  extern __shared__ __align__(128) char dynamic[];
  const u32 memory = shared_address(dynamic);
  const int warp = __shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0);
  const int lane = threadIdx.x % WARP_SIZE;
  const u32 slots = memory + warp * (DEPTH * SLOT_BYTES);
  const u32 bases = memory + Memory::BASES + warp * Digits::BASES_BYTES;
  const u32 scratch = memory + Memory::SCRATCH + warp * Digits::SCRATCH_BYTES;
  const int parts = ceil_div(k, WARPS * GROUPS * 128);

  // 1. The first tiles' codes and scales. Those that come: tiles of a batch, for each part of k.
  Source source;
  source.place(weight, scales, first_tile, warp * GROUPS, n, k);
  int next_batch = 0, next = 0, next_part = 0, next_slot = 0;
  const auto bring = [&] {
    if (next < tiles) {
      source.copy(slots + next_slot);
      next_slot = next_slot == (DEPTH - 1) * SLOT_BYTES ? 0 : next_slot + SLOT_BYTES;
      ++next;
      if (parts > 1 && next == min(next_batch + BATCH, tiles)) {
        if (++next_part == parts) next_part = 0, next_batch = next;
        next = next_batch;
        source.place(weight, scales, tile_of(next), (next_part * WARPS + warp) * GROUPS, n, k);
      }
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < DEPTH - 1; ++i) bring();

  const Epilogue<Activation, GATE, elem_t, out_t> epilogue = {
      bias, residual, nullptr, residual_stride, scale, n};
  Digits own;
  int slot = 0, turn = 0;
#pragma unroll 1
  for (int first = 0; first < tiles; first += BATCH, ++turn) {
    const int count = min(BATCH, tiles - first);
    const u32 sums = memory + Memory::OF_SUMS + turn % 2 * (BATCH * WARPS * SUMS * 4);

    // 2. Products: tile after tile, for each part of k.
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      if (parts > 1 || first == 0)
        own.load(x, x_stride, m, (part * WARPS + warp) * GROUPS, k, scratch, bases);
      u32 to = sums + (warp * SUMS + lane * 4) * 4;
#pragma unroll 1
      for (int i = 0; i < count; ++i, to += WARPS * SUMS * 4) {
        cp_async_wait<DEPTH - 2>();
        __syncwarp();  // other lanes' scales are there, and have been read where the next come
        bring();
        float d[4] = {};
        multiply(d, own, slots + slot, bases, lane);
        slot = slot == (DEPTH - 1) * SLOT_BYTES ? 0 : slot + SLOT_BYTES;
        float before[4] = {};
        if (part > 0) load_shared_floats(before, to);
#pragma unroll
        for (int c = 0; c < 4; ++c) d[c] = fmaf(d[c], own.by[c % 2], before[c]);
        store_shared_floats(to, d);
      }
    }

    // 3. Sums of all warps in their order, a tile by a warp. The next batch's have another place.
    __syncthreads();
    const int tile = (warp + turn * BATCH) % WARPS;
    if (tile < count) {
      float d[4] = {};
      add_warps(d, sums + tile * (WARPS * SUMS * 4), lane);
      const int place = lane / 4, t = lane % 4, output = tile_of(first + tile) * OUTPUTS + place;
#pragma unroll
      for (int c = 0; c < (GATE ? 2 : 4); ++c) {
        const int row = c % 2, column = output + c / 2 * 8;
        if (row < m && column < n && t == c)
          out[row * out_stride + column] =
              static_cast<out_t>(epilogue(d[c], GATE ? d[c + 2] : 0.f, row, column));
      }
    }
  }
}
