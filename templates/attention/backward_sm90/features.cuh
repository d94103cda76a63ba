// Forms of attention (attention/features.cuh) in its backward on sm_90: a band of keys, packed
// sequences. Which tiles of queries a block of keys goes through follows from the band; the thread
// that loads tiles works it out and notes it for all others (loads.cuh), so that nobody else
// knows of bands and sequences.
#pragma once
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/special_registers.cuh"
#include "tile/ring.cuh"
#include "attention/backward_sm90/bias.cuh"
#include "attention/backward_sm90/features_schedule.cuh"
#include "attention/backward_sm90/loads.cuh"
#include "attention/backward_sm90/mask.cuh"
#include "attention/backward_sm90/tensor_rows.cuh"
#include "attention/backward_sm90/tile.cuh"

// What the others are told of a block of keys, beside what BackwardTile has: words in shared
// memory.
//
//   row, head, place     of keys, see tensor_rows.cuh
template <bool PACKED>
struct FormKeys {
  int row, head, place;

  __device__ __forceinline__ explicit FormKeys(uint4 words)
      : row(words.x), head(words.y), place(words.z) {}
  // Coordinates of the rows from `skipped` on.
  __device__ __forceinline__ TensorRows<PACKED> from(int skipped) const {
    return {row + skipped, PACKED ? place - skipped : place};
  }
};

// A tile of queries beside the keys of a block.
template <int BLOCK_Q, int BLOCK_K>
struct FormTile : BackwardTile<BLOCK_Q, BLOCK_K> {
  int width;  // so many queries see a key

