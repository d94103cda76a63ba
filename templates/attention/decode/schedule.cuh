// Who does what in decoding: the keys of all sequences, KV heads and tiles of rows make one list of
// units, 2^unit_log2 keys each, which is shared out evenly over the blocks of a grid, whatever the
// lengths are. A block's share is cut into segments where a head or a sequence ends; a head that is
// cut is put together by the last block that has a part of it.
//
//   sequences   0                     1             2
//   units       a a a a a | b b b b b | c c | d d d | e e ...      a, b: the heads of sequence 0
//   blocks      0 0 0 0   1 1 1 1   2 2 2 2   3 3 3 3 ...          a has parts in blocks 0 and 1
//
// Or the heads go abreast: a crew is as many blocks as a sequence has heads, a head each, and what
// is shared out over the crews is a list without heads. Then keys that lie side by side in memory
// are read at the same time.
//
//   units       a a a a a | c c | e e e ...       by one block of each crew
//               b b b b b | d d | f f f ...       by the next one
//   crews       0 0 0   1 1 1   2 2 2   3 3 3 ...
#pragma once
#include "prelude.cuh"

// How long the sequences of a batch are; lengths are read on the device.
struct Sequences {
  static constexpr int ROUND = 32;  // a window's first key is rounded down to so many: whole steps
  const int* seq_lens;              // [rows of the table], or null: all have `longest` keys
  const int* rows;                  // [batch] rows of the table, or null: sequence b has row b
  int batch, longest, table_rows;
  int window = -1;  // keys from the end on that a query sees; -1: all
  // [batch + 1], where q and o are packed, or null: sequence b has row b. Then sequences of one new
  // token alone are there.
  const int* cu_seqlens_q = nullptr;
  // >= 0: `seq_lens` has a number for each sequence of the batch, and its keys are so many more.
  int added = -1;

  // Which row of q and o a sequence has, or which batch.
  __device__ __forceinline__ int queries(int number) const {
    return cu_seqlens_q == nullptr ? number : cu_seqlens_q[number];
  }
  __device__ __forceinline__ bool has(int number) const {
    return cu_seqlens_q == nullptr || cu_seqlens_q[number + 1] - cu_seqlens_q[number] == 1;
  }

  // Where the units of a sequence begin: keys before are seen by no query.
  __device__ __forceinline__ int first_key(int length) const {
    return window < 0 ? 0 : max(length - window, 0) / ROUND * ROUND;
  }
};

// One of them: its row in the table, and its keys.
struct Sequence {
  int row, length;
  bool there;

  __device__ __forceinline__ Sequence(const Sequences& all, int number)
      : row(0), length(0), there(all.has(number)) {
    if (!there) return;
    const int at = all.rows == nullptr ? number : all.rows[number];
    if (static_cast<u32>(at) >= static_cast<u32>(all.table_rows)) return;  // there is none
    row = at;
    if (all.added >= 0) {
      length = min(max(all.seq_lens[number] + all.added, 0), all.longest);
    } else {
      length = all.seq_lens == nullptr ? all.longest : min(max(all.seq_lens[at], 0), all.longest);
    }
  }
  // Of a head; an empty sequence has one, in which its output is written.
  __device__ __forceinline__ int units(const Sequences& all, int unit_log2) const {
    return there ? max(((length - all.first_key(length) - 1) >> unit_log2) + 1, 1) : 0;
  }
};

// `total` units, shared out over blocks: each has `each`, the first `rest` of them one more.
struct Shares {
  int each, rest;

  __device__ __forceinline__ Shares(int total, int blocks)
      : each(static_cast<u32>(total) / static_cast<u32>(blocks)), rest(total - each * blocks) {}
  __device__ __forceinline__ int begin(int block) const { return block * each + min(block, rest); }
  __device__ __forceinline__ int owner(int unit) const {
    const u32 longer = rest * (each + 1), at = unit;
    return at < longer ? at / (each + 1u) : rest + (at - longer) / each;
  }
};

// The blocks that take heads abreast; or a block alone, which takes one head after the other.
struct Crew {
  int size, number;  // of its blocks; which crew this block is of

  __device__ __forceinline__ explicit Crew(int abreast)
      : size(abreast), number(blockIdx.x / static_cast<u32>(abreast)) {}
  __device__ __forceinline__ int count() const { return gridDim.x / static_cast<u32>(size); }
  __device__ __forceinline__ int member() const { return blockIdx.x - number * size; }
};

// A sequence in the list: where its units begin, and how many each of its heads has.
struct Place {
  int sequence, row, length;
  int first, units;

  // On to the next one that has units, of which `unit` is the first.
  __device__ __forceinline__ void advance(const Sequences& all, int unit, int unit_log2) {
    const Sequence next(all, sequence + 1);
    *this = {sequence + 1, next.row, next.length, unit, next.units(all, unit_log2)};
    if (all.cu_seqlens_q != nullptr && units == 0) advance(all, unit, unit_log2);
  }
};

