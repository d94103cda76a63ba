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
  static constexpr int ROWS = MOST + EXTRA, BYTES = TILE * sizeof(float);
  struct Shared {
    float sums[PLACES][WARPS][ROWS][TILE];
  };
  Ring& ring;
  const u32 shared;
  const int m;

  __device__ __forceinline__ TileSums(Ring& ring, Shared& shared, int m)
      : ring(ring), shared(kept(shared_address(&shared))), m(m) {}

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
    const int row_bytes = (k + GATHERED_GAP) * sizeof(T);
    const typename Ring::Lane x = Ring::lane_of(rows, k, row_bytes, m + work.extra, work.coded);
#pragma unroll 1
    for (int first = 0; first < work.tiles; first += PLACES) {
      if (first > 0) {
        work.each(first, m, [&](int j, int row, int column, int, int) { before(j, row, column); });
        Meet()();  // sums have been added up
      }
      const int end = min(first + PLACES, work.tiles);
#pragma unroll 1
      for (int tile = first; tile < end; ++tile)
        if (Ring::CODED > 0 && work.coded)
          multiply<true>(work, tile, tile - first, x, k);
        else
          multiply<false>(work, tile, tile - first, x, k);
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
  __device__ __forceinline__ u32 sums_of(int place, int warp, int row, int i) const {
    return shared + ((place * WARPS + warp) * ROWS + row) * BYTES + i * 4;
  }

  // This warp's part of a tile, of codes or numbers, to its place.
  template <bool CODED>
  __device__ __forceinline__ void multiply(const Work& work, int tile, int place,
                                           const typename Ring::Lane& x, int k) const {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const bool both = work.halves || work.outputs - (tile << work.log2) > TILE / 2;
    constexpr int COLUMNS = CODED ? Ring::CODED : Ring::COLUMNS_OF_STAGE, PART = COLUMNS / WARPS;
    typename Ring::Sums sums = {};
#pragma unroll 1
    for (int at = 0; at < k; at += COLUMNS) {
      mbarrier_wait(ring.full + 8 * ring.place.stage, ring.place.parity);
      const int own = at + warp * PART;
      ring.multiply<CODED>(sums, both, x, own, min(max(k - own, 0), PART));
      __syncwarp();
      release(ring.place, ring.empty + 8 * ring.place.stage, lane == 0);
    }
    const u32 own = sums_of(place, warp, 0, Ring::row_of(lane, CODED));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = Ring::token_of(i, CODED);
      if (row < ROWS)
        store_shared_word(own + row * BYTES + Ring::row_behind(i, CODED) * 4,
                          __float_as_uint(sums.total(i)));
    }
  }

  __device__ __forceinline__ float2 added_up(int tile, int row, int place, bool halves) const {
    float2 total = {0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const u32 sums = sums_of(tile, w, row, place);
      total.x += __uint_as_float(load_shared_word(sums));
      if (halves) total.y += __uint_as_float(load_shared_word(sums + BYTES / 2));
    }
    return total;
  }
};
