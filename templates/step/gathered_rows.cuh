// Rows that all blocks have parts of (step/exchange.cuh), gathered by a block into its shared memory
// and there normalised, for a product to multiply with (step/tile_sums.cuh).
//
//   LayerNorm (CENTERED)   (x - mean) * rstd * weight + bias     rstd = 1 / sqrt(variance + eps)
//   RMSNorm                 x * rstd * weight                    rstd = 1 / sqrt(mean of x^2 + eps)
//
// A warp takes the columns that it will multiply with, its part of each stage's, so that it need not
// wait for the others. Statistics are fp32; the variance is put together by Chan's formula of what each
// warp found of its numbers, the distances from their own mean, so that threads meet once. Results are
// rounded to T once.
//
// Of RMSNorm in bf16 a row is x * weight alone (LATE): a product's sums are multiplied with rstd in the
// end, so that nobody waits for statistics. fp16 has no room for numbers that are not normalised.
//
// The code is short rather than unrolled: all blocks go through it twice a layer, each time from memory.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "step/exchange.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

constexpr int GATHERED_GAP = 8;  // elements between rows: 16 bytes of eight rows meet all banks

template <typename T, typename Ring, int WARPS, bool CENTERED, int MOST, typename Meet>
struct GatheredRows {
  static constexpr int THREADS = 32 * WARPS, SIZE = 4;  // numbers of an access
  // Accesses of a thread under way, of each row: where it has few of them, and many.
  // As registers permit.
  static constexpr int MANY = MOST == 1                       ? Ring::HAS_CODES ? 4 : 8
                              : MOST == 2 && !Ring::HAS_CODES ? 2
                                                              : 1;
  static constexpr int FEW = MANY < 2 ? 1 : 2, TOGETHER = 2;
  static constexpr bool LATE = !CENTERED && SAME_TYPE<T, bf16>;
  static_assert(WARPS == 8 && MOST <= 8, "eight lanes find out about a row");
  struct Shared {
    float4 of_warps[MOST][WARPS];  // sum, mean, squares, numbers
    float squares[MOST][WARPS];    // LATE
  };
  Shared& shared;
  const u32 rows, factors;  // shared memory: [m][k + GATHERED_GAP]; of a norm weight [k], bias [k]
  const int m;

  __device__ __forceinline__ GatheredRows(Shared& shared, u32 rows, u32 factors, int m)
      : shared(shared), rows(rows), factors(factors), m(m) {}

  // The columns of this warp: its part of each stage's. Those of a lane are four of each access.
  struct Own {
    int k;
    bool coded;
    int accesses;
    __device__ __forceinline__ Own(int k, bool coded) : k(k), coded(Ring::HAS_CODES && coded) {
      accesses = this->coded ? accesses_of<Ring::CODED>() : accesses_of<Ring::WIDE>();
    }
    // The first column of an access, at or behind k if there is none.
    __device__ __forceinline__ int column(int access) const {
      const int i = access * WARP_SIZE + threadIdx.x % WARP_SIZE;
      return coded ? column_of<Ring::CODED>(i) : column_of<Ring::WIDE>(i);
    }
    __device__ __forceinline__ int numbers() const {
      return coded ? numbers_of<Ring::CODED>() : numbers_of<Ring::WIDE>();
    }

   private:
    template <int WIDE>
    __device__ __forceinline__ int accesses_of() const {
      return ceil_div(ceil_div(k, WIDE) * (WIDE / WARPS), WARP_SIZE * SIZE);
    }
    template <int WIDE>
    static __device__ __forceinline__ int column_of(int i) {
      constexpr int PART = WIDE / WARPS, QUADS = PART / SIZE;
      return i / QUADS * WIDE + threadIdx.x / WARP_SIZE * PART + i % QUADS * SIZE;
    }
    template <int WIDE>
    __device__ __forceinline__ int numbers_of() const {
      constexpr int PART = WIDE / WARPS;
      const int rest = k % WIDE - static_cast<int>(threadIdx.x) / WARP_SIZE * PART;
      return k / WIDE * PART + min(max(rest, 0), PART);
    }
  };

  // Rows of words [m, k] as they are. Lanes may read them when their warp has met.
  __device__ __forceinline__ void gather(const u32* words, const Own& own, u32 tag) const {
    const auto keep = [&](int row, int, int column, uint2 x) { write(x, row, column, own.k); };
    if (FEW < MANY && own.accesses > FEW)
      take_all<MANY>(words, own, tag, [](int, int) {}, keep);
    else
      take_all<FEW>(words, own, tag, [](int, int) {}, keep);
  }

