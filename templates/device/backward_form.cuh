// Forms of attention (device/attention_form.cuh) in its backward on Hopper: a band of keys, packed
// sequences. Which tiles of queries a block of keys goes through follows from the band; the thread
// that loads tiles works it out and notes it for all others (backward_loads.cuh), so that nobody else
// knows of bands and sequences.
//
// Pieces of work, blocks of keys of a KV head, are drawn from a counter. Those that a sequence does
// not have are nobody's. A tile is added to by the block of keys that see it.
//
// In a fixed order (ORDERED) a head's last block of keys is drawn first and comes first to the tiles
// that it sees, each block from its first tile onwards:
//
//        block 3            D B B B         its first tile has been seen by nobody that comes later
//        block 2        D B B B .           in the order; each tile was handed on 128 queries ago
//        block 1    D B B B .
//                   ------------> queries
//
// So blocks that begin at the same time wait for nobody, as long as handing on takes less than 128
// queries do; but where all of them begin at the first tile each follows the one before. Therefore
// several heads are drawn from in turns: few blocks of one head begin at a time. A block waits only
// for such as were drawn before it: whoever has the first piece that is not done goes on.
#pragma once
#include "device/attention_form.cuh"
#include "device/backward_loads.cuh"
#include "device/backward_tile.cuh"
#include "device/padded_rows.cuh"
#include "device/tensor_rows.cuh"

template <int BLOCK_Q_, int BLOCK_K_, bool ORDERED_, bool PACKED_, bool ALIBI_ = false>
struct FormSizes {
  static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_;
  static constexpr bool ORDERED = ORDERED_, PACKED = PACKED_, ALIBI = ALIBI_;
  const int *cu_seqlens_q, *cu_seqlens_k;
  int batch, heads_q, group_size;
  int seqlen_q, seqlen_k;  // of the longest sequence
  int rows_padded;
  int heads_abreast;  // if ORDERED
  int left, right;
  int alibi_batch_stride;
  const float* alibi_slopes;

  __device__ __forceinline__ FormSizes(const int* q_ends, const int* k_ends, int batch_, int heads,
                                       int group, int longest_q, int longest_k, int rows,
                                       int abreast, const AttentionForm& form, const float* slopes)
      : cu_seqlens_q(q_ends),
        cu_seqlens_k(k_ends),
        batch(batch_),
        heads_q(heads),
        group_size(group),
        seqlen_q(longest_q),
        seqlen_k(longest_k),
        rows_padded(rows),
        heads_abreast(abreast),
        left(form.window_left),
        right(form.window_right),
        alibi_batch_stride(form.alibi_batch_stride),
        alibi_slopes(slopes) {}

  // The same, but what follows from it is computed again, and not kept in registers until then.
  __device__ __forceinline__ FormSizes again() const {
    FormSizes made = *this;
    asm volatile("" : "+r"(made.group_size), "+r"(made.seqlen_k), "+r"(made.seqlen_q));
    return made;
  }

  __device__ __forceinline__ int heads_kv() const { return heads_q / group_size; }
  __device__ __forceinline__ int blocks() const { return ceil_div(seqlen_k, BLOCK_K); }
  __device__ __forceinline__ int all_heads() const { return heads_kv() * batch; }
  __device__ __forceinline__ int pieces() const { return blocks() * all_heads(); }
  // What the others are told: that the number of a piece is below this, or that it is not.
  __device__ __forceinline__ int works() const { return 1; }
};

// Which block of keys of which head, batches included, a number stands for: one head after the other,
// or several of them in turns.
struct FormOrder {
  int head, block;

  template <typename Sizes>
  __device__ static __forceinline__ FormOrder one(int number, const Sizes& sizes) {
    const int blocks = sizes.blocks();
    return {number / blocks, number % blocks};
  }
  template <typename Sizes>
  __device__ static __forceinline__ FormOrder abreast(int number, const Sizes& sizes) {
    const int step = sizes.heads_abreast * sizes.blocks(), section = number / step;
    const int first = section * sizes.heads_abreast, within = number - section * step;
    const int width = min(sizes.heads_abreast, sizes.all_heads() - first);
    return {first + within % width, within / width};
  }
};

