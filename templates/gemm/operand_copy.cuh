// An operand of a product on its way into shared memory: a thread's part of every tile, one tile
// after the other along k. Tiles are made of rows of 16-byte chunks, swizzled (tile/swizzle.cuh) or
// not (gemm/thread_product.cuh):
//
//   K_MAJOR   [outer][k], as x [m, k] and a weight [n, k] lie; "outer" counts rows of x or outputs
//   else      [k][outer], as their transposes lie
//
// A thread copies one chunk of 16 bytes from every ROWS_A_PASS-th row of each panel: consecutive
// threads read consecutive bytes. A copy costs a minimum and a multiply-add for its address.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/register_fence.cuh"
#include "tile/register_copy.cuh"
#include "tile/tile_fp32.cuh"

// Which output row i of a weight's tile is. With GATE a warp's RUN rows are as many of gate as of
// up: a thread then has both sums of an element.
//
//   RUN 64   rows    0-31: gate 0-31     32-63: up 0-31     64-95: gate 32-63     96-127: up 32-63
template <bool GATE, int RUN>
struct OutputOrder {
  static constexpr int HALF = RUN / 2;
  __device__ __forceinline__ static constexpr int output(int i) {
    return GATE ? i / RUN * HALF + i % HALF : i;
  }
  __device__ __forceinline__ static constexpr bool is_up(int i) { return GATE && i / HALF % 2; }
};
using RowsInOrder = OutputOrder<false, 2>;

// A chunk, of which the first `elements` (any number) exist; the others are zero.
template <bool ALIGNED, typename T>
__device__ __forceinline__ uint4 fetch_chunk(const T* source, int elements) {
  if constexpr (sizeof(T) == 2) {
    return load_global_chunk<ALIGNED>(source, elements);
  } else {
    const float4 x = load_global4<ALIGNED>(source, elements);
    return *reinterpret_cast<const uint4*>(&x);
  }
}

// ALIGNED: rows in memory start on 16-byte boundaries. Elements past the end of k become zero; past
// the end of the outer dimension it may be anything that is there. Row i of the tile (unless
// K_MAJOR, column i) is output, or row of x, Order::output(i).
template <typename T, typename Tile, bool K_MAJOR, int THREADS, bool ALIGNED, typename Order>
struct OperandCopy {
  static constexpr int CHUNK = 16 / sizeof(T);  // elements
  static constexpr int ROWS_A_PASS = THREADS / Tile::CHUNKS;
  static constexpr int COPIES = Tile::ROWS / ROWS_A_PASS * Tile::PANELS;  // of a thread
  static constexpr int BLOCK_K = K_MAJOR ? Tile::COLUMNS : Tile::ROWS;
  static constexpr int OUTER = K_MAJOR ? Tile::ROWS : Tile::COLUMNS;
  static_assert(Tile::ROWS % ROWS_A_PASS == 0, "every thread copies the same number of chunks");

  const T* source;  // of this thread's first chunk of the next tile
  const T* array;   // where there is something to read
  i64 up;           // elements from a gate's row to that of its up
  int stride;       // bytes from one row in memory to the next
  u32 place;        // of the first chunk, bytes into a tile
  int outer_left;   // from the first chunk on; may be negative
  bool whole;       // of the block: copies do not depend on where the outer dimension ends

  // The tiles that begin at `outer`, of `outers`.
  __device__ __forceinline__ OperandCopy(const T* operand, i64 row_stride, int outer, int outers)
      : array(operand), stride(static_cast<int>(row_stride * sizeof(T))) {
    const int row = threadIdx.x / Tile::CHUNKS, column = threadIdx.x % Tile::CHUNKS * CHUNK;
    const int first = K_MAJOR ? row : column, k = K_MAJOR ? column : row;
    const i64 mine = outer + Order::output(first);
    up = K_MAJOR ? outers * row_stride : outers;
    source = operand + (K_MAJOR ? mine * row_stride + k : k * row_stride + mine) +
             (Order::is_up(first) ? up : 0);
    place = Tile::offset(row, column / CHUNK);
    outer_left = outers - static_cast<int>(mine);
    whole = K_MAJOR || outers - outer >= Order::output(OUTER - 1) + 1;
  }

