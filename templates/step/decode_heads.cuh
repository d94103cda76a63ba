// One new token's attention to the keys before it and to itself, of OWN of the GROUP query heads of one
// key head, in a launch of many steps (step/whole.cu). Its q, k and v come from all blocks (step/exchange.cuh), as
// sums of a product, fp32:
//
//   q and k are turned by the token's position; k and v go to the token's slot in the paged cache, and
//   like q are rounded to T first
//   keys are shared out: over SPLITS work items of a sequence and OWN heads, and in one over the block's
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
  u64* partials;   // words [work items][OWN][D + 2]
  u32 tag;         // of all these
  T *k_pages, *v_pages;
};

struct DecodeState {
  const int *rows, *positions;                   // [m]
  const int *page_table, *lengths, *capacities;  // of the cache
  PagedPool pool;                                // of keys, and of values
  int max_sequences, max_pages, table_rows;
  int heads_kv, splits;
  float scale;
};

// The work item of a block, the same in all layers: made once, in shared memory.
struct DecodeItem {
  int number, team, sequence, head, part, split;  // part: of a key head's query heads
  int position;                                   // in the cache of the new token
  int keys;  // of the sequence, the new one included where there is room for it
  int each;  // keys of an item where all are seen
  int begin_column, end_column, lanes_log2;  // what it merges, so many lanes a column
  bool room;
  i64 place;  // of the new token's k and v, elements of a layer
  const int* pages;

  // parts: of a key head's query heads; columns: of those of one part.
  static __device__ __forceinline__ DecodeItem make(const DecodeState& state, int number, int parts,
                                                    int columns) {
    DecodeItem made = {number};
    const int team = number / state.splits, head = team / parts;
    made.team = team;
    made.split = number % state.splits, made.part = team % parts;
    made.head = head % state.heads_kv, made.sequence = head / state.heads_kv;
    const int row = state.rows[made.sequence];
    const bool known = row >= 0 && row < state.max_sequences;
    made.pages = state.page_table + wide(known ? row : 0, state.max_pages);
    made.position = known ? state.lengths[row] : 0;
    made.room = known && made.position < state.capacities[row];
    made.keys = made.position + made.room, made.each = ceil_div(made.keys, state.splits);
    made.begin_column = columns * made.split / state.splits;
    made.end_column = columns * (made.split + 1) / state.splits;
    made.lanes_log2 = state.splits > 8 ? 4 : state.splits > 4 ? 3 : state.splits > 2 ? 2 : 1;
    made.place = made.room ? made.offset(state.pool, made.position) : 0;
    return made;
  }
  __device__ __forceinline__ i64 offset(const PagedPool& pool, int key) const {
    const int page = pages[key >> pool.page_log2], token = key & ((1 << pool.page_log2) - 1);
    return wide(page, pool.page_step) + wide(token, pool.token_step) + wide(head, pool.head_step);
  }
};

// The keys of a work item. window: keys that a token sees, itself included; 0: all.
struct DecodeSpan {
  const DecodeItem& item;
  int first, last;  // keys, of which the new one may be the last
  bool fresh;       // the new token has a slot, and its key is among these

  __device__ __forceinline__ DecodeSpan(const DecodeItem& item, int splits, int window)
      : item(item) {
    const int begin = window > 0 ? max(item.keys - window, 0) : 0;
    const int each = window > 0 ? ceil_div(item.keys - begin, splits) : item.each;
    first = begin + item.split * each, last = min(first + each, item.keys);
    fresh = item.room && first < last && last == item.keys;
  }
  __device__ __forceinline__ int cached() const { return last - fresh; }
};

template <typename T, int D, int GROUP, int OWN, int WARPS, int DEPTH, bool ROPE>
struct DecodeHeads {
  static constexpr int SIZE = Vector<T>::SIZE, LANES = D / SIZE, KEYS = WARP_SIZE / LANES;
  static constexpr int THREADS = 32 * WARPS, WIDE = D + 2;
  static_assert(D % SIZE == 0 && WARP_SIZE % LANES == 0 && GROUP % OWN == 0, "groups of lanes");
  static constexpr int PARTS = GROUP / OWN;
  struct alignas(16) Shared {
    float q[OWN][D];
    T fresh[2][D];                 // the new token's key and value
    float sums[WARPS][OWN][WIDE];  // sums of values; maximum; sum
  };
  static constexpr int STEP = WARPS * KEYS;  // keys that the block has at a time
  // Of one key: a lane's columns, zeros of none.
  struct Key {
    Vector<T> k = {}, v = {};
    Key() = default;
    __device__ __forceinline__ Key(const DecodeState& state, const DecodeLayer<T>& layer,
                                   const DecodeSpan& span, int key) {
      const bool there = key < span.cached();
      const i64 at = there ? span.item.offset(state.pool, key) + threadIdx.x % LANES * SIZE : 0;
      load_chunk_if(k.bits, layer.k_pages + at, there);
      load_chunk_if(v.bits, layer.v_pages + at, there);
    }
  };
  // Of a group of lanes; a lane has SIZE of the D columns.
  struct Sums {
    float top[OWN], total[OWN], value[OWN][SIZE];
  };

