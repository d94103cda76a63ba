// Codes of keys and values in pages on their way to wgmma: TMA brings a tile of bytes into a ring of
// its own, and warps beside the one that asks for it store it as the 16-bit tile that products read. A code is
// a number of fp16 and of bf16, exactly; scales of heads belong to the scores and to the output.
//
//   tiles are brought, and made numbers, as consumers ask for them:   K_n  K_(n-1) V_n  ...  V_first
//
// A thread asks for several chunks before it widens the first, as shared memory is far, and its rows
// are whole eights apart, so that each address is a register and a constant.
//
// Each thread takes 16 codes at a time, two chunks of the tile. Eight neighbours have half a swizzled
// row of codes of each of two rows, r and r ^ 5: they read 32 banks, as the rows differ in bit 2, and
// every second chunk of two rows of the tile: they write 32 banks, as these differ in bit 0.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/prmt.cuh"
#include "ptx/proxy_fence.cuh"
#include "kv/e4m3.cuh"
#include "attention/sm90/work.cuh"

// Rows of bytes as TMA brings them: panels of 128, swizzled as 16-bit tiles are (tile/swizzle.cuh), or
// rows of another width one behind another.
template <int ROWS_, int COLUMNS_>
struct ByteTile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr bool SWIZZLED = COLUMNS % 128 == 0;
  static constexpr int PANEL_COLUMNS = SWIZZLED ? 128 : COLUMNS, PANELS = COLUMNS / PANEL_COLUMNS;
  static constexpr int ROW_BYTES = PANEL_COLUMNS, PANEL_BYTES = ROWS * ROW_BYTES;
  static constexpr int BYTES = ROWS * COLUMNS;

  // Of sixteen codes of a row.
  __device__ static __forceinline__ int offset(int row, int chunk) {
    if (!SWIZZLED) return row * COLUMNS + chunk * 16;
    return chunk / 8 * PANEL_BYTES + row * 128 + ((chunk % 8 ^ row & 7) << 4);
  }
};

// The numbers of four codes, S as T.
template <typename T, typename S>
struct WideCodes;

// A word of which ptxas does not know what it is: else it would put it into the instruction, and the
// selector of each PRMT, which has room for one of them, into a register.
__device__ __forceinline__ u32 word_in_register(u32 word) { return word | gridDim.x >> 31; }

// 0x4300 + the low seven bits is 128 more than they are in bf16, and 0x4300 + the eighth bit is 128
// or, for a negative code, 256.
template <>
struct WideCodes<bf16, i8> {
  static __device__ __forceinline__ u32 pair(u32 raised) {
    return subtract_pairs<bf16>(raised & 0xff7fff7fu, raised & 0xff80ff80u);
  }
  static __device__ __forceinline__ uint2 of(u32 codes) {
    const u32 high = word_in_register(0x43434343u);
    return {pair(__byte_perm(codes, high, 0x4140)), pair(__byte_perm(codes, high, 0x4342))};
  }
};

// With 128 added, the low bits of 1024 + 128 + code.
template <>
struct WideCodes<fp16, i8> {
  static __device__ __forceinline__ uint2 of(u32 codes) {
    const u32 raised = codes ^ 0x80808080u, zero = 0x64806480u;  // 1152
    const u32 high = word_in_register(0x64646464u);
    return {subtract_pairs<fp16>(__byte_perm(raised, high, 0x4140), zero),
            subtract_pairs<fp16>(__byte_perm(raised, high, 0x4342), zero)};
  }
};

template <>
struct WideCodes<fp16, e4m3> {
  static __device__ __forceinline__ u32 pair(u32 codes) {
    const __half2_raw x = __nv_cvt_fp8x2_to_halfraw2(static_cast<u16>(codes), __NV_E4M3);
    return x.x | static_cast<u32>(x.y) << 16;
  }
  static __device__ __forceinline__ uint2 of(u32 codes) {
    return {pair(codes & 0xffff), pair(codes >> 16)};
  }
};

// Exponent and mantissa, moved to where bf16 has them, are a number 2^120 times smaller, subnormal
// or not. The sign of the lower code stands where a shift brings it to its place from. NaN, 0x7f,
// would be 480: who has one of it takes the way over fp16.
template <>
struct WideCodes<bf16, e4m3> {
  static __device__ __forceinline__ u32 pair(u32 codes) {  // bits 8..14, 19 and 24..31
    const u32 bits = static_cast<u32>(static_cast<int>(codes) >> 4) & 0x87f087f0u, by = 0x7b807b80u;
    const auto x = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits),
                           reinterpret_cast<const __nv_bfloat162&>(by));
    return reinterpret_cast<const u32&>(x);
  }
  static __device__ __forceinline__ uint2 of(u32 codes) {
    return {pair(permute_bytes<0x1804>(codes, 0)), pair(permute_bytes<0x3a24>(codes, 0))};
  }
  static __device__ __forceinline__ u32 through_fp16(u32 codes) {
    const float2 x = unpack2<fp16>(WideCodes<fp16, e4m3>::pair(codes));
    return pack2<bf16>(x.x, x.y);
  }
};

