// The adjoint of attention: a block takes a tile of queries, or a query that is alone, through all that it read.
//
// Probabilities are computed again from the log-sum-exps, so nothing of the size of the scores is kept. Gradients of queries stay
// in registers until the block is done; those of keys, values and counts, which other tiles add to as well, are summed over the
// tile and then added by atomics, or in fixed point where their order shall not matter. Bytes moved: queries and incoming
// gradients once and again for each chunk of entries, keys and values of what the tile read three times, all of these from the
// caches; the gradients of these once, as atomics of 16 bytes on sm_90; the gradient of the queries once.
#include "attention.cuh"

namespace texvlm::cuda {
namespace {

// What several tiles add to, by number; rows of channels first.
enum Target : int { to_k, to_v, to_keys, to_values, to_prefix_k, to_prefix_v, to_log_count, to_log_weight, kTargets };
enum Kind : int { of_key, of_value, of_log, kKinds };  // each has a bound, for fixed point
constexpr int kFixedWords = 8;                         // four magnitudes, three bounds

template <class A>
struct AdjointOf : AttendAdjoint<A> {
  A* target[kTargets];
  unsigned long long* sums[kTargets];  // fixed point
  const unsigned long long* bounds;    // of each kind
  int64_t count;                       // queries that may add to a row

  __device__ FixedPoint fixed(int kind) const { return {nullptr, const_cast<unsigned long long*>(bounds + kind), count}; }
};

// Sinks for the targets, made where they are used.
template <class Sink, class A>
struct Sinks {
  const AdjointOf<A>& f;
  double scale[kKinds];

  __device__ explicit Sinks(const AdjointOf<A>& of) : f(of) {
    if constexpr (std::is_same_v<Sink, FixedSink<A>>)
      for (int k = 0; k < kKinds; ++k) scale[k] = fixed_scale(of.fixed(k));
  }
  __device__ Sink of(int target, int kind) const {
    if constexpr (std::is_same_v<Sink, FixedSink<A>>) {
      return {f.target[target], {f.sums[target], nullptr, 0}, scale[kind]};
    } else {
      return {f.target[target]};
    }
  }
};

// Four neighbours of a row, of which `left` are there. All lanes of the warp call it.
template <class Sink, class A>
__device__ void add_four(const Sink& sink, bool live, int64_t at, int64_t left, bool wide, A (&value)[4]) {
  if (wide) return sink.add(live && left > 0, at, value);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    A one[1] = {value[w]};
    sink.add(live && w < left, at + w, one);
  }
}

// Where the gradients of entries go: numbers of targets; -1: not wanted.
struct Wanted {
  int key, value, log;
};

// --- a tile of queries --------------------------------------------------------------------------------------------------------

template <class A>
struct TileAdjointShared {
  static constexpr int kEntries = kTileEntries<A>, kAcross = kEntries + 4;
  Operands<A> operands;
  alignas(16) A panel[kTileQueries * kAcross > kEntries* kPitch ? kTileQueries * kAcross : kEntries * kPitch];
  EntryRows<A, kEntries> rows;
  const void *query[kTileQueries], *grad[kTileQueries];
  A lse[kTileQueries], delta[kTileQueries];
};

template <class A, class Sink, int kGroups>
struct TogetherAdjoint {
  using Shared = TileAdjointShared<A>;
  static constexpr int kEntries = Shared::kEntries, kAcross = Shared::kAcross, J = kEntries / kSide;

  const AdjointOf<A>& f;
  Shared& shared;
  const Sinks<Sink, A>& sinks;
  bool wide;
  CellBox box;
  int64_t bh, c0;
  A query[kGroups][4][4];  // the gradient

