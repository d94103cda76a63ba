// Rows that all blocks have parts of (step/exchange.cuh), gathered by a block into its shared memory
// and there normalised, for a product to read (step/tile_sums.cuh).
//
//   LayerNorm (CENTERED)   (x - mean) * rstd * weight + bias     rstd = 1 / sqrt(variance + eps)
//   RMSNorm                 x * rstd * weight                    rstd = 1 / sqrt(mean of x^2 + eps)
//
// A team of warps has a row: all WARPS one row, half of them each of two rows, and so on. Statistics
// are fp32; the variance is put together by Chan's formula of what each warp found of its numbers, the
// distances from their own mean, so that threads meet once. Results are rounded to T once.
//
// In bf16 a row is x * weight alone (LATE): a product's sums are multiplied with rstd in the end, so that
// nobody waits for statistics. fp16 has no room for numbers that are not normalised. LayerNorm's weight
// and bias are two rows more behind the tokens', EXTRA, and what they come to in the product
//
//   rstd * (sum of W * weight * x - mean * sum of W * weight) + sum of W * bias
//
// tells what is missing: there are eight columns for rows, however few tokens there are.
//
// The code is short rather than unrolled: all blocks go through it twice a layer, each time from memory.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/register_fence.cuh"
#include "step/exchange.cuh"
#include "step/row_digits.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

constexpr int GATHERED_GAP = 8;  // elements between rows: 16 bytes of eight rows meet all banks

template <typename T, int WARPS, bool CENTERED, bool DIGITS, int MOST, int MOST_AHEAD,
          typename Meet>
struct GatheredRows {
  static constexpr int THREADS = 32 * WARPS, SIZE = 4;  // numbers of an access
  // Accesses of a thread under way: of rows to normalise, (MOST_AHEAD) of longer ones that are taken as
  // they are, and those held in registers.
  static constexpr int AHEAD = MOST < 2 ? 2 : MOST_AHEAD, HELD = 2;
  static constexpr int FULL_LOG2 = 10;  // of the numbers of all threads
  static constexpr bool LATE = SAME_TYPE<T, bf16> && (!CENTERED || MOST <= 6);
  static constexpr int EXTRA = LATE && CENTERED ? 2 : 0;
  static_assert(THREADS * SIZE == 1 << FULL_LOG2, "eight warps");
  struct Shared {
    float4 of_warps[WARPS];  // sum, mean, squares, numbers
    float2 late[WARPS];      // LATE: sum, squares
  };
  Shared& shared;
  const u32 late_sums;      // shared.late
  const u32 rows, factors;  // shared memory: [m][k + GATHERED_GAP]; of a norm weight [k], bias [k]
  const int m, warps_log2;
  int row, first;  // of a thread's team; its first number
  int step;        // from there to the next ones

  __device__ __forceinline__ GatheredRows(Shared& shared, u32 rows, u32 factors, int m)
      : shared(shared),
        late_sums(kept(shared_address(shared.late))),
        rows(rows),
        factors(factors),
        m(m),
        warps_log2(m > 4   ? 0
                   : m > 2 ? 1
                   : m > 1 ? 2
                           : 3) {
    static_assert(WARPS == 8, "a warp for each of eight rows");
    row = threadIdx.x / WARP_SIZE >> warps_log2;
    first = (threadIdx.x - (row << warps_log2) * WARP_SIZE) * SIZE;
    step = WARP_SIZE * SIZE << warps_log2;
  }

  // Rows of words [m, k] as they are, for a product with codes as digits. Nobody may read them before all
  // have met.
  __device__ __forceinline__ void gather(const u32* words, int k, u32 tag, bool coded) const {
    if (row >= m) return;
    const auto keep = [&](const auto& x, int at) { put(x, at, k, coded); };
    if (k <= step * AHEAD)
      take<AHEAD>(words, k, tag, first, keep);
    else
#pragma unroll 1
      for (int at = first; at < k; at += step * MOST_AHEAD)
        take<MOST_AHEAD>(words, k, tag, at, keep);
  }

