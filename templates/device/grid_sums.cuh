// Numbers of all blocks of a grid added up, once a launch: in each column the sum over the blocks
// before this one, and over all of them. Blocks wait for one another, so all of them have to run at
// the same time: launch cooperatively, with no more blocks than fit (in fkjit: `cooperative=True`).
//
//   const GridSums<COLUMNS> sums = {counters};
//   sums.add(column, number);                   // each column once a block, by any thread
//   const uint2 found = sums.get(column);       // by the same warp; waits
//   const u32 left = sums.leave(column / 32);   // lane 0 of that warp
//   if (sums.is_last(left)) sums.clear(column)  // by all of it, at the end
//
// There is no barrier and no fence. Whoever adds to a word also counts himself in its upper bits; one
// who sees it full has the sum in the same load, and nothing but such words is handed over. The words
// are 0 before and after the launch. Rows of COLUMNS words:
//
//   [groups]  sums over GROUP neighbouring blocks
//   [blocks]  sums over the earlier blocks of a block's own group, which add to it; it clears its row
//
// so a block reads blocks / GROUP + 1 numbers of a column, not one of every block. The groups' rows
// are cleared, 32 columns at a time, by the last warp to have read them.
#pragma once
#include "prelude.cuh"

template <int COLUMNS>
struct GridSums {
  static constexpr int GROUP = 16, BITS = 27;  // blocks; bits of a sum, of all blocks as well
  static constexpr int HEAD = 32;              // words: warps that have read, by 32 columns
  static constexpr int AHEAD = 12;             // groups that a thread asks for at a time
  static constexpr u32 FULL = 1u << 31;        // so many blocks' count, and nothing else
  static_assert(static_cast<u32>(GROUP) << BITS == FULL, "the highest bit says full");
  u32* words;  // [HEAD + (groups + blocks) * COLUMNS]

  static __device__ __forceinline__ int groups() {
    return ceil_div(static_cast<int>(gridDim.x), GROUP);
  }
  static __device__ __forceinline__ int group() { return blockIdx.x / GROUP; }
  static __device__ __forceinline__ int rank() { return blockIdx.x % GROUP; }

  __device__ __forceinline__ size_t word(int row, int column) const {
    return __cvta_generic_to_global(words + HEAD + row * COLUMNS + column);
  }

  // The last block counts for those that are missing in its group.
  __device__ __forceinline__ void add(int column, int number) const {
    const int behind = static_cast<int>(gridDim.x - blockIdx.x) - 1;
    const int later = min(behind, GROUP - 1 - rank()), count = behind > 0 ? 1 : GROUP - rank();
    red(word(group(), column), static_cast<u32>(count) << BITS | number, 0, 0);
    const size_t own = word(groups() + blockIdx.x, column);
#pragma unroll
    for (int i = 1; i < GROUP; ++i)
      red(own + i * COLUMNS * sizeof(u32), 1u << BITS | number, i, later);
  }

  // x: over the blocks before, y: over all.
  __device__ __forceinline__ uint2 get(int column) const {
    const int rows = groups();
    const u32 missing = static_cast<u32>(GROUP - rank()) << BITS;  // in this block's own row
    const size_t own = word(rows + blockIdx.x, column);
    u32 mine = 0, before = 0, all = 0;
#pragma unroll 1
    for (int first = 0; first < rows; first += AHEAD) {
      const size_t source = word(first, column);
      u32 seen[AHEAD], full;
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) seen[i] = first + i < rows ? 0 : FULL;
      do {
        load(mine, own, mine + missing);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) load(seen[i], source + i * COLUMNS * sizeof(u32), seen[i]);
        full = mine + missing;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) full &= seen[i];
      } while (full < FULL);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) all += seen[i], before += first + i < group() ? seen[i] : 0;
    }
    if (rank() > 0) store(own, 0);
    return {(before + mine + missing) & (FULL - 1), all & (FULL - 1)};
  }

  // PTX ISA: atom.relaxed.gpu.global.inc.u32
  __device__ __forceinline__ u32 leave(int chunk) const {
    u32 left;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(left)
                 : "l"(__cvta_generic_to_global(words + chunk)), "r"(gridDim.x - 1)
                 : "memory");
    return left;
  }
  static __device__ __forceinline__ bool is_last(u32 left) { return left == gridDim.x - 1; }
  __device__ __forceinline__ void clear(int column) const {
#pragma unroll 1
    for (int row = 0; row < groups(); ++row) store(word(row, column), 0);
  }

 private:
  // Where `least` is at most `most`.                        PTX ISA: red.relaxed.gpu.global.add.u32
  static __device__ __forceinline__ void red(size_t word, u32 number, int least, int most) {
    asm volatile(
        "{ .reg .pred needed; setp.le.s32 needed, %2, %3;"
        " @needed red.relaxed.gpu.global.add.u32 [%0], %1; }" ::"l"(word),
        "r"(number), "r"(least), "r"(most)
        : "memory");
  }
  // PTX ISA: st.relaxed.gpu
  static __device__ __forceinline__ void store(size_t word, u32 number) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(number) : "memory");
  }
  // Where `now` is not FULL. Under a predicate, so that loads need not wait for one another.
  // PTX ISA: ld.relaxed.gpu
  static __device__ __forceinline__ void load(u32& seen, size_t word, u32 now) {
    asm volatile(
        "{ .reg .pred needed; setp.ge.s32 needed, %2, 0;"
        " @needed ld.relaxed.gpu.global.u32 %0, [%1]; }"
        : "+r"(seen)
        : "l"(word), "r"(now));
  }
};
