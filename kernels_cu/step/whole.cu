/* A decode step of up to eight sequences in one launch: from their tokens to logits, through all
   layers, with a paged KV cache.

   One block on a multiprocessor, all at the same time (cooperative). WARPS warps compute;
   others fetch the weights of the block's part of every product, in order, through a ring in shared
   memory (step/weight_ring.cuh). No weight depends on what is computed, so they run ahead of what the
   others wait for: memory stays busy meanwhile.

     phase          what a block computes                        what comes out
     embedding      a part of the tokens' rows                   stream [m, hidden], T
     per layer:
       qkv          norm of all rows; its outputs                qkv [m, heads, D], fp32
       heads        work items of attention (decode_heads.cuh)   attended [m, heads_q, D], T;
                                                                 k and v in the cache
       out          its outputs                                  stream, added to
       up           norm of all rows; its outputs                inner [m, mlp], T
       down         its outputs                                  stream, added to
     head           norm of all rows; its outputs                logits, fp32; the largest of each

   Numbers pass from phase to phase by words with tags (step/exchange.cuh): no barrier of the grid. Each
   block has outputs of every product, so when all of a later phase's have come everybody has read
   what may be written again. The sums of a product are added up over the warps in their order; so the
   bits are the same every time.

   Weights are found by `layers`: of each layer how many elements behind `weights` its arrays begin.
   For Hopper: on others it spills, and was not tried. */
#include "prelude.cuh"
#include "gemm/activation.cuh"
#include "ptx/named_barrier.cuh"
#include "step/decode_heads.cuh"
#include "step/gathered_rows.cuh"
#include "step/largest.cuh"
#include "step/layers.cuh"
#include "step/tile_sums.cuh"
#include "ptx/atomic.cuh"
#include "ptx/setmaxnreg.cuh"

using elem_t = ${dtype};
using Activation = ${activation};
constexpr bool CENTERED = ${centered};  // LayerNorm
constexpr bool ROPE = ${rope}, GATE = ${gate};
constexpr bool CODES = ${codes};                  // weights of layers' products are of int4
constexpr int D = ${head_dim}, GROUP = ${group};  // query heads of a key head
constexpr int OWN = ${own};                       // of those in a work item of attention
constexpr int MOST = ${most};                     // rows there is room for
constexpr int WARPS = ${warps};
constexpr int COLUMNS = ${columns};  // of a weight in a stage of the ring
constexpr int STAGES = ${stages}, FLIGHT = ${flight};
constexpr int ROOM = ${room} << 10;    // bytes of shared memory for rows and what is beside them
constexpr int ASIDE = ${aside} << 10;  // of that for the table of layers and a norm's weights

constexpr int THREADS = 32 * WARPS;  // that compute
// Warps that compute want more registers for several query heads; they move by warpgroups, so there are
// two warps more beside those that fetch.
constexpr bool MOVES = OWN > 1;
constexpr int OTHERS = MOVES ? 128 : 64;  // threads
constexpr int FEWER = 56, MORE = 224;     // registers of one of those, and of one that computes
static_assert(!MOVES || THREADS * MORE + OTHERS * FEWER <=
                            registers_at_start(THREADS + OTHERS) * (THREADS + OTHERS),
              "who asks for more than there are waits for ever");

struct Meet {
  __device__ __forceinline__ void operator()() const { named_barrier_wait_aligned<THREADS>(1); }
};
// Codes are multiplied with rows of digits where there are few, since every block makes them of all
// rows; numbers that have to be normalised before they are rounded, and rows of a LayerNorm, stay numbers.
constexpr bool DIGITS = CODES && MOST <= 2 && !CENTERED && SAME_TYPE<elem_t, bf16>;
using Ring = WeightRing<elem_t, COLUMNS, STAGES, FLIGHT, WARPS, CODES, DIGITS>;
constexpr int TAKEN = MOVES || MOST < 4 ? 8 : 4;  // as registers permit
using Rows = GatheredRows<elem_t, WARPS, CENTERED, DIGITS, MOST, TAKEN, Meet>;
// Keys of a group of lanes that are under way.
constexpr int DEPTH = OWN > 1 ? 3 : 5;
using Heads = DecodeHeads<elem_t, D, GROUP, OWN, WARPS, DEPTH, ROPE>;
static_assert(MOST <= 8, "columns of a product of tensor cores");
static_assert(sizeof(typename Heads::Shared) <= ROOM - ASIDE, "attention has its room");

