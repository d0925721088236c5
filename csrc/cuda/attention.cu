// Keys and values pooled into cells, and attention that reads cells and places.
//
// Packing: a block takes a few cells of the coarsest level, finest level first, a warp for each cell, channels across lanes; a
// coarser cell is made of the finer ones. Bytes moved: the keys and values of the places once (and again from the caches, for the
// deviations), the cells once out and once in. Adjoint: a warp gathers for each place from the cells above it, no atomics: the
// cells' gradients from the caches, those of the places once out; where the weights want a gradient, keys and values once in.
//
// Attention: a block takes a tile of queries, or a query that is alone, through all stages: it scores the cells that are there,
// chooses, adds those that stay whole to the sums of its softmax, and goes on with the others; nothing is scored twice, but for
// the mass. Bytes moved: queries once, and once more for each chunk of entries from the caches; for a tile the keys and values of
// what it reads (about `keep` of all, from the L2 cache where a head fits), what cells are chosen by, and the scores of the cells
// of a stage, out and in, which also stay in L2; the output once. Products are those of 4 x 4 numbers a thread from shared memory,
// in the precision of the sums: no matrix units.
#include "../math/order.h"
#include "attention.cuh"

namespace texvlm::cuda {
namespace {

// --- packing ------------------------------------------------------------------------------------------------------------------

constexpr int kPackWarps = kThreads / kLanes;

// ln of the sum of the weights of places, in all lanes of the warp.
template <class A>
__device__ A log_count_of(const A* log_weight, const CellBox& box) {
  if (!log_weight) return log_for(static_cast<A>(box.count()));
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  A top = nothing<A>(), sum = 0;
  for (int64_t i = lane; i < box.count(); i += kLanes) top = maximum(top, log_weight[box.cell(i)]);
  top = lanes_max(top);
  const A base = top == nothing<A>() ? A(0) : top;
  for (int64_t i = lane; i < box.count(); i += kLanes) sum += exp_for(log_weight[box.cell(i)] - base);
  return base + log_for(lanes_sum(sum));
}

// A cell of stage s from its children by a warp, W channels a lane: U is T where these are places, else A.
template <class U, int W, class T, class A = Acc<T>>
__device__ void pack_cell(const AttentionPack<T>& f, int64_t b, int64_t h, int s, int64_t cell) {
  using P = const Pack<U, W>*;
  const CellPyramid& cells = f.cells;
  const bool places = s + 1 == cells.stages;
  const CellBox box = cells.children(s, cell);
  const int64_t bh = b * f.heads + h, rows = places ? cells.places() : cells.total(), dim = f.dim;
  const U *k, *v;
  if constexpr (std::is_same_v<U, A>) {
    k = places ? reinterpret_cast<const U*>(f.k) : f.keys, v = places ? reinterpret_cast<const U*>(f.v) : f.values;
  } else {
    k = f.k, v = f.v;
  }
  k += bh * rows * dim, v += bh * rows * dim;
  const A* log_weight = f.log_weight ? f.log_weight + b * cells.places() : nullptr;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, many = static_cast<int>(box.count());
  const int64_t to = bh * cells.total() + cells.offset[s] + cell;

  // ln of the weight of each child: of a place at once, of up to 32 cells in the lanes.
  const auto find = [&](int i) {
    if (places) return log_weight ? log_weight[box.cell(i)] : A(0);
    return log_count_of(log_weight, cells.places_of(s + 1, box.cell(i)));
  };
  A own = 0, top = nothing<A>(), count = 0;
  const bool held = !places && many <= kLanes;
  for (int i = 0; held && i < many; ++i) {
    const A log = find(i);
    if (i == lane) own = log;
  }
  const auto log_of = [&](int i) { return held ? __shfl_sync(kAllLanes, own, i) : find(i); };
  if (!places || log_weight)
    for (int i = 0; i < many; ++i) top = maximum(top, log_of(i));
  else
    top = 0;
  const A base = top == nothing<A>() ? A(0) : top;
  for (int i = 0; i < many; ++i) count += exp_for(log_of(i) - base);
  const bool empty = count == A(0);

  A far_k = 0, far_v = 0;
  for (int64_t c0 = 0; c0 < dim; c0 += kLanes * W) {
    const int64_t c = c0 + lane * W;
    const bool mine = c < dim;
    A mean_k[W] = {}, mean_v[W] = {}, low[W], high[W];
#pragma unroll
    for (int w = 0; w < W; ++w) low[w] = -nothing<A>(), high[w] = nothing<A>();
#pragma unroll 4
    for (int i = 0; i < many; ++i) {
      const A weight = exp_for(log_of(i) - base);
      if (weight == A(0) || !mine) continue;
      const int64_t from = box.base * (places ? 0 : 1) + box.cell(i);
      const Pack<U, W> key = *reinterpret_cast<P>(k + from * dim + c), value = *reinterpret_cast<P>(v + from * dim + c);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const A x = static_cast<A>(key.v[w]);
        A least = x, most = x;
        if (!places) {
          least = f.low[(bh * rows + from) * dim + c + w], most = f.high[(bh * rows + from) * dim + c + w];
        }
        mean_k[w] = fused(weight, x, mean_k[w]);
        mean_v[w] = fused(weight, static_cast<A>(value.v[w]), mean_v[w]);
        if (least < low[w] || least != least) low[w] = least;  // NaN stays
        if (most > high[w] || most != most) high[w] = most;
      }
    }
#pragma unroll
    for (int w = 0; w < W; ++w) {
      mean_k[w] = empty ? A(0) : mean_k[w] / count, mean_v[w] = empty ? A(0) : mean_v[w] / count;
      low[w] = empty ? A(0) : low[w], high[w] = empty ? A(0) : high[w];
    }
    for (int i = 0; i < many; ++i) {
      const A weight = exp_for(log_of(i) - base);
      if (weight == A(0) || !mine) continue;
      const int64_t from = box.base * (places ? 0 : 1) + box.cell(i);
      const Pack<U, W> key = *reinterpret_cast<P>(k + from * dim + c), value = *reinterpret_cast<P>(v + from * dim + c);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const A x = static_cast<A>(key.v[w]) - mean_k[w], y = static_cast<A>(value.v[w]) - mean_v[w];
        far_k = fused(weight * x, x, far_k);
        far_v = fused(weight * y, y, far_v);
      }
    }
    if (!mine) continue;
    const auto store = [&](A* out, const A(&value)[W]) {
      Pack<A, W> pack;
#pragma unroll
      for (int w = 0; w < W; ++w) pack.v[w] = value[w];
      *reinterpret_cast<Pack<A, W>*>(out + to * dim + c) = pack;
    };
    store(f.keys, mean_k), store(f.values, mean_v), store(f.low, low), store(f.high, high);
  }
  far_k = lanes_sum(far_k), far_v = lanes_sum(far_v);
  for (int i = 0; !places && i < many; ++i) {  // the deviations within the children
    const A weight = exp_for(log_of(i) - base);
    if (weight == A(0)) continue;
    const A* spread = f.spread + 2 * (bh * rows + box.base + box.cell(i));
    far_k = fused(weight, spread[0], far_k), far_v = fused(weight, spread[1], far_v);
  }
  const A log_count = log_count_of(log_weight, cells.places_of(s, cell));
  if (lane != 0) return;
  f.spread[2 * to] = empty ? A(0) : far_k / count;
  f.spread[2 * to + 1] = empty ? A(0) : far_v / count;
  if (h == 0) f.log_count[b * cells.total() + cells.offset[s] + cell] = log_count;
}

