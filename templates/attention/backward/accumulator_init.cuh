// A bias and a mask as what sums of products start from: mma adds Q K^T to them, and no rule is
// left for afterwards. A score is then (seed + q . k) * softmax_scale, so a seed is the bias over
// softmax_scale, -inf where the key is hidden.
//
// Keys stand in tiles in the order of tile/row_order.cuh, so that a lane reads runs of them; they
// are asked for a tile ahead, and wait in registers as they are.
#pragma once
#include "ptx/register_fence.cuh"
#include "ptx/special_registers.cuh"
#include "tile/reduce.cuh"
#include "tile/row_order.cuh"
#include "attention/backward/mma.cuh"
#include "attention/features.cuh"
#include "attention/key_block.cuh"

// Which scores a lane has of D fragments whose keys stand in runs: [M][N][4] as in ptx/mma.cuh.
template <bool KEYS_ARE_ROWS, int M, int N>
struct InitPlaces {
  static constexpr int RUN = KEYS_ARE_ROWS ? 2 * M : 2 * N;      // keys side by side
  static constexpr int QUERIES = KEYS_ARE_ROWS ? 2 * N : 2 * M;  // of a lane

  // The first key of this lane's, its query number r, and where key j of query r is.
  __device__ __forceinline__ static int key(int lane) {
    return (KEYS_ARE_ROWS ? lane / 4 : lane % 4) * RUN;
  }
  __device__ __forceinline__ static int query(int lane, int r) {
    return KEYS_ARE_ROWS ? r / 2 * 8 + lane % 4 * 2 + r % 2 : r * 8 + lane / 4;
  }
  template <typename T>
  __device__ __forceinline__ static T& at(T (&s)[M][N][4], int r, int j) {
    if constexpr (KEYS_ARE_ROWS) {
      return s[j / 2][r / 2][j % 2 * 2 + r % 2];
    } else {
      return s[r / 2][j / 2][r % 2 * 2 + j % 2];
    }
  }
};

// COUNT neighbours of a row, in one load or several of 16 bytes: rows start on such boundaries, or
// on those of a run if it is shorter, and hold whole runs.
template <typename T, int COUNT>
struct Run {
  static constexpr int BYTES = COUNT * static_cast<int>(sizeof(T));
  static constexpr int WORD_BYTES = min_of(BYTES, 4), WORDS = BYTES / WORD_BYTES;
  u32 words[WORDS];

  // Zeros where it does not exist.
  __device__ __forceinline__ void load(const T* from, bool exists) {
    if (!exists) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) words[i] = 0;
    } else if constexpr (BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS / 4; ++i) {
        const uint4 some = reinterpret_cast<const uint4*>(from)[i];
        words[4 * i] = some.x, words[4 * i + 1] = some.y;
        words[4 * i + 2] = some.z, words[4 * i + 3] = some.w;
      }
    } else if constexpr (BYTES == 8) {
      const uint2 some = *reinterpret_cast<const uint2*>(from);
      words[0] = some.x, words[1] = some.y;
    } else {
      words[0] = *reinterpret_cast<const typename WordOf<BYTES>::Type*>(from);
    }
  }

  __device__ __forceinline__ void store(T* to) const {
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS / 4; ++i)
        reinterpret_cast<uint4*>(to)[i] =
            make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    } else if constexpr (BYTES == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<typename WordOf<BYTES>::Type*>(to) = words[0];
    }
  }

  __device__ __forceinline__ T get(int i) const { return reinterpret_cast<const T*>(words)[i]; }
  __device__ __forceinline__ void set(int i, float value) {
    reinterpret_cast<T*>(words)[i] = static_cast<T>(value);
  }
};

// A lane's run of a row of D fragments: two neighbours of each of N blocks of eight columns, the
// first pair at `pairs`. A row has `columns`.
template <typename T, int N>
__device__ __forceinline__ void store_run(T* row, int column, int columns, const float* pairs) {
  Run<T, 2 * N> run;
#pragma unroll
  for (int j = 0; j < 2 * N; ++j) run.set(j, pairs[j / 2 * 4 + j % 2]);
  if (column < columns) run.store(row + column);
}