struct DecodeModel {
  i64 plane;  // elements of a layer's keys, as many as of its values
  int m;      // 1..MOST
  int layers, hidden, mlp, vocabulary, heads_q, heads_kv;
  int splits;  // work items of a sequence and OWN query heads
  int page_step, head_step, token_step, page_log2, max_sequences, max_pages, table_rows;
  int logits_stride;
  int advance;     // 0: nothing; positions become the next; 2: tokens the largest, too
  int head_coded;  // the head is of int4, too
  int qkv, partials, stream, attended, inner, largest;  // words of `exchange` before these
  float eps, scale;
};

// What passes from phase to phase: words with tags.
struct Between {
  u32* const exchange;
  const DecodeModel& model;
  __device__ __forceinline__ u64* qkv() const { return pairs(model.qkv); }
  __device__ __forceinline__ u64* partials() const { return pairs(model.partials); }
  __device__ __forceinline__ u32* stream() const { return exchange + model.stream; }
  __device__ __forceinline__ u32* attended() const { return exchange + model.attended; }
  __device__ __forceinline__ u32* inner() const { return exchange + model.inner; }
  // Without tags.
  __device__ __forceinline__ u32* largest() const { return exchange + model.largest; }

 private:
  __device__ __forceinline__ u64* pairs(int first) const {
    return reinterpret_cast<u64*>(exchange + first);
  }
};

using Sums = TileSums<elem_t, Ring, WARPS, MOST, Rows::EXTRA, Meet>;
struct Wanted {  // of an output, as loaded: to convert is to wait
  elem_t x, y;   // biases
  u32 word;      // of the stream
};

__device__ __forceinline__ elem_t bias_at(const elem_t* bias, int column) {
  return bias == nullptr ? elem_t(0.f) : bias[column];
}

// Tokens' rows of the embedding, shared out over the grid.
__device__ __forceinline__ void embed(u32* stream, u32 tag, const i64* tokens, const int* positions,
                                      const elem_t* embedding, const elem_t* position_embedding,
                                      int m, int hidden) {
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < m * hidden; i += gridDim.x * THREADS) {
    const int row = i / hidden, column = i % hidden;
    elem_t x = embedding[tokens[row] * hidden + column];
    if (position_embedding != nullptr)
      x = static_cast<elem_t>(
          static_cast<float>(x) +
          static_cast<float>(
              position_embedding[static_cast<i64>(positions[row]) * hidden + column]));
    store_word(stream + i, tagged(x, tag));
  }
}

// A sequence has one token more, where there was room for it.
__device__ __forceinline__ void count_token(const DecodeState& state, int* lengths, int i) {
  const int row = state.rows[i];
  if (row < 0 || row >= state.max_sequences) return;
  const int length = lengths[row];
  if (length < state.capacities[row]) lengths[row] = length + 1;
}