  __device__ void start(int64_t head, int64_t tile, int64_t column) {
    const AttentionShape& shape = f.shape;
    box = shape.tile(tile), bh = head, c0 = column;
    constexpr int kShare = kThreads / kTileQueries;  // threads for a query
    const int q = static_cast<int>(threadIdx.x) / kShare, part = static_cast<int>(threadIdx.x) % kShare;
    const bool here = q < box.count();
    const int64_t row = bh * shape.queries + (here ? box.cell(q) : 0);
    const void* const grad = here ? row_at<A>(f.grad, f.storage, row, shape.dim) : nullptr;
    const void* const out = here ? row_at<A>(f.out, f.storage, row, shape.dim) : nullptr;
    A delta = 0;
    for (int64_t c = 4 * part; c < shape.dim; c += 4 * kShare) {
      A x[4], y[4];
      load_four(grad, f.storage, c, shape.dim, wide, x);
      load_four(out, f.storage, c, shape.dim, wide, y);
#pragma unroll
      for (int w = 0; w < 4; ++w) delta = fused(x[w], y[w], delta);
    }
    delta = lanes_sum(delta, kShare);
    if (part == 0) {
      shared.query[q] = here ? row_at<A>(f.q, f.storage, row, shape.dim) : nullptr;
      shared.grad[q] = grad;
      shared.delta[q] = here && f.grad_lse ? delta - f.grad_lse[row] : delta;
      shared.lse[q] = here ? f.lse[row] : nothing<A>();
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) query[g][i][j] = 0;
    __syncthreads();
  }

  // Sums over the queries of what is in the panel times their rows, to the rows of the entries. The block is in step after.
  __device__ void scatter(const Sink& sink, const void* const* rows, A scale) {
    const auto panel = reinterpret_cast<const A(*)[kAcross]>(shared.panel);
    for (int64_t c = c0; c < minimum(c0 + kGroups * kColumns, f.shape.dim); c += kColumns) {
      A sum[1][J][4] = {};
      add_rows(sum, shared.operands, panel, {rows, f.storage}, kTileQueries, c, f.shape.dim, wide);
      const int64_t column = c + 4 * across();
#pragma unroll
      for (int i = 0; i < J; ++i) {
        const int64_t row = shared.rows.row[J * down() + i];
#pragma unroll
        for (int w = 0; w < 4; ++w) sum[0][i][w] *= scale;
        add_four(sink, row >= 0, (row < 0 ? 0 : row) * f.shape.dim + column, f.shape.dim - column, wide, sum[0][i]);
      }
    }
  }

  __device__ void visit(const Entries<A>& of, const Wanted& wanted, const Numbers<A>& numbers) {
    const A scale = static_cast<A>(f.shape.scale);
    const int me = static_cast<int>(threadIdx.x);
    for (int first = 0; first < numbers.count; first += kEntries) {
      shared.rows.fill(of, f.shape.dim, numbers, first);
      __syncthreads();
      A p[4][J], ds[4][J];
      dot_rows(p, shared.operands, {shared.query, f.storage}, {shared.rows.key, of.storage}, f.shape.dim, wide);
      dot_rows(ds, shared.operands, {shared.grad, f.storage}, {shared.rows.value, of.storage}, f.shape.dim, wide);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const A lse = shared.lse[4 * down() + i], delta = shared.delta[4 * down() + i];
#pragma unroll
        for (int j = 0; j < J; ++j) {
          const bool there = shared.rows.row[J * across() + j] >= 0 && lse != nothing<A>();
          p[i][j] = there ? exp_for(fused(scale, p[i][j], shared.rows.log[J * across() + j]) - lse) : A(0);
          ds[i][j] = there ? p[i][j] * (ds[i][j] - delta) : A(0);
        }
      }
      const auto by_query = [&](const A(&of_pair)[4][J]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) write_shared(&shared.panel[(4 * down() + i) * kAcross + J * across()], of_pair[i]);
        __syncthreads();
      };
      if (wanted.value >= 0) {
        by_query(p);
        scatter(sinks.of(wanted.value, of_value), shared.grad, A(1));
      }
      if (wanted.key >= 0 || wanted.log >= 0) {
        by_query(ds);
        if (wanted.log >= 0 && c0 == 0) {
          const int e = me % kEntries;
          A sum[1] = {0};
          for (int q = me / kEntries; q < kTileQueries; q += kThreads / kEntries) sum[0] += shared.panel[q * kAcross + e];
          const int64_t row = shared.rows.row[e];
          sinks.of(wanted.log, of_log).add(row >= 0, row < 0 ? 0 : row, sum);
        }
        if (wanted.key >= 0) scatter(sinks.of(wanted.key, of_key), shared.query, scale);
        __syncthreads();
      }
      if (f.grad_q) {
        const auto panel = reinterpret_cast<A(*)[kPitch]>(shared.panel);
#pragma unroll
        for (int j = 0; j < J; ++j) {
          const A column[4] = {ds[0][j], ds[1][j], ds[2][j], ds[3][j]};
          write_shared(&panel[J * across() + j][4 * down()], column);
        }
        __syncthreads();
        add_rows(query, shared.operands, panel, {shared.rows.key, of.storage}, minimum(numbers.count - first, kEntries), c0,
                 f.shape.dim, wide);
      }
      __syncthreads();
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int q = 4 * down() + i;
      if (!f.grad_q || q >= box.count()) continue;
      A* const row = f.grad_q + (bh * f.shape.queries + box.cell(q)) * f.shape.dim;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) query[g][i][j] *= static_cast<A>(f.shape.scale);
        store_four(row, Storage::own, c0 + kColumns * g + 4 * across(), f.shape.dim, wide, query[g][i]);
      }
    }
  }
};

