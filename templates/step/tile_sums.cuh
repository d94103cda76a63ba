// The compute warps' way through a product whose weight comes by a ring (step/weight_ring.cuh). A tile's
// columns are several parts, two of a stage (of codes: eight), each multiplied by another warp, up to
// WARPS of them, which leave their sums in shared memory. One of these warps, another one of each tile,
// adds them up, in the order of the columns, and does what is to be done with outputs:
//
//   part             0    1    2    3  |  4    5    6    7  |  8 ...
//   warp             0    1    2    3  |  4    5    6    7  |  0 ...         (here: of eight warps)
//   tile, columns  0, a  0, b  0, c  0, d | 1, a  1, b ...
//   adds up                          *              *
//
// It does so DELAY tiles later, when it has left its part of those, too: else one tile's sums would wait
// for those of the tile before.
//
// WARPS tiles have places; a place is taken again when its tile has been added up. So a warp that leaves
// sums there has left its part of the tile before there, too, and its barriers are one phase behind at
// the most, as waiting by parity wants it. With a stage of the ring that is not so: its last tile may be
// another warp's, who has to have released it first.
#pragma once
#include "step/gathered_rows.cuh"
#include "step/weight_ring.cuh"

template <typename T, typename Ring, int WARPS, int MOST>
struct TileSums {
  static constexpr int TILE = Ring::ROWS, PLACES = WARPS, COLUMNS = Ring::PART;
  static_assert(Ring::SIZE >= WARPS,
                "what was asked for WARPS stages ago is not in the same place");
  static constexpr int DELAY = 2;
  static constexpr int EACH = ceil_div(TILE * MOST, WARP_SIZE);  // outputs of a lane
  struct Shared {
    float sums[PLACES][WARPS][MOST][TILE];
    u64 full[PLACES], empty[PLACES];  // mbarriers
  };
  Ring& ring;
  Shared& shared;
  const int m;
  u32 parts_before = 0, stages = 0, tile = 0;  // of this product
  int expected = 0;                            // the part whose tile's wants were asked for

  __device__ __forceinline__ TileSums(Ring& ring, Shared& shared, int m)
      : ring(ring), shared(shared), m(m) {}

  static __device__ __forceinline__ void make_barriers(Shared& shared) {  // by one thread
    for (int i = 0; i < PLACES; ++i) {
      mbarrier_init(shared_address(&shared.full[i]), WARPS);
      mbarrier_init(shared_address(&shared.empty[i]), 1);
    }
  }

