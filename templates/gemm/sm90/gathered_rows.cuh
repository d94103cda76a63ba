// x's rows of a grouped product on sm_90, gathered by token: WARPS producer warps copy the rows that
// a tile's places name, each its part of them, where TMA would bring rows that lie together.
//
//   a copy     four rows, eight lanes each: lane (r, c) has chunk c of row r, 16 bytes
//   a stage    64 of k of all rows of the tile, in the swizzle that TMA gives it (tile/swizzle.cuh)
//
// A lane keeps the tokens of every 32nd row of its warp's and hands them round by shuffles. What
// cp.async has written engines may read after a fence by who wrote it: so a stage is announced when
// it has landed, with AHEAD more of them on their way by then. (Two fewer than there are stages:
// consumers release one when they have the next.)
#pragma once
#include "ptx/cp_async.cuh"
#include "gemm/sm90/produce.cuh"

// Rows of x [tokens, k] by places: place p has that of token choices[p] / top_k, if there is one.
template <typename T>
struct TokenRows {
  const T* x;
  i64 stride;  // elements
  const int* choices;
  int tokens, top_k, k;

  __device__ __forceinline__ int token(int place) const {
    const int found = choices[place] / top_k;
    return found < tokens ? found : -1;
  }
};

template <typename T, typename Stages, int BLOCK_M>
struct GatheredRows {
  static constexpr int WARPS = 2, ROWS = BLOCK_M / WARPS;  // of a warp
  static constexpr int CHUNKS = BLOCK_K / 8, ROWS_A_COPY = WARP_SIZE / CHUNKS;
  static constexpr int AHEAD = Stages::STAGES / 2;
  static_assert(ROWS % WARP_SIZE == 0, "each lane has as many tokens");
  static_assert(AHEAD > 0 && AHEAD <= Stages::STAGES - 2, "consumers get the stage after");
  const Stages stages;
  const TokenRows<T> rows;
  const int first;  // of the tile's rows, this warp's
  int tokens[ROWS / WARP_SIZE];
  int unannounced = 0;
  RingPlace<Stages::STAGES> next = {};  // to be announced

  __device__ __forceinline__ GatheredRows(const Stages& ring, const TokenRows<T>& of_tokens,
                                          int warp)
      : stages(ring), rows(of_tokens), first(warp * ROWS) {}

  template <typename Order, typename Work>
  __device__ __forceinline__ void produce(Order order, Work work) {
    RingPlace<Stages::STAGES> place;
    for (Piece piece; work.take(piece);) {
      const GroupedTile tile = order(piece.tile);
      if (order.is_beyond(tile)) break;
      look_up(tile);
      for (int step = 0; step < piece.steps; ++step) {
        mbarrier_wait(stages.empty(place.stage), place.parity ^ 1);
        copy(stages.a(place.stage), step * BLOCK_K);
        if (unannounced == AHEAD) {
          announce<AHEAD>();
        } else {
          ++unannounced;
        }
        place.advance();
      }
    }
    for (; unannounced > 0; --unannounced) announce<0>();
  }

 private:
  __device__ __forceinline__ void look_up(const GroupedTile& tile) {
#pragma unroll
    for (int i = 0; i < ROWS / WARP_SIZE; ++i) {
      const int row = tile.row + first + i * WARP_SIZE + threadIdx.x % WARP_SIZE;
      tokens[i] = row < tile.end ? rows.token(row) : -1;
    }
  }

  // From `k` on, to the tile at `tile`: zeros where nobody is.
  __device__ __forceinline__ void copy(u32 tile, int k) const {
    const int lane = threadIdx.x % WARP_SIZE, chunk = lane % CHUNKS, row = lane / CHUNKS;
    const bool inside = k + chunk * 8 < rows.k;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_A_COPY) {
      const int token = __shfl_sync(FULL_MASK, tokens[i / WARP_SIZE], i % WARP_SIZE + row);
      const bool there = inside && token >= 0;
      const T* const source = rows.x + (there ? token * rows.stride + k + chunk * 8 : 0);
      const int place = first + i + row;
      cp_async_16(tile + place * (BLOCK_K * 2) + ((chunk ^ place % 8) << 4), source,
                  there ? 16 : 0);
    }
    cp_async_commit();
  }

  // A stage behind which LATER more are on their way.
  template <int LATER>
  __device__ __forceinline__ void announce() {
    cp_async_wait<LATER>();
    proxy_fence();
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) mbarrier_arrive(stages.full(next.stage));
    next.advance();
  }
};