// The cells of stage s in cell i of the first.
__device__ inline CellBox within(const CellPyramid& cells, int s, int64_t i) {
  const int64_t step = int64_t{1} << (cells.level[0] - cells.level[s]), h = cells.rows_of(s), w = cells.columns_of(s);
  const int64_t y = i / cells.columns_of(0) * step, x = i % cells.columns_of(0) * step;
  return {y, minimum(y + step, h), x, minimum(x + step, w), w, cells.offset[s]};
}

// together: cells of the first stage that a block takes.
template <class T, int W>
__global__ void __launch_bounds__(kThreads) attention_pack_kernel(AttentionPack<T> f, int64_t groups, int64_t together) {
  using A = Acc<T>;
  const int warp = static_cast<int>(threadIdx.x) / kLanes, stages = f.cells.stages;
  for (int64_t item = blockIdx.x; item < f.batch * f.heads * groups; item += gridDim.x) {
    const int64_t group = item % groups, h = item / groups % f.heads, b = item / groups / f.heads;
    for (int s = stages - 1; s >= 0; --s) {
      const int64_t step = int64_t{1} << (f.cells.level[0] - f.cells.level[s]);
      const int64_t each = minimum(step, f.cells.rows_of(s)) * minimum(step, f.cells.columns_of(s));
      for (int64_t i = warp; i < together * each; i += kPackWarps) {
        const int64_t first = group * together + i / each;
        if (first >= f.cells.cells(0)) break;
        const CellBox box = within(f.cells, s, first);
        if (i % each >= box.count()) continue;
        if (s + 1 == stages) {
          pack_cell<T, W>(f, b, h, s, box.cell(i % each));
        } else {
          pack_cell<A, W>(f, b, h, s, box.cell(i % each));
        }
      }
      __syncthreads();
    }
  }
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads) attention_pack_adjoint_kernel(AttentionPackAdjoint<T> f) {
  using A = Acc<T>;
  const CellPyramid& cells = f.cells;
  const int64_t places = cells.places(), total = cells.total(), dim = f.dim;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPackWarps + threadIdx.x / kLanes; i < f.batch * places;
       i += static_cast<int64_t>(gridDim.x) * kPackWarps) {
    const int64_t b = i / places, j = i - b * places, y = j / cells.columns, x = j % cells.columns;
    const A log_weight = f.log_weight ? f.log_weight[i] : A(0);
    const bool there = log_weight != nothing<A>();
    A along = 0;
    for (int64_t h = 0; h < f.heads; ++h) {
      const int64_t bh = b * f.heads + h, own = (bh * places + j) * dim;
      for (int64_t c = lane * W; c < dim; c += kLanes * W) {
        A to_k[W] = {}, to_v[W] = {};
        for (int s = 0; there && s < cells.stages; ++s) {
          const int64_t cell = cells.above(s, y, x), at = (bh * total + cell) * dim + c;
          const A share = exp_for(log_weight - f.log_count[b * total + cell]);
          const auto gather = [&](const A* grad, const T* of, const A* mean, A(&to)[W]) {
            if (!grad) return;
            const Pack<A, W> g = *reinterpret_cast<const Pack<A, W>*>(grad + at);
#pragma unroll
            for (int w = 0; w < W; ++w) to[w] = fused(share, g.v[w], to[w]);
            if (!f.grad_log_weight) return;
            const Pack<T, W> own_value = *reinterpret_cast<const Pack<T, W>*>(of + own + c);
            const Pack<A, W> m = *reinterpret_cast<const Pack<A, W>*>(mean + at);
#pragma unroll
            for (int w = 0; w < W; ++w) along = fused(share * (static_cast<A>(own_value.v[w]) - m.v[w]), g.v[w], along);
          };
          gather(f.grad_keys, f.k, f.keys, to_k);
          gather(f.grad_values, f.v, f.values, to_v);
        }
        const auto store = [&](A* out, const A(&value)[W]) {
          if (!out) return;
          Pack<A, W> pack;
#pragma unroll
          for (int w = 0; w < W; ++w) pack.v[w] = value[w];
          *reinterpret_cast<Pack<A, W>*>(out + own + c) = pack;
        };
        store(f.grad_k, to_k), store(f.grad_v, to_v);
      }
    }
    if (!f.grad_log_weight) continue;
    along = lanes_sum(along);
    for (int s = 0; there && f.grad_log_count && s < cells.stages; ++s) {
      const int64_t cell = b * total + cells.above(s, y, x);
      along = fused(exp_for(log_weight - f.log_count[cell]), f.grad_log_count[cell], along);
    }
    if (lane == 0) f.grad_log_weight[i] = along;
  }
}

