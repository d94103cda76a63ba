// The way out of a product whose operands are swapped (gemm/ragged.cu): a warp has the sums of 16 rows
// of the weight, which are columns of out, and of a tile's rows of x. Its blocks of 8 by 8 go to shared
// memory transposed, 32 rows of out at a time, and from there to memory as whole lines:
//
//   staged row     chunks of 8 columns, the warps' beside each other, swizzled
//     without GATE   w0 w0 w1 w1 w2 w2 w3 w3     sums 0 and 1 of a block: the first 8 columns, 2, 3: the next
//     with GATE      w0 w1 w2 w3                 sums 0 and 1: gate of 8 columns, 2, 3: up of the same
//       what is kept   w0 w1 w2 w3 w0 w1 w2 w3   gate, up
//
// Stored from registers a warp's 16 or 32 bytes of a row take 13 us of a tile's 128 x 136.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/stmatrix.cuh"
#include "gemm/pairs.cuh"
#include "gemm/sm90/ragged_products.cuh"

constexpr int STAGED_ROWS = 32, STAGED_BYTES = STAGED_ROWS * 128;  // of a consumer
constexpr int CONSUMER_THREADS = 128;

// How the columns of a consumer's 64 rows of the weight lie in a staged row and in an array.
// BOTH: a warp has two chunks; APART: they are of two halves of the array's columns.
template <bool BOTH, bool APART>
struct RaggedColumns {
  static constexpr int CHUNKS = BOTH ? 8 : 4;
  static constexpr int COLUMNS = BOTH && !APART ? 64 : 32;  // of one half
  u32 box;
  int barrier;

  __device__ __forceinline__ u32 at(int row, int chunk) const {
    // Of half a row the other half is the next one's: eight lanes read two rows at once.
    const int place = BOTH ? chunk ^ (row & 7) : (chunk | (row & 1) << 2) ^ (row >> 1 & 3);
    return box + row * 128 + (place << 4);
  }

  // Words of four blocks of a warp, to rows 0 to 31.
  __device__ __forceinline__ void fill(const u32 (&low)[4], const u32 (&high)[4], int warp,
                                       int lane) const {
    stmatrix_x4_trans(at(lane, BOTH && !APART ? 2 * warp : warp), low);
    if (BOTH) stmatrix_x4_trans(at(lane, APART ? 4 + warp : 2 * warp + 1), high);
  }

  // Staged rows to `target`, of which `rows` are there, and `columns`, by eights. `half`: from the
  // first half of the array's columns to the second. By all of a consumer.
  template <typename Out>
  __device__ __forceinline__ void store(Out* target, i64 stride, int half, int rows, int columns,
                                        int thread) const {
    named_barrier_wait_aligned<CONSUMER_THREADS>(barrier);
#pragma unroll
    for (int i = 0; i < STAGED_ROWS * CHUNKS / CONSUMER_THREADS; ++i) {
      const int number = i * CONSUMER_THREADS + thread, row = number / CHUNKS;
      const int chunk = number % CHUNKS, column = chunk * 8 % COLUMNS;
      if (row < rows && column < columns)
        store_global_chunk(target + row * stride + (chunk * 8 < COLUMNS ? column : half + column),
                           load_shared_chunk(at(row, chunk)));
    }
    named_barrier_wait_aligned<CONSUMER_THREADS>(barrier);
  }
};

// What sums of a part are multiplied with and what is added to them: of a lane's outputs, of sums 0
// and 1, and of 2 and 3. Scales of rows of x are in shared memory, from the part's first row on.
template <bool CODES>
struct RaggedOutputs {
  float2 bias, scales;
  u32 x_scales;

  __device__ __forceinline__ void apply(float2& a, float2& b, int row) const {
    if (!CODES) return;
    const float2 by = load_shared_pair(x_scales + row * 4);
    a = {a.x * (by.x * scales.x), a.y * (by.y * scales.x)};
    b = {b.x * (by.x * scales.y), b.y * (by.y * scales.y)};
  }
};

// Where a part's rows and columns begin in an array, and how many there are of them.
template <typename Out>
struct RaggedPart {
  Out *out, *pre;
  i64 out_stride, pre_stride;
  int half, rows, columns;  // half: of pre, from gate to up
};

// PRE: what the activation is of is stored, too. By all of a consumer.
template <bool CODES, bool PRE, typename Pairs, typename Out>
__device__ __forceinline__ void store_ragged(const float (&acc)[BLOCKS_OF_8][4],
                                             const Pairs& epilogue, const RaggedOutputs<CODES>& of,
                                             const RaggedPart<Out>& to, u32 box, int barrier) {
  constexpr bool GATE = Pairs::GATE;
  const RaggedColumns<!GATE, false> made{box, barrier};
  const RaggedColumns<true, GATE> kept{box, barrier};
  const int thread = threadIdx.x % CONSUMER_THREADS, warp = thread / WARP_SIZE;
  const int lane = thread % WARP_SIZE;
  const float2 none = {0.f, 0.f}, first = {of.bias.x, of.bias.x}, second = {of.bias.y, of.bias.y};
#pragma unroll
  for (int i = 0; i < BLOCKS_OF_8; i += 4) {
    if (i * 8 >= to.rows) break;
    u32 low[4], high[4];
#pragma unroll
    for (int part = PRE ? 0 : 1; part < 2; ++part) {  // before and behind the activation
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 a = {acc[i + j][0], acc[i + j][1]}, b = {acc[i + j][2], acc[i + j][3]};
        of.apply(a, b, (i + j) * 8 + lane % 4 * 2);
        if (part == 0) {
          const float2 y = added(a, first), z = added(b, second);
          low[j] = pack2<Out>(y.x, y.y), high[j] = pack2<Out>(z.x, z.y);
        } else {
          const float2 y = epilogue.activated(a, first, b, second, 0, 0);
          low[j] = pack2<Out>(y.x, y.y);
          const float2 z = GATE ? none : epilogue.activated(b, second, none, none, 0, 0);
          high[j] = pack2<Out>(z.x, z.y);
        }
      }
      if (part == 0) {
        kept.fill(low, high, warp, lane);
        kept.store(to.pre + i * 8 * to.pre_stride, to.pre_stride, to.half, to.rows - i * 8,
                   to.columns, thread);
      } else {
        made.fill(low, high, warp, lane);
        made.store(to.out + i * 8 * to.out_stride, to.out_stride, 0, to.rows - i * 8, to.columns,
                   thread);
      }
    }
  }
}
