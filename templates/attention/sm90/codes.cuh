// Attention on codes by wgmma: the products of tiles that are bytes (code_rows.cuh), and a softmax whose
// scores have scales of their own. Keys of V^T are in the order of attention/codes.cuh, so no
// score changes its lane on the way to the second product.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bytes.cuh"
#include "tile/swizzle.cuh"
#include "attention/codes.cuh"
#include "attention/packed_codes.cuh"
#include "attention/sm90/products.cuh"
#include "attention/sm90/span.cuh"

// ---------------------------------------------------------------- products

// S = Q K^T of codes, sums in fp32 (e4m3) or whole numbers (int8).
template <typename Rings, int STEPS, typename Sum, int N>
__device__ __forceinline__ void issue_code_scores(Sum (&s)[N][4], u64 q, u64 k) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma_bytes(s, q + Rings::QTile::step(step), k + Rings::KTile::step(step), step > 0);
  wgmma_commit();
}

// The two codes in bits 0..15 as fp16. Of int8: 1024 and more have steps of 1.
template <bool INT8>
__device__ __forceinline__ u32 fp16_of_code(u32 codes) {
  if (!INT8) return fp16_of_e4m3(codes);
  return subtract_pairs<fp16>(__byte_perm(codes ^ 0x8080, 0x64646464, 0x4140), 0x64806480);
}

// S = Q K^T once more, by mma.sync, for the 16 rows of a warp from `row` of the tile of Q on; codes as
// fp16, which Hopper's mma.sync would make of e4m3 as well, 8 of k at a time: there are few registers.
template <bool INT8, typename Rings, int N>
__device__ __forceinline__ void code_scores_again(float (&s)[1][N][4], u32 q_tile, int row,
                                                  u32 k_tile) {
  using QTile = SwizzledTile<Rings::BLOCK_Q, Rings::COLUMNS / 2>;  // of two bytes each
  using KTile = SwizzledTile<Rings::BLOCK_K, Rings::COLUMNS / 2>;
  const int lane = lane_index_again() % 16;  // no register is kept for what almost never runs
#pragma unroll
  for (int i = 0; i < 4 * N; ++i) s[0][i / 4][i % 4] = 0.f;
#pragma unroll 1
  for (int step = 0; step < Rings::COLUMNS / 8; ++step) {
    const int chunk = step / 2, half = step % 2 * 16;
    const int panel = QTile::PANELS == 1 ? 0 : chunk / QTile::CHUNKS,
              in_panel = chunk % QTile::CHUNKS;
    u32 a[2];
    ldmatrix_x2(a, q_tile + panel * QTile::PANEL_BYTES + row * QTile::ROW_BYTES +
                       QTile::offset(lane, in_panel));
    a[0] = fp16_of_code<INT8>(a[0] >> half), a[1] = fp16_of_code<INT8>(a[1] >> half);
    const u32 keys = k_tile + panel * KTile::PANEL_BYTES + KTile::offset(lane, in_panel);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      u32 b[2];
      __syncwarp();  // nothing is fetched ahead
      ldmatrix_x2(b, keys + n * 8 * KTile::ROW_BYTES);
      b[0] >>= half, b[1] >>= half;
#pragma unroll
      for (int i = 0; i < 2; ++i) mma_m16n8k8(s[0][n + i], a[0], a[1], fp16_of_code<INT8>(b[i]));
    }
  }
  __syncwarp();  // before one lane gives the tile of K back
}

// O = P V of e4m3, or V of E5M2 (+ O), 32 keys a step.
template <typename VTile, bool E5M2, int STEPS, int COLUMNS>
__device__ __forceinline__ void issue_code_values(float (&acc)[COLUMNS][4],
                                                  const u32 (&p)[STEPS][4], u64 v, bool add) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma_bytes_registers<E5M2>(acc, p[step], v + VTile::step(step), add || step > 0);
  wgmma_commit();
}

// Whole sums of codes -> fp32, in place. e4m3's are already.
template <int N>
__device__ __forceinline__ void sums_to_float(float (&)[N][4]) {}
template <int N>
__device__ __forceinline__ void sums_to_float(int (&s)[N][4]) {
#pragma unroll
  for (int i = 0; i < N * 4; ++i)
    s[i / 4][i % 4] = __float_as_int(static_cast<float>(s[i / 4][i % 4]));
}

// ---------------------------------------------------------------- softmax

