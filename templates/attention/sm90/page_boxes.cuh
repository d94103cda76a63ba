// Keys and values in pages as TMA brings them: a tile in boxes of 2^box_log2 tokens, each in one page.
// Lane i of a warp knows the page of box i, and asks for it.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "attention/pages.cuh"

struct PageBoxes : SequencePages {
  int box_log2;

  struct Box {
    int page, token;  // where it begins
  };

  // This lane's of a tile of ROWS keys. Boxes past the last key are the last one's again: so many
  // bytes come with each tile, and nothing is read that the table does not name.
  template <int ROWS>
  __device__ __forceinline__ Box box(int tile) const {
    const int lane = threadIdx.x % WARP_SIZE, last = max(length - 1, 0) >> box_log2 << box_log2;
    const int key = min(tile * ROWS + (lane << box_log2), last);
    return {page(key), place(key)};
  }

  // By a whole warp; its first lane is one arrival at `barrier`.
  template <typename Tile>
  __device__ __forceinline__ void load(u32 shared, const TensorMap& map, u32 barrier,
                                       const Box& box, int head) const {
    const int lane = threadIdx.x % WARP_SIZE;
    if (lane == 0) mbarrier_expect(barrier, Tile::BYTES);
    __syncwarp();
    if (lane >= Tile::ROWS >> box_log2) return;
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel)
      tma_load(shared + panel * Tile::PANEL_BYTES + (lane << box_log2) * Tile::ROW_BYTES, map,
               barrier, panel * Tile::PANEL_COLUMNS, box.token, head, box.page);
  }
};
