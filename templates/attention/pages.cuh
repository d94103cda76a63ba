// Keys and values of sequences in the pages of a cache, [pages, page tokens, heads, dim] or with heads
// and tokens the other way round: which page a key is in. Tables and lengths are read on the device.
#pragma once
#include "attention/sequence_rows.cuh"

// The pages of one sequence.
struct SequencePages {
  const int* table;
  int length;  // keys
  int page_log2, num_pages;

  // Below 0, or num_pages and above: there is no such page, and its keys are zeros.
  __device__ __forceinline__ int page(int key) const {
    return key < length ? table[key >> page_log2] : num_pages;
  }
  __device__ __forceinline__ bool has(int page) const {
    return static_cast<u32>(page) < static_cast<u32>(num_pages);
  }
  __device__ __forceinline__ int place(int key) const { return key & ((1 << page_log2) - 1); }
};

// What a call says of all sequences.
struct PagedKeys {
  const int* table;    // [table rows, width]
  const int* lengths;  // [table rows]: keys of each
  const int*
      rows;  // [sequences]: the table's row of each, below 0: it has no keys; or null: i of i
  int width, page_log2, num_pages;
  int longest;  // keys at most

  __device__ __forceinline__ SequencePages operator()(int sequence) const {
    const int row = rows == nullptr ? sequence : rows[sequence];
    const int held = row < 0 ? 0 : min(max(lengths[row], 0), longest);
    return {table + static_cast<i64>(max(row, 0)) * width, held, page_log2, num_pages};
  }
};
