// The compute warps' way through a product whose weight comes by a ring (step/weight_ring.cuh). A tile's
// columns are several stages, each multiplied by another warp, up to WARPS of them, which leave their
// sums in shared memory. The warp that has the tile's last columns adds them up, in the order of the
// columns, and does what is to be done with outputs:
//
//   stage            0    1    2    3  |  4    5    6    7  |  8 ...
//   warp             0    1    2    3  |  4    5    6    7  |  0 ...         (here: of eight warps)
//   tile, columns  0, a  0, b  0, c  0, d | 1, a  1, b ...
//   adds up                          *                   *
//
// WARPS tiles have places; a place is taken again when its tile has been added up. So a warp that leaves
// sums there has left its part of the tile before there, too, and its barriers are one phase behind at
// the most, as waiting by parity wants it. With a stage of the ring that is not so: its last tile may be
// another warp's, who has to have released it first.
#pragma once
#include "step/weight_ring.cuh"

template <typename T, typename Ring, int WARPS, int MOST>
struct TileSums {
  static constexpr int TILE = Ring::ROWS, PLACES = WARPS;
  static_assert(Ring::SIZE >= WARPS,
                "what was asked for WARPS stages ago is not in the same place");
  static constexpr int EACH = ceil_div(TILE * MOST, WARP_SIZE);  // outputs of a lane
  struct Shared {
    float sums[PLACES][WARPS][MOST][TILE];
    u64 full[PLACES], empty[PLACES];  // mbarriers
  };
  Ring& ring;
  Shared& shared;
  const unsigned char* const stages;
  const int m;
  int stage = 0, tile = 0;  // so many before this product

  __device__ __forceinline__ TileSums(Ring& ring, Shared& shared, const unsigned char* stages,
                                      int m)
      : ring(ring), shared(shared), stages(stages), m(m) {}

  static __device__ __forceinline__ void make_barriers(Shared& shared) {  // by one thread
    for (int i = 0; i < PLACES; ++i) {
      mbarrier_init(shared_address(&shared.full[i]), WARPS);
      mbarrier_init(shared_address(&shared.empty[i]), 1);
    }
  }

  // rows: [m][k + ROW_GAP]. Of the outputs that this lane adds up, the i-th of a tile:
  // before(i, row, column): what it will want, asked for while the tile is multiplied;
  // after(i, row, column, sum and with HALVES up's): what becomes of it.
  template <bool HALVES, typename Before, typename After>
  __device__ __forceinline__ void product(const T* rows, int n, int k, int share,
                                          const Before& before, const After& after) {
    constexpr int OUTPUTS = HALVES ? TILE / 2 : TILE;
    const Outputs mine(n, share);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int parts = ceil_div(k, Ring::COLUMNS_OF_STAGE), warps = min(parts, WARPS);
    const int tiles = ceil_div(mine.end - mine.begin, OUTPUTS), all = tiles * parts;
    const T* const x = lane / 4 < m ? rows + lane / 4 * (k + ROW_GAP) : nullptr;
    float d[4] = {};
#pragma unroll 1
    for (int i = (warp - stage % WARPS + WARPS) % WARPS; i < all; i += WARPS) {
      const int own = i / parts, part = i - own * parts, first = mine.begin + own * OUTPUTS;
      const int outputs = min(OUTPUTS, mine.end - first), at = part * Ring::COLUMNS_OF_STAGE;
      const bool last = part == parts - 1;
      if (last) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const int row = (lane + j * WARP_SIZE) / OUTPUTS,
                    place = (lane + j * WARP_SIZE) % OUTPUTS;
          if (row < m && place < outputs) before(j, row, first + place);
        }
      }
      const int number = (stage + i) % Ring::SIZE, parity = (stage + i) / Ring::SIZE % 2;
      mbarrier_wait(ring.empty + 8 * number, parity ^ 1);
      mbarrier_wait(ring.full + 8 * number, parity);
      Ring::template multiply<HALVES>(d, stages + number * Ring::STAGE,
                                      x == nullptr ? nullptr : x + at, outputs,
                                      min(Ring::COLUMNS_OF_STAGE, k - at));
      __syncwarp();
      if (lane == 0) ring.release(number);
      if (part + WARPS < parts) continue;  // this warp has more of the same tile
      leave(d, tile + own, part % WARPS, part == parts - warps ? WARPS - warps + 1 : 1);
      if (last) {
        const int slot = (tile + own) % PLACES;
        mbarrier_wait(shared_address(&shared.full[slot]), (tile + own) / PLACES % 2);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const int row = (lane + j * WARP_SIZE) / OUTPUTS,
                    place = (lane + j * WARP_SIZE) % OUTPUTS;
          if (row >= m || place >= outputs) continue;
          float2 total = {0.f, 0.f};
          for (int w = 0; w < warps; ++w) {
            const int from = (part + 1 + w) % warps;  // the order of their last columns
            total.x += shared.sums[slot][from][row][place];
            if (HALVES) total.y += shared.sums[slot][from][row][place + OUTPUTS];
          }
          after(j, row, first + place, total);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[slot]));
      }
    }
    stage += all, tile += tiles;
  }

 private:
  // A warp's sums to the tile's place; `count` arrivals, of all warps together WARPS.
  __device__ __forceinline__ void leave(float (&d)[4], int number, int part, int count) {
    const int lane = threadIdx.x % WARP_SIZE, slot = number % PLACES;
    mbarrier_wait(shared_address(&shared.empty[slot]), number / PLACES % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane % 4 * 2 + i % 2;
      if (row < MOST) shared.sums[slot][part][row][lane / 4 + i / 2 * 8] = d[i];
      d[i] = 0.f;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive_times(shared_address(&shared.full[slot]), count);
  }
};
