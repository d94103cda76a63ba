// A tile of the weight in the stages of a product on sm_90: one run of rows, or two that come from
// two places (gate and up), by two blocks of a cluster, or are more than a box may have.
#pragma once
#include "ptx/mbarrier.cuh"
#include "gemm/sm90/operands.cuh"

// W: the OperandTile; BLOCKS of a cluster share it.
template <typename W, bool GATE, int BLOCKS>
struct WeightParts {
  static constexpr bool TALL = W::ROWS > 256;
  static constexpr int PARTS = GATE || BLOCKS > 1 || TALL ? 2 : 1, PART = W::ROWS / PARTS;
  static constexpr u16 ALL_BLOCKS = BLOCKS > 1 ? (1 << BLOCKS) - 1 : 0;
  int n;  // columns of out

  // Rows that are asked for of part `part` of the tile that begins at `column` of out.
  __device__ __forceinline__ int asked(int column, int part) const {
    return W::template asked<PART>(n - column - (GATE ? 0 : part * PART));
  }

  // All of its bytes are expected at `barrier`; asks for the part, or parts, of the block of `rank`.
  __device__ __forceinline__ void load(u32 tile, const OperandMaps& maps, u32 barrier, int column,
                                       int k, int expert, int rank) const {
    const int low = asked(column, 0), high = PARTS > 1 ? asked(column, 1) : 0;
    const int second = GATE ? n + column : column + PART;  // where the other part's rows are
    mbarrier_expect(barrier, (low + high) * (BLOCK_K * 2));
    if (BLOCKS == 1 || rank == 0)
      W::template load<0, PART>(tile, maps, barrier, column, low, k, expert, ALL_BLOCKS);
    if (PARTS > 1 && (BLOCKS == 1 || rank == 1))
      W::template load<W::ROWS - PART, PART>(tile, maps, barrier, second, high, k, expert,
                                             ALL_BLOCKS);
  }

  // Where memory is checked: NaN in the rows that are not asked for.
  __device__ __forceinline__ void mark(u32 tile, int column) const {
    for (int part = 0; part < PARTS; ++part)
      W::mark(tile, part * PART + asked(column, part), (part + 1) * PART);
  }
};

// Where memory is checked: rows of stages that the last tiles' boxes do not fill are NaN, so that
// they are read by who does not care, and seen in the result of who does.
template <int BLOCKS, int OUT_COLUMNS, typename Stages, typename Parts>
__device__ __forceinline__ void mark_rows_that_are_not_there(const Stages& stages,
                                                             const Parts& parts, int m) {
  using X = typename Stages::A;
  const bool alone = BLOCKS > 1 && ceil_div(m, X::ROWS) % BLOCKS != 0;  // no rows for the other
  const int rows = alone ? 0 : X::template asked<X::ROWS>((m - 1) % X::ROWS + 1);
  for (int stage = 0; stage < Stages::STAGES; ++stage) {
    X::mark(stages.a(stage), rows, X::ROWS);
    parts.mark(stages.b(stage), (ceil_div(parts.n, OUT_COLUMNS) - 1) * OUT_COLUMNS);
  }
}
