// One new token's attention to the keys before it and to itself, of the query heads of one key head,
// in a launch of many steps (step/whole.cu). Its q, k and v come from all blocks (step/exchange.cuh), as
// sums of a product, fp32:
//
//   q and k are turned by the token's position; k and v go to the token's slot in the paged cache, and
//   like q are rounded to T first
//   keys are shared out: over SPLITS work items of a sequence and a head, and in one over the block's
//   warps and a warp's groups of lanes, each with a maximum and a sum of its own (online softmax)
//   last, warps' sums are merged, and each work item of a head merges a part of the columns of all of
//   them, in their order: the same bits every time
#pragma once
#include "kv/place.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "step/exchange.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

// Of one layer, of all sequences of the step.
template <typename T>
struct DecodeLayer {
  const u64* qkv;  // words [m, heads_q + 2 heads_kv, D]
  u32* attended;   // words [m, heads_q, D]
  u64* partials;   // words [work items][GROUP][D + 2]
  u32 tag;         // of all these
  T *k_pages, *v_pages;
};

struct DecodeState {
  const int *rows, *positions;                   // [m]
  const int *page_table, *lengths, *capacities;  // of the cache
  const float* table;                            // [table_rows, D]: cosines, then sines
  PagedPool pool;                                // of keys, and of values
  int max_sequences, max_pages, table_rows;
  int heads_kv, splits;
  float scale;
};

// The keys of a work item. window: keys that a token sees, itself included; 0: all.
struct DecodeSpan {
  int sequence, head, split;
  int position;     // in the cache of the new token
  int first, last;  // keys, of which the new one may be the last
  bool fresh;       // the new token has a slot, and its key is among these
  const int* pages;

  __device__ __forceinline__ DecodeSpan(const DecodeState& state, int item, int window) {
    split = item % state.splits, head = item / state.splits % state.heads_kv;
    sequence = item / state.splits / state.heads_kv;
    const int row = state.rows[sequence];
    const bool known = row >= 0 && row < state.max_sequences;
    pages = state.page_table + wide(known ? row : 0, state.max_pages);
    position = known ? state.lengths[row] : 0;
    const bool room = known && position < state.capacities[row];
    const int keys = position + room, begin = window > 0 ? max(keys - window, 0) : 0;
    const int each = ceil_div(keys - begin, state.splits);
    first = begin + split * each, last = min(first + each, keys);
    fresh = room && first < last && last == keys;
  }
  __device__ __forceinline__ i64 offset(const PagedPool& pool, int key) const {
    const int page = pages[key >> pool.page_log2], token = key & ((1 << pool.page_log2) - 1);
    return wide(page, pool.page_step) + wide(token, pool.token_step) + wide(head, pool.head_step);
  }
  __device__ __forceinline__ int cached() const { return last - fresh; }
};

template <typename T, int D, int GROUP, int WARPS, bool ROPE>
struct DecodeHeads {
  static constexpr int SIZE = Vector<T>::SIZE, LANES = D / SIZE, KEYS = WARP_SIZE / LANES;
  static constexpr int THREADS = 32 * WARPS, WIDE = D + 2;
  static_assert(D % SIZE == 0 && WARP_SIZE % LANES == 0, "groups of lanes");
  struct Shared {
    float q[GROUP][D];
    T fresh[2][D];                   // the new token's key and value
    float sums[WARPS][GROUP][WIDE];  // sums of values; maximum; sum
  };
  static constexpr int STEP = WARPS * KEYS;  // keys that the block has at a time
  // Of one key: a lane's columns, zeros of none.
  struct Key {
    Vector<T> k = {}, v = {};
    __device__ __forceinline__ Key(const DecodeState& state, const DecodeLayer<T>& layer,
                                   const DecodeSpan& span, int key) {
      const bool there = key < span.cached();
      const i64 at = there ? span.offset(state.pool, key) + threadIdx.x % LANES * SIZE : 0;
      load_chunk_if(k.bits, layer.k_pages + at, there);
      load_chunk_if(v.bits, layer.v_pages + at, there);
    }
  };
  // Of a group of lanes; a lane has SIZE of the D columns.
  struct Sums {
    float top[GROUP], total[GROUP], value[GROUP][SIZE];
  };

  // Keys and values come to L2.
  static __device__ __forceinline__ void prefetch(const DecodeState& state,
                                                  const DecodeLayer<T>& layer,
                                                  const DecodeSpan& span) {
#pragma unroll 1
    for (int key = span.first + threadIdx.x % WARP_SIZE; key < span.cached(); key += WARP_SIZE) {
      const i64 at = span.offset(state.pool, key);
      for (int i = 0; i < D; i += 128 / sizeof(T)) {
        prefetch_l2(layer.k_pages + at + i);
        prefetch_l2(layer.v_pages + at + i);
      }
    }
  }