  __device__ __forceinline__ FormTile(u32 address, int width_)
      : BackwardTile<BLOCK_Q, BLOCK_K>(address), width(width_) {}
  __device__ __forceinline__ bool masked() const {
    return BackwardTile<BLOCK_Q, BLOCK_K>::masked() || this->shift + width < BLOCK_Q;
  }
  __device__ __forceinline__ bool sees(int query, int key) const {
    return query >= this->first_visible(key) && query < key + this->shift + width;
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
                                                     u32 lane_lse, float softcap) {
  register_fence(softcap);  // computed here again, as registers have no room for it
  const float rate = inverse_fast(softcap * LOG2E);
  const auto slope = [&](float probability, float lse) {
    const float x = fmaxf((log2_fast(probability) + lse) * rate, -1.f);  // -1 where P is 0
    return probability * fmaf(-x, x, 1.f);
  };
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n) {
    const float2 lse = load_shared_pair(lane_lse + n * 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = unpack2<T>(p[n / 2][n % 2 * 2 + half]);
      ds[n / 2][n % 2 * 2 + half] = pack2<T>(slope(pair.x, lse.x) * dp[0][n][2 * half],
                                             slope(pair.y, lse.y) * dp[0][n][2 * half + 1]);
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

// Raw products of a warp of tile `step` become final scores, times log2(e) where there are rules or
// a bias.
template <typename Layout, bool SOFTCAP, bool ALIBI, typename T, typename Barriers, int N>
__device__ __forceinline__ void feature_scores(float (&s)[1][N][4], const Barriers& barriers,
                                               u32 shared, int step, int lane, float scale_log2,
                                               const AttentionForm& form) {
  constexpr int BLOCK_Q = Layout::BLOCK_Q, BLOCK_K = Layout::BLOCK_K;
  const auto warp_key = [] { return own_key<Layout>(); };
  const u32 about = barriers.tile(step);
  FormTile<BLOCK_Q, BLOCK_K> tile(about, form.window_left + form.window_right + 1);
  tile.shift -= own_query<Layout>();
  if (SOFTCAP || ALIBI) final_scores<SOFTCAP, ALIBI>(s, lane, tile, about, warp_key(), form);
  if constexpr (Layout::BIAS_BYTES > 0) {
    mbarrier_wait(barriers.bias_full(), step & 1);
    add_bias<T, BLOCK_Q, BLOCK_K>(s, shared + Layout::BIAS_TILE, warp_key(),
                                  ALIBI ? 1.f : scale_log2);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.bias_empty());
  }
  if (Layout::MASK_BYTES > 0) {
    const u32 bits = shared + Layout::ROWS + step % Layout::ROWS_STAGES * Layout::ROWS_STAGE +
                     Layout::ROWS_BYTES;
    MaskBits<BLOCK_Q, BLOCK_K>::hide(s, bits, lane, warp_key(), own_query<Layout>());
  }
  if (tile.masked()) mask_band(s, lane, tile, warp_key());
}

// By the thread that loads: whether there is a piece `begun` of this thread block, with the keys
// that lie at `keys`.
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

template <int BLOCK_Q, int BLOCK_K, bool ORDERED, bool PACKED, bool ALIBI, bool MASK,
          typename KTile, typename VTile, typename Barriers>
__device__ __forceinline__ void load_keys(
    const KeyLoads<KTile, VTile, Barriers>& loads,
    const FormSizes<BLOCK_Q, BLOCK_K, ORDERED, PACKED, ALIBI, MASK>& sizes) {
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
struct WorkItemNotes {
  static constexpr int BLOCK_Q = Sizes::BLOCK_Q, BLOCK_K = Sizes::BLOCK_K;
  static constexpr int KEYS = 32;     // bytes before what the others are told
  static constexpr int NUMBER = 176;  // before the last number, where clusters take turns
  u32 address;

  __device__ __forceinline__ void write(const FormWorkItem<Sizes>& piece,
                                        const Sizes& sizes) const {
    const int keys_left = piece.keys.length - piece.first_key(), start = piece.queries.start;
    const int row_blocks = Sizes::PACKED
                               ? start / ROW_STEP + piece.batch
                               : piece.batch * sizes.heads_q * (sizes.rows_padded / ROW_STEP);
    store_shared_chunk(
        address, make_uint4(piece.first_row(sizes.right), keys_left, start, piece.queries.length));
    const bool backwards = Sizes::ORDERED && piece.backwards;
    const int first = piece.first_tile(sizes.right), last = piece.end_tile(sizes.left) - 1;
    store_shared_chunk(address + 16,
                       make_uint4(backwards ? last : first, backwards ? first : last,
                                  row_blocks * (ROW_STEP / BLOCK_Q), piece.block * 2 + backwards));
    store_shared_chunk(
        address + KEYS,
        make_uint4(piece.keys.start + piece.first_key() + sizes.own_key, piece.head,
                   Sizes::PACKED ? keys_left - sizes.own_key : piece.batch, piece.batch));
  }

  // Those of the next piece (see BackwardWorkItem::next), if there is one. Without a counter
  // clusters take turns.
  __device__ __forceinline__ bool next(bool first, u32* counter, const Sizes& sizes) const {
    while (true) {
      const int pieces = sizes.pieces();
      int number = first ? cluster_index() : 0;
      if (counter == nullptr) {
        if (!first) number = load_shared_word(address + NUMBER) + cluster_count();
        store_shared_word(address + NUMBER, number);
      } else if (!first) {
        number = gridDim.x + atomicInc(counter, pieces - 1);
      }
      if (number >= pieces) return false;
      const FormWorkItem<Sizes> piece(number, sizes);
      if (piece.exists()) {
        write(piece, sizes);
        return true;
      }
      first = false;
    }
  }
};

// Forms have one work item after the other, too.
template <int BLOCK_Q, int BLOCK_K, bool ORDERED, bool PACKED, bool ALIBI, bool MASK,
          typename Rings, typename Barriers>
__device__ __forceinline__ void load_tiles(
    const BackwardLoads<Rings, Barriers>& loads,
    const FormSizes<BLOCK_Q, BLOCK_K, ORDERED, PACKED, ALIBI, MASK>& sizes, u32* counters) {
  const Barriers& barriers = loads.barriers;
  const WorkItemNotes<FormSizes<BLOCK_Q, BLOCK_K, ORDERED, PACKED, ALIBI, MASK>> notes{
      barriers.note()};
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
      if (ALIBI) {
        const int batch = load_shared_word(note + notes.KEYS + 12);
        const float slope = sizes.alibi_slopes[batch * sizes.alibi_batch_stride + head] * LOG2E;
        store_shared_word(load.about + 44, __float_as_uint(slope));
      }
      const uint4 rows = load_shared_chunk(note);
      const int first_row = rows.x, keys_left = rows.y, q0 = tile * BLOCK_Q;
      const int row = PACKED ? rows.z + q0 : q0, left = static_cast<int>(rows.w) - q0;
      const int index = load_shared_word(note + 24) + head * (sizes.rows_padded / BLOCK_Q) + tile;
      const bool last_tile = tile == load_shared_word(note + 20);
      last =
          last_tile && head + 1 == (load_shared_word(note + notes.KEYS + 4) + 1) * sizes.group_size;
      store_shared_chunk(load.about,
                         make_uint4(first_row - q0 + sizes.own_key, keys_left - sizes.own_key, last,
                                    index * (BLOCK_Q / 16)));
      store_shared_pair(load.about + 24, row, head);
      if (ORDERED) {
        const int block = load_shared_word(note + 28);
        const FormRank<BLOCK_Q, BLOCK_K> turn(tile, left, block / 2, block % 2, keys_left,
                                              first_row, sizes.left + sizes.right);
        store_shared_pair(load.about + 16, turn.rank, turn.others);
      }
      const uint4 keys = load_shared_chunk(note + notes.KEYS);
      const int place = PACKED ? left : keys.z;
      store_shared_pair(load.about + 32, place, keys.x);
      store_shared_word(load.about + 40, keys.y);
      const TensorRows<PACKED> at(row, place);
      const u32* bits = nullptr;
      // Of its batch or sequence.
      const int key = load_shared_word(note + 28) / 2 * BLOCK_K + sizes.own_key;
      if (MASK)
        bits = sizes.mask_bits + keys.w * sizes.mask_strides.batch +
               head * sizes.mask_strides.head + tile * sizes.mask_strides.row +
               key * (BLOCK_Q / 32);
      load.load(at.row, head, at.batch, index, bits);
      if constexpr (Rings::BIAS_BYTES > 0)
        load_bias(loads, step_number, key, q0, head, load_shared_word(note + notes.KEYS + 12));
      const int step = ORDERED && load_shared_word(note + 28) % 2 ? -1 : 1;
      tile = last_tile ? load_shared_word(note + 16) : tile + step;
      head += last_tile;
    }
  }
}