// Added up over the lanes before this one, and this one.
__device__ __forceinline__ int inclusive_sum(int x) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int step = 1; step < WARP_SIZE; step *= 2) {
    const int before = __shfl_up_sync(FULL_MASK, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

// The sequences of a batch, 32 at a time, one for each lane of a warp.
struct LaneSequence {
  int row, length, units, up_to;  // units of a head, and those of the lanes up to this one

  __device__ __forceinline__ LaneSequence(const Sequences& all, int first, int unit_log2)
      : row(0), length(0), units(0) {
    const int number = first + threadIdx.x % WARP_SIZE;
    if (number < all.batch) {
      const Sequence mine(all, number);
      row = mine.row, length = mine.length, units = mine.units(all, unit_log2);
    }
    up_to = inclusive_sum(units);
  }
  __device__ __forceinline__ int sum() const {
    return __shfl_sync(FULL_MASK, up_to, WARP_SIZE - 1);
  }
  __device__ __forceinline__ Place place(int lane, int base, int first, int heads) const {
    const int each = __shfl_sync(FULL_MASK, units, lane);
    return {base + lane, __shfl_sync(FULL_MASK, row, lane), __shfl_sync(FULL_MASK, length, lane),
            first + (__shfl_sync(FULL_MASK, up_to, lane) - each) * heads, each};
  }
};

// Units of one head of all sequences from `first` on, `lanes` being those from there. By whole
// warps.
__device__ __forceinline__ int count_units(const Sequences& all, const LaneSequence& lanes,
                                           int unit_log2) {
  int count = lanes.sum();
  for (int first = WARP_SIZE; first < all.batch; first += WARP_SIZE)
    count += LaneSequence(all, first, unit_log2).sum();
  return count;
}

// The sequence that `unit` belongs to, which there is; each has `heads` times its units; `lanes`
// are the first 32. By whole warps.
__device__ __forceinline__ Place find_place(const Sequences& all, LaneSequence lanes, int unit_log2,
                                            int heads, int unit) {
  int first = 0;
  for (int base = 0;;) {
    const u32 beyond = __ballot_sync(FULL_MASK, first + lanes.up_to * heads > unit);
    if (beyond != 0) return lanes.place(__ffs(beyond) - 1, base, first, heads);
    first += lanes.sum() * heads, base += WARP_SIZE;
    lanes = LaneSequence(all, base, unit_log2);
  }
}

// Some units of one head of one sequence, all of which one block takes in one go.
struct Segment {
  int unit, end;               // of the list
  int head_begin, head_units;  // of the head: where its units begin, and how many there are
  int head;                    // of the sequence

  // From `unit` to the end of the head, or of the block's share; one unit where heads are `split`.
  // `first_head`: of the sequence in this list.
  __device__ __forceinline__ Segment(const Place& place, int unit, int share_end, int split,
                                     int first_head)
      : unit(unit), head_units(place.units) {
    const int number = static_cast<u32>(unit - place.first) / static_cast<u32>(place.units);
    head = first_head + number;
    head_begin = place.first + number * place.units;
    end = split ? unit + 1 : min(share_end, head_begin + head_units);
  }
  __device__ __forceinline__ bool is_whole() const {
    return unit == head_begin && end == head_begin + head_units;
  }
};

// Which blocks have parts of a head, and where those lie in the workspace. A block has at most two
// heads that others have as well: slot 2i is for one that began before block i, 2i + 1 for one that
// begins in it. Where heads are split at every unit, each unit has a slot. With heads abreast i is
// a crew, and each of its blocks has slots of its own.
struct HeadParts {
  int count = 1;  // 1: no other block has any
  int first = 0;  // block, or unit
  Crew crew;

  __device__ __forceinline__ HeadParts(const Segment& segment, const Shares& shares,
                                       const Crew& crew, int split)
      : crew(crew) {
    if (segment.is_whole()) return;
    first = split ? segment.head_begin : shares.owner(segment.head_begin);
    count = segment.head_units;
    if (!split) count = shares.owner(segment.head_begin + segment.head_units - 1) - first + 1;
  }
  __device__ __forceinline__ int slot(int part, int split) const {
    const int number = split ? first + part : 2 * (first + part) + (part == 0);
    return number * crew.size + crew.member();
  }
  __device__ __forceinline__ int own_slot(const Segment& segment, int split) const {
    return slot((split ? segment.unit : crew.number) - first, split);
  }
  // One for each head that may be cut: heads are numbered, or where that takes more, the blocks
  // that they begin in, each of which has one such head.
  __device__ __forceinline__ int counter(int head, int heads, int split) const {
    return split || heads <= gridDim.x ? head : first * crew.size + crew.member();
  }
};