// --- the choice ---------------------------------------------------------------------------------------------------------------

// Over the cells of a stage that have a finite rank: the sum of their importances and the largest bound. many: of all.
template <class A>
struct RankSums {
  A total, top;
  unsigned many, unused;

  __device__ void clear() { total = 0, top = nothing<A>(), many = 0, unused = 0; }
  __device__ void join(int, const RankSums& other, int, int) {
    total += other.total, top = maximum(top, other.top), many += other.many;
  }
};

// Of scores: the largest, and the sum of the exponentials of what they are below it.
template <class A>
struct LogSum {
  A top, sum;

  __device__ void clear() { top = nothing<A>(), sum = 0; }
  __device__ A base() const { return top == nothing<A>() ? A(0) : top; }
  __device__ void meet(A score) { join(0, {score != score ? nothing<A>() : score, score != score ? score : A(1)}, 0, 1); }
  __device__ void join(int, const LogSum& other, int, int) {
    const A before = top, from = other.top;
    top = maximum(top, from);
    sum = sum * exp_for(before - base()) + other.sum * exp_for(from - base());
  }
  __device__ A log() const { return base() + log_for(sum); }
};

template <class A>
struct Selection {
  using Bits = std::make_unsigned_t<decltype(rank_key(A(0)))>;
  unsigned histogram[kDigits];
  Bits limit;
  unsigned ties;

  static __device__ Bits of(A value) {  // ascending: the best first
    return ~(static_cast<Bits>(rank_key(value)) ^ (Bits{1} << (8 * sizeof(Bits) - 1)));
  }
};