  // Rows [m, k] of heads of D columns, each of which SPLITS work items of attention have a part of:
  // words [m, k / D, SPLITS][D and then 4] of their outcomes, the first two behind which are one of 64
  // bits: the logarithm to base 2 of what the outcome counts for. As `gather`.
  template <int D, int SPLITS>
  __device__ __forceinline__ void join(const u32* words, const Own& own, u32 tag) const {
#pragma unroll 1
    for (int first = 0; first < m * own.accesses; first += TOGETHER) {
      int rows_of[TOGETHER], columns[TOGETHER];
      const u32* from[TOGETHER];
      uint4 parts[TOGETHER][SPLITS] = {};
      u64 counts[TOGETHER][SPLITS] = {};
      u32 missing = 0;
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int row = rows_of[i] = (first + i) / own.accesses;
        const int column = columns[i] = own.column(first + i - row * own.accesses);
        if (row < m && column < own.k) missing |= ((1u << SPLITS) - 1) << i * SPLITS;
        const int at = row * own.k + column;
        from[i] = words + at / D * SPLITS * (D + 4) + at % D;
        columns[i] = missing >> i * SPLITS ? column : own.k;
      }
      while (missing) {
#pragma unroll
        for (int i = 0; i < TOGETHER * SPLITS; ++i) {
          const int unit = i / SPLITS, s = i % SPLITS;
          const u32* const part = from[unit] + s * (D + 4);
          load_words_if(parts[unit][s], part, missing >> i & 1);
          load_words_if(counts[unit][s], reinterpret_cast<const u64*>(part + D - columns[unit] % D),
                        missing >> i & 1);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER * SPLITS; ++i) {
          const u32 apart = tags_apart(parts[i / SPLITS][i % SPLITS], tag) |
                            tags_apart(counts[i / SPLITS][i % SPLITS], tag);
          missing &= ~((apart & 0xffff ? 0u : 1u) << i);
        }
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i)
        if (columns[i] < own.k) write(joined(parts[i], counts[i]), rows_of[i], columns[i], own.k);
    }
  }

  // A norm's weights, which nobody writes: on their way while the rows are waited for.
  __device__ __forceinline__ void load_factors(const T* weight, const T* bias, int k) const {
    constexpr int CHUNK = 16 / sizeof(T);
    if (LATE) return;
    for (int i = threadIdx.x * CHUNK; i < k; i += THREADS * CHUNK) {
      cp_async_16(factors + i * sizeof(T), weight + i);
      if (CENTERED) cp_async_16(factors + (k + i) * sizeof(T), bias + i);
    }
    cp_async_commit();
  }

  // As `gather`, normalised with the factors that were loaded; LATE: times `weight`. scale: 1 / k.
  __device__ __forceinline__ void normalise(const T* weight, const u32* words, const Own& own,
                                            u32 tag, float scale, float eps) const {
    if constexpr (LATE)
      multiply(weight, words, own, tag);
    else
      normalise_now(words, own, tag, scale, eps);
  }

  // LATE: what sums of products with row `row` are to be multiplied with, when all have met.
  // scale: 1 / k.
  __device__ __forceinline__ float late(int row, float scale, float eps) const {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) squares += shared.squares[row][i];
    return rsqrtf(squares * scale + eps);
  }

 private:
  // Of four columns.
  template <int SPLITS>
  static __device__ __forceinline__ uint2 joined(const uint4 (&parts)[SPLITS],
                                                 const u64 (&counts)[SPLITS]) {
    float top = NEG_INFINITY, total = 0.f, y[SIZE] = {};
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) top = max_or_nan(top, number(counts[s]));
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) {
      const float log = number(counts[s]);
      const float share = log == NEG_INFINITY ? 0.f : exp2_fast(log - top);
      const uint2 x = numbers(parts[s]);
      total += share;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) y[j] += share * get(x, j);
    }
    const float by = total == 0.f ? 0.f : inverse_fast(total);
    return make_uint2(pack2<T>(y[0] * by, y[1] * by), pack2<T>(y[2] * by, y[3] * by));
  }

  __device__ __forceinline__ void multiply(const T* weight, const u32* words, const Own& own,
                                           u32 tag) const {
    float squares[MOST] = {};
    uint2 by[FEW];
    take_all<FEW>(
        words, own, tag,
        [&](int i, int column) { by[i] = __ldg(reinterpret_cast<const uint2*>(weight + column)); },
        [&](int row, int i, int column, uint2 x) {
          const float2 low = unpack2<T>(x.x), high = unpack2<T>(x.y);
          squares[row] += low.x * low.x + low.y * low.y + (high.x * high.x + high.y * high.y);
          write({multiply_pairs<T>(x.x, by[i].x), multiply_pairs<T>(x.y, by[i].y)}, row, column,
                own.k);
        });
#pragma unroll
    for (int row = 0; row < MOST; ++row) {
      if (row >= m) break;
      squares[row] = lanes_sum<WARP_SIZE>(squares[row]);
      if (threadIdx.x % WARP_SIZE == 0) shared.squares[row][threadIdx.x / WARP_SIZE] = squares[row];
    }
  }

  __device__ __forceinline__ void normalise_now(const u32* words, const Own& own, u32 tag,
                                                float scale, float eps) const {
    float sums[MOST] = {};
    take_all<FEW>(
        words, own, tag, [](int, int) {},
        [&](int row, int, int column, uint2 x) {
          if (CENTERED) sums[row] += (get(x, 0) + get(x, 1)) + (get(x, 2) + get(x, 3));
          write(x, row, column, own.k);
        });
    const float count = own.numbers(), inverse = inverse_fast(fmaxf(count, 1.f));
#pragma unroll
    for (int row = 0; row < MOST; ++row) {
      if (row >= m) break;
      const float sum = CENTERED ? lanes_sum<WARP_SIZE>(sums[row]) : 0.f, mean = sum * inverse;
      float squares = 0.f;
      each(own, row, [&](uint2 x, int) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) squares += (get(x, j) - mean) * (get(x, j) - mean);
      });
      squares = lanes_sum<WARP_SIZE>(squares);
      if (threadIdx.x % WARP_SIZE == 0)
        shared.of_warps[row][threadIdx.x / WARP_SIZE] = {sum, mean, squares, count};
    }
    cp_async_wait<0>();  // the factors, which others see when all have met
    Meet()();