  // A norm's weights, which nobody writes: on their way while the rows are waited for.
  __device__ __forceinline__ void load_factors(const T* weight, const T* bias, int k) const {
    constexpr int CHUNK = 16 / sizeof(T);
    if (LATE && !CENTERED) return;
    const u32 first = LATE ? rows + m * (k + GATHERED_GAP) * sizeof(T) : factors,
              second = LATE ? first + (k + GATHERED_GAP) * sizeof(T) : factors + k * sizeof(T);
    for (int i = threadIdx.x * CHUNK; i < k; i += THREADS * CHUNK) {
      cp_async_16(first + i * sizeof(T), weight + i);
      if (CENTERED) cp_async_16(second + i * sizeof(T), bias + i);
    }
    cp_async_commit();
  }

  // The same normalised, with the factors that were loaded; LATE: times `weight`.
  __device__ __forceinline__ void normalise(const T* weight, const u32* words, int k, u32 tag,
                                            bool coded, float scale, float eps) const {
    if constexpr (LATE)
      multiply(weight, words, k, tag, coded);
    else
      normalise_now(words, k, tag, scale, eps);
  }

  // LATE: a row's mean (RMSNorm: 0), and what sums of products with it are to be multiplied with, when
  // all have met. scale: 1 / k.
  __device__ __forceinline__ float2 late(int row, float scale, float eps) const {
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i)
      if (MOST == 1 || i < 1 << warps_log2) {
        const float2 own = load_shared_pair(late_sums + ((row << warps_log2) + i) * 8);
        sum += own.x, squares += own.y;
      }
    const float mean = CENTERED ? sum * scale : 0.f;
    return {mean, rsqrtf(fmaxf(squares * scale - mean * mean, 0.f) + eps)};
  }

 private:
  __device__ __forceinline__ void multiply(const T* weight, const u32* words, int k, u32 tag,
                                           bool coded) const {
    float sum = 0.f, squares = 0.f;
    if (row < m) {
#pragma unroll 1
      for (int at = first; at < k; at += step * AHEAD) {
        uint2 by[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
          if (at + i * step < k)
            by[i] = __ldg(reinterpret_cast<const uint2*>(weight + at + i * step));
        take<AHEAD>(words, k, tag, at, [&](uint2(&x)[AHEAD], int) {
#pragma unroll
          for (int i = 0; i < AHEAD; ++i) {
            if (at + i * step >= k) break;
            const float2 low = unpack2<T>(x[i].x), high = unpack2<T>(x[i].y);
            squares += low.x * low.x + low.y * low.y + (high.x * high.x + high.y * high.y);
            if (CENTERED) sum += (low.x + low.y) + (high.x + high.y);
            x[i] = {multiply_pairs<T>(x[i].x, by[i].x), multiply_pairs<T>(x[i].y, by[i].y)};
          }
          put(x, at, k, coded);
        });
      }
    }
    squares = lanes_sum<WARP_SIZE>(squares);
    if (CENTERED) sum = lanes_sum<WARP_SIZE>(sum);
    if (threadIdx.x % WARP_SIZE == 0)
      store_shared_pair(late_sums + threadIdx.x / WARP_SIZE * 8, __float_as_uint(sum),
                        __float_as_uint(squares));
    if (CENTERED) cp_async_wait<0>();
  }

  __device__ __forceinline__ void normalise_now(const u32* words, int k, u32 tag, float scale,
                                                float eps) const {
    uint2 held[HELD] = {};
    float sum = 0.f, squares = 0.f;
    const float count = numbers_of_warp(k), inverse = inverse_fast(fmaxf(count, 1.f));
    const auto see = [&](uint2 x) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        if (CENTERED) sum += get(x, j);
        if (!CENTERED) squares += get(x, j) * get(x, j);
      }
    };
    if (row < m) {
      take<HELD>(words, k, tag, first, [&](uint2(&x)[HELD], int) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
          if (first + i * step < k) held[i] = x[i], see(x[i]);
      });
