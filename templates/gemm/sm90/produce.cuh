// A producer warp of a product on sm_90: stage after stage, tile after tile.
#pragma once
#include "ptx/elect.cuh"
#include "tile/ring.cuh"
#include "gemm/groups.cuh"
#include "gemm/pieces.cuh"
#include "gemm/sm90/operands.cuh"

// `fetch` fills its operand's place in each stage; `part`: what this block does of a piece.
template <typename Stages, typename Order, typename Work, typename Part, typename Fetch>
__device__ __forceinline__ void produce(const Stages& stages, Order order, Work work,
                                        const Part& part, const Fetch& fetch) {
  RingPlace<Stages::STAGES> place;
  for (Piece piece; work.take(piece);) {
    const GroupedTile tile = order(piece.tile);
    if (order.is_beyond(tile)) break;
    piece = part(piece, order);
    for (int step = piece.first; step < piece.first + piece.steps; ++step) {
      mbarrier_wait(stages.empty(place.stage), place.parity ^ 1);
      if (elect_one())
        fetch(tile, place.stage, step * BLOCK_K - piece.first * (BLOCK_K - Order::STEP_OF_FIRST));
      place.advance();
    }
  }
}
