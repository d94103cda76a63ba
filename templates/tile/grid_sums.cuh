// Numbers of all blocks of a grid added up, once a launch: in each column the sum over the blocks
// before this one, and over all of them. Blocks wait for one another, so all of them have to run at
// the same time: launch cooperatively, with no more blocks than fit (in fkjit: `cooperative=True`).
// Two neighbouring columns at a time, of which the first is even:
//
//   const GridSums<COLUMNS> sums = {counters};
//   sums.add(column, numbers, turn);            // for each turn from 0 to GROUP - 1, by any thread
//   const uint4 found = sums.get(column);       // by one thread; waits
//   const u32 left = sums.leave(column / 64);   // by lane 0 of a warp that got 64 columns
//   if (sums.is_last(left)) sums.clear(column)  // by all of it, at the end
//
// There is no barrier and no fence. Whoever adds to a word also counts himself in its upper bits;
// one who sees it full has the sum in the same load, and nothing but such words is handed over. The
// words are 0 before and after the launch. Rows of COLUMNS words:
//
//   [groups]  sums over GROUP neighbouring blocks: turn 0
//   [blocks]  sums over the earlier blocks of a block's own group, which add to it in their turns 1 to
//             GROUP - 1, to the next block first; it clears its row
//
// so a block reads blocks / GROUP + 1 numbers of a column, not one of every block. The groups' rows
// are cleared, 64 columns at a time, by the last warp to have read them.
#pragma once
#include "ptx/atomic.cuh"

template <int COLUMNS>
struct GridSums {
  static constexpr int GROUP = 16, BITS = 27;  // blocks; bits of a sum, of all blocks as well
  static constexpr int HEAD = 32;              // words: warps that have read, by 64 columns
  static constexpr int AHEAD = 12;             // groups that a thread asks for at a time
  static constexpr u32 FULL = 1u << 31;        // so many blocks' count, and nothing else
  static_assert(static_cast<u32>(GROUP) << BITS == FULL, "the highest bit says full");
  static_assert(COLUMNS % 64 == 0 && COLUMNS / 64 <= HEAD, "pairs of a whole warp");
  u32* words;  // [HEAD + (groups + blocks) * COLUMNS], on an 8-byte boundary

  static __device__ __forceinline__ int groups() {
    return ceil_div(static_cast<int>(gridDim.x), GROUP);
  }
  static __device__ __forceinline__ int group() { return blockIdx.x / GROUP; }
  static __device__ __forceinline__ int rank() { return blockIdx.x % GROUP; }

  __device__ __forceinline__ size_t word(int row, int column) const {
    return __cvta_generic_to_global(words + HEAD + row * COLUMNS + column);
  }

  // The last block counts for those that are missing in its group.
  __device__ __forceinline__ void add(int column, uint2 numbers, int turn) const {
    const int behind = static_cast<int>(gridDim.x - blockIdx.x) - 1;
    if (turn > min(behind, GROUP - 1 - rank())) return;
    const u32 count = (turn > 0 || behind > 0 ? 1u : GROUP - rank()) << BITS;
    const u64 both = static_cast<u64>(count + numbers.y) << 32 | (count + numbers.x);
    const int row = turn > 0 ? groups() + blockIdx.x + turn : group();
    red_add_relaxed(word(row, column), both);
  }

  // x and y: over the blocks before, z and w: over all.
  __device__ __forceinline__ uint4 get(int column) const {
    const int rows = groups();
    const u32 missing = static_cast<u32>(GROUP - rank()) << BITS;  // in this block's own row
    const size_t own = word(rows + blockIdx.x, column);
    uint2 mine = {0, 0}, before = {0, 0}, all = {0, 0};
#pragma unroll 1
    for (int first = 0; first < rows; first += AHEAD) {
      const size_t source = word(first, column);
      uint2 seen[AHEAD];
      u32 earlier[AHEAD], full;
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const u32 now = first + i < rows ? 0 : FULL;
        seen[i] = {now, now}, earlier[i] = first + i < group();
      }
      do {
        load_relaxed_unless(mine, own, (mine.x + missing) & (mine.y + missing));
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
          load_relaxed_unless(seen[i], source + i * COLUMNS * sizeof(u32), seen[i].x & seen[i].y);
        full = (mine.x + missing) & (mine.y + missing);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) full &= seen[i].x & seen[i].y;
      } while (full < FULL);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        all.x += seen[i].x, all.y += seen[i].y;
        before.x += seen[i].x * earlier[i], before.y += seen[i].y * earlier[i];
      }
    }
    if (rank() > 0) store_zeros_relaxed(own);
    return {(before.x + mine.x + missing) & (FULL - 1), (before.y + mine.y + missing) & (FULL - 1),
            all.x & (FULL - 1), all.y & (FULL - 1)};
  }

  __device__ __forceinline__ u32 leave(int chunk) const {
    return atom_inc_relaxed(words + chunk, gridDim.x);
  }
  static __device__ __forceinline__ bool is_last(u32 left) { return left == gridDim.x - 1; }
  __device__ __forceinline__ void clear(int column) const {
#pragma unroll 1
    for (int row = 0; row < groups(); ++row) store_zeros_relaxed(word(row, column));
  }
};