// A block of keys, by the number of its piece of work.
template <typename Sizes>
struct FormPiece {
  static constexpr int BLOCK_Q = Sizes::BLOCK_Q, BLOCK_K = Sizes::BLOCK_K;
  int head, block, batch;  // head: of keys
  SequenceRows<Sizes::PACKED> queries, keys;

  __device__ __forceinline__ FormPiece(int number, const Sizes& sizes)
      : FormPiece(
            Sizes::ORDERED ? FormOrder::abreast(number, sizes) : FormOrder::one(number, sizes),
            sizes) {}

  __device__ __forceinline__ FormPiece(FormOrder order, const Sizes& sizes)
      : head(order.head),
        block(order.block),
        batch(head / sizes.heads_kv()),
        queries(sizes.cu_seqlens_q, batch, sizes.seqlen_q),
        keys(sizes.cu_seqlens_k, batch, sizes.seqlen_k) {
    head -= batch * sizes.heads_kv();
    if (Sizes::ORDERED) block = ceil_div(keys.length, BLOCK_K) - 1 - block;
  }

  __device__ __forceinline__ bool exists() const {
    return !Sizes::PACKED || (block >= 0 && first_key() < keys.length && queries.length > 0);
  }
  __device__ __forceinline__ int first_key() const { return block * BLOCK_K; }
  // Key 0 of the block is seen by queries from here on.
  __device__ __forceinline__ int first_row(int right) const {
    return first_key() - (keys.length - queries.length) - right;
  }
  // In order, the first block adds zeros to the tiles that see no key.
  __device__ __forceinline__ int first_tile(int right) const {
    return Sizes::ORDERED && block == 0 ? 0 : max(first_row(right), 0) / BLOCK_Q;
  }
  // A block that nobody sees has the first tile, and is hidden from it.
  __device__ __forceinline__ int end_tile(int left) const {
    const int last_key = min(first_key() + BLOCK_K, keys.length) - 1;
    const int end = min(last_key - (keys.length - queries.length) + left + 1, queries.length);
    return max(ceil_div(max(end, 0), BLOCK_Q), 1);
  }
};

// How many blocks of keys come to a tile of queries before a block does, and how many in all, where
// they have an order. rows_left: of queries from the tile on. width: of the band, less one.
template <int BLOCK_Q, int BLOCK_K>
struct FormTurn {
  int rank, others;

  __device__ __forceinline__ FormTurn(int tile, int rows_left, int block, int keys_left,
                                      int first_row, int width) {
    const int q0 = tile * BLOCK_Q, last_row = q0 + min(BLOCK_Q, rows_left) - 1;
    // Keys behind the first one of this block; of all keys.
    const int last_key = min(last_row - first_row, keys_left - 1);
    const int first_key = block * BLOCK_K + q0 - first_row - width;
    rank = max(last_key, 0) / BLOCK_K;
    others = rank + 1 + block - (tile == 0 ? 0 : max(first_key, 0) / BLOCK_K);
  }
};

// What the others are told of a block of keys, beside what BackwardTile has: words in shared memory.
//
//   place    of queries: the batch, of packed sequences how many rows there are from the tile on
//   row, head, place     of keys, see tensor_rows.cuh
template <bool PACKED>
struct FormKeys {
  int row, head, place;

  __device__ __forceinline__ explicit FormKeys(uint4 words)
      : row(words.x), head(words.y), place(words.z) {}
  // Of the notes of a tile.
  __device__ __forceinline__ static FormKeys of_tile(u32 address) {
    const uint4 words = load_shared_chunk(address + 32);
    const u32 place = PACKED ? load_shared_word(address + 4) : words.x;
    return FormKeys(make_uint4(words.y, words.z, place, 0));
  }
  // Coordinates of the rows from `skipped` on.
  __device__ __forceinline__ TensorRows<PACKED> from(int skipped) const {
    return {row + skipped, PACKED ? place - skipped : place};
  }
};