extern "C" __global__ void __launch_bounds__(THREADS + OTHERS, 1)
    step_whole(i64* tokens,                                    // [m]
               int* positions,                                 // [m]
               const int* active,                              // [m]: by which positions advance
               const int* rows_of_cache,                       // [m]; below 0: no sequence
               const elem_t* __restrict__ embedding,           // [vocabulary, hidden]
               const elem_t* __restrict__ position_embedding,  // [positions, hidden], or null
               const elem_t* __restrict__ weights, const LayerWeights* __restrict__ table_of_layers,
               const TensorMap* __restrict__ maps,      // [products][1, of CODES 2 with scales]
               const elem_t* __restrict__ norm_weight,  // [hidden]
               const elem_t* __restrict__ norm_bias,    // [hidden], or null
               const float* __restrict__ table,         // [table_rows, D], or null
               const int* page_table,                   // [max_sequences, max_pages]
               const int* capacities,                   // [max_sequences]
               int* lengths,                            // [max_sequences]
               elem_t* pages,                           // [layers, 2, pages of the cache]
               float* __restrict__ logits,              // [m, vocabulary]
               i64* __restrict__ largest,               // [m]
               u32* exchange,                           // launches so far, and the words that pass
               u32* counters, const DecodeModel model) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) u64 barriers[Ring::BARRIERS];
  __shared__ typename Sums::Shared sums;
  __shared__ typename Rows::Shared statistics;
  __shared__ DecodeItem item;
  __shared__ float angles[D];
  const int m = model.m, hidden = model.hidden, dim_q = model.heads_q * D;
  const int heads = (model.heads_q + 2 * model.heads_kv) * D;
  Ring ring(shared_address(shared) + ROOM, shared_address(barriers));
  if (threadIdx.x == 0) ring.make_barriers();
  const auto calm = [&](bool so) {
    if (threadIdx.x == 0) ring.calm(so);
  };
  const DecodeState state = {
      rows_of_cache,       positions,
      page_table,          lengths,
      capacities,          {model.page_step, model.head_step, model.token_step, 0, model.page_log2},
      model.max_sequences, model.max_pages,
      model.table_rows,    model.heads_kv,
      model.splits,        model.scale};
  const int splits = model.splits, items = m * model.heads_kv * Heads::PARTS * splits;
  const u32 launches = load_word(exchange);
  const Between at = {exchange, model};
  const u32 first_tag = launches * model.layers + 1,
            first_stream = launches * (2 * model.layers + 1) + 1;
  const bool attends = blockIdx.x < items;
  const auto heads_of = [&](int n) {
    elem_t* const own = pages + 2 * n * model.plane;
    return DecodeLayer<elem_t>{at.qkv(),      at.attended(), at.partials(),
                               first_tag + n, own,           own + model.plane};
  };

  // What this block has of each product, and of attention.
  Product<elem_t>* const list = reinterpret_cast<Product<elem_t>*>(shared + ROOM - ASIDE);
  const int products = 4 * model.layers + 1;
  const auto inputs_of = [&](int kind) {
    return kind == DOWN ? model.mlp : kind == OUT ? dim_q : hidden;
  };
  for (int p = threadIdx.x; p < products; p += blockDim.x) {
    const int kind = p == products - 1 ? HEAD : p % 4;
    Product<elem_t> made = {nullptr, norm_weight, norm_bias, 0, 0, 0, model.head_coded != 0};
    if (kind != HEAD) made = product_of(weights, table_of_layers[p / 4], kind);
    share_out(made,
              kind == QKV    ? heads
              : kind == UP   ? model.mlp
              : kind == HEAD ? model.vocabulary
                             : hidden,
              p);
    list[p] = made;
    for (int i = 0; i < Ring::MAPS; ++i) tma_acquire(maps[p * Ring::MAPS + i]);
  }
  if (attends) {
    if (threadIdx.x == 0) item = DecodeItem::make(state, blockIdx.x, Heads::PARTS, OWN * D);
    if (ROPE)
      Heads::load_angles(angles, table, state, blockIdx.x / splits / Heads::PARTS / model.heads_kv);
  }
  __syncthreads();

  // The warps that fetch.
  if (threadIdx.x >= THREADS) {
    if constexpr (MOVES) fewer_registers<FEWER>();
    if (threadIdx.x >= THREADS + 32 * Ring::FETCHERS) return;
    const int half = (threadIdx.x - THREADS) / WARP_SIZE;
#pragma unroll 1
    for (int p = 0; p < products; ++p) {
      const Product<elem_t>& next = list[p];
      const int kind = p == products - 1 ? HEAD : p % 4;
      if (threadIdx.x < THREADS + 32) {
        prefetch_small(next.norm, hidden), prefetch_small(next.norm_bias, hidden);
        prefetch_small(next.bias, kind == QKV  ? heads
                                  : kind != UP ? hidden
                                               : (GATE + 1) * model.mlp);
        if (kind == OUT && attends)
          Heads::prefetch(state, heads_of(p / 4), DecodeSpan(item, splits, next.window));
      }
      typename Ring::Way way;
      way.enter(next, maps, p, half, model.mlp, inputs_of(kind), GATE && kind == UP);
      if (threadIdx.x % WARP_SIZE == 0) {
        for (int i = 0; i < Ring::MAPS && p + 1 < products; ++i)
          tma_prefetch(maps[(p + 1) * Ring::MAPS + i]);
        if (way.tiles > 0) ring.fetch(way);
      }
      __syncwarp();
    }
    return;
  }

  if constexpr (MOVES) more_registers<MORE>();
  const Meet meet;
  const u32 rows = shared_address(shared);
  const float of_hidden = 1.f / hidden;
  const u32 factors = rows + ROOM - ASIDE + round_up<int>(products * sizeof(Product<elem_t>), 16);
  const Rows taken(statistics, rows, factors, m);
  const Sums sums_of(ring, sums, m);
  Largest best[Sums::EACH];

  // 1. Embedding.
  embed(at.stream(), first_stream, tokens, positions, embedding, position_embedding, m, hidden);