#pragma unroll 1
      for (int at = first + step * HELD; at < k; at += step * AHEAD)
        take<AHEAD>(words, k, tag, at, [&](uint2(&x)[AHEAD], int) {
          put(x, at, k, false);
#pragma unroll
          for (int i = 0; i < AHEAD; ++i)
            if (at + i * step < k) see(x[i]);
        });
    }
    const int warp = threadIdx.x / WARP_SIZE;
    float own_mean = 0.f;
    if (CENTERED) {
      sum = lanes_sum<WARP_SIZE>(sum), own_mean = sum * inverse;
      each(held, k, [&](uint2 x, int) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) squares += (get(x, j) - own_mean) * (get(x, j) - own_mean);
      });
    }
    squares = lanes_sum<WARP_SIZE>(squares);
    if (threadIdx.x % WARP_SIZE == 0) shared.of_warps[warp] = {sum, own_mean, squares, count};
    cp_async_wait<0>();  // the factors, which others see when all have met
    Meet()();
    const float2 found = of_team(shared.of_warps + (row << warps_log2), scale);
    const float mean = found.x, rstd = rsqrtf(found.y + eps);
    each(held, k, [&](uint2 x, int i) {
      const uint2 weight = load(factors + i * sizeof(T));
      const uint2 bias = CENTERED ? load(factors + (k + i) * sizeof(T)) : make_uint2(0, 0);
      float y[SIZE];
#pragma unroll
      for (int j = 0; j < SIZE; ++j)
        y[j] = (get(x, j) - mean) * rstd * get(weight, j) + (CENTERED ? get(bias, j) : 0.f);
      write(make_uint2(pack2<T>(y[0], y[1]), pack2<T>(y[2], y[3])), i, k);
    });
  }

  static __device__ __forceinline__ float get(uint2 x, int j) {
    return static_cast<float>(reinterpret_cast<const T*>(&x)[j]);
  }
  static __device__ __forceinline__ uint2 load(u32 address) {
    const float2 x = load_shared_pair(address);
    return make_uint2(__float_as_uint(x.x), __float_as_uint(x.y));
  }
  // Of the thread's row, four numbers from column i on.
  __device__ __forceinline__ u32 own(int i, int k) const {
    return rows + (row * (k + GATHERED_GAP) + i) * sizeof(T);
  }
  __device__ __forceinline__ void write(uint2 x, int i, int k) const {
    store_shared_pair(own(i, k), x.x, x.y);
  }
  template <int COUNT>
  __device__ __forceinline__ void put(const uint2 (&x)[COUNT], int at, int k, bool coded) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int column = at + i * step;
      if (column >= k) continue;
      if (DIGITS && coded)
        RowDigits<T>::store(rows + row * RowDigits<T>::bytes(k), x[i], column, k);
      else
        write(x[i], column, k);
    }
  }

  // COUNT accesses from column `at` on, all under way before the first is waited for: act(numbers of each,
  // at); of those behind the end of the row they say nothing.
  template <int COUNT, typename Act>
  __device__ __forceinline__ void take(const u32* words, int k, u32 tag, int at,
                                       const Act& act) const {
    const u32* const source = words + static_cast<i64>(row) * k;
    uint4 asked[COUNT];
    const auto there = [&](int i) { return at + i * step < k; };
    await(asked, tag, [&](int i) { return load_words(source + at + i * step); }, there);
    uint2 found[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) found[i] = numbers(asked[i]);
    act(found, at);
  }

  // act(numbers, their column): all of the thread.
  template <typename Act>
  __device__ __forceinline__ void each(const uint2 (&held)[HELD], int k, const Act& act) const {
    if (row >= m) return;
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (first + i * step < k) act(held[i], first + i * step);
#pragma unroll 1
    for (int i = first + HELD * step; i < k; i += step) act(load(own(i, k)), i);
  }

  // That this warp has of a row of k.
  __device__ __forceinline__ float numbers_of_warp(int k) const {
    constexpr int ACCESS = WARP_SIZE * SIZE;
    const int rest = (k & (step - 1)) - (first - static_cast<int>(threadIdx.x) % WARP_SIZE * SIZE);
    const int whole = k >> (FULL_LOG2 - 3 + warps_log2);
    return static_cast<float>(whole * ACCESS + min(max(rest, 0), ACCESS));
  }

  // Mean and variance of a row of what its warps found (RMSNorm: 0, and the mean of squares): the same
  // bits in each thread. scale: 1 / k.
  __device__ __forceinline__ float2 of_team(const float4* of_warps, float scale) const {
    float4 found[WARPS];
    float mean = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      found[i] = i < 1 << warps_log2 ? of_warps[i] : float4{0.f, 0.f, 0.f, 0.f};
      mean += found[i].x;
    }
    mean = CENTERED ? mean * scale : 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      const float apart = found[i].y - mean;
      squares += found[i].z + (CENTERED ? apart * apart * found[i].w : 0.f);
    }
    return {mean, squares * scale};
  }
};
