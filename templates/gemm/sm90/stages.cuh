// Shared memory of a product on sm_90: a ring of stages, each a tile of either operand; what warps
// stage of the output; bias of the tiles that consumers work on and come to next; and the barriers
// of the ring.
#pragma once
#include "ptx/mbarrier.cuh"
#include "tile/ring.cuh"
#include "tile/swizzle.cuh"
#include "gemm/sm90/operands.cuh"

// BOXES of output have room for each warp. GUARD: bytes behind each tile.
template <typename A_, typename B_, int STAGES_, int CONSUMERS, int BOXES, int GUARD>
struct GemmStages : RingBarriers<GemmStages<A_, B_, STAGES_, CONSUMERS, BOXES, GUARD>, STAGES_> {
  using A = A_;
  using B = B_;
  using Staged = SwizzledTile<16, PANEL>;  // of the output: rows of a warp
  static constexpr int STAGES = STAGES_;
  static constexpr bool GAPS = GUARD > 0;
  static constexpr int A_STAGE = A::BYTES + GUARD, B_STAGE = B::BYTES + GUARD;
  static constexpr int STAGED = STAGES * (A_STAGE + B_STAGE);
  static constexpr int STAGED_BYTES = BOXES > 0 ? BOXES * Staged::BYTES + GUARD : 0;  // of a warp
  static constexpr int BIAS = STAGED + 4 * CONSUMERS * STAGED_BYTES;
  static constexpr int BIAS_BYTES = B::ROWS * 2;  // of a tile's columns; two of a consumer
  static constexpr int BARRIERS = BIAS + 2 * CONSUMERS * BIAS_BYTES + GUARD;

  __device__ __forceinline__ u32 a(int stage) const { return this->base + stage * A_STAGE; }
  __device__ __forceinline__ u32 b(int stage) const {
    return this->base + STAGES * A_STAGE + stage * B_STAGE;
  }
  __device__ __forceinline__ u32 staged(int warp) const {
    return this->base + STAGED + warp * STAGED_BYTES;
  }

  // A word of a consumer's own, behind the barriers.
  __device__ __forceinline__ u32* flag(unsigned char* memory, int consumer) const {
    return reinterpret_cast<u32*>(memory + BARRIERS + STAGES * 16) + consumer;
  }
};
