// Who does what in decoding: the keys of all sequences, KV heads and tiles of rows make one list of
// units, 2^unit_log2 keys each, which is shared out evenly over the blocks of a grid, whatever the
// lengths are. A block's share is cut into segments where a head or a sequence ends; a head that is
// cut is put together by the last block that has a part of it.
//
//   sequences   0                     1             2
//   units       a a a a a | b b b b b | c c | d d d | e e ...      a, b: the heads of sequence 0
//   blocks      0 0 0 0   1 1 1 1   2 2 2 2   3 3 3 3 ...          a has parts in blocks 0 and 1
#pragma once
#include "prelude.cuh"

// How long the sequences of a batch are; lengths are read on the device.
struct Sequences {
  const int* seq_lens;  // [rows of the table], or null: all have `longest` keys
  const int* rows;      // [batch] rows of the table, or null: sequence b has row b
  int longest, table_rows;

  // Below 0: there is none.
  __device__ __forceinline__ int row(int sequence) const {
    const int row = rows == nullptr ? sequence : rows[sequence];
    return static_cast<u32>(row) < static_cast<u32>(table_rows) ? row : -1;
  }
  __device__ __forceinline__ int length(int sequence) const {
    const int at = row(sequence);
    if (at < 0) return 0;
    return seq_lens == nullptr ? longest : min(max(seq_lens[at], 0), longest);
  }
  // Of a head; an empty sequence has one, in which its output is written.
  __device__ __forceinline__ int units(int sequence, int unit_log2) const {
    return max(((length(sequence) - 1) >> unit_log2) + 1, 1);
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

// A sequence in the list: where its units begin, and how many each of its heads has.
struct Place {
  int sequence, first, units;
};

// Units of all sequences, for one head. Called by whole warps.
__device__ __forceinline__ int count_units(const Sequences& sequences, int batch, int unit_log2) {
  int count = 0;
  for (int i = threadIdx.x % WARP_SIZE; i < batch; i += WARP_SIZE)
    count += sequences.units(i, unit_log2);
#pragma unroll
  for (int step = 1; step < WARP_SIZE; step *= 2) count += __shfl_xor_sync(FULL_MASK, count, step);
  return count;
}

// The sequence that `unit` belongs to, which there is; each has `heads` times its units. Called by
// whole warps.
__device__ __forceinline__ Place find_place(const Sequences& sequences, int unit_log2, int batch,
                                            int heads, int unit) {
  const int lane = threadIdx.x % WARP_SIZE;
  int first = 0;
  for (int base = 0;; base += WARP_SIZE) {
    const int mine = base + lane < batch ? sequences.units(base + lane, unit_log2) : 0;
    int up_to = mine;
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const int before = __shfl_up_sync(FULL_MASK, up_to, step);
      if (lane >= step) up_to += before;
    }
    const u32 beyond = __ballot_sync(FULL_MASK, first + up_to * heads > unit);
    if (beyond != 0 || base + WARP_SIZE >= batch) {
      const int at = __ffs(beyond) - 1, units = __shfl_sync(FULL_MASK, mine, at);
      return {base + at, first + (__shfl_sync(FULL_MASK, up_to, at) - units) * heads, units};
    }
    first += __shfl_sync(FULL_MASK, up_to, WARP_SIZE - 1) * heads;
  }
}

// Some units of one head of one sequence, all of which one block takes in one go.
struct Segment {
  int unit, end;               // of the list
  int head_begin, head_units;  // of the head: where its units begin, and how many there are
  int head;                    // of the sequence

  // From `unit` to the end of the head, or of the block's share; one unit where heads are `split`.
  __device__ __forceinline__ Segment(const Place& place, int unit, int share_end, int split)
      : unit(unit), head_units(place.units) {
    head = static_cast<u32>(unit - place.first) / static_cast<u32>(place.units);
    head_begin = place.first + head * place.units;
    end = split ? unit + 1 : min(share_end, head_begin + head_units);
  }
  __device__ __forceinline__ bool is_whole() const {
    return unit == head_begin && end == head_begin + head_units;
  }
};

// Which blocks have parts of a head, and where those lie in the workspace. A block has at most two
// heads that others have as well: slot 2i is for one that began before block i, 2i + 1 for one that
// begins in it. Where heads are split at every unit, each has a slot.
struct HeadParts {
  int count = 1;  // 1: no other block has any
  int own_slot = 0, counter = 0;
  int first_slot = 0, second_slot = 0, step = 0;  // and so on, step after step

  __device__ __forceinline__ HeadParts(const Segment& segment, const Shares& shares, int split,
                                       int head_number) {
    if (segment.is_whole()) return;
    const int first = shares.owner(segment.head_begin);
    const int last = shares.owner(segment.head_begin + segment.head_units - 1);
    count = split ? segment.head_units : last - first + 1;
    counter = split ? head_number : first;
    first_slot = split ? segment.head_begin : 2 * first + 1;
    second_slot = split ? segment.head_begin + 1 : 2 * first + 2;
    step = split ? 1 : 2;
    own_slot = slot(split ? segment.unit - segment.head_begin : blockIdx.x - first);
  }
  __device__ __forceinline__ int slot(int part) const {
    return part == 0 ? first_slot : second_slot + (part - 1) * step;
  }
};