// What one array adds to a lane's scores, or nothing.
template <bool PRESENT, typename T, typename Places>
struct InitRuns {
  Run<T, Places::RUN> runs[Places::QUERIES];

  __device__ __forceinline__ void fetch(int lane, const T* array, const Strides& strides, int batch,
                                        int head, int seqlen_q, int seqlen_k, int q0, int k0) {
    const int key = k0 + Places::key(lane);
    const T* keys = array + batch * strides.batch + head * strides.head + key;
#pragma unroll
    for (int r = 0; r < Places::QUERIES; ++r) {
      const int query = min(q0 + Places::query(lane, r), seqlen_q - 1);
      runs[r].load(keys + query * strides.row, key < seqlen_k);
    }
  }
  __device__ __forceinline__ T get(int r, int j) const { return runs[r].get(j); }
};
template <typename T, typename Places>
struct InitRuns<false, T, Places> {
  template <typename... Arguments>
  __device__ __forceinline__ void fetch(const Arguments&...) {}
  __device__ __forceinline__ T get(int, int) const { return T(1); }
};

// A warp's: M, N are those of its fragments.
template <bool KEYS_ARE_ROWS, int M, int N, typename T, bool BIAS, bool MASK>
struct AccumulatorInit {
  using Places = InitPlaces<KEYS_ARE_ROWS, M, N>;
  InitRuns<BIAS, T, Places> bias;
  InitRuns<MASK, u8, Places> mask;

  // Asks for those of fragments that begin at query q0 and key k0.
  __device__ __forceinline__ void fetch(int lane, const AttentionForm& form, const T* biases,
                                        const u8* masks, int batch, int head, int seqlen_q,
                                        int seqlen_k, int q0, int k0) {
    bias.fetch(lane, biases, form.bias, batch, head, seqlen_q, seqlen_k, q0, k0);
    mask.fetch(lane, masks, form.mask, batch, head, seqlen_q, seqlen_k, q0, k0);
  }

  // Where keys are rows: of a block's tile of keys from k0 on and queries from q0 on. WARPS_K warps
  // share the keys; others have as many each, and SHARE queries after those before them.
  template <int WARPS_K, int SHARE>
  __device__ __forceinline__ void fetch_keys(const AttentionForm& form, const T* biases,
                                             const u8* masks, int batch, int head, int seqlen_q,
                                             int seqlen_k, int q0, int k0) {
    const u32 thread = thread_index_again(), warp = thread / WARP_SIZE;
    fetch(thread % WARP_SIZE, form, biases, masks, anew(batch), head, seqlen_q, seqlen_k,
          q0 + warp / WARPS_K * SHARE, k0 + warp % WARPS_K * 16 * M);
  }

  // inverse_scale: 1 / softmax_scale.
  __device__ __forceinline__ void start(float (&s)[M][N][4], float inverse_scale) const {
#pragma unroll
    for (int r = 0; r < Places::QUERIES; ++r)
#pragma unroll
      for (int j = 0; j < Places::RUN; ++j) {
        const float added = BIAS ? static_cast<float>(bias.get(r, j)) * inverse_scale : 0.f;
        const bool hidden = MASK && !mask.get(r, j);
        Places::at(s, r, j) = hidden ? hidden_score(inverse_scale) : added;
      }
  }
};

// Where keys are rows: the gradient of a bias that has one row for all queries, of one head, in the
// lanes of a warp.
template <int M>
struct KeySums {
  float sums[M][2] = {};  // of this lane's keys: 2 * m + half of its run

  template <int N>
  __device__ __forceinline__ void add(const float (&ds)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][i / 2] += ds[m][n][i];
  }

  // To a row of `columns`; from key `end` on there is none, and the gradient 0. Then they begin
  // anew.
  __device__ __forceinline__ void store(float* rows, i64 row, int lane, int first, int end,
                                        int columns) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first + lane / 4 * 2 * M + m * 2 + half;
        const float sum = lanes_sum<4>(sums[m][half]);
        if (lane % 4 == 0 && key < columns) rows[row * columns + key] = key < end ? sum : 0.f;
        sums[m][half] = 0.f;
      }
  }
};