// Online softmax of a warp's 16 rows of sums of codes (attention/online_softmax.cuh says more): a
// lane has rows g and g + 8. What a sum is multiplied by depends on its row and on which of GROUPS
// parts of the tile its key is in, and is part of the FMA before an exponential. Maxima are in powers
// of two. RAISED: powers of two that probabilities are raised by; a maximum may lag by GROWTH, which
// e4m3 has room for above 2^RAISED.
template <int BLOCK_K, int SCALE_KEYS, int GROUPS, int RAISED>
struct CodedSoftmax {
  static constexpr float GROWTH = RAISED == 0 ? 8.f : 8.75f - RAISED;
  static constexpr int TOP = 8;              // what those of peaked rows are raised by
  static constexpr float FAR = 67108864.f;   // from where an FMA's addend is too coarse
  static constexpr float GREAT = 1048576.f;  // from where one is too coarse to be corrected
  // What no probability may be above, and from where on a greater maximum is worth its corrections.
  static constexpr float LIMIT = RAISED == 0 ? 1024.f : 448.f;
  static constexpr float HIGH = RAISED == 0 ? 256.f : 1.4142f * (1 << RAISED);
  // What is added to score * by before the exponential: RAISED less the maximum, which is NOTHING as
  // long as every key is masked.
  static constexpr float NOTHING = -3e38f;
  float add[2] = {RAISED - NOTHING, RAISED - NOTHING}, row_sum[2] = {};
  float by[2][GROUPS];  // of this tile; above 0
  bool far = false;   // a maximum of the warp is: each tile is to lose it before anything is added
  bool exact = true;  // a maximum is unknown or great: a tile's is to be looked for first

  // Scales of a tile's groups, from the first one on; the last tile may have fewer keys than there is room
  // for. Thirds of 96 keys have two scales: of 64 and 32 keys, or of 32 and 64.
  __device__ __forceinline__ static void load(float (&of_group)[GROUPS], const float* scales,
                                              int tile, int last = 0x7fffffff) {
    constexpr int COUNT = (BLOCK_K + SCALE_KEYS - 1) / SCALE_KEYS;
    float found[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) found[i] = __ldg(scales + min(i, last));
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
      of_group[i] = GROUPS == COUNT           ? found[i]
                    : i == 1 && tile % 2 == 0 ? found[0]
                                              : found[i / 2 + i % 2];
  }

  // Scales between the first one of a tile and that of the tile behind it.
  __device__ __forceinline__ static int step(int tile) {
    return BLOCK_K == 96 ? 1 + (tile & 1) : BLOCK_K / SCALE_KEYS;
  }

  // Takes in a tile. True (for the whole warp) when the output must be multiplied by `correction`.
  template <int N>
  __device__ __forceinline__ bool raise_max(float (&s)[1][N][4], float (&correction)[1][2]) {
    constexpr int WIDTH = N / GROUPS;
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = NEG_INFINITY;
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        float x = s[0][group * WIDTH][2 * half], y = s[0][group * WIDTH][2 * half + 1];
#pragma unroll
        for (int n = group * WIDTH + 1; n < (group + 1) * WIDTH; ++n) {
          x = fmaxf(x, s[0][n][2 * half]);
          y = fmaxf(y, s[0][n][2 * half + 1]);
        }
        top[half] = fmaxf(top[half], fmaxf(x, y) * by[half][group]);
      }
    }
    if (!__any_sync(FULL_MASK, grown(top) || far)) return false;
    far = exact = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = RAISED - add[half];
      const float most = fmaxf(old, fminf(quad_max(top[half]), LARGEST));
      correction[0][half] = exp2_fast(old - most);
      row_sum[half] *= correction[0][half];
      add[half] = RAISED - most;
      far |= fabsf(most) > FAR && most > NOTHING;
      exact |= fabsf(most) > GREAT;
    }
    far = __any_sync(FULL_MASK, far);
    exact = __any_sync(FULL_MASK, exact);
    if (far) subtract_max(s);
    return true;
  }

  // Whether a maximum, in powers of two, is too far above the one that is subtracted.
  __device__ __forceinline__ bool grown(const float (&top)[2]) const {
    return (top[0] + add[0] > GROWTH + RAISED) | (top[1] + add[1] > GROWTH + RAISED);
  }

  template <int N>
  __device__ __forceinline__ void subtract_max(float (&s)[1][N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s[0][n][i] * by[i / 2][n / (N / GROUPS)];
        s[0][n][i] = (x > LARGEST ? LARGEST : x) - (RAISED - add[i / 2]);
      }
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) by[i / GROUPS][i % GROUPS] = 1.f;
  }

  __device__ __forceinline__ float addend(int half) const { return far ? RAISED : add[half]; }

  // Scores -> probabilities in place by the maxima there are, which no one has looked for in this tile:
  // `sums` are this lane's. True (for the whole warp) where one may be too great: as no sum of a part of
  // them is above LIMIT, none is.
  template <int N>
  __device__ __forceinline__ bool speculate(float (&s)[1][N][4], float (&sums)[2]) {
    float most = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = 0.f, odd = 0.f;
      const float more = addend(half);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float* pair = &s[0][n][2 * half];
        const float scale = by[half][n / (N / GROUPS)];
        pair[0] = exp2_fast(fmaf(pair[0], scale, more));
        pair[1] = exp2_fast(fmaf(pair[1], scale, more));
        even += pair[0], odd += pair[1];
      }
      sums[half] = even + odd;
      most = most > LIMIT ? most : fmaxf(even, odd);
      if (!(sums[half] <= 2.f * LIMIT)) most = 2.f * LIMIT;  // NaN as well
    }
    return __any_sync(FULL_MASK, most > LIMIT);
  }

  // Probabilities one of which may be too great -> right ones, where maxima have grown. False (for the
  // whole warp) where it needs the scores.
  template <int N>
  __device__ __forceinline__ bool settle(float (&s)[1][N][4], float (&sums)[2],
                                         float (&correction)[1][2], bool& rescale) {
    const bool bad = !(sums[0] < FAR && sums[1] < FAR);
    if (__any_sync(FULL_MASK, bad)) return false;
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = 0.f, y = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n)
        x = fmaxf(x, s[0][n][2 * half]), y = fmaxf(y, s[0][n][2 * half + 1]);
      top[half] = fmaxf(x, y);
    }
    rescale = __any_sync(FULL_MASK, fmaxf(top[0], top[1]) > HIGH);
    if (!rescale) return true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = quad_max(top[half]);
      const float less = fmaxf(log2f(most) - (is_peaked(sums[half], most) ? TOP : RAISED), 0.f);
      const float by_less = exp2_fast(-less);
      correction[0][half] = by_less;
      add[half] -= less;
      row_sum[half] *= by_less, sums[half] *= by_less;