  // What this warp does of a product. halves: rows of a tile are 8 outputs' gates and their ups.
  struct Work {
    int begin, outputs, log2;  // log2 of a tile's outputs
    bool coded;
    int of_stage;           // log2 of its parts
    int parts, all, first;  // of a tile, of all; the warp's first one
    u32 inverse;
    __device__ __forceinline__ Work(const TileSums& sums, const Product<T>& product, int k,
                                    bool halves)
        : begin(product.begin),
          outputs(product.outputs),
          log2(halves ? 3 : 4),
          coded(product.scales != nullptr),
          of_stage(Ring::parts_log2(coded)),
          parts(ceil_div(k, Ring::columns_of(coded)) << of_stage),
          inverse(product.inverse) {
      all = ((outputs + (1 << log2) - 1) >> log2) * parts;
      first = (threadIdx.x / WARP_SIZE - sums.parts_before) % WARPS;
    }
    // act(j, row, output) of those of a tile that this lane adds up.
    template <typename Act>
    __device__ __forceinline__ void each(int tile, int m, const Act& act) const {
      const int before = tile << log2, here = min(1 << log2, outputs - before);
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const int at = static_cast<int>(threadIdx.x % WARP_SIZE) + j * WARP_SIZE;
        const int row = at >> log2, place = at & ((1 << log2) - 1);
        if (row < m && place < here) act(j, row, begin + before + place);
      }
    }
  };

  // What the first tile that this warp adds up will want is asked for: `before` as below.
  template <typename Before>
  __device__ __forceinline__ void expect(const Work& work, const Before& before) {
    const int warps = min(work.parts, WARPS);
    expected = -1;  // none: others add up
#pragma unroll 1
    for (int tile = 0, end = work.parts; tile < WARPS && end <= work.all; ++tile, end += work.parts)
      if ((end - 1 - tile % warps) % WARPS == work.first) {
        expected = end - 1 - tile % warps;
        work.each(tile, m, before);
        break;
      }
  }

  // rows: shared memory, [m][k + GATHERED_GAP]. Of the outputs that this lane adds up, the j-th of a tile:
  // before(j, row, column): what it will want, asked for while the tile is multiplied;
  // after(j, row, column, sum and with `halves` up's): what becomes of it.
  template <typename Before, typename After>
  __device__ __forceinline__ void product(const Work& work, u32 rows, int k, bool halves,
                                          const Before& before, const After& after) {
    const int lane = threadIdx.x % WARP_SIZE, parts = work.parts, warps = min(parts, WARPS);
    const int token = min(work.coded ? lane / 4 : lane % 8, m - 1);
    const u32 row = rows + token * (k + GATHERED_GAP) * sizeof(T);
    float d[4] = {};
    int pending = -1;  // a tile that this warp has to add up
#pragma unroll 1
    for (int i = work.first; i < work.all; i += WARPS) {
      const int own = Quotient::of(i >> work.of_stage, work.inverse), part = i - own * parts,
                at = part * COLUMNS;
      const int outputs = min(1 << work.log2, work.outputs - (own << work.log2));
      const bool adds = part == parts - 1 - own % warps;  // this tile up
      if (pending >= 0 && (adds || own >= pending + DELAY)) {
        add_up(work, pending, halves, after);
        pending = -1;
      }
      if (adds) {
        if (i != expected) work.each(own, m, before);
        pending = own;
      }
      const u32 turn = stages + (i >> work.of_stage);
      const int number = turn % Ring::SIZE, parity = turn / Ring::SIZE % 2;
      mbarrier_wait(ring.empty + 8 * number, parity ^ 1);
      mbarrier_wait(ring.full + 8 * number, parity);
      const int columns = min(max(k - at, 0), COLUMNS);  // the last parts may have none
      const int place = part & ((1 << work.of_stage) - 1);
      ring.multiply(d, number, place, outputs, halves, work.coded, row + at * sizeof(T), columns);
      __syncwarp();
      if (lane == 0) ring.release(number, work.coded);
      if (part + WARPS < parts) continue;  // this warp has more of the same tile
      leave(d, tile + own, part % WARPS, part == parts - warps ? WARPS - warps + 1 : 1);
    }
    if (pending >= 0) add_up(work, pending, halves, after);
    const int all = work.all >> work.of_stage;
    parts_before += work.all, stages += all, tile += Quotient::of(all, work.inverse);
  }

 private:
  // What all warps have left of a tile, in the order of the columns.
  template <typename After>
  __device__ __forceinline__ void add_up(const Work& work, int own, bool halves,
                                         const After& after) const {
    const int slot = (tile + own) % PLACES, parts = work.parts, warps = min(parts, WARPS);
    const int first_of = parts > WARPS ? parts % WARPS : 0;  // by their last columns
    mbarrier_wait(shared_address(&shared.full[slot]), (tile + own) / PLACES % 2);
    work.each(own, m, [&](int j, int row, int column) {
      const float* const sums =
          shared.sums[slot][0][row] + (column - work.begin) - (own << work.log2);
      float2 total = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (w >= warps) break;
        const int at = first_of + w, from = at < warps ? at : at - warps;
        total.x += sums[from * MOST * TILE];
        if (halves) total.y += sums[from * MOST * TILE + TILE / 2];
      }
      after(j, row, column, total);
    });
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) mbarrier_arrive(shared_address(&shared.empty[slot]));
  }

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