// --- a query that is alone ----------------------------------------------------------------------------------------------------

template <class A>
struct AloneAdjointShared {
  EntryRows<A, kAloneEntries> rows;
  A p[kAloneEntries], ds[kAloneEntries];
  alignas(16) A partial[kSide][kPitch];
};

template <class A, class Sink>
struct AloneAdjoint {
  using Shared = AloneAdjointShared<A>;
  static constexpr int kGroups = 2;

  const AdjointOf<A>& f;
  Shared& shared;
  const Sinks<Sink, A>& sinks;
  bool wide;
  int64_t row, c0;
  A lse, delta, own[kGroups][4], grad[kGroups][4], query[kGroups][4];  // its channels, those of its gradient; the gradient

  __device__ const void* of_query(const void* rows) const { return row_at<A>(rows, f.storage, row, f.shape.dim); }

  __device__ void start(int64_t head, int64_t tile, int64_t column) {
    row = head * f.shape.queries + tile, c0 = column;
    delta = 0, lse = f.lse[row];
    for (int64_t c = 4 * (static_cast<int>(threadIdx.x) % kLanes); c < f.shape.dim; c += 4 * kLanes) {  // in each warp
      A x[4], y[4];
      load_four(of_query(f.grad), f.storage, c, f.shape.dim, wide, x);
      load_four(of_query(f.out), f.storage, c, f.shape.dim, wide, y);
#pragma unroll
      for (int w = 0; w < 4; ++w) delta = fused(x[w], y[w], delta);
    }
    delta = lanes_sum(delta);
    if (f.grad_lse) delta -= f.grad_lse[row];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t c = c0 + kColumns * g + 4 * across();
      load_four(of_query(f.q), f.storage, c, f.shape.dim, wide, own[g]);
      load_four(of_query(f.grad), f.storage, c, f.shape.dim, wide, grad[g]);
#pragma unroll
      for (int j = 0; j < 4; ++j) query[g][j] = 0;
    }
  }

  __device__ void visit(const Entries<A>& of, const Wanted& wanted, const Numbers<A>& numbers) {
    const A scale = static_cast<A>(f.shape.scale);
    const int me = static_cast<int>(threadIdx.x);
    for (int first = 0; first < numbers.count; first += kAloneEntries) {
      const int many = minimum(numbers.count - first, kAloneEntries);
      shared.rows.fill(of, f.shape.dim, numbers, first);
      __syncthreads();
      A s[kDotRows], along[kDotRows];
      dot_alone(s, of_query(f.q), f.storage, {shared.rows.key, of.storage}, f.shape.dim, wide);
      dot_alone(along, of_query(f.grad), f.storage, {shared.rows.value, of.storage}, f.shape.dim, wide);
#pragma unroll
      for (int u = 0; u < kDotRows; ++u) {
        const int i = dot_row() + u * (kThreads / kDotLanes);
        if (me % kDotLanes != 0) continue;
        const bool there = shared.rows.row[i] >= 0 && lse != nothing<A>();
        const A p = there ? exp_for(fused(scale, s[u], shared.rows.log[i]) - lse) : A(0);
        shared.p[i] = p, shared.ds[i] = there ? p * (along[u] - delta) : A(0);
      }
      __syncthreads();
      if (wanted.log >= 0 && c0 == 0 && me < kAloneEntries) {  // whole warps
        A sum[1] = {shared.ds[me]};
        const int64_t to = shared.rows.row[me];
        sinks.of(wanted.log, of_log).add(to >= 0, to < 0 ? 0 : to, sum);
      }
      for (int t = down(); t < (many + kSide - 1) / kSide * kSide; t += kSide) {
        const int64_t to = shared.rows.row[t], at = (to < 0 ? 0 : to) * f.shape.dim;
        const A p = shared.p[t], ds = shared.ds[t];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const int64_t c = c0 + kColumns * g + 4 * across(), left = f.shape.dim - c;
          A value[4];
          if (wanted.value >= 0) {
#pragma unroll
            for (int w = 0; w < 4; ++w) value[w] = p * grad[g][w];
            add_four(sinks.of(wanted.value, of_value), to >= 0, at + c, left, wide, value);
          }
          if (wanted.key >= 0) {
#pragma unroll
            for (int w = 0; w < 4; ++w) value[w] = scale * ds * own[g][w];
            add_four(sinks.of(wanted.key, of_key), to >= 0, at + c, left, wide, value);
          }
        }
      }
      if (f.grad_q) add_alone(query, shared.ds, {shared.rows.key, of.storage}, many, c0, f.shape.dim, wide);
      __syncthreads();
    }
  }

  __device__ void finish() {
    if (!f.grad_q) return;
    sum_down(query, shared.partial);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) query[g][j] *= static_cast<A>(f.shape.scale);
      if (down() == 0)
        store_four(f.grad_q + row * f.shape.dim, Storage::own, c0 + kColumns * g + 4 * across(), f.shape.dim, wide, query[g]);
    }
  }
};