// Which of the cells that are there are split: their bits and their list, both of the stage. Returns how many. scores: [number][Q]
// in the work memory; lse [Q]: over all that is there, not finite for a query that has no say. The same in every block that is
// given the same.
template <int Q, class T, class A = Acc<T>>
__device__ int choose(const Attend<T>& f, Descent<A>& at, int64_t b, int64_t kv, const void* const* query, const A* lse,
                      A (*partial)[kPitch]) {
  TEXVLM_SHARED(selection, Selection<A>);
  using Bits = typename Selection<A>::Bits;
  const AttentionShape& shape = f.shape;
  const TileSpace<A>& space = at.space;
  const int me = static_cast<int>(threadIdx.x), lane = me % kLanes;
  const int64_t offset = shape.cells.offset[at.stage], total = shape.cells.total(), dim = shape.dim;
  const A none = static_cast<A>(NAN);
  const bool bounded = f.importance != Importance::mass, massive = f.importance != Importance::bound;

  const int said = __syncthreads_count(me < Q && finite(lse[me < Q ? me : 0]));
  for (int64_t c0 = 0; bounded && c0 < dim; c0 += kColumns) {  // the mean of the queries
    const int64_t c = c0 + me % kColumns;
    A sum = 0;
    for (int q = me / kColumns; c < dim && q < Q; q += kThreads / kColumns)
      if (finite(lse[q])) sum += static_cast<A>(static_cast<const T*>(query[q])[c]);
    partial[me / kColumns][me % kColumns] = sum;
    __syncthreads();
    if (me < kColumns && c < dim) {
      for (int g = 1; g < kThreads / kColumns; ++g) sum += partial[g][me];
      space.mean[c] = static_cast<A>(shape.scale) * sum / static_cast<A>(maximum(said, 1));
    }
    __syncthreads();
  }

  // Importances and bounds; the bound of what has no finite rank is NaN, and so is the value of what is not there.
  for (int i = me / kLanes; i < at.present; i += kThreads / kLanes) {
    const int cell = at.cell(i);
    A value = none, bound = none;
    if (cell >= 0 && f.log_count[b * total + offset + cell] == nothing<A>()) {
      value = -1;
    } else if (cell >= 0) {
      const int64_t entry = kv * total + offset + cell;
      value = bound = 0;
      for (int q = lane; massive && q < Q; q += kLanes)
        if (finite(lse[q])) value += exp_for(space.scores[static_cast<int64_t>(i) * Q + q] - lse[q]);
      for (int64_t c = lane; bounded && c < dim; c += kLanes) {
        const A u = space.mean[c], x = u * f.low[entry * dim + c], y = u * f.high[entry * dim + c];
        bound += x > y || x != x ? x : y;
      }
      value = lanes_sum(value), bound = lanes_sum(bound);
      if (f.importance == Importance::spread) value = value * f.spread[2 * entry] * sqrt_of(f.spread[2 * entry + 1]);
      if (bounded && (!finite(value) || !finite(bound))) value = -nothing<A>(), bound = none;
    }
    if (lane == 0) space.values[i] = value, space.bounds[i] = bound;
  }
  __syncthreads();
  RankSums<A> part;
  part.clear();
  for (int i = me; i < at.present; i += kThreads) {
    const A value = space.values[i], bound = space.bounds[i];
    if (value == value) ++part.many;
    if (bound == bound) part.total += value, part.top = maximum(part.top, bound);
  }
  part = block_join(part);
  A shares = 0;
  for (int i = me; bounded && i < at.present; i += kThreads) {
    const A bound = space.bounds[i];
    if (bound == bound) shares += exp_for(bound - part.top);
  }
  shares = block_sum(shares);
  for (int i = me; i < at.present; i += kThreads) {
    const A bound = space.bounds[i];
    if (bound != bound) continue;
    const A share = bounded ? exp_for(bound - part.top) / shares : A(0);
    const A value = massive && part.total != A(0) ? space.values[i] / part.total : A(0);
    space.values[i] = f.importance == Importance::bound ? share : value + static_cast<A>(kBoundShare) * share;
  }
  __syncthreads();

  // The best, by radix (see cascade.cu): keys below the limit, and of those equal to it the first.
  const unsigned wanted = static_cast<unsigned>(minimum<int64_t>(shape.counts[at.stage], part.many));
  Bits limit = wanted < part.many ? 0 : ~Bits(0);
  unsigned ties = wanted < part.many ? wanted : 0;
  for (int shift = 8 * sizeof(Bits) - 8; ties > 0 && shift >= 0; shift -= 8) {
    selection.histogram[me] = 0;
    __syncthreads();
    for (int first = 0; first < at.present; first += kThreads) {
      const Bits key = first + me < at.present ? Selection<A>::of(space.values[first + me]) : Bits(0);
      const bool on_the_way = shift + 8 >= static_cast<int>(8 * sizeof(Bits)) || key >> (shift + 7) >> 1 == limit >> (shift + 7) >> 1;
      count_digit(selection.histogram, first + me < at.present && on_the_way, digit_of(key, shift));
    }
    __syncthreads();
    const unsigned own = selection.histogram[me];
    unsigned all;
    const unsigned before = block_exclusive<kThreads>(own, all);
    if (before < ties && ties <= before + own)
      selection.limit = static_cast<Bits>(limit | static_cast<Bits>(me) << shift), selection.ties = ties - before;
    __syncthreads();
    limit = selection.limit, ties = selection.ties;
    __syncthreads();
  }
  at.clear(at.bits);
  at.clear(space.equal);
  for (int i = me; i < at.present; i += kThreads) {
    const Bits key = Selection<A>::of(space.values[i]);
    if (key < limit) at.set(at.bits, at.cell(i));
    if (key == limit && ties > 0) at.set(space.equal, at.cell(i));
  }
  __syncthreads();
  return at.list_split(space.equal, ties);
}

// --- a tile of queries --------------------------------------------------------------------------------------------------------

constexpr int kSpare = 60;  // bits of a mass below its sign

// Probabilities are summed in fixed point: at most one for each query. The sign says NaN.
__device__ inline double mass_scale(int64_t queries) {
  int doublings = 0;
  while (doublings < kSpare && (int64_t{1} << doublings) < queries) ++doublings;
  return ldexp(1.0, kSpare - doublings);
}
template <class A>
__device__ void add_fixed_mass(unsigned long long* to, A mass, double scale) {
  if (finite(mass)) {
    atomicAdd(to, static_cast<unsigned long long>(llrint(static_cast<double>(mass) * scale)));
  } else {
    atomicOr(to, 1ull << 63);
  }
}

template <class A>
struct TileShared {
  static constexpr int kEntries = kTileEntries<A>;
  Operands<A> operands;
  alignas(16) A panel[kEntries][kPitch];
  EntryRows<A, kEntries> rows;
  const void* query[kTileQueries];
  A lse[kTileQueries];
};

// The block as kSide x kSide threads, 4 queries and J entries of each chunk a thread, and of the output 4 queries by 4 channels.
template <class T>
struct Together {
  using A = Acc<T>;
  using Shared = TileShared<A>;
  static constexpr int kQueries = kTileQueries, kEntries = Shared::kEntries, J = kEntries / kSide;

  const Attend<T>& f;
  Shared& shared;
  bool wide;
  CellBox box;
  int64_t bh, c0;
  A top[4], sum[4], out[kGroups][4][4];  // of the queries 4 down() and on: largest score, sum of exponentials, weighted values