// Not 0 in its eighth bits where one of four codes is NaN.
__device__ __forceinline__ u32 nan_of_e4m3(u32 codes) {
  return (codes & 0x7f7f7f7fu) + 0x01010101u;
}

// The numbers of sixteen codes.
template <typename T, typename S>
__device__ __forceinline__ void widen_chunk(uint4& first, uint4& second, const uint4& codes) {
  using Wide = WideCodes<T, S>;
  if constexpr (SAME_TYPE<T, bf16> && SAME_TYPE<S, e4m3>) {
    const u32 nan =
        nan_of_e4m3(codes.x) | nan_of_e4m3(codes.y) | nan_of_e4m3(codes.z) | nan_of_e4m3(codes.w);
    if ((nan & 0x80808080u) != 0) {
      const auto pair = [](u32 two) { return Wide::through_fp16(two & 0xffff); };
      first = make_uint4(pair(codes.x), pair(codes.x >> 16), pair(codes.y), pair(codes.y >> 16));
      second = make_uint4(pair(codes.z), pair(codes.z >> 16), pair(codes.w), pair(codes.w >> 16));
      return;
    }
  }
  const uint2 a = Wide::of(codes.x), b = Wide::of(codes.y);
  const uint2 c = Wide::of(codes.z), d = Wide::of(codes.w);
  first = make_uint4(a.x, a.y, b.x, b.y), second = make_uint4(c.x, c.y, d.x, d.y);
}

// Who has what of a tile: four threads a panel's 64 codes of a row, the next four those of another
// row, then come other panels, as far as the next rows of a thread are whole eights further: then all
// of its addresses are one and constants.
template <typename Tile, int THREADS>
struct WideningRows {
  static constexpr bool BESIDE = THREADS % (32 * Tile::PANELS) == 0;
  static constexpr int PANELS = BESIDE ? Tile::PANELS : 1;  // of which threads have their own
  static constexpr int STEP = THREADS / (4 * PANELS);
  static_assert(STEP % 8 == 0, "the swizzle repeats every eight rows");
  int row, panel, column;  // the first row; the panel; which of the four

  __device__ __forceinline__ explicit WideningRows(int thread)
      : panel(thread / 8 % PANELS), column(thread % 4) {
    const int i = thread / (8 * PANELS) * 2 + thread / 4 % 2;
    row = (i & ~7) + (i % 8 / 2 ^ i % 2 * 5);  // each of eight once
  }
};

// A tile of codes -> Tile, of which the first `rows` rows are wanted and the others become zeros.
// AT_ONCE: chunks that a thread has under way.
template <typename T, typename S, typename Tile, typename Codes, int THREADS, int AT_ONCE,
          bool WHOLE>
__device__ __forceinline__ void widen_rows(u32 to, u32 from, int rows, int thread) {
  using Rows = WideningRows<Tile, THREADS>;
  const Rows own(thread);
  to += Tile::offset(own.row, 2 * own.column);
#pragma unroll 1
  for (int panel = own.panel; panel < Tile::PANELS; panel += Rows::PANELS) {
    u32 source = from + Codes::offset(own.row, panel * 4 + own.column);
    u32 target = to + panel * Tile::PANEL_BYTES;
#pragma unroll 1
    for (int row = own.row; row < Tile::ROWS; row += AT_ONCE * Rows::STEP) {
      uint4 codes[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        codes[i] = make_uint4(0, 0, 0, 0);
        if (row + i * Rows::STEP < (WHOLE ? Tile::ROWS : rows))
          codes[i] = load_shared_chunk(source + i * Rows::STEP * Codes::ROW_BYTES);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (i > 0 && row + i * Rows::STEP >= Tile::ROWS) break;
        uint4 low, high;
        widen_chunk<T, S>(low, high, codes[i]);
        store_shared_chunk(target + i * Rows::STEP * Tile::ROW_BYTES, low);
        store_shared_chunk((target ^ 16) + i * Rows::STEP * Tile::ROW_BYTES, high);
      }
      source += AT_ONCE * Rows::STEP * Codes::ROW_BYTES;
      target += AT_ONCE * Rows::STEP * Tile::ROW_BYTES;
    }
  }
}
template <typename T, typename S, typename Tile, typename Codes, int THREADS, int AT_ONCE>
__device__ __forceinline__ void widen_tile(u32 to, u32 from, int rows, int thread) {
  if (rows >= Tile::ROWS)
    widen_rows<T, S, Tile, Codes, THREADS, AT_ONCE, true>(to, from, rows, thread);
  else
    widen_rows<T, S, Tile, Codes, THREADS, AT_ONCE, false>(to, from, rows, thread);
  proxy_fence();
  __syncwarp();
}