  // The first two keys of each group of lanes are on their way while q is waited for.
  template <typename Meet>
  static __device__ __forceinline__ void attend(Shared& shared, const DecodeState& state,
                                                const DecodeLayer<T>& layer, const DecodeSpan& span,
                                                int item, const Meet& meet) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int cached = span.cached();
    int key = span.first + warp * KEYS + lane / LANES;
    Key now(state, layer, span, key), next(state, layer, span, key + STEP);
    turn(shared, state, layer, span);
    meet();
    float q[GROUP][SIZE];
    Sums sums = {};
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      sums.top[g] = NEG_INFINITY;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) q[g][j] = shared.q[g][lane % LANES * SIZE + j];
    }
#pragma unroll 1
    for (int first = span.first; first < span.last; first += STEP, key += STEP) {
      if (key == cached && span.fresh) {
        const T* const own = shared.fresh[0] + lane % LANES * SIZE;
        now.k = load_vector(own), now.v = load_vector(own + D);
      }
      add(sums, q, now.k, now.v, key < span.last);
      now = next, next = Key(state, layer, span, key + 2 * STEP);
    }
    merge_lanes(sums);
    if (lane < LANES) {
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) shared.sums[warp][g][lane * SIZE + j] = sums.value[g][j];
        if (lane == 0) shared.sums[warp][g][D] = sums.top[g];
        if (lane == 0) shared.sums[warp][g][D + 1] = sums.total[g];
      }
    }
    meet();
    finish(shared, state, layer, span, item);
  }

 private:
  // q, and the new token's k and v, turned and rounded, to shared memory; k and v to the cache.
  static __device__ __forceinline__ void turn(Shared& shared, const DecodeState& state,
                                              const DecodeLayer<T>& layer, const DecodeSpan& span) {
    constexpr int HALF = D / 2;
    const int heads_q = state.heads_kv * GROUP, position = state.positions[span.sequence];
    const bool inside = position >= 0 && position < state.table_rows;
    const float unit = inside ? 1.f : __int_as_float(0x7fffffff);
    const float* const angles = state.table + (inside ? wide(position, D) : 0);
    const u64* const source = layer.qkv + wide(span.sequence, (heads_q + 2 * state.heads_kv) * D);
    const i64 place = span.fresh ? span.offset(state.pool, span.position) : 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < (GROUP + 2) * HALF; i += THREADS) {
      const int head = i / HALF, pair = i % HALF;
      const int from = head < GROUP    ? span.head * GROUP + head
                       : head == GROUP ? heads_q + span.head
                                       : heads_q + state.heads_kv + span.head;
      const u64 *const low_word = source + from * D + pair, *const high_word = low_word + HALF;
      const u64 first = load_word(low_word), second = load_word(high_word);
      const float cosine = ROPE ? angles[pair] * unit : 1.f,
                  sine = ROPE ? angles[pair + HALF] * unit : 0.f;
      float a = await(first, low_word, layer.tag), b = await(second, high_word, layer.tag);
      if (ROPE && head <= GROUP) {
        const float turned = a * cosine - b * sine;
        b = b * cosine + a * sine, a = turned;
      }
      const T low = static_cast<T>(a), high = static_cast<T>(b);
      if (head < GROUP) {
        shared.q[head][pair] = static_cast<float>(low) * state.scale * LOG2E;
        shared.q[head][pair + HALF] = static_cast<float>(high) * state.scale * LOG2E;
      } else {
        T* const own = shared.fresh[head - GROUP];
        own[pair] = low, own[pair + HALF] = high;
        T* const target = (head == GROUP ? layer.k_pages : layer.v_pages) + place;
        if (span.fresh) target[pair] = low, target[pair + HALF] = high;
      }
    }
  }

  static __device__ __forceinline__ void add(Sums& sums, const float (&q)[GROUP][SIZE],
                                             const Vector<T>& k, const Vector<T>& v, bool there) {
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      float score = 0.f;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) score += q[g][j] * k.get(j);
      score = lanes_sum<LANES>(score);
      if (!there) continue;
      const float top = max_or_nan(sums.top[g], score);
      const float old = exp2_fast(sums.top[g] - top), weight = exp2_fast(score - top);
      sums.top[g] = top, sums.total[g] = sums.total[g] * old + weight;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) sums.value[g][j] = sums.value[g][j] * old + weight * v.get(j);
    }
  }

  // What sums with this maximum count for beside others with the maximum `top`.
  static __device__ __forceinline__ float share(float own, float top) {
    return own == NEG_INFINITY ? 0.f : exp2_fast(own - top);
  }

  static __device__ __forceinline__ void merge_lanes(Sums& sums) {
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      float top = sums.top[g];
#pragma unroll
      for (int distance = LANES; distance < WARP_SIZE; distance *= 2)
        top = max_or_nan(top, __shfl_xor_sync(FULL_MASK, top, distance));
      const float own = share(sums.top[g], top);
      sums.top[g] = top, sums.total[g] = over_keys(sums.total[g] * own);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) sums.value[g][j] = over_keys(sums.value[g][j] * own);
    }
  }

  // The sum over lanes with the same columns.
  static __device__ __forceinline__ float over_keys(float x) {
#pragma unroll
    for (int distance = LANES; distance < WARP_SIZE; distance *= 2)
      x += __shfl_xor_sync(FULL_MASK, x, distance);
    return x;
  }

  // Of one column: a sum of values with its maximum and total, or several put together.
  struct Merged {
    float top = NEG_INFINITY, value = 0.f, total = 0.f;
    __device__ __forceinline__ void add(const Merged& other) {
      const float all = max_or_nan(top, other.top);
      const float mine = share(top, all), theirs = share(other.top, all);
      top = all, value = value * mine + other.value * theirs;
      total = total * mine + other.total * theirs;
    }
    __device__ __forceinline__ T result() const {
      return static_cast<T>(total == 0.f ? 0.f : value / total);
    }
  };

  // All warps' of one column. Their shares do not wait for one another.
  static __device__ __forceinline__ Merged of_warps(const Shared& shared, int head, int column) {
    Merged sums;
    float tops[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) tops[w] = shared.sums[w][head][D];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sums.top = max_or_nan(sums.top, tops[w]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float own = share(tops[w], sums.top);
      sums.value += shared.sums[w][head][column] * own;
      sums.total += shared.sums[w][head][D + 1] * own;
    }
    return sums;
  }

  // The warps' sums to the others with the same head, and theirs to what was attended.
  static __device__ __forceinline__ void finish(const Shared& shared, const DecodeState& state,
                                                const DecodeLayer<T>& layer, const DecodeSpan& span,
                                                int item) {
    constexpr int COLUMNS = GROUP * D, STEP = GROUP * WIDE;
    const int team = span.sequence * state.heads_kv + span.head, splits = state.splits;
    u32* const target = layer.attended + wide(team, COLUMNS);
    u64* const own = layer.partials + wide(item, STEP);
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
      const int head = i / D, column = i % D;
      const Merged sums = of_warps(shared, head, column);
      if (splits == 1) {
        store_word(target + i, tagged(sums.result(), layer.tag));
        continue;
      }
      store_word(own + head * WIDE + column, tagged(sums.value, layer.tag));
      if (column == 0) {
        store_word(own + head * WIDE + D, tagged(sums.top, layer.tag));
        store_word(own + head * WIDE + D + 1, tagged(sums.total, layer.tag));
      }
    }
    if (splits == 1) return;
    const int begin = COLUMNS * span.split / splits, end = COLUMNS * (span.split + 1) / splits;
    merge_items(layer.partials + wide(team * splits, STEP), splits, begin, end, layer.tag, target);
  }

  // Columns of all items of a head, whose sums are `from` and STEP behind each other. Neighbouring
  // lanes have a column, each every so-many-th item's, and add up in pairs.
  static __device__ __forceinline__ void merge_items(const u64* from, int splits, int begin,
                                                     int end, u32 tag, u32* target) {
    constexpr int STEP = GROUP * WIDE;
    const int lanes = splits > 8 ? 16 : splits > 4 ? 8 : splits > 2 ? 4 : 2;
    const int own = threadIdx.x % lanes, each = THREADS / lanes;
    for (int first = begin; first < end; first += each) {
      const int i = first + static_cast<int>(threadIdx.x) / lanes, column = min(i, end - 1);
      const u64* const head = from + column / D * WIDE;
      Merged sums;
      for (int item = own; item < splits; item += lanes) {
        const u64 *const top = head + item * STEP + D, *const value = top - D + column % D;
        const u64 words[] = {load_word(top), load_word(value), load_word(top + 1)};
        Merged one;
        one.top = await(words[0], top, tag), one.value = await(words[1], value, tag);
        one.total = await(words[2], top + 1, tag);
        sums.add(one);
      }
      for (int distance = lanes / 2; distance > 0; distance /= 2) {
        Merged other;
        other.top = __shfl_xor_sync(FULL_MASK, sums.top, distance);
        other.value = __shfl_xor_sync(FULL_MASK, sums.value, distance);
        other.total = __shfl_xor_sync(FULL_MASK, sums.total, distance);
        sums.add(other);
      }
      if (own == 0 && i < end) store_word(target + i, tagged(sums.result(), tag));
    }
  }
};