  // Keys and values come to L2.
  static __device__ __forceinline__ void prefetch(const DecodeState& state,
                                                  const DecodeLayer<T>& layer,
                                                  const DecodeSpan& span) {
#pragma unroll 1
    for (int key = span.first + threadIdx.x % WARP_SIZE; key < span.cached(); key += WARP_SIZE) {
      const i64 at = span.item.offset(state.pool, key);
      for (int i = 0; i < D; i += 128 / sizeof(T)) {
        prefetch_l2(layer.k_pages + at + i);
        prefetch_l2(layer.v_pages + at + i);
      }
    }
  }

  // The first keys of each group of lanes are on their way while q is waited for. calm(so): whether others'
  // numbers are waited for.
  template <typename Meet, typename Calm>
  static __device__ __forceinline__ void attend(Shared& shared, const DecodeState& state,
                                                const DecodeLayer<T>& layer, const DecodeSpan& span,
                                                const float* angles, const Meet& meet,
                                                const Calm& calm) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int cached = span.cached();
    int key = span.first + warp * KEYS + lane / LANES;
    Key keys[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) keys[i] = Key(state, layer, span, key + i * STEP);
    calm(true);
    turn(shared, state, layer, span, angles);
    calm(false);
    meet();
    float q[OWN][SIZE];
    Sums sums = {};
#pragma unroll
    for (int g = 0; g < OWN; ++g) {
      sums.top[g] = NEG_INFINITY;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) q[g][j] = shared.q[g][lane % LANES * SIZE + j];
    }