  __device__ void start(int64_t head, int64_t tile, int64_t column) {
    box = f.shape.tile(tile), bh = head, c0 = column;
    const int me = static_cast<int>(threadIdx.x);
    if (me < kTileQueries) shared.query[me] = me < box.count() ? f.q + (bh * f.shape.queries + box.cell(me)) * f.shape.dim : nullptr;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i] = nothing<A>(), sum[i] = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int j = 0; j < 4; ++j) out[g][i][j] = 0;
    }
    __syncthreads();
  }

  __device__ A (*spare())[kPitch] { return shared.operands.side[0]; }

  // The scores of the chunk in shared.rows.
  template <class U>
  __device__ void score_rows(A (&s)[4][J]) {
    dot_rows<T, U>(s, shared.operands, shared.query, shared.rows.key, f.shape.dim, wide);
    const A scale = static_cast<A>(f.shape.scale);
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const A log = shared.rows.log[J * across() + j];
      const bool there = shared.rows.row[J * across() + j] >= 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i][j] = there ? fused(scale, s[i][j], log) : nothing<A>();
    }
  }

  // exp(s - m) in the place of s, m: the largest score so far; returns by what earlier sums shrink.
  __device__ static A soften(A (&s)[J], A& m, A& total) {
    A most = m;
#pragma unroll
    for (int j = 0; j < J; ++j) most = maximum(most, s[j]);
    most = lanes_max(most, kSide);
    const A base = most == nothing<A>() ? A(0) : most, shrink = exp_for(m - base);
    A more = 0;
#pragma unroll
    for (int j = 0; j < J; ++j) s[j] = exp_for(s[j] - base), more += s[j];
    total = fused(total, shrink, lanes_sum(more, kSide));
    m = most;
    return shrink;
  }

  // The entries of a chunk, of which these are the scores, into the sums.
  template <class U>
  __device__ void take(A (&s)[4][J], int many) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const A shrink = soften(s[i], top[i], sum[i]);
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int j = 0; j < 4; ++j) out[g][i][j] *= shrink;
    }
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const A column[4] = {s[0][j], s[1][j], s[2][j], s[3][j]};
      write_shared(&shared.panel[J * across() + j][4 * down()], column);
    }
    __syncthreads();
    add_rows<U>(out, shared.operands, shared.panel, shared.rows.value, many, c0, f.shape.dim, wide);
  }

  // Scores of entries into work memory, and with `found` what all of them and those taken before sum up to, into shared.lse.
  template <class At>
  __device__ void score(const Entries<A, A>& of, int count, const At& at, const TileSpace<A>& space, bool found) {
    A m[4], total[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = top[i], total[i] = sum[i];
    for (int first = 0; first < count; first += kEntries) {
      shared.rows.fill(of, f.shape.dim, first, count, at);
      __syncthreads();
      A s[4][J];
      score_rows<A>(s);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < J; ++j) {
        const int number = first + J * across() + j;
        const A column[4] = {s[0][j], s[1][j], s[2][j], s[3][j]};
        if (number < count) write_shared(space.scores + static_cast<int64_t>(number) * kQueries + 4 * down(), column);
      }
      if (!found) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) soften(s[i], m[i], total[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (across() == 0) shared.lse[4 * down() + i] = 4 * down() + i < box.count() ? LogSum<A>{m[i], total[i]}.log() : nothing<A>();
    __syncthreads();
  }

  template <class U, class At>
  __device__ void absorb(const Entries<U, A>& of, int64_t count, const At& at) {
    for (int first = 0; first < count; first += kEntries) {
      shared.rows.fill(of, f.shape.dim, first, static_cast<int>(count), at);
      __syncthreads();
      A s[4][J];
      score_rows<U>(s);
      take<U>(s, static_cast<int>(minimum<int64_t>(count - first, kEntries)));
      __syncthreads();
    }
  }
  // The same where they have been scored.
  __device__ void absorb_scored(const Entries<A, A>& of, const TileSpace<A>& space, int begin, int count) {
    for (int first = 0; first < count; first += kEntries) {
      shared.rows.fill(of, f.shape.dim, first, count, [&](int i) { return space.kept[begin + i]; });
      A s[4][J];
#pragma unroll
      for (int j = 0; j < J; ++j) {
        const int i = first + J * across() + j;
        A column[4] = {nothing<A>(), nothing<A>(), nothing<A>(), nothing<A>()};
        if (i < count) read_shared(space.scores + static_cast<int64_t>(space.slot[i]) * kQueries + 4 * down(), column);
#pragma unroll
        for (int k = 0; k < 4; ++k) s[k][j] = column[k];
      }
      take<A>(s, minimum(count - first, kEntries));
      __syncthreads();
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int q = 4 * down() + i;
      const bool here = q < box.count();
      const int64_t row = bh * f.shape.queries + (here ? box.cell(q) : 0);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int64_t c = c0 + kColumns * g + 4 * across();
#pragma unroll
        for (int j = 0; j < 4; ++j) out[g][i][j] = sum[i] == A(0) ? A(0) : out[g][i][j] / sum[i];
        if (here) store_four(f.out + row * f.shape.dim + c, f.shape.dim - c, wide, out[g][i]);
      }
      if (across() != 0) continue;
      const A lse = top[i] == -nothing<A>() ? top[i] : LogSum<A>{top[i], sum[i]}.log();
      shared.lse[q] = here ? lse : nothing<A>();
      if (here && c0 == 0) f.lse[row] = lse;
    }
    __syncthreads();
  }

  template <class U, class At>
  __device__ void add_mass(const Entries<U, A>& of, int64_t count, const At& at, unsigned long long* to, double scale) {
    for (int first = 0; first < count; first += kEntries) {
      shared.rows.fill(of, f.shape.dim, first, static_cast<int>(count), at);
      __syncthreads();
      A s[4][J];
      score_rows<U>(s);
#pragma unroll
      for (int j = 0; j < J; ++j) {
        A column[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const A lse = shared.lse[4 * down() + i];
          column[i] = lse == nothing<A>() ? A(0) : exp_for(s[i][j] - lse);
        }
        write_shared(&shared.panel[J * across() + j][4 * down()], column);
      }
      __syncthreads();
      constexpr int kShare = kThreads / kEntries;  // threads for an entry
      const int j = static_cast<int>(threadIdx.x) / kShare;
      A mass = 0;
      for (int q = static_cast<int>(threadIdx.x) % kShare; q < kTileQueries; q += kShare) mass += shared.panel[j][q];
      mass = lanes_sum(mass, kShare);
      if (threadIdx.x % kShare == 0 && shared.rows.row[j] >= 0) add_fixed_mass(to + shared.rows.row[j], mass, scale);
      __syncthreads();
    }
  }
};

