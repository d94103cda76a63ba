/* A product of a decode step of up to 64 sequences, on sm_90 (sm_90a):

     out = activation(x weight^T + bias) [* up] + residual                                   [m, n]
     or, HEAD: out is fp32, and of each tile and row its largest column comes, too
     or, APPEND: the heads of q, k and v = x weight^T + bias; those of q and k turned by RoPE; q to
     out_q, k and v to the tokens' slots in a paged KV cache (step/qkv_append.cuh)

   A step is a chain of such products, each too short for memory to become busy: what counts is
   what lies between them. So a block's weight comes through a ring of its own, which TMA fills
   before the previous kernel is over (PDL): the weight is not what work still under way writes. A
   block takes half of an SM's shared memory at most, so that blocks of two kernels have room beside
   each other, and the next kernel's weight comes while this one's last sums are on their way.

   A norm has no launch of its own. Who makes the residual stream (LEAVES) also leaves `scaled`, it
   times the norm's weight, and of each tile and row the sum of squares; who multiplies `scaled`
   (NORM) gives each row of sums its rstd, out of these in their order. LayerNorm takes more, with
   weight g and bias b of the norm:

     norm(x) weight^T = rstd ((x g) weight^T - mean (g weight^T)) + b weight^T

   so a tile leaves two moments, and g and b are multiplied as rows behind those of x.

   A block has ROWS of the weight (with GATE half of them gate, half up), all rows of x, and a part
   of k: the operands are swapped, so that wgmma's 64 rows are the weight's. Where CLUSTER blocks
   share k, each has some rows of out, to which the others send it their sums. The same bits each
   time. Nothing waits for a way to memory that could have begun earlier: the tensor maps, bias, norm
   weight and rows' factors are not asked for where they are needed. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "ptx/elect.cuh"
#include "ptx/pdl.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_products.cuh"
#include "gemm/activation.cuh"
#include "step/stream_rings.cuh"
#include "step/stream_sums.cuh"
//% if append
#include "step/qkv_append.cuh"
//% endif
//% if head
#include "step/largest.cuh"
//% endif

using elem_t = ${dtype};
//% if head
using out_t = float;
//% else
using out_t = ${dtype};
//% endif
using Activation = ${activation};
constexpr bool GATE = ${gate}, HEAD = ${head}, APPEND = ${append}, ROPE = ${rope};
constexpr bool NORM = ${norm != "none"}, CENTERED = ${norm == "layer"};           // of x
constexpr bool LEAVES = ${leaves != "none"}, LEAVES_MEAN = ${leaves == "layer"};  // for out's
constexpr int TOKENS = ${tokens};    // rows of x, padded, and what stands behind them
constexpr int ROWS = ${rows};        // of the weight in a tile; with APPEND a head
constexpr int CLUSTER = ${cluster};  // blocks that share the k of a tile
constexpr int W_STAGES = ${weight_stages}, X_STAGES = ${x_stages};
constexpr int GUARD = ${guard};  // bytes between arrays: 0 except where memory is checked
constexpr int CONSUMERS = 4, WARPS = CONSUMERS + (NORM ? 3 : 2);  // warps that multiply; all
constexpr int THREADS = 32 * WARPS;
constexpr int HALVES = GATE ? 2 : 1, OUTPUTS = ROWS / HALVES;
constexpr bool PAIRS = GATE || APPEND;  // two rows of the weight make one of out, or a pair
constexpr int QUADS = (APPEND ? ROWS / 2 : OUTPUTS) / 4;  // threads that share a row of out
constexpr int PASS = 32 * CONSUMERS / QUADS;
static_assert(ROWS % 64 == 0 && TOKENS % 16 == 0, "wgmma's rows and columns");
static_assert(WARP_SIZE % QUADS == 0, "a row's threads are of one warp");
static_assert(GATE + HEAD + APPEND + LEAVES <= 1, "one way out");

using Sums = StreamSums<ROWS, TOKENS, CLUSTER, CENTERED>;
using Rings = StreamRings<ROWS, TOKENS, W_STAGES, X_STAGES, Sums::PARTS_BYTES, GUARD>;
static_assert(Sums::BYTES <= W_STAGES * Rings::W_STAGE, "sums lie where the weight was");

//% if cluster > 1
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 2)
    //% else
    extern "C" __global__ void __launch_bounds__(THREADS, 2)
    //% endif
    step_stream(const __grid_constant__ TensorMap weight_map,  // [n, k], with GATE [2 n, k]
                const __grid_constant__ TensorMap x_map,       // [m, k], boxes of x_rows
                //% if norm == "layer"
                const __grid_constant__ TensorMap norm_map,  // [1, k], the norm's weight
                const __grid_constant__ TensorMap norm_bias_map,
                //% endif
                const elem_t* __restrict__ bias,  // [n], with GATE [2 n], or null
                //% if norm != "none"
                const float* moments,  // [parts, m], with CENTERED [parts, m, 2], of x's rows
                //% endif
                //% if append
                const int* slot_mapping,          // [m]
                const int* positions,             // [m], of position_words words each
                const float* __restrict__ table,  // [table_rows, head_dim]
                elem_t* __restrict__ k_pages, elem_t* __restrict__ v_pages,
                elem_t* __restrict__ out_q,  // [m, heads_q, head_dim]
                //% else
                const elem_t* residual,  // [m, n], or null
                out_t* out,              // [m, n]
                //% endif
                //% if head
                u32* __restrict__ largest,  // [tiles, m, 2]: values, and columns
                //% endif
                //% if leaves != "none"
                const elem_t* __restrict__ norm_weight,  // [n]
                elem_t* __restrict__ scaled_out,         // [m, n]
                float* __restrict__ moments_out,         // [tiles, m], or [tiles, m, 2]
                //% endif
                //% if norm != "none"
                const int parts, const float eps,
                //% endif
                //% if append
                const int k_page_step, const int k_head_step, const int k_token_step,
                const int v_page_step, const int v_head_step, const int v_token_step,
                const u32 num_slots, const int page_log2, const int position_words,
                const int table_rows, const int heads_q, const int heads_kv, const int head_dim,
                //% else
                const i64 residual_stride, const i64 out_stride,
                //% endif
                const int m,       // 1..TOKENS
                const int x_rows,  // m rounded up to 8
                const int n, const int k) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  float* const factors = reinterpret_cast<float*>(shared_memory + Rings::FACTORS);
  float* const means = factors + TOKENS;
  const Rings rings{shared_address(shared_memory)};
  const int warp = __shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0);
  const int lane = threadIdx.x % WARP_SIZE;
  const int tile = blockIdx.x / CLUSTER, first = tile * OUTPUTS;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, steps = ceil_div(k, BLOCK_K);
  const int begin = rank * steps / CLUSTER, count = (rank + 1) * steps / CLUSTER - begin;
  const Sums sums{reinterpret_cast<float*>(shared_memory),
                  reinterpret_cast<float*>(shared_memory + Rings::PARTS), rank};
  float acc[ROWS / 64][TOKENS / 8][4];
  if ((warp == CONSUMERS || warp == CONSUMERS + 1) && elect_one()) {
    tma_prefetch(warp == CONSUMERS ? weight_map : x_map);
    //% if norm == "layer"
    if (warp > CONSUMERS) tma_prefetch(norm_map), tma_prefetch(norm_bias_map);
    //% endif
  }

  // 1. Barriers; where memory is checked, NaN in rows that x has not.
  if (threadIdx.x == 0) rings.begin(sums.bytes(m));
  if (GUARD > 0)
    for (int stage = 0; stage < X_STAGES; ++stage) Rings::X::mark(rings.x(stage), x_rows, TOKENS);
  __syncthreads();
  if (CLUSTER > 1) cluster_arrive_relaxed();  // others may send
  let_next_kernel();

  // What the thread's four columns of a row of out take beside the sums: what no kernel writes comes
  // before the wait, the rest of the first row under the products.
  const auto row_of = [&](int pass) {
    return (pass * PASS + static_cast<int>(threadIdx.x) / QUADS) * CLUSTER + rank;
  };
  const int quad = threadIdx.x % QUADS * 4, column = first + quad;
  const int apart = GATE ? n : ROWS / 2;  // to the columns beside these
  uint2 biases[2] = {};
  //% if leaves != "none"
  uint2 norm_weights = {};
  //% endif
  const auto load_constants = [&] {
    if (column >= n) return;
    if (bias != nullptr) biases[0] = load_eight_bytes(bias + column);
    if (PAIRS && bias != nullptr) biases[1] = load_eight_bytes(bias + column + apart);
    //% if leaves != "none"
    norm_weights = load_eight_bytes(norm_weight + column);
    //% endif
  };
  //% if append
  using Append = QkvAppend<elem_t, ROPE>;
  const Append append = {out_q,
                         k_pages,
                         v_pages,
                         slot_mapping,
                         positions,
                         table,
                         {k_page_step, k_head_step, k_token_step, num_slots, page_log2},
                         {v_page_step, v_head_step, v_token_step, num_slots, page_log2},
                         position_words,
                         table_rows,
                         heads_q,
                         heads_kv,
                         head_dim};
  float4 cosines = {}, sines = {};
  elem_t* target = nullptr;
  //% else
  uint2 added = {};
  //% endif
  const auto load_added = [&](int pass) {
    const int row = row_of(pass);
    if (row >= m || column >= n) return;
    //% if append
    target = append.place(row, tile);
    if (!append.turns(tile)) return;
    const float* const entry = append.entry(row);
    const float none = __int_as_float(0x7fffffff);
    cosines = entry == nullptr ? make_float4(none, none, none, none) : load_floats(entry + quad);
    if (entry != nullptr) sines = load_floats(entry + ROWS / 2 + quad);
    //% else
    if (residual != nullptr) added = load_eight_bytes(residual + row * residual_stride + column);
    //% endif
  };

  // 2. The weight at once; x behind the previous kernel; products, and what comes to the first row.
  if (warp == CONSUMERS) {
    rings.fetch_weight<HALVES>(weight_map, begin, count, first, n);
  } else {
    if (warp < CONSUMERS) load_constants();
    after_previous_kernel(false);
    if (warp == CONSUMERS + 1) {
      rings.fetch_x<CENTERED ? 2 : 0>(
          x_map, begin, count, x_rows, [&](u32 to, u32 barrier, int column) {
            //% if norm == "layer"
            tma_load(to, norm_map, barrier, column, 0, 0, 0);
            tma_load(to + 8 * BLOCK_K * 2, norm_bias_map, barrier, column, 0, 0, 0);
            //% endif
          });
    }
    if (warp == WARPS - 1) {
      //% if norm != "none"
      row_factors<CENTERED>(factors, means, moments, parts, m, k, eps, lane);
      //% endif
    } else if (warp < CONSUMERS) {
      load_added(0);
      rings.multiply<elem_t>(acc, count, lane);
    }
  }
  __syncwarp();
  __syncthreads();

  // 3. All parts of k.
  if (warp < CONSUMERS) sums.store(acc, warp, lane);
  __syncthreads();
  if (CLUSTER > 1) cluster_wait();
  if (warp >= CONSUMERS) return;
  if (CLUSTER > 1) {
    sums.send<32 * CONSUMERS>(rings.parts_full(), m, x_rows, threadIdx.x);
    mbarrier_wait(rings.parts_full(), 0);
  }

  // 4. What becomes of them; a warp has whole rows.
  const int passes = ceil_div(ceil_div(m, CLUSTER), PASS);
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const int row = row_of(pass);
    const bool there = row < m && column < n;  // of a head perhaps not all four
    const float factor = NORM && there ? factors[row] : 1.f;
    const float shift = CENTERED && there ? -means[row] : 0.f;
    const auto sum_of = [&](int place, uint2 of_bias) {
      float4 z = sums.of(row, place);
      if (CENTERED) add_four(z, sums.behind(0, x_rows, place), shift);
      z.x *= factor, z.y *= factor, z.z *= factor, z.w *= factor;
      if (CENTERED) add_four(z, sums.behind(1, x_rows, place));
      if (bias != nullptr) add_four(z, unpack_four<elem_t>(of_bias));
      return z;
    };
    if (pass > 0) load_added(pass);
    float4 y = {}, beside = {};
    if (there) {
      y = sum_of(quad, biases[0]);
      if (PAIRS) beside = sum_of(quad + (GATE ? OUTPUTS : ROWS / 2), biases[1]);
    }
    //% if append
    if (!there || target == nullptr) continue;
    if (append.turns(tile)) turn_four(y, beside, cosines, sines);
    store_four(target + quad, y, 4);
    store_four(target + quad + ROWS / 2, beside, 4);
    //% else
    if (there) {
      y.x = Activation::value(y.x), y.y = Activation::value(y.y);
      y.z = Activation::value(y.z), y.w = Activation::value(y.w);
      if (GATE) y.x *= beside.x, y.y *= beside.y, y.z *= beside.z, y.w *= beside.w;
      if (residual != nullptr) add_four(y, unpack_four<elem_t>(added));
      store_four(out + row * out_stride + column, y, HEAD ? n - column : 4);
    }
    //% endif
    //% if head
    Largest best;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (there && column + i < n) best.see(reinterpret_cast<const float*>(&y)[i], column + i);
    best = best.of_lanes<QUADS>();
    if (row < m && quad == 0) best.store(largest, tile * m + row);
    //% endif
    //% if leaves != "none"
    const uint2 bits = pack_four<elem_t>(y);
    const float2 low = unpack2<elem_t>(bits.x), high = unpack2<elem_t>(bits.y);
    y = make_float4(low.x, low.y, high.x, high.y);
    leave_moments<LEAVES_MEAN, OUTPUTS>(moments_out + (tile * m + row) * (LEAVES_MEAN ? 2 : 1), y,
                                        row < m && quad == 0);
    if (!there) continue;
    const float4 w = unpack_four<elem_t>(norm_weights);
    *reinterpret_cast<uint2*>(scaled_out + static_cast<i64>(row) * n + column) =
        pack_four<elem_t>(make_float4(y.x * w.x, y.y * w.y, y.z * w.z, y.w * w.w));
    //% endif
  }
}