  // Copies have nothing to begin with.
  __device__ __forceinline__ void begin(int k) {}

  // The next tile -> the tile at `tile`, asynchronously. `k_left`: of k, from this tile on; SURE: all
  // of the tile is there. Elements of 16 bits: ALIGNED only.
  template <bool SURE = false>
  __device__ __forceinline__ void copy(u32 tile, int k_left) {
    if (SURE || (ALIGNED && whole && k_left >= BLOCK_K)) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) cp_async_16(tile + target(i), chunk(i));
    } else {
#pragma unroll 1
      for (int i = 0; i < COPIES; ++i) copy_some(tile + target(i), chunk(i), left_of(i, k_left));
    }
    advance();
  }

  // The next tile -> registers, and from there to the tile at `tile`.
  __device__ __forceinline__ void fetch(uint4 (&chunks)[COPIES], int k_left) {
    const bool all = whole && k_left >= BLOCK_K;
#pragma unroll
    for (int i = 0; i < COPIES; ++i)
      chunks[i] = fetch_chunk<ALIGNED>(chunk(i), all ? CHUNK : left_of(i, k_left));
    advance();
  }
  __device__ __forceinline__ void store(u32 tile, const uint4 (&chunks)[COPIES]) const {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) store_shared_chunk(tile + target(i), chunks[i]);
  }

 private:
  __device__ __forceinline__ static constexpr int row(int i) {
    return i / Tile::PANELS * ROWS_A_PASS;
  }
  __device__ __forceinline__ static constexpr int column(int i) {
    return i % Tile::PANELS * Tile::PANEL_COLUMNS;
  }
  __device__ __forceinline__ u32 target(int i) const {
    return place + row(i) * Tile::ROW_BYTES + i % Tile::PANELS * Tile::PANEL_BYTES;
  }

  // The first `elements` of a chunk, asynchronously.
  __device__ __forceinline__ void copy_some(u32 shared, const T* from, int elements) const {
    if constexpr (ALIGNED) {
      const int bytes = static_cast<int>(sizeof(T)) * max(min(elements, CHUNK), 0);
      cp_async_16(shared, elements > 0 ? from : array, bytes);
    } else {
#pragma unroll
      for (int e = 0; e < CHUNK; ++e)
        cp_async_4(shared + 4 * e, e < elements ? from + e : array, e < elements);
    }
  }

  // In place of a row past the end comes the last one: nobody looks at what becomes of it.
  __device__ __forceinline__ const T* chunk(int i) const {
    if (K_MAJOR)
      return rows_on(min(Order::output(row(i)), anew(outer_left) - 1)) + column(i) +
             (Order::is_up(row(i)) ? up : 0);
    return rows_on(row(i)) + Order::output(column(i)) + (Order::is_up(column(i)) ? up : 0);
  }

  // The stride is taken anew: products of it would stay in registers through the main loop.
  __device__ __forceinline__ const T* rows_on(int rows) const {
    const i64 bytes = static_cast<i64>(anew(stride)) * rows;
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(source) + bytes);
  }

  // Elements of chunk i that there are: any number, CHUNK or more where it is whole.
  __device__ __forceinline__ int left_of(int i, int k_left) const {
    const int first_k = K_MAJOR ? threadIdx.x % Tile::CHUNKS * CHUNK : threadIdx.x / Tile::CHUNKS;
    const int ks = k_left - first_k - (K_MAJOR ? column(i) : row(i));
    if (K_MAJOR) return ks;
    return ks > 0 ? outer_left - Order::output(column(i)) : 0;
  }

  __device__ __forceinline__ void advance() {
    source = K_MAJOR ? source + BLOCK_K : rows_on(BLOCK_K);
  }
};