// Of a block whose keys nobody sees: zeros in all PARTS of its heads' rows.
template <int BLOCK_K, int PARTS, int THREADS>
__device__ __forceinline__ void store_no_sums(float* rows, const KeyBlock<BLOCK_K>& place,
                                              int heads_q, int group_size, int columns) {
  const i64 head = static_cast<i64>(place.batch) * heads_q + place.head * group_size;
  for (int i = threadIdx.x; i < BLOCK_K * group_size * PARTS; i += THREADS) {
    const int key = place.k0 + i % BLOCK_K;
    if (key < columns) rows[(head * PARTS + i / BLOCK_K) * columns + key] = 0.f;
  }
}

// Where queries are rows: the gradient of a bias that has a row for each of them, one head of it.
template <int M, int N, typename T>
struct BiasGradient {
  using Places = InitPlaces<false, M, N>;
  using Runs = Run<T, Places::RUN>[Places::QUERIES];
  T* dbias;
  int head, seqlen_q, seqlen_k;

  // dbias: [heads, seqlen_q, seqlen_k] contiguous
  __device__ __forceinline__ BiasGradient(T* dbias_, int head_, int seqlen_q_, int seqlen_k_)
      : dbias(dbias_), head(head_), seqlen_q(seqlen_q_), seqlen_k(seqlen_k_) {}

  __device__ __forceinline__ T* row(int query) const {
    return dbias + (static_cast<i64>(anew(head)) * seqlen_q + query) * seqlen_k;
  }

  // What is there of a warp's fragments, in a block that begins at query q0 and key k0. Here and
  // below places are computed anew rather than kept in registers.
  template <int ROWS_A_WARP>
  __device__ __forceinline__ void fetch(Runs& runs, int q0, int k0) const {
    const u32 thread = thread_index_again();
    const int lane = thread % WARP_SIZE, key = k0 + Places::key(lane);
    const int first = q0 + thread / WARP_SIZE * ROWS_A_WARP;
#pragma unroll
    for (int r = 0; r < Places::QUERIES; ++r) {
      const int query = first + Places::query(lane, r);
      runs[r].load(row(query) + key, query < seqlen_q && key < seqlen_k);
    }
  }

  // dS, added to what was there if `adds`.
  template <int ROWS_A_WARP>
  __device__ __forceinline__ void store(Runs& runs, float (&ds)[M][N][4], bool adds, int q0,
                                        int k0) const {
    const u32 thread = thread_index_again();
    const int lane = thread % WARP_SIZE, key = k0 + Places::key(lane);
    const int first = q0 + thread / WARP_SIZE * ROWS_A_WARP;
#pragma unroll
    for (int r = 0; r < Places::QUERIES; ++r) {
      const int query = first + Places::query(lane, r);
#pragma unroll
      for (int j = 0; j < Places::RUN; ++j) {
        const float before = adds ? static_cast<float>(runs[r].get(j)) : 0.f;
        runs[r].set(j, before + Places::at(ds, r, j));
      }
      if (query < seqlen_q && key < seqlen_k) runs[r].store(row(query) + key);
    }
  }

  // Of a warp's rows what lies outside of keys first .. end - 1: zeros.
  template <int ROWS_A_WARP>
  __device__ __forceinline__ void store_zeros(int q0, int first, int end) const {
    const int gap = min(first, seqlen_k), from = max(end, first);
    const int zeros = gap + max(seqlen_k - from, 0), lane = thread_index_again() % WARP_SIZE;
    const int row0 = q0 + thread_index_again() / WARP_SIZE * ROWS_A_WARP;
    Run<T, Places::RUN> none;
    none.load(dbias, false);
    for (int query = row0; query < min(row0 + ROWS_A_WARP, seqlen_q); ++query)
      for (int i = lane * Places::RUN; i < zeros; i += WARP_SIZE * Places::RUN)
        none.store(row(query) + (i < gap ? i : from + i - gap));
  }
};