#pragma unroll 1
    for (int first = span.first; first < span.last; first += DEPTH * STEP, key += DEPTH * STEP) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i)
        if (key + i * STEP == cached && span.fresh) {
          const T* const own = shared.fresh[0] + lane % LANES * SIZE;
          keys[i].k = load_vector(own), keys[i].v = load_vector(own + D);
        }
      add(sums, q, keys, span.last - key);
      if (first + DEPTH * STEP >= span.last) break;
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) keys[i] = Key(state, layer, span, key + (DEPTH + i) * STEP);
    }
    merge_lanes(sums);
    if (lane < LANES) {
#pragma unroll
      for (int g = 0; g < OWN; ++g) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) shared.sums[warp][g][lane * SIZE + j] = sums.value[g][j];
        if (lane == 0) shared.sums[warp][g][D] = sums.top[g];
        if (lane == 0) shared.sums[warp][g][D + 1] = sums.total[g];
      }
    }
    meet();
    calm(true);
    finish(shared, state, layer, span.item);
    calm(false);
  }

  // A position's row of `table`, [table_rows, D]: cosines, then sines; NaN of one that it has not.
  static __device__ __forceinline__ void load_angles(float* angles, const float* table,
                                                     const DecodeState& state, int sequence) {
    const int position = state.positions[sequence];
    const bool inside = position >= 0 && position < state.table_rows;
    for (int i = threadIdx.x; i < D; i += blockDim.x)
      angles[i] = inside ? table[wide(position, D) + i] : __int_as_float(0x7fffffff);
  }

 private:
  // q, and the new token's k and v, turned and rounded, to shared memory; k and v to the cache.
  static __device__ __forceinline__ void turn(Shared& shared, const DecodeState& state,
                                              const DecodeLayer<T>& layer, const DecodeSpan& span,
                                              const float* angles) {
    constexpr int HALF = D / 2;
    const int heads_q = state.heads_kv * GROUP, own_head = span.item.head;
    const u64* const source =
        layer.qkv + wide(span.item.sequence, (heads_q + 2 * state.heads_kv) * D);
#pragma unroll 1
    for (int i = threadIdx.x; i < (OWN + 2) * HALF; i += THREADS) {
      const int head = i / HALF, pair = i % HALF;
      const int from = head < OWN    ? own_head * GROUP + span.item.part * OWN + head
                       : head == OWN ? heads_q + own_head
                                     : heads_q + state.heads_kv + own_head;
      const u64* const low_word = source + from * D + pair;
      const float cosine = ROPE ? angles[pair] : 1.f, sine = ROPE ? angles[pair + HALF] : 0.f;
      u64 words[2];
      await(
          words, layer.tag, [&](int i) { return load_word(low_word + i * HALF); },
          [](int) { return true; });
      float a = number(words[0]), b = number(words[1]);
      if (ROPE && head <= OWN) {
        const float turned = a * cosine - b * sine;
        b = b * cosine + a * sine, a = turned;
      }
      const T low = static_cast<T>(a), high = static_cast<T>(b);
      if (head < OWN) {
        shared.q[head][pair] = static_cast<float>(low) * state.scale * LOG2E;
        shared.q[head][pair + HALF] = static_cast<float>(high) * state.scale * LOG2E;
      } else {
        T* const own = shared.fresh[head - OWN];
        own[pair] = low, own[pair + HALF] = high;
        T* const target = (head == OWN ? layer.k_pages : layer.v_pages) + span.item.place;
        if (span.fresh && span.item.part == 0) target[pair] = low, target[pair + HALF] = high;
      }
    }
  }

  // DEPTH keys, STEP apart; those from `rest` on are none. Their scores do not wait for one another.
  static __device__ __forceinline__ void add(Sums& sums, const float (&q)[OWN][SIZE],
                                             const Key (&keys)[DEPTH], int rest) {
#pragma unroll
    for (int g = 0; g < OWN; ++g) {
      float scores[DEPTH], top = sums.top[g];
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        scores[i] = 0.f;
#pragma unroll
        for (int j = 0; j < SIZE; ++j) scores[i] += q[g][j] * keys[i].k.get(j);
      }
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        scores[i] = lanes_sum<LANES>(scores[i]);
        if (i * STEP >= rest) scores[i] = NEG_INFINITY;
        top = max_or_nan(top, scores[i]);
      }
      if (top == NEG_INFINITY) continue;
      const float old = exp2_fast(sums.top[g] - top);
      sums.top[g] = top, sums.total[g] *= old;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) sums.value[g][j] *= old;
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        const float weight = exp2_fast(scores[i] - top);
        sums.total[g] += weight;
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sums.value[g][j] += weight * keys[i].v.get(j);
      }
    }
  }

  // What sums with this maximum count for beside others with the maximum `top`.
  static __device__ __forceinline__ float share(float own, float top) {
    return own == NEG_INFINITY ? 0.f : exp2_fast(own - top);
  }

  static __device__ __forceinline__ void merge_lanes(Sums& sums) {
#pragma unroll
    for (int g = 0; g < OWN; ++g) {
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
      return static_cast<T>(total == 0.f ? 0.f : value * inverse_fast(total));
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
                                                const DecodeLayer<T>& layer,
                                                const DecodeItem& item) {
    constexpr int COLUMNS = OWN * D, STEP = OWN * WIDE;
    const int splits = state.splits, team = item.team;
    u32* const target = layer.attended + wide(team, COLUMNS);
    u64* const own = layer.partials + wide(item.number, STEP);
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
    merge_items(layer.partials + wide(team * splits, STEP), splits, item, layer.tag, target);
  }

  // Columns of all items of a head, whose sums are `from` and STEP behind each other. Neighbouring
  // lanes have a column, each every so-many-th item's, and add up in pairs.
  static __device__ __forceinline__ void merge_items(const u64* from, int splits,
                                                     const DecodeItem& item, u32 tag, u32* target) {
    constexpr int STEP = OWN * WIDE;
    const int lanes = 1 << item.lanes_log2, own = threadIdx.x & (lanes - 1), end = item.end_column;
    const int thread = threadIdx.x >> item.lanes_log2, each = THREADS >> item.lanes_log2;
    for (int first = item.begin_column; first < end; first += each) {
      const int i = first + thread, column = min(i, end - 1);
      const u64* const head = from + column / D * WIDE;
      Merged sums;
      for (int other = own; other < splits; other += lanes) {
        const u64 *const top = head + other * STEP + D, *const value = top - D + column % D;
        const u64* const from[] = {top, value, top + 1};
        u64 words[3];
        await(words, tag, [&](int i) { return load_word(from[i]); }, [](int) { return true; });
        const Merged one = {number(words[0]), number(words[1]), number(words[2])};
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
