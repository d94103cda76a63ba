// Shared memory of a product of a decode step on sm_90: a ring of tiles of the weight, one of tiles
// of x, each of 64 k, and their barriers. Two rings, since the weight comes before the previous
// kernel is over, and x does not.
//
//   weight stage 0, 1, ...   [ROWS][64 k], 128-byte swizzle, with two halves gate's rows, then up's
//   x stage 0, 1, ...        [TOKENS][64 k]; behind x's rows perhaps a LayerNorm's weight and bias
//   parts                    others' sums of this block's rows of out (step/stream_sums.cuh)
//   barriers                 of each stage: full, empty; of the parts: full
//   factors                  [2][TOKENS] floats, of x's rows
//
// When all has been multiplied, sums lie where the weight was (step/stream_sums.cuh).
#pragma once
#include "ptx/mbarrier.cuh"
#include "tile/ring.cuh"
#include "gemm/sm90/operands.cuh"

template <int ROWS, int TOKENS, int W_STAGES_, int X_STAGES_, int PARTS_BYTES, int GUARD>
struct StreamRings {
  using W = OperandTile<ROWS, true>;
  using X = OperandTile<TOKENS, true>;
  static constexpr int W_STAGES = W_STAGES_, X_STAGES = X_STAGES_;
  static constexpr int W_STAGE = W::BYTES, X_STAGE = X::BYTES;
  static constexpr int X_FIRST = W_STAGES * W_STAGE + GUARD;
  static constexpr int PARTS = X_FIRST + X_STAGES * X_STAGE + GUARD;
  static constexpr int BARRIERS = PARTS + (PARTS_BYTES > 0 ? PARTS_BYTES + GUARD : 0);
  static constexpr int FACTORS = BARRIERS + 16 * (W_STAGES + X_STAGES + 1) + GUARD;
  static constexpr int RELEASES = 4;  // by a warp each
  u32 base;

  __device__ __forceinline__ u32 weight(int stage) const { return base + stage * W_STAGE; }
  __device__ __forceinline__ u32 x(int stage) const { return base + X_FIRST + stage * X_STAGE; }
  __device__ __forceinline__ u32 weight_full(int stage) const {
    return base + BARRIERS + stage * 16;
  }
  __device__ __forceinline__ u32 weight_empty(int stage) const { return weight_full(stage) + 8; }
  __device__ __forceinline__ u32 x_full(int stage) const { return weight_full(W_STAGES + stage); }
  __device__ __forceinline__ u32 x_empty(int stage) const { return x_full(stage) + 8; }

  __device__ __forceinline__ u32 parts_full() const { return weight_full(W_STAGES + X_STAGES); }

  // By one thread; the others wait for it. parts: bytes of others' sums that will come.
  __device__ __forceinline__ void begin(int parts) const {
#pragma unroll
    for (int stage = 0; stage < W_STAGES + X_STAGES; ++stage) {
      mbarrier_init(weight_full(stage), 1);
      mbarrier_init(weight_empty(stage), RELEASES);
    }
    if (PARTS_BYTES > 0) mbarrier_init(parts_full(), 1);
    mbarrier_init_fence();
    if (PARTS_BYTES > 0) mbarrier_expect(parts_full(), parts);
  }

  // By one warp: steps `first` to `first + count` of a weight's rows from `row` on; with two HALVES
  // half of a tile's rows are those, and half lie `apart` behind them.
  template <int HALVES>
  __device__ __forceinline__ void fetch_weight(const TensorMap& map, int first, int count, int row,
                                               int apart) const {
    constexpr int PART = ROWS / HALVES;
    RingPlace<W_STAGES> place;
    for (int step = first; step < first + count; ++step, place.advance()) {
      mbarrier_wait(weight_empty(place.stage), place.parity ^ 1);
      if (!elect_one()) continue;
      mbarrier_expect(weight_full(place.stage), W::BYTES);
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
        tma_load(weight(place.stage) + half * PART * (BLOCK_K * 2), map, weight_full(place.stage),
                 step * BLOCK_K, row + half * apart, 0, 0);
    }
  }

  // By one warp: the same steps of x, of which `rows` rows come; what `more(tile, barrier, k)` asks
  // for are MORE rows behind them.
  template <int MORE, typename More>
  __device__ __forceinline__ void fetch_x(const TensorMap& map, int first, int count, int rows,
                                          const More& more) const {
    RingPlace<X_STAGES> place;
    for (int step = first; step < first + count; ++step, place.advance()) {
      mbarrier_wait(x_empty(place.stage), place.parity ^ 1);
      if (!elect_one()) continue;
      const u32 barrier = x_full(place.stage);
      mbarrier_expect(barrier, (rows + MORE) * (BLOCK_K * 2));
      tma_load(x(place.stage), map, barrier, step * BLOCK_K, 0, 0, 0);
      if (MORE > 0) more(x(place.stage) + rows * (BLOCK_K * 2), barrier, step * BLOCK_K);
    }
  }

  // By the four warps that multiply. A stage is let go when the next one's products are under way
  // and its own are done.
  template <typename T, int BLOCKS, int N>
  __device__ __forceinline__ void multiply(float (&acc)[BLOCKS][N][4], int count, int lane) const {
    RingPlace<W_STAGES> of_weight, last_weight;
    RingPlace<X_STAGES> of_x, last_x;
    for (int step = 0; step < count; ++step) {
      mbarrier_wait(weight_full(of_weight.stage), of_weight.parity);
      mbarrier_wait(x_full(of_x.stage), of_x.parity);
      const u64 a = W::operand(weight(of_weight.stage), 0), b = X::operand(x(of_x.stage), 0);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < BLOCK_K / 16; ++slice)
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
          wgmma_shared<T, false, false>(acc[block],
                                        a + block * (64 * BLOCK_K * 2 >> 4) + slice * W::STEP,
                                        b + slice * X::STEP, step > 0 || slice > 0);
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        if (lane == 0) mbarrier_arrive(weight_empty(last_weight.stage));
        if (lane == 0) mbarrier_arrive(x_empty(last_x.stage));
      }
      last_weight = of_weight, last_x = of_x;
      of_weight.advance(), of_x.advance();
    }
    wgmma_wait<0>();
  }
};
