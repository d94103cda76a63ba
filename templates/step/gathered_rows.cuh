// Rows that all blocks have parts of (step/exchange.cuh), gathered by a block into its shared memory
// and there normalised, for a product to read (SharedRow in step/normed_rows.cuh).
//
//   LayerNorm (CENTERED)   (x - mean) * rstd * weight + bias     rstd = 1 / sqrt(variance + eps)
//   RMSNorm                 x * rstd * weight                    rstd = 1 / sqrt(mean of x^2 + eps)
//
// A team of warps has a row: all WARPS one row, half of them each of two rows, and so on. Statistics
// are fp32, the variance of distances from the mean; results are rounded to T once. A thread has the
// same numbers of a row from the beginning to the end, so that only sums pass between threads.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "step/exchange.cuh"
#include "step/normed_rows.cuh"

template <typename T, int WARPS, bool CENTERED, typename Meet>
struct GatheredRows {
  static constexpr int THREADS = 32 * WARPS, SIZE = 4;  // numbers of an access
  static constexpr int AHEAD = 4;                       // accesses under way
  const u32 rows, factors;  // shared memory: [m][k + ROW_GAP]; of a norm weight [k], bias [k]
  const int m;
  int row, warps, first, step;  // of a thread's team; its first number, and to the next four

  __device__ __forceinline__ GatheredRows(u32 rows, u32 factors, int m)
      : rows(rows), factors(factors), m(m) {
    static_assert(WARPS >= 8, "a warp for each of eight rows");
    const int log2 = m > 4 ? 3 : m > 2 ? 2 : m > 1 ? 1 : 0;
    warps = WARPS >> log2;
    row = threadIdx.x / WARP_SIZE / warps;
    first = (threadIdx.x - row * warps * WARP_SIZE) * SIZE;
    step = warps * WARP_SIZE * SIZE;
  }

  // Rows of words [m, k] as they are. Nobody may read them before all have met.
  __device__ __forceinline__ void gather(const u32* words, int k, u32 tag) const {
    gather(words, k, tag, [](uint2) {});
  }

  // A norm's weights, which nobody writes: on their way while the rows are waited for.
  __device__ __forceinline__ void load_factors(const T* weight, const T* bias, int k) const {
    constexpr int CHUNK = 16 / sizeof(T);
    for (int i = threadIdx.x * CHUNK; i < k; i += THREADS * CHUNK) {
      cp_async_16(factors + i * sizeof(T), weight + i);
      if (CENTERED) cp_async_16(factors + (k + i) * sizeof(T), bias + i);
    }
    cp_async_commit();
  }

  // The same normalised, with the factors that were loaded.
  __device__ __forceinline__ void normalise(const u32* words, int k, u32 tag, float eps) const {
    __shared__ float of_warps[2][WARPS];
    float sum = 0.f, squares = 0.f, mean = 0.f;
    gather(words, k, tag, [&](uint2 x) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float y = get(x, j);
        sum += y, squares += y * y;
      }
    });
    cp_async_wait<0>();  // the factors: others see them when sums have been added up
    if (CENTERED) {
      mean = of_team(sum, of_warps[0]) / k, squares = 0.f;
      each(k, [&](uint2 x, int) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) squares += (get(x, j) - mean) * (get(x, j) - mean);
        return x;
      });
    }
    const float rstd = 1.f / sqrtf(of_team(squares, of_warps[1]) / k + eps);
    each(k, [&](uint2 x, int i) {
      const uint2 weight = load(factors + i * sizeof(T));
      const uint2 bias = CENTERED ? load(factors + (k + i) * sizeof(T)) : make_uint2(0, 0);
      float y[SIZE];
#pragma unroll
      for (int j = 0; j < SIZE; ++j)
        y[j] = (get(x, j) - mean) * rstd * get(weight, j) + (CENTERED ? get(bias, j) : 0.f);
      return make_uint2(pack2<T>(y[0], y[1]), pack2<T>(y[2], y[3]));
    });
  }

 private:
  static __device__ __forceinline__ float get(uint2 x, int j) {
    return static_cast<float>(reinterpret_cast<const T*>(&x)[j]);
  }
  static __device__ __forceinline__ uint2 load(u32 address) {
    const float2 x = load_shared_pair(address);
    return make_uint2(__float_as_uint(x.x), __float_as_uint(x.y));
  }
  __device__ __forceinline__ u32 own(int k) const { return rows + row * (k + ROW_GAP) * sizeof(T); }

  template <typename See>
  __device__ __forceinline__ void gather(const u32* words, int k, u32 tag, const See& see) const {
    if (row >= m) return;
    const u32* const source = words + static_cast<i64>(row) * k;
    for (int at = first; at < k; at += step * AHEAD) {
      uint4 asked[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (at + i * step < k) asked[i] = load_words(source + at + i * step);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int place = at + i * step;
        if (place >= k) break;
        const uint2 x = await(asked[i], source + place, tag);
        store_shared_pair(own(k) + place * sizeof(T), x.x, x.y);
        see(x);
      }
    }
  }

  // x becomes act(x, its first column), for the thread's numbers of its row.
  template <typename Act>
  __device__ __forceinline__ void each(int k, const Act& act) const {
    if (row >= m) return;
    for (int i = first; i < k; i += step) {
      const uint2 x = act(load(own(k) + i * sizeof(T)), i);
      store_shared_pair(own(k) + i * sizeof(T), x.x, x.y);
    }
  }

  // Over the team, in one order, to the same bits in each thread. By all of the warps.
  __device__ __forceinline__ float of_team(float x, float (&of_warps)[WARPS]) const {
    x = lanes_sum<WARP_SIZE>(x);
    if (threadIdx.x % WARP_SIZE == 0) of_warps[threadIdx.x / WARP_SIZE] = x;
    Meet()();
    float total = 0.f;
    for (int i = 0; i < warps; ++i) total += of_warps[row * warps + i];
    return total;
  }
};