// --- a query that is alone ----------------------------------------------------------------------------------------------------

template <class A>
struct AloneShared {
  EntryRows<A, kAloneEntries> rows;
  A score[kAloneEntries], weight[kAloneEntries];
  alignas(16) A partial[kSide][kPitch];
  const void* query[1];
  A lse[1];
};

// Eight threads for the product of an entry, and of the output four channels a thread, of every sixteenth entry.
template <class T>
struct Alone {
  using A = Acc<T>;
  using Shared = AloneShared<A>;
  static constexpr int kQueries = 1;

  const Attend<T>& f;
  Shared& shared;
  bool wide;
  int64_t row, c0;
  LogSum<A> sum;  // the same in all threads
  A out[kGroups][4];

  __device__ void start(int64_t head, int64_t tile, int64_t column) {
    row = head * f.shape.queries + tile, c0 = column;
    if (threadIdx.x == 0) shared.query[0] = f.q + row * f.shape.dim;
    sum.clear();
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j) out[g][j] = 0;
    __syncthreads();
  }

  __device__ A (*spare())[kPitch] { return shared.partial; }

  // The scores of the chunk in shared.rows into to[i], i < many. All threads of the block have to be in step after.
  template <class U>
  __device__ void score_rows(A* to, int many) {
    A s[kDotRows];
    dot_alone<T, U>(s, f.q + row * f.shape.dim, shared.rows.key, f.shape.dim, wide);
#pragma unroll
    for (int u = 0; u < kDotRows; ++u) {
      const int i = dot_row() + u * (kThreads / kDotLanes);
      if (threadIdx.x % kDotLanes == 0 && i < many)
        to[i] = shared.rows.row[i] >= 0 ? fused(static_cast<A>(f.shape.scale), s[u], shared.rows.log[i]) : nothing<A>();
    }
  }

  // The entries of a chunk, of which shared.score has the scores, into the sums.
  template <class U>
  __device__ void take(int many) {
    const int me = static_cast<int>(threadIdx.x), lane = me % kLanes;
    LogSum<A> next = sum;
    for (int i = lane; i < many; i += kLanes) next.top = maximum(next.top, shared.score[i]);
    next.top = lanes_max(next.top);
    const A shrink = exp_for(sum.top - next.base());
    if (me < many) shared.weight[me] = exp_for(shared.score[me] - next.base());
    __syncthreads();
    A more = 0;
    for (int i = lane; i < many; i += kLanes) more += shared.weight[i];
    next.sum = fused(sum.sum, shrink, lanes_sum(more));
    sum = next;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j) out[g][j] *= shrink;
    add_alone<U>(out, shared.weight, shared.rows.value, many, c0, f.shape.dim, wide);
    __syncthreads();
  }

  template <class At>
  __device__ void score(const Entries<A, A>& of, int count, const At& at, const TileSpace<A>& space, bool found) {
    for (int first = 0; first < count; first += kAloneEntries) {
      shared.rows.fill(of, f.shape.dim, first, count, at);
      __syncthreads();
      score_rows<A>(space.scores + first, minimum(count - first, kAloneEntries));
      __syncthreads();
    }
    if (!found) return;
    LogSum<A> part;
    part.clear();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) part.meet(space.scores[i]);
    part = block_join(part);
    part.join(0, sum, 0, 1);
    if (threadIdx.x == 0) shared.lse[0] = part.log();
    __syncthreads();
  }

  template <class U, class At>
  __device__ void absorb(const Entries<U, A>& of, int64_t count, const At& at) {
    for (int first = 0; first < count; first += kAloneEntries) {
      const int many = static_cast<int>(minimum<int64_t>(count - first, kAloneEntries));
      shared.rows.fill(of, f.shape.dim, first, static_cast<int>(count), at);
      __syncthreads();
      score_rows<U>(shared.score, many);
      __syncthreads();
      take<U>(many);
    }
  }
  __device__ void absorb_scored(const Entries<A, A>& of, const TileSpace<A>& space, int begin, int count) {
    for (int first = 0; first < count; first += kAloneEntries) {
      const int me = static_cast<int>(threadIdx.x), many = minimum(count - first, kAloneEntries);
      shared.rows.fill(of, f.shape.dim, first, count, [&](int i) { return space.kept[begin + i]; });
      if (me < many) shared.score[me] = space.scores[space.slot[first + me]];
      __syncthreads();
      take<A>(many);
    }
  }

  __device__ void finish() {
    sum_down(out, shared.partial);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t c = c0 + kColumns * g + 4 * across();
#pragma unroll
      for (int j = 0; j < 4; ++j) out[g][j] = sum.sum == A(0) ? A(0) : out[g][j] / sum.sum;
      if (down() == 0) store_four(f.out + row * f.shape.dim + c, f.shape.dim - c, wide, out[g]);
    }
    const A lse = sum.top == -nothing<A>() ? sum.top : sum.log();
    if (threadIdx.x != 0) return;
    shared.lse[0] = lse;
    if (c0 == 0) f.lse[row] = lse;
  }

  template <class U, class At>
  __device__ void add_mass(const Entries<U, A>& of, int64_t count, const At& at, unsigned long long* to, double scale) {
    for (int first = 0; first < count; first += kAloneEntries) {
      const int me = static_cast<int>(threadIdx.x), many = static_cast<int>(minimum<int64_t>(count - first, kAloneEntries));
      shared.rows.fill(of, f.shape.dim, first, static_cast<int>(count), at);
      __syncthreads();
      score_rows<U>(shared.score, many);
      __syncthreads();
      const A lse = shared.lse[0];
      if (me < many && shared.rows.row[me] >= 0)
        add_fixed_mass(to + shared.rows.row[me], lse == nothing<A>() ? A(0) : exp_for(shared.score[me] - lse), scale);
      __syncthreads();
    }
  }
};