#pragma unroll
      for (int n = 0; n < N; ++n) s[0][n][2 * half] *= by_less, s[0][n][2 * half + 1] *= by_less;
    }
    return true;
  }

  // Whether one probability of a row, the greatest, is nearly all of them in its lanes: others, here and
  // in tiles to come, are so small that they need what room there is, and seldom is one greater.
  __device__ __forceinline__ static bool is_peaked(float sum, float most) {
    return (RAISED > 0) & (quad_max(sum) < 1.0625f * most);
  }

  // Rows that are peaked after two tiles are raised by TOP powers of two instead, with what they have so
  // far. True (for the whole warp) when the output must be multiplied by `correction`.
  template <int N>
  __device__ __forceinline__ bool raise_peaked(float (&s)[1][N][4], float (&sums)[2],
                                               float (&correction)[1][2], bool rescale) {
    bool peaked[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      peaked[half] = is_peaked(row_sum[half] + sums[half], 1 << RAISED) & (add[half] < -NOTHING);
    if (!__any_sync(FULL_MASK, peaked[0] | peaked[1]) || far) return rescale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float by = peaked[half] ? 1 << (TOP - RAISED) : 1.f;
      if (peaked[half]) add[half] += TOP - RAISED;
      correction[0][half] = rescale ? correction[0][half] * by : by;
      row_sum[half] *= by, sums[half] *= by;
#pragma unroll
      for (int n = 0; n < N; ++n) s[0][n][2 * half] *= by, s[0][n][2 * half + 1] *= by;
    }
    return true;
  }

  // Natural log of the sum of exp(score); -inf for a row without keys.
  __device__ __forceinline__ float lse(int half, float sum) const {
    return sum == 0.f ? NEG_INFINITY : (log2f(sum) - add[half]) * LN2;
  }
};

// Probabilities as e4m3, A fragments of 32 keys (probabilities_e4m3 of attention/codes.cuh).
template <int N>
__device__ __forceinline__ void round_to_e4m3(u32 (&p)[N / 4][4], const float (&s)[1][N][4]) {
#pragma unroll
  for (int n = 0; n < N; n += 2)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float *low = &s[0][n][2 * half], *high = &s[0][n + 1][2 * half];
      p[n / 4][n % 4 + half] = pack4_e4m3(low[0], low[1], high[0], high[1]);
    }
}

// Sums of P V in fp32 that a lane keeps in its warp's room, where the output is staged in the end: what
// the tensor core has added up so far is added to them now and then.
template <int N>
struct SumsAside {
  bool any = false;

  // They become (they + acc) * by, where that is anything, and acc 0; `left` again.
  __device__ __forceinline__ int add(float (&acc)[1][N][4], bool rescale,
                                     const float (&correction)[2], int left, u32 room, int lane) {
    const float by[2] = {rescale ? correction[0] : 1.f, rescale ? correction[1] : 1.f};
    if (!any) {  // the last output is read from there
      if (lane == 0) bulk_wait_read();
      __syncwarp();
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const u32 at = room + n * 512 + lane * 16;
      float sum[4] = {};
      if (any) load_shared_floats(sum, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = (sum[i] + acc[0][n][i]) * by[i / 2], acc[0][n][i] = 0.f;
      store_shared_floats(at, sum);
    }
    any = true;
    return left;
  }

  // acc += them.
  __device__ __forceinline__ void take(float (&acc)[1][N][4], u32 room, int lane) const {
    if (!any) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float sum[4];
      load_shared_floats(sum, room + n * 512 + lane * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[0][n][i] += sum[i];
    }
  }
};
