// Codes of a weight as operands of mma.sync: whole numbers in 16 bits, exact; scales come to the sums.
//
// Rows of the weight are the side of sixteen (A of ptx/mma.cuh), tokens that of eight. Of a span of k
// lane (g, t) has the 16 bytes of codes t of row g, CHUNK_K numbers; step s of a span takes four of
// them as k = 2t, 2t + 1, 2t + 8, 2t + 9. x is loaded in the same order, so that no code moves:
//
//   k of a span    int4   lane t has 32t ... 32t + 31, step s of 8 takes 32t + 4s ... + 3
//                  int8   lane t has 16t ... 16t + 15, step s of 4 takes 16t + 4s ... + 3
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

// A pair of T's numbers that are BASE + 8 in bits, where T counts by ones: with the low four bits of
// a code in the place of that 8's, and its sign turned, they are BASE + 8 + code.
template <typename T>
constexpr u32 RAISED = 0x64086408;  // fp16: 1032
template <>
constexpr u32 RAISED<bf16> = 0x43084308;  // 136

__device__ __forceinline__ u32 word_of(const uint4& chunk, int i) {
  return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

template <typename T>
struct Int4Weights {
  static constexpr int BITS = 4, CHUNK_K = 32, SPAN = 4 * CHUNK_K, STEPS = CHUNK_K / 4;

  // Four numbers of a step, in pairs.
  static __device__ __forceinline__ void pairs(u32 (&p)[2], const uint4& codes, int step) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      p[j] = subtract_pairs<T>(nibbles(codes, step, j, RAISED<T>), RAISED<T>);
  }
  // bf16: the first pair is 136 + code, the second one code - 135, as BASES have it of codes 0:
  // products with those are to be subtracted from sums. Of two signs, so that sums stay small.
  static constexpr bool RAISES = SAME_TYPE<T, bf16>;
  static constexpr u32 BASES[2] = {0x43084308, 0xc307c307};
  static __device__ __forceinline__ void raised(u32 (&p)[2], const uint4& codes, int step) {
#pragma unroll
    for (int j = 0; j < 2; ++j) p[j] = nibbles(codes, step, j, j == 0 ? BASES[0] : BASES[1]);
  }

 private:
  static __device__ __forceinline__ u32 nibbles(const uint4& codes, int step, int j, u32 turned) {
    return and_xor(word_of(codes, step / 2) >> (step % 2 * 8 + j * 4), 0x000f000f, turned);
  }
};

template <typename T>
struct Int8Weights {
  static constexpr int BITS = 8, CHUNK_K = 16, SPAN = 4 * CHUNK_K, STEPS = CHUNK_K / 4;

  static constexpr bool RAISES = false;
  static constexpr u32 BASES[2] = {};
  // fp16: 1024 + 128 + code, out of two bytes. bf16, which has no room for that, by way of fp32:
  // 2^23 + 128 + code.                                                          PTX ISA: prmt.b32
  static __device__ __forceinline__ void pairs(u32 (&p)[2], const uint4& codes, int step) {
    const u32 raised = word_of(codes, step) ^ 0x80808080;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (SAME_TYPE<T, fp16>) {
        const u32 both = __byte_perm(raised, 0x64646464, j == 0 ? 0x4140 : 0x4342);
        p[j] = subtract_pairs<T>(both, 0x64806480);
      } else {
        const float low = __uint_as_float(__byte_perm(raised, 0x4b000000, 0x7650 + 2 * j));
        const float high = __uint_as_float(__byte_perm(raised, 0x4b000000, 0x7651 + 2 * j));
        p[j] = pack2<T>(low - 8388736.f, high - 8388736.f);
      }
    }
  }
};

// A lane's codes of rows g (low) and g + 8 (high) in a step, as A; as numbers, or still raised.
template <typename Weights, bool STILL_RAISED = false>
__device__ __forceinline__ void weight_fragment(u32 (&a)[4], const uint4& low, const uint4& high,
                                                int step) {
  const auto pairs = [&](u32(&p)[2], const uint4& codes) {
    if constexpr (STILL_RAISED)
      Weights::raised(p, codes, step);
    else
      Weights::pairs(p, codes, step);
  };
  u32 p[2];
  pairs(p, low);
  a[0] = p[0], a[2] = p[1];
  pairs(p, high);
  a[1] = p[0], a[3] = p[1];
}

// A lane's numbers of a row of x, in so many groups of 128 from `first` on, in the order of its codes;
// zeros from k on, and where the row is not `there`.
template <typename Weights, typename T, int GROUPS>
__device__ __forceinline__ void load_token(uint4 (&x)[GROUPS][4], const T* row, int first, int k,
                                           bool there) {
  constexpr int EACH = Weights::CHUNK_K / 8;  // accesses of a span
#pragma unroll
  for (int i = 0; i < GROUPS * 4; ++i) {
    const int chunk = i % 4;
    const int at = (first + i / 4) * 128 + chunk / EACH * Weights::SPAN +
                   threadIdx.x % 4 * Weights::CHUNK_K + chunk % EACH * 8;
    x[i / 4][chunk] = make_uint4(0, 0, 0, 0);
    load_chunk_if(x[i / 4][chunk], row + at, there && at < k);
  }
}