// --- all stages ---------------------------------------------------------------------------------------------------------------

template <class Team, class T>
__global__ void __launch_bounds__(kThreads, 2)
    attend_kernel(Attend<T> f, TileSpace<Acc<T>> spaces, int64_t bytes, int64_t parts, unsigned long long* masses, bool wide) {
  using A = Acc<T>;
  TEXVLM_SHARED(shared, typename Team::Shared);
  const AttentionShape& shape = f.shape;
  const TileSpace<A> space = spaces.of_block(bytes);
  const int64_t tiles = shape.tiles(), total = shape.cells.total(), places = shape.cells.places(), dim = shape.dim;
  Team team{f, shared, wide};
  for (int64_t item = blockIdx.x; item < shape.batch * shape.heads * tiles * parts; item += gridDim.x) {
    const int64_t part = item % parts, row = item / parts, tile = row % tiles, bh = row / tiles, b = bh / shape.heads;
    const int64_t kv = b * shape.kv_heads + shape.kv_head(bh % shape.heads);
    const Entries<A, A> cells{f.keys + kv * total * dim, f.values + kv * total * dim, f.log_count + b * total};
    const Entries<T, A> near{f.k + kv * places * dim, f.v + kv * places * dim, f.log_weight ? f.log_weight + b * places : nullptr};
    const Entries<T, A> prefix{f.prefix_k + kv * shape.prefix * dim, f.prefix_v + kv * shape.prefix * dim, nullptr};
    const auto itself = [](int i) { return i; };
    team.start(bh, tile, part * kMostColumns);
    team.absorb(prefix, shape.prefix, itself);
    Descent<A> at(shape, space);
    for (int64_t choice = row * shape.splits; at.stage < shape.cells.stages; choice += shape.counts[at.stage - 1]) {
      const int64_t first = shape.cells.offset[at.stage];
      const auto cell = [&](int i) { return at.cell(i); };
      team.score({cells.key + first * dim, cells.value + first * dim, cells.log + first}, at.present, cell, space, !f.choice);
      int many;
      if (f.choice) {
        at.mark(f.choice + choice);
        many = at.list_split(nullptr, 0);
      } else {
        many = choose<Team::kQueries>(f, at, b, kv, shared.query, shared.lse, team.spare());
      }
      for (int64_t i = threadIdx.x; part == 0 && i < shape.counts[at.stage]; i += kThreads)
        f.chosen[choice + i] = f.choice ? f.choice[choice + i] : i < many ? at.split[i] : -1;
      const int before = at.kept, whole = at.list_kept(cells.log, true);
      team.absorb_scored(cells, space, before, whole);
      at.next(many);
    }
    const auto place = [&](int i) { return at.cell(i); };
    team.absorb(near, at.present, place);
    team.finish();
    if (masses && part == 0) {
      unsigned long long* const to = masses + bh * (total + places);
      const double scale = mass_scale(shape.queries);
      team.add_mass(cells, at.kept, [&](int i) { return space.kept[i]; }, to, scale);
      team.add_mass(near, at.present, place, to + total, scale);
    }
    __syncthreads();
  }
}