// 16 rows of dK or dV, from row `skipped` of the block on that has the notes of a tile.
template <typename Tile, bool PACKED>
__device__ __forceinline__ void store_keys(const TensorMap& map, u32 staged, u32 notes,
                                           int skipped) {
  const auto keys = FormKeys<PACKED>::of_tile(notes);
  const TensorRows<PACKED> to = keys.from(skipped);
  tma_store_tile<Tile>(map, staged, to.row, keys.head, to.batch);
}

// A tile of queries beside the keys of a block.
template <int BLOCK_Q, int BLOCK_K>
struct FormTile : BackwardTile<BLOCK_Q, BLOCK_K> {
  int width;  // so many queries see a key

  __device__ __forceinline__ FormTile(u32 address, int width_)
      : BackwardTile<BLOCK_Q, BLOCK_K>(address), width(width_) {}
  __device__ __forceinline__ bool masked() const {
    return BackwardTile<BLOCK_Q, BLOCK_K>::masked() || this->shift + width < BLOCK_Q;
  }
};

// Raw products of a warp become final scores times log2(e). The slope of the tile's head lies among
// its notes.
template <bool SOFTCAP, bool ALIBI, int N, typename Tile>
__device__ __forceinline__ void final_scores(float (&s)[1][N][4], int lane, const Tile& tile,
                                             u32 notes, int warp_key, const AttentionForm& form) {
  const float scale = form.softmax_scale * LOG2E, cap = form.softcap * LOG2E;
  const float rate = 2.f * scale * inverse_fast(form.softcap);
  const float slope = ALIBI ? __uint_as_float(load_shared_word(notes + 44)) : 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = warp_key + lane / 4 + half * 8;
    const float apart = static_cast<float>(lane % 4 * 2 - key - tile.shift - form.window_right);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[0][n][2 * half + i];
        x = SOFTCAP ? fmaf(-2.f * cap, inverse_fast(exp2_fast(x * rate) + 1.f), cap) : x * scale;
        if (ALIBI) x = fmaf(-slope, fabsf(apart + (n * 8 + i)), x);
      }
  }
}

// dS^T as without a cap, times d(final) / d(scaled) = 1 - (x / cap)^2, with x = log(P) + lse.
template <typename T, int STEPS>
__device__ __forceinline__ void capped_differentials(u32 (&ds)[STEPS][4], const u32 (&p)[STEPS][4],
                                                     const float (&dp)[1][2 * STEPS][4],
                                                     u32 lane_lse, u32 lane_delta, float softcap) {
  const float rate = inverse_fast(softcap * LOG2E);
  const auto slope = [&](float probability, float lse) {
    const float x = fmaxf((log2_fast(probability) + lse) * rate, -1.f);  // -1 where P is 0
    return probability * fmaf(-x, x, 1.f);
  };
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n) {
    const float2 lse = load_shared_pair(lane_lse + n * 32);
    const float2 delta = load_shared_pair(lane_delta + n * 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = unpack2<T>(p[n / 2][n % 2 * 2 + half]);
      ds[n / 2][n % 2 * 2 + half] =
          pack2<T>(slope(pair.x, lse.x) * (dp[0][n][2 * half] - delta.x),
                   slope(pair.y, lse.y) * (dp[0][n][2 * half + 1] - delta.y));
    }
  }
}