// Codes S in pages, which become T. GROUPS: warpgroups of the block that do nothing else, behind the
// consumers; all warps of the producer but one help. AT_ONCE: chunks that a thread has under way.
template <typename Rings, typename T, typename S, int GROUPS, int AT_ONCE>
struct PageCodes {
  using KTile = typename Rings::KTile;
  using VTile = typename Rings::VTile;
  // That make K and V: in the producer's warpgroup, and in all. Six, not seven: see WideningRows.
  static constexpr int HELPERS = GROUPS > 0 ? 2 : 3;
  static constexpr int WARPS = HELPERS + 4 * GROUPS, THREADS = WARPS * WARP_SIZE;
  using KCodes = ByteTile<KTile::ROWS, KTile::COLUMNS>;
  using VCodes = ByteTile<VTile::ROWS, VTile::COLUMNS>;
  using Place = RingPlace<Rings::CODE_STAGES>;
  const Barriers<Rings::STAGES>& barriers;
  u32 shared;  // where the rings are

  // Asks for a tile. By a whole warp.
  template <typename Tile, typename Range>
  __device__ __forceinline__ void load(const TensorMap& map, Place& place, const Range& range,
                                       int tile, int head) const {
    const auto box = range.pages.template box<Tile::ROWS>(tile);
    mbarrier_wait(barriers.codes_empty(place.stage), place.parity ^ 1);
    range.pages.template load<Tile>(shared + Rings::CODES + place.stage * Rings::CODE_STAGE, map,
                                    barriers.codes_full(place.stage), box, head);
    place.advance();
  }

  // Makes K and V of all tiles of what is announced: next() is that, span_of(next()) its keys.
  template <typename Next, typename SpanOf>
  __device__ __forceinline__ void widen(int batch, int thread, const Next& next,
                                        const SpanOf& span_of) const {
    RingPlace<Rings::K_STAGES> k_place;
    RingPlace<Rings::V_STAGES> v_place;
    Place codes;
    const bool arrives = threadIdx.x % WARP_SIZE == 0;
    const auto take = [&](auto tile, auto bytes, u32 to, u32 full, int rows) {
      mbarrier_wait(barriers.codes_full(codes.stage), codes.parity);
      widen_tile<T, S, decltype(tile), decltype(bytes), THREADS, AT_ONCE>(
          to, shared + Rings::CODES + codes.stage * Rings::CODE_STAGE, rows, thread);
      if (arrives) mbarrier_arrive(full);
      release(codes, barriers.codes_empty(codes.stage), arrives);
    };
    const auto take_k = [&] {
      const int stage = k_place.stage;
      mbarrier_wait(barriers.k_empty(stage), k_place.parity ^ 1);
      take(KTile(), KCodes(), shared + Rings::K + stage * Rings::K_STAGE, barriers.k_full(stage),
           KTile::ROWS);
      k_place.advance();
    };
    while (true) {
      const auto piece = next();
      if (piece.batch >= batch) break;
      const auto range = span_of(piece);
      take_k();
      for (int tile = range.end - 1; tile >= range.first; --tile) {
        if (tile > range.first) take_k();
        const int stage = v_place.stage;
        mbarrier_wait(barriers.v_empty(stage), v_place.parity ^ 1);
        take(VTile(), VCodes(), shared + Rings::V + stage * Rings::V_STAGE, barriers.v_full(stage),
             range.seqlen_k - tile * VTile::ROWS);
        v_place.advance();
      }
    }
    // Consumers multiply one K more before they know that there was none: zeros.
    mbarrier_wait(barriers.k_empty(k_place.stage), k_place.parity ^ 1);
    widen_tile<T, S, KTile, KCodes, THREADS, AT_ONCE>(
        shared + Rings::K + k_place.stage * Rings::K_STAGE, 0, 0, thread);
    if (arrives) mbarrier_arrive(barriers.k_full(k_place.stage));
  }
};