// --- all that a tile read -----------------------------------------------------------------------------------------------------

template <class Team, class Sink, class A>
__global__ void __launch_bounds__(kThreads, sizeof(A) == 8 ? 1 : 2)
    attend_adjoint_kernel(const __grid_constant__ AdjointOf<A> f, TileSpace<A> spaces, int64_t bytes, int64_t parts,
                          int64_t columns, bool wide) {
  TEXVLM_SHARED(shared, typename Team::Shared);
  const AttentionShape& shape = f.shape;
  const TileSpace<A> space = spaces.of_block(bytes);
  const int64_t tiles = shape.tiles(), total = shape.cells.total(), places = shape.cells.places();
  const Sinks<Sink, A> sinks(f);
  Team team{f, shared, sinks, wide};
  for (int64_t item = blockIdx.x; item < shape.batch * shape.heads * tiles * parts; item += gridDim.x) {
    const int64_t part = item % parts, row = item / parts, tile = row % tiles, bh = row / tiles, b = bh / shape.heads;
    const int64_t kv = b * shape.kv_heads + shape.kv_head(bh % shape.heads);
    team.start(bh, tile, part * columns);
    Descent<A> at(shape, space);
    for (int64_t choice = row * shape.splits; at.stage < shape.cells.stages; choice += shape.counts[at.stage - 1]) {
      at.mark(f.chosen + choice);
      const int many = at.list_split(nullptr, 0);
      at.kept += at.list_kept(f.log_count + b * total, false);
      at.next(many);
    }
    const auto target = [&](int number) { return f.target[number] ? number : -1; };
    for (int kind = 0; kind < 3; ++kind) {  // cells, places, the prefix
      const int64_t each = kind == 0 ? total : kind == 1 ? places : shape.prefix;
      const void* const key = kind == 0 ? f.keys : kind == 1 ? f.k : f.prefix_k;
      const void* const value = kind == 0 ? f.values : kind == 1 ? f.v : f.prefix_v;
      const A* const log = kind == 0 ? f.log_count : kind == 1 ? f.log_weight : nullptr;
      const Storage storage = kind == 0 ? Storage::own : f.storage;
      const Entries<A> of{row_at<A>(key, storage, kv * each, shape.dim), row_at<A>(value, storage, kv * each, shape.dim),
                          log ? log + b * each : nullptr, storage, kv * each};
      const Wanted wanted{target(kind == 0   ? to_keys
                                 : kind == 1 ? to_k
                                             : to_prefix_k),
                          target(kind == 0   ? to_values
                                 : kind == 1 ? to_v
                                             : to_prefix_v),
                          kind == 0   ? target(to_log_count)
                          : kind == 1 ? target(to_log_weight)
                                      : -1};
      const Numbers<A> numbers{kind == 0   ? at.kept
                               : kind == 1 ? at.present
                                           : static_cast<int>(shape.prefix),
                               kind == 0 ? space.kept : nullptr, kind == 1 ? &at : nullptr};
      team.visit(of, wanted, numbers);
    }
    team.finish();
    __syncthreads();
  }
}