#pragma unroll 1
  for (int p = 0; p < products; ++p) {
    const Product<elem_t>& own = list[p];
    const int kind = p == products - 1 ? HEAD : p % 4, k = inputs_of(kind);
    const bool halves = GATE && kind == UP;
    const u32 tag = first_tag + p / 4, stream_tag = first_stream + p / 2;

    // 2. Attention, whose work area is the rows'.
    if (kind == OUT && attends) {
      Heads::attend(*reinterpret_cast<typename Heads::Shared*>(shared), state, heads_of(p / 4),
                    DecodeSpan(item, splits, own.window), angles, meet, calm);
      meet();
    }

    const typename Sums::Work work(own, halves);
    const elem_t* const bias = own.bias;
    Wanted wanted[Sums::EACH] = {};
    const auto before = [&](int i, int row, int column) {
      wanted[i].x = bias_at(bias, column);
      if (halves) wanted[i].y = bias_at(bias, model.mlp + column);
      if (kind == OUT || kind == DOWN)
        wanted[i].word = load_word(at.stream() + row * hidden + column);
    };

    // 3. Rows, normalised or as they are.
    work.each(0, m, [&](int i, int row, int column, int, int) { before(i, row, column); });
    const bool waits = kind != QKV && kind != DOWN;  // else the ring is empty, and has to fill
    if (waits) calm(true);
    if (own.norm != nullptr) {
      taken.load_factors(own.norm, own.norm_bias, hidden);
      taken.normalise(own.norm, at.stream(), hidden, stream_tag, own.coded, of_hidden, model.eps);
    } else {
      taken.gather(kind == OUT ? at.attended() : at.inner(), k, tag, own.coded);
    }
    if (waits) calm(false);
    meet();

    // 4. The block's outputs: heads of q, k and v; added to the stream; up with its activation; logits,
    //    and the largest of them.
    sums_of.product(
        work, rows, k, before, [&](int i, int row, int column, float2 sum, const float2(&more)[2]) {
          if (Rows::LATE && own.norm != nullptr) {
            const float2 by = taken.late(row, of_hidden, model.eps);
            if (CENTERED) sum.x -= by.x * more[0].x, sum.y -= by.x * more[0].y;
            sum.x *= by.y, sum.y *= by.y;
            if (CENTERED) sum.x += more[1].x, sum.y += more[1].y;
          }
          float y = sum.x + static_cast<float>(wanted[i].x);
          if (kind == QKV) {
            store_word(at.qkv() + row * heads + column, tagged(y, tag));
          } else if (kind == UP) {
            y = Activation::value(y);
            if (GATE) y *= sum.y + static_cast<float>(wanted[i].y);
            store_word(at.inner() + row * model.mlp + column, tagged(static_cast<elem_t>(y), tag));
          } else if (kind == HEAD) {
            logits[row * static_cast<i64>(model.logits_stride) + column] = sum.x;
            best[i].see(sum.x, column);
          } else {
            y += static_cast<float>(number<elem_t>(wanted[i].word));
            store_word(at.stream() + row * hidden + column,
                       tagged(static_cast<elem_t>(y), stream_tag + 1));
          }
        });
  }

  // 5. The largest of the block's; the last block has the largest of all.
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  constexpr int WARPS_OF_ROW = Sums::PLACES * Ring::ROWS / WARP_SIZE;
  Largest* const of_warps = reinterpret_cast<Largest*>(shared);  // [m][WARPS_OF_ROW]
#pragma unroll
  for (int i = 0; i < Sums::EACH; ++i) {
    const Largest most = best[i].of_lanes<WARP_SIZE>();
    const int at = warp + i * WARPS;
    if (lane == 0 && at < m * WARPS_OF_ROW) of_warps[at] = most;
  }
  meet();
  if (warp < m) {
    const Largest most =
        of_warps[warp * WARPS_OF_ROW + lane % WARPS_OF_ROW].of_lanes<WARPS_OF_ROW>();
    if (lane == 0) most.store(at.largest(), warp * gridDim.x + blockIdx.x);
  }
  meet();
  u32& is_last = *reinterpret_cast<u32*>(shared);
  if (threadIdx.x == 0) is_last = atom_inc_acq_rel(counters, gridDim.x) == gridDim.x - 1;
  meet();
  if (!is_last) return;
  if (warp < m) {
    Largest all;
#pragma unroll 4
    for (int i = lane; i < gridDim.x; i += WARP_SIZE)
      all.see(Largest::loaded(at.largest(), warp * gridDim.x + i));
    all = all.of_lanes<WARP_SIZE>();
    if (lane == 0) {
      largest[warp] = all.column;
      if (model.advance > 0) positions[warp] += active[warp];
      if (model.advance > 1) tokens[warp] = all.column;
    }
  }
  if (threadIdx.x < m) count_token(state, lengths, threadIdx.x);
  if (threadIdx.x == 0) store_word(exchange, launches + 1);
}