// Scores of pairs that the band hides become -inf. `key`: the first of the warp's.
template <int N, typename Tile>
__device__ __forceinline__ void mask_band(float (&s)[1][N][4], int lane, const Tile& tile,
                                          int warp_key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = warp_key + lane / 4 + half * 8, column = lane % 4 * 2;
    const int first = tile.first_visible(key) - column;
    const int end = key + tile.shift + tile.width - column;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 8 < first || n * 8 >= end) s[0][n][2 * half] = NEG_INFINITY;
      if (n * 8 + 1 < first || n * 8 + 1 >= end) s[0][n][2 * half + 1] = NEG_INFINITY;
    }
  }
}

// Raw products of a warp become final scores, times log2(e) where there are rules.
template <bool SOFTCAP, bool ALIBI, int BLOCK_Q, int BLOCK_K, int N>
__device__ __forceinline__ void band_scores(float (&s)[1][N][4], int lane, u32 notes, int warp_key,
                                            const AttentionForm& form) {
  const FormTile<BLOCK_Q, BLOCK_K> tile(notes, form.window_left + form.window_right + 1);
  if (SOFTCAP || ALIBI) final_scores<SOFTCAP, ALIBI>(s, lane, tile, notes, warp_key, form);
  if (tile.masked()) mask_band(s, lane, tile, warp_key);
}

// By the thread that loads: whether there is a piece `begun` of this thread block, with the keys that
// lie at `keys`.
template <typename Barriers>
__device__ __forceinline__ void announce_keys(const Barriers& barriers, int begun, u32 keys,
                                              bool exists) {
  const RingPlace<Barriers::SLOTS> slot = ring_place<Barriers::SLOTS>(begun);
  mbarrier_wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
  if (exists) store_shared_chunk(barriers.keys(slot.stage), load_shared_chunk(keys));
  store_shared_word(barriers.work(slot.stage), !exists);
  mbarrier_arrive(barriers.work_full(slot.stage));
}

// The keys of piece `taken`, and whether there is one; for one thread (see take_work_alone).
template <bool PACKED, typename Barriers>
__device__ __forceinline__ FormKeys<PACKED> take_keys(const Barriers& barriers, int taken,
                                                      bool& exists) {
  const RingPlace<Barriers::SLOTS> slot = ring_place<Barriers::SLOTS>(taken);
  mbarrier_wait(barriers.work_full(slot.stage), slot.parity);
  exists = load_shared_word(barriers.work(slot.stage)) == 0;
  const FormKeys<PACKED> keys(exists ? load_shared_chunk(barriers.keys(slot.stage)) : uint4{});
  mbarrier_arrive(barriers.work_empty(slot.stage));
  return keys;
}

template <int BLOCK_Q, int BLOCK_K, bool ORDERED, bool PACKED, bool ALIBI, typename Tile,
          typename Barriers>
__device__ __forceinline__ void load_keys(
    const KeyLoads<Tile, Barriers>& loads,
    const FormSizes<BLOCK_Q, BLOCK_K, ORDERED, PACKED, ALIBI>& sizes) {
  for (int taken = 0;; ++taken) {
    bool exists;
    const auto keys = take_keys<PACKED>(loads.barriers, taken, exists);
    if (!exists) break;
    const TensorRows<PACKED> from = keys.from(0);
    loads.load(taken, from.row, keys.head, from.batch);
  }
}

// What the thread that loads notes for itself of a piece, for want of registers.
template <typename Sizes>
struct PieceNotes {
  static constexpr int BLOCK_Q = Sizes::BLOCK_Q, BLOCK_K = Sizes::BLOCK_K;
  static constexpr int KEYS = 32;  // bytes before what the others are told
  u32 address;