template <class Sink, class A>
auto adjoint_kernel(const AttentionShape& shape) {
  if constexpr (std::is_same_v<A, float>)
    if (!shape.alone() && groups_of<A>(shape) == 2) return attend_adjoint_kernel<TogetherAdjoint<A, Sink, 2>, Sink, A>;
  return shape.alone() ? attend_adjoint_kernel<AloneAdjoint<A, Sink>, Sink, A>
                       : attend_adjoint_kernel<TogetherAdjoint<A, Sink, 1>, Sink, A>;
}

// No gradient is above these: magnitudes, as bits of doubles, of the incoming gradient, that of lse, queries and values.
__global__ void bounds_kernel(const unsigned long long* magnitudes, double scale, double dim, unsigned long long* bounds) {
  if (threadIdx.x != 0) return;
  const auto of = [&](int i) { return __longlong_as_double(static_cast<long long>(magnitudes[i])); };
  const double log = 2 * dim * of(0) * of(3) + of(1), bound[kKinds] = {fabs(scale) * of(2) * log, of(0), log};
  for (int k = 0; k < kKinds; ++k) {
    const double kept = minimum(bound[k], 1e300);
    bounds[k] = static_cast<unsigned long long>(__double_as_longlong(kept));
  }
}

template <class A>
void largest_stored(Storage storage, const void* rows, int64_t count, unsigned long long* largest, void* stream) {
  if constexpr (std::is_same_v<A, float>) {
    if (storage == Storage::half) return largest_magnitude(static_cast<const Half*>(rows), count, largest, stream);
    if (storage == Storage::bfloat16) return largest_magnitude(static_cast<const BFloat16*>(rows), count, largest, stream);
  }
  largest_magnitude(static_cast<const A*>(rows), count, largest, stream);
}

struct TargetSizes {
  int64_t of[kTargets], all;

  static TargetSizes from(const AttentionShape& shape) {
    const int64_t heads = shape.batch * shape.kv_heads, places = heads * shape.cells.places(),
                  cells = heads * shape.cells.total();
    const int64_t prefix = heads * shape.prefix, dim = shape.dim;
    TargetSizes sizes{{places * dim, places * dim, cells * dim, cells * dim, prefix * dim, prefix * dim, cells, places}, 0};
    for (const int64_t size : sizes.of) sizes.all += size;
    return sizes;
  }
};

}  // namespace