#pragma unroll 1
    for (int row = 0; row < m; ++row) {
      const float2 found = of_row(row, scale);
      const float mean = found.x, rstd = rsqrtf(found.y + eps);
      each(own, row, [&](uint2 x, int column) {
        const uint2 weight = load(factors + column * sizeof(T));
        const uint2 bias =
            CENTERED ? load(factors + (own.k + column) * sizeof(T)) : make_uint2(0, 0);
        float y[SIZE];
#pragma unroll
        for (int j = 0; j < SIZE; ++j)
          y[j] = (get(x, j) - mean) * rstd * get(weight, j) + (CENTERED ? get(bias, j) : 0.f);
        write(make_uint2(pack2<T>(y[0], y[1]), pack2<T>(y[2], y[3])), row, column, own.k);
      });
    }
  }

  static __device__ __forceinline__ float get(uint2 x, int j) {
    return static_cast<float>(reinterpret_cast<const T*>(&x)[j]);
  }
  static __device__ __forceinline__ uint2 load(u32 address) {
    const float2 x = load_shared_pair(address);
    return make_uint2(__float_as_uint(x.x), __float_as_uint(x.y));
  }
  __device__ __forceinline__ u32 place(int row, int column, int k) const {
    return rows + (row * (k + GATHERED_GAP) + column) * sizeof(T);
  }
  __device__ __forceinline__ void write(uint2 x, int row, int column, int k) const {
    store_shared_pair(place(row, column, k), x.x, x.y);
  }

  // All of this lane, of all rows, COUNT of each under way. before(i, column): of the i-th access under way, while it is;
  // act(row, i, column, four numbers from there on).
  template <int COUNT, typename Before, typename Act>
  __device__ __forceinline__ void take_all(const u32* words, const Own& own, u32 tag,
                                           const Before& before, const Act& act) const {
#pragma unroll 1
    for (int at = 0; at < own.accesses; at += COUNT) take<COUNT>(words, own, tag, at, before, act);
  }

  // COUNT accesses of each row, all under way before the first is waited for.
  template <int COUNT, typename Before, typename Act>
  __device__ __forceinline__ void take(const u32* words, const Own& own, u32 tag, int at,
                                       const Before& before, const Act& act) const {
    uint4 asked[MOST * COUNT];
    int columns[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      columns[i] = own.column(at + i);
      if (columns[i] < own.k) before(i, columns[i]);
    }
    const auto there = [&](int i) {
      return i / COUNT < m && at + i % COUNT < own.accesses && columns[i % COUNT] < own.k;
    };
    await(
        asked, tag,
        [&](int i) { return words + static_cast<i64>(i / COUNT) * own.k + columns[i % COUNT]; },
        there);
#pragma unroll
    for (int i = 0; i < MOST * COUNT; ++i)
      if (there(i)) act(i / COUNT, i % COUNT, columns[i % COUNT], numbers(asked[i]));
  }

  // act(numbers, their column): what this lane has written of a row.
  template <typename Act>
  __device__ __forceinline__ void each(const Own& own, int row, const Act& act) const {
#pragma unroll 1
    for (int i = 0; i < own.accesses; ++i) {
      const int column = own.column(i);
      if (column < own.k) act(load(place(row, column, own.k)), column);
    }
  }

  // Mean and variance of a row of what its warps found (RMSNorm: 0, and the mean of squares): the same
  // bits in each thread. scale: 1 / k.
  __device__ __forceinline__ float2 of_row(int row, float scale) const {
    const float4 found = shared.of_warps[row][threadIdx.x % WARPS];
    const float mean = CENTERED ? lanes_sum<WARPS>(found.x) * scale : 0.f;
    const float apart = found.y - mean;
    const float squares = found.z + (CENTERED ? apart * apart * found.w : 0.f);
    return {mean, lanes_sum<WARPS>(squares) * scale};
  }
};