// What places have, by themselves and by their cells.
template <class T>
__global__ void __launch_bounds__(kThreads) mass_kernel(Attend<T> f, const unsigned long long* masses) {
  using A = Acc<T>;
  const CellPyramid& cells = f.shape.cells;
  const int64_t places = cells.places(), total = cells.total(), all = f.shape.batch * f.shape.heads * places;
  const double scale = mass_scale(f.shape.queries);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t bh = i / places, j = i - bh * places, b = bh / f.shape.heads, y = j / cells.columns, x = j % cells.columns;
    const unsigned long long* const row = masses + bh * (total + places);
    const A log_weight = f.log_weight ? f.log_weight[b * places + j] : A(0);
    A mass = 0;
    const auto add = [&](unsigned long long word, A log_share) {
      if (word >> 63) mass = static_cast<A>(NAN);
      if (word) mass += exp_for(log_share) * static_cast<A>(static_cast<double>(word) / scale);
    };
    if (log_weight != nothing<A>()) {
      add(row[total + j], 0);
      for (int s = 0; s < cells.stages; ++s) {
        const int64_t cell = cells.above(s, y, x);
        add(row[cell], log_weight - f.log_count[b * total + cell]);
      }
    }
    f.mass[i] = mass;
  }
}

template <class... P>
bool aligned(const P*... p) {
  return (packs<4>(p) && ...);
}

}  // namespace

template <class T>
void attention_pack(const AttentionPack<T>& f, void* stream) {
  if (f.batch <= 0 || f.heads <= 0 || f.cells.total() <= 0) return;
  const int finest = f.cells.stages - 1;
  const int64_t each = ceil_div(f.cells.cells(finest), f.cells.cells(0));
  const int64_t together = maximum<int64_t>(1, kPackWarps / each), groups = ceil_div(f.cells.cells(0), together);
  const dim3 grid(at_most(f.batch * f.heads * groups, 1 << 20));
  const bool wide = aligned(f.k, f.v, f.keys, f.values, f.low, f.high);
  const auto with = [&](auto width) {
    launch(attention_pack_kernel<T, decltype(width)::value>, grid, kThreads, 0, stream, f, groups, together);
  };
  if (wide && f.dim % (4 * kLanes) == 0) return with(std::integral_constant<int, 4>{});
  if (wide && f.dim % 2 == 0) return with(std::integral_constant<int, 2>{});
  with(std::integral_constant<int, 1>{});
}

template <class T>
void attention_pack_adjoint(const AttentionPackAdjoint<T>& f, void* stream) {
  const int64_t all = f.batch * f.cells.places();
  if (all <= 0 || (!f.grad_k && !f.grad_v && !f.grad_log_weight)) return;
  const dim3 grid(at_most(ceil_div(all, kPackWarps), 1 << 20));
  const bool wide = aligned(f.grad_keys, f.grad_values, f.k, f.v, f.keys, f.values, f.grad_k, f.grad_v);
  const auto with = [&](auto width) {
    launch(attention_pack_adjoint_kernel<T, decltype(width)::value>, grid, kThreads, 0, stream, f);
  };
  if (wide && f.dim % (4 * kLanes) == 0) return with(std::integral_constant<int, 4>{});
  if (wide && f.dim % 2 == 0) return with(std::integral_constant<int, 2>{});
  with(std::integral_constant<int, 1>{});
}

template <class T>
int64_t attend_workspace(const AttentionShape& shape) {
  return Resident::of(shape, TileSpace<Acc<T>>::bytes(shape, shape.alone() ? 1 : kTileQueries)).all();
}

template <class T>
void attend(const Attend<T>& f, unsigned long long* masses, void* workspace, void* stream) {
  using A = Acc<T>;
  const AttentionShape& shape = f.shape;
  const int64_t queries = shape.alone() ? 1 : kTileQueries, parts = Resident::parts(shape);
  const Resident resident = Resident::of(shape, TileSpace<A>::bytes(shape, queries));
  const bool wide = shape.dim % 4 == 0 && aligned(f.q, f.k, f.v, f.prefix_k, f.prefix_v, f.keys, f.values, f.out);
  if (resident.blocks > 0) {
    Carver carver{static_cast<char*>(workspace)};
    const TileSpace<A> spaces = TileSpace<A>::carve(carver, shape, queries);
    const dim3 grid(static_cast<unsigned>(resident.blocks));
    if (shape.alone()) {
      launch(attend_kernel<Alone<T>, T>, grid, kThreads, 0, stream, f, spaces, resident.bytes, parts, masses, wide);
    } else {
      launch(attend_kernel<Together<T>, T>, grid, kThreads, 0, stream, f, spaces, resident.bytes, parts, masses, wide);
    }
  }
  const int64_t places = shape.batch * shape.heads * shape.cells.places();
  if (f.mass && places > 0) launch(mass_kernel<T>, dim3(blocks_for(places)), kThreads, 0, stream, f, masses);
}

#define TEXVLM_ATTENTION(T)                                                   \
  template void attention_pack(const AttentionPack<T>&, void*);               \
  template void attention_pack_adjoint(const AttentionPackAdjoint<T>&, void*); \
  template int64_t attend_workspace<T>(const AttentionShape&);                \
  template void attend(const Attend<T>&, unsigned long long*, void*, void*)
TEXVLM_ATTENTION(float);
TEXVLM_ATTENTION(double);
TEXVLM_ATTENTION(Half);
TEXVLM_ATTENTION(BFloat16);

}  // namespace texvlm::cuda