int64_t attend_fixed_words(const AttentionShape& shape) { return kFixedWords + TargetSizes::from(shape).all; }

template <class A>
int64_t attend_adjoint_workspace(const AttentionShape& shape) {
  return Resident::of(shape, parts_of<A>(shape), TileSpace<A>::bytes(shape, 0)).all();
}

template <class A>
void attend_adjoint(const AttendAdjoint<A>& f, unsigned long long* fixed, void* workspace, void* stream) {
  const AttentionShape& shape = f.shape;
  const int64_t parts = parts_of<A>(shape), columns = kColumns * groups_of<A>(shape);
  const Resident resident = Resident::of(shape, parts, TileSpace<A>::bytes(shape, 0));
  if (resident.blocks <= 0) return;
  Carver carver{static_cast<char*>(workspace)};
  const TileSpace<A> spaces = TileSpace<A>::carve(carver, shape, 0);
  const TargetSizes sizes = TargetSizes::from(shape);
  AdjointOf<A> of{
      f,
      {f.grad_k, f.grad_v, f.grad_keys, f.grad_values, f.grad_prefix_k, f.grad_prefix_v, f.grad_log_count, f.grad_log_weight},
      {},
      fixed ? fixed + 4 : nullptr,
      maximum<int64_t>(1, shape.queries * (shape.heads / shape.kv_heads))};
  if (fixed) {
    unsigned long long* to = fixed + kFixedWords;
    for (int t = 0; t < kTargets; ++t) of.sums[t] = to, to += sizes.of[t];
    const int64_t asked = shape.batch * shape.heads * shape.queries;
    largest_stored<A>(f.storage, f.grad, asked * shape.dim, fixed, stream);
    if (f.grad_lse) largest_magnitude(f.grad_lse, asked, fixed + 1, stream);
    largest_stored<A>(f.storage, f.q, asked * shape.dim, fixed + 2, stream);
    largest_stored<A>(f.storage, f.v, sizes.of[to_v], fixed + 3, stream);
    largest_magnitude(f.values, sizes.of[to_values], fixed + 3, stream);
    largest_stored<A>(f.storage, f.prefix_v, sizes.of[to_prefix_v], fixed + 3, stream);
    launch(bounds_kernel, dim3(1), kLanes, 0, stream, static_cast<const unsigned long long*>(fixed), shape.scale,
           static_cast<double>(shape.dim), fixed + 4);
  }
  const bool wide = shape.dim % 4 == 0 && aligned<A>(f.storage, f.grad, f.q, f.k, f.v, f.prefix_k, f.prefix_v, f.out) &&
                    aligned<A>(Storage::own, f.keys, f.values, f.grad_q, f.grad_k, f.grad_v, f.grad_keys, f.grad_values,
                               f.grad_prefix_k, f.grad_prefix_v);
  const auto kernel = fixed ? adjoint_kernel<FixedSink<A>, A>(shape) : adjoint_kernel<FloatSink<A>, A>(shape);
  launch(kernel, dim3(static_cast<unsigned>(resident.blocks)), kThreads, 0, stream, of, spaces, resident.bytes, parts, columns,
         wide);
  for (int t = 0; fixed && t < kTargets; ++t) {
    const int kind = t == to_log_count || t == to_log_weight ? of_log : t % 2 ? of_value : of_key;
    if (of.target[t]) add_fixed(FixedPoint{of.sums[t], fixed + 4 + kind, of.count}, of.target[t], sizes.of[t], stream);
  }
}

#define TEXVLM_ATTENTION_ADJOINT(A)                                    \
  template int64_t attend_adjoint_workspace<A>(const AttentionShape&); \
  template void attend_adjoint(const AttendAdjoint<A>&, unsigned long long*, void*, void*)
TEXVLM_ATTENTION_ADJOINT(float);
TEXVLM_ATTENTION_ADJOINT(double);

}  // namespace texvlm::cuda
