// Rows that come, and rows that are wanted, while a product runs: a word of memory for each run of
// `chunk_rows` rows, a multiple of a tile's.
//
//   arrived[c]    not 0 once the rows c of x are there. Who brings them (a copy engine) writes it
//                 behind them, and tiles of these rows are asked for then.
//   finished[c]   how many warps have stored their part of a tile of the rows c of out. Who takes
//                 them away (a copy engine) waits for all of them.
//
// Tiles are taken from a row on, and around the end (GroupedOrder): own rows first, or last.
#pragma once
#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/proxy_fence.cuh"

// By one thread, which asks TMA for rows then.
struct Arrivals {
  const u32* arrived;
  int chunk_rows;

  __device__ __forceinline__ void wait(int row) const {
    const u32* const flag = arrived + row / chunk_rows;
    while (load_acquire_system(flag) == 0) {
    }
    proxy_fence_global();
  }
};

// Of a warp whose first lane has had TMA store its rows. A tile is told of under the products
// of the next one: by then nothing is waited for.
struct Finished {
  u32* finished;
  int chunk_rows;
  int row = -1;  // of the last tile, that nobody was told of

  __device__ __forceinline__ void tell(int lane) {
    if (lane == 0 && row >= 0) {
      bulk_wait();
      proxy_fence_global();
      red_add_release_system(finished + row / chunk_rows, 1);
    }
    row = -1;
  }
};
