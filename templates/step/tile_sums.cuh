// The compute warps' way through a product whose weight comes by a ring (step/weight_ring.cuh). All of
// them share each stage: a warp has its own columns of it, in all tiles of the block, and keeps its
// sums of a tile in registers until the tile's last stage.
//
//   stage      tile 0, columns 0 ...         tile 0, the next ones        tile 1 ...
//   warp       0 | 1 | 2 | ... | 7           0 | 1 | 2 | ... | 7          0 | 1 ...
//
// Then they leave them in shared memory, side by side for PLACES tiles. When all have left theirs, each
// thread adds up the warps' sums of its outputs, in the order of the warps, and does what is to be done
// with them: two meetings a product, however many tiles there are up to PLACES.
#pragma once
#include "step/gathered_rows.cuh"
#include "step/weight_ring.cuh"

template <typename T, typename Ring, int WARPS, int MOST, int EXTRA, typename Meet>
struct TileSums {
  static constexpr int TILE = Ring::ROWS, THREADS = 32 * WARPS, PLACES = 8;
  static constexpr int EACH = ceil_div(PLACES * TILE * MOST, THREADS);  // outputs of a thread
  struct Shared {
    float sums[PLACES][WARPS][MOST + EXTRA][TILE];
  };
  Ring& ring;
  Shared& shared;
  const int m;

  __device__ __forceinline__ TileSums(Ring& ring, Shared& shared, int m)
      : ring(ring), shared(shared), m(m) {}

  // What this block does of a product. halves: rows of a tile are 8 outputs' gates and their ups.
  struct Work {
    int begin, outputs, log2, tiles;  // log2 of a tile's outputs
    bool coded, halves;
    int extra;  // rows behind the tokens'
    __device__ __forceinline__ Work(const Product<T>& product, bool halves)
        : begin(product.begin),
          outputs(product.outputs),
          log2(halves ? 3 : 4),
          tiles((product.outputs + (1 << log2) - 1) >> log2),
          coded(product.coded),
          halves(halves),
          extra(product.norm != nullptr ? EXTRA : 0) {}

    // act(j, row, output, where its sums are) of those that this thread adds up, from tile `first` on.
    template <typename Act>
    __device__ __forceinline__ void each(int first, int m, const Act& act) const {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const int at = static_cast<int>(threadIdx.x) + j * THREADS;
        const int place = at & (TILE - 1), tile = at / TILE % PLACES, row = at / (TILE * PLACES);
        const int output = ((first + tile) << log2) + place;
        if (row < m && place < 1 << log2 && output < outputs)
          act(j, row, begin + output, tile, place);
      }
    }
  };

  // rows: shared memory, [m][k + GATHERED_GAP], which all have met for. Of the outputs that this thread
  // adds up, the j-th: before(j, row, column): what it will want, asked for (of the first PLACES tiles by
  // the caller, earlier); after(j, row, column, sum and with halves up's): what becomes of it.
  template <typename Before, typename After>
  __device__ __forceinline__ void product(const Work& work, u32 rows, int k, const Before& before,
                                          const After& after) const {
    const int lane = threadIdx.x % WARP_SIZE;
    const int token = min(work.coded ? lane / 4 : lane % 8, m - 1 + work.extra);
    const u32 x = rows + token * (k + GATHERED_GAP) * sizeof(T);
#pragma unroll 1
    for (int first = 0; first < work.tiles; first += PLACES) {
      if (first > 0) {
        work.each(first, m, [&](int j, int row, int column, int, int) { before(j, row, column); });
        Meet()();  // sums have been added up
      }
      const int end = min(first + PLACES, work.tiles);
#pragma unroll 1
      for (int tile = first; tile < end; ++tile) multiply(work, tile, tile - first, x, k);
      Meet()();  // sums are there
      work.each(first, m, [&](int j, int row, int column, int tile, int place) {
        float2 more[2] = {};
        if (EXTRA > 0 && work.extra > 0)
#pragma unroll
          for (int i = 0; i < 2; ++i) more[i] = added_up(tile, m + i, place, work.halves);
        after(j, row, column, added_up(tile, row, place, work.halves), more);
      });
    }
  }

 private:
  // This warp's part of a tile, to its place.
  __device__ __forceinline__ void multiply(const Work& work, int tile, int place, u32 x,
                                           int k) const {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const bool both = work.halves || work.outputs - (tile << work.log2) > TILE / 2;
    const int columns = Ring::columns_of(work.coded), part = columns / WARPS;
    typename Ring::Sums sums = {};
#pragma unroll 1
    for (int at = 0; at < k; at += columns) {
      mbarrier_wait(ring.full + 8 * ring.place.stage, ring.place.parity);
      const int own = at + warp * part;
      ring.multiply(sums, both, work.coded, x + own * sizeof(T), min(max(k - own, 0), part));
      __syncwarp();
      release(ring.place, ring.empty + 8 * ring.place.stage, lane == 0);
    }
    const int own = Ring::row_of(lane, work.coded);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane % 4 * 2 + i % 2;
      if (row < MOST + EXTRA) shared.sums[place][warp][row][own + i / 2 * 8] = sums.total(i);
    }
  }

  __device__ __forceinline__ float2 added_up(int tile, int row, int place, bool halves) const {
    float2 total = {0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float* const sums = shared.sums[tile][w][row] + place;
      total.x += sums[0];
      if (halves) total.y += sums[TILE / 2];
    }
    return total;
  }
};