  __device__ __forceinline__ void write(const FormPiece<Sizes>& piece, const Sizes& sizes) const {
    const int keys_left = piece.keys.length - piece.first_key(), start = piece.queries.start;
    const int row_blocks = Sizes::PACKED
                               ? start / ROW_STEP + piece.batch
                               : piece.batch * sizes.heads_q * (sizes.rows_padded / ROW_STEP);
    store_shared_chunk(
        address, make_uint4(piece.first_row(sizes.right), keys_left, start, piece.queries.length));
    store_shared_chunk(address + 16,
                       make_uint4(piece.first_tile(sizes.right), piece.end_tile(sizes.left),
                                  row_blocks * (ROW_STEP / BLOCK_Q), piece.block));
    store_shared_chunk(address + KEYS,
                       make_uint4(piece.keys.start + piece.first_key(), piece.head,
                                  Sizes::PACKED ? keys_left : piece.batch, piece.batch));
  }

  // Those of the next piece (see BackwardWork::next), if there is one.
  __device__ __forceinline__ bool next(bool first, u32* counter, const Sizes& sizes) const {
    while (true) {
      const int pieces = sizes.pieces();
      const int number = first ? blockIdx.x : gridDim.x + atomicInc(counter, pieces - 1);
      if (number >= pieces) return false;
      const FormPiece<Sizes> piece(number, sizes);
      if (piece.exists()) {
        write(piece, sizes);
        return true;
      }
      first = false;
    }
  }
};

// Forms have one piece of work after the other, too.
template <int BLOCK_Q, int BLOCK_K, bool ORDERED, bool PACKED, bool ALIBI, typename Rings,
          typename Barriers>
__device__ __forceinline__ void load_tiles(
    const BackwardLoads<Rings, Barriers>& loads,
    const FormSizes<BLOCK_Q, BLOCK_K, ORDERED, PACKED, ALIBI>& sizes, u32* counters) {
  const Barriers& barriers = loads.barriers;
  const PieceNotes<FormSizes<BLOCK_Q, BLOCK_K, ORDERED, PACKED, ALIBI>> notes{barriers.note()};
  int step_number = 0;
  for (int begun = 0;; ++begun) {
    const bool exists = notes.next(begun == 0, counters, sizes.again());
    announce_keys(barriers, begun, notes.address + notes.KEYS, exists);
    if (!exists) break;
    const u32 note = notes.address;
    int tile = load_shared_word(note + 16);
    int head = load_shared_word(note + notes.KEYS + 4) * sizes.group_size;
    for (bool last = false; !last; ++step_number) {
      TileLoad<Rings, Barriers> load(loads, step_number);
      load.begin(step_number);
      const uint4 rows = load_shared_chunk(note);
      const int first_row = rows.x, keys_left = rows.y, q0 = tile * BLOCK_Q;
      const int row = PACKED ? rows.z + q0 : q0, left = static_cast<int>(rows.w) - q0;
      const int index = load_shared_word(note + 24) + head * (sizes.rows_padded / BLOCK_Q) + tile;
      const bool last_tile = tile + 1 == load_shared_word(note + 20);
      last =
          last_tile && head + 1 == (load_shared_word(note + notes.KEYS + 4) + 1) * sizes.group_size;
      store_shared_chunk(load.about, make_uint4(first_row - q0, keys_left, last, index));
      if (ORDERED) {
        const FormTurn<BLOCK_Q, BLOCK_K> turn(tile, left, load_shared_word(note + 28), keys_left,
                                              first_row, sizes.left + sizes.right);
        store_shared_chunk(load.about + 16, make_uint4(turn.rank, turn.others, row, head));
      }
      const uint4 keys = load_shared_chunk(note + notes.KEYS);
      const int place = PACKED ? left : keys.z;
      store_shared_chunk(load.about + 32, make_uint4(place, keys.x, keys.y, 0));
      if (ALIBI) {
        const int batch = load_shared_word(note + notes.KEYS + 12);
        const float slope = sizes.alibi_slopes[batch * sizes.alibi_batch_stride + head] * LOG2E;
        store_shared_word(load.about + 44, __float_as_uint(slope));
      }
      const TensorRows<PACKED> at(row, place);
      load.load(at.row, head, at.batch, index);
      tile = last_tile ? load_shared_word(note + 16) : tile + 1;
      head += last_tile;
    }
  }
}
