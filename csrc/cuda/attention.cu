// Attention that reads cells and places.
//
// A block takes a tile of queries, or a query that is alone, through all stages: it scores the cells that are there, chooses,
// adds those that stay whole to the sums of its softmax, and goes on with the others; nothing is scored twice, but for the mass.
// Bytes moved: queries once, and once more for each chunk of entries from the caches; for a tile the keys and values of what it
// reads (about `keep` of all, from the L2 cache where a head fits), what cells are chosen by, and the scores of the cells of a
// stage, out and in, which also stay in L2; the output once. Sums are in the precision of the results: no matrix units.
#include "attention_choice.cuh"

namespace texvlm::cuda {
namespace {

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
template <class A, int kGroups>
struct Together {
  using Shared = TileShared<A>;
  static constexpr int kQueries = kTileQueries, kEntries = Shared::kEntries, J = kEntries / kSide;

  const Attend<A>& f;
  Shared& shared;
  bool wide;
  CellBox box;
  int64_t bh, c0;
  A top[4], sum[4], out[kGroups][4][4];  // of the queries 4 down() and on: largest score, sum of exponentials, weighted values

  __device__ A (*spare()) [kPitch] { return shared.operands.side[0]; } __device__ void* row_of(int64_t row) {
    return static_cast<char*>(f.out) + row * f.shape.dim * bytes_each<A>(f.storage);
  }

  __device__ void start(int64_t head, int64_t tile, int64_t column) {
    box = f.shape.tile(tile), bh = head, c0 = column;
    const int me = static_cast<int>(threadIdx.x);
    if (me < kTileQueries)
      shared.query[me] = me < box.count() ? row_at<A>(f.q, f.storage, bh * f.shape.queries + box.cell(me), f.shape.dim) : nullptr;
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

  // The scores of the chunk in shared.rows.
  __device__ void score_rows(A (&s)[4][J], Storage storage) {
    dot_rows(s, shared.operands, {shared.query, f.storage}, {shared.rows.key, storage}, f.shape.dim, wide);
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

  // Scores of entries into work memory, and with `found` what all of them and those taken before sum up to, into shared.lse.
  __device__ void score(const Entries<A>& of, const Numbers<A>& numbers, const TileSpace<A>& space, bool found) {
    A m[4], total[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = top[i], total[i] = sum[i];
    for (int first = 0; first < numbers.count; first += kEntries) {
      shared.rows.fill(of, f.shape.dim, numbers, first);
      __syncthreads();
      A s[4][J];
      score_rows(s, of.storage);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < J; ++j) {
        const int number = first + J * across() + j;
        const A column[4] = {s[0][j], s[1][j], s[2][j], s[3][j]};
        if (number < numbers.count) write_shared(space.scores + static_cast<int64_t>(number) * kQueries + 4 * down(), column);
      }
      if (!found) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) soften(s[i], m[i], total[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (across() == 0)
        shared.lse[4 * down() + i] = 4 * down() + i < box.count() ? LogSum<A>{m[i], total[i]}.log() : nothing<A>();
    __syncthreads();
  }

  // Entries into the sums; slots: null, or where their scores are in work memory.
  __device__ void absorb(const Entries<A>& of, const Numbers<A>& numbers, const A* scores, const int32_t* slots) {
    for (int first = 0; first < numbers.count; first += kEntries) {
      shared.rows.fill(of, f.shape.dim, numbers, first);
      __syncthreads();
      A s[4][J];
      if (slots) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
          const int i = first + J * across() + j;
          A column[4] = {nothing<A>(), nothing<A>(), nothing<A>(), nothing<A>()};
          if (i < numbers.count) read_shared(scores + static_cast<int64_t>(slots[i]) * kQueries + 4 * down(), column);
#pragma unroll
          for (int k = 0; k < 4; ++k) s[k][j] = column[k];
        }
      } else {
        score_rows(s, of.storage);
      }
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
      add_rows(out, shared.operands, shared.panel, {shared.rows.value, of.storage}, minimum(numbers.count - first, kEntries), c0,
               f.shape.dim, wide);
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
        if (here) store_four(row_of(row), f.storage, c, f.shape.dim, wide, out[g][i]);
      }
      if (across() != 0) continue;
      const A lse = LogSum<A>{top[i], sum[i]}.log();
      shared.lse[q] = here ? lse : nothing<A>();
      if (here && c0 == 0) f.lse[row] = lse;
    }
    __syncthreads();
  }

  __device__ void add_mass(const Entries<A>& of, const Numbers<A>& numbers, unsigned long long* to, double scale) {
    for (int first = 0; first < numbers.count; first += kEntries) {
      shared.rows.fill(of, f.shape.dim, numbers, first);
      __syncthreads();
      A s[4][J];
      score_rows(s, of.storage);
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
template <class A>
struct Alone {
  using Shared = AloneShared<A>;
  static constexpr int kQueries = 1, kGroups = 2;

  const Attend<A>& f;
  Shared& shared;
  bool wide;
  int64_t row, c0;
  LogSum<A> sum;  // the same in all threads
  A out[kGroups][4];

  __device__ A (*spare()) [kPitch] { return shared.partial; } __device__ const void* query() const {
    return row_at<A>(f.q, f.storage, row, f.shape.dim);
  }

  __device__ void start(int64_t head, int64_t tile, int64_t column) {
    row = head * f.shape.queries + tile, c0 = column;
    if (threadIdx.x == 0) shared.query[0] = query();
    sum.clear();
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j) out[g][j] = 0;
    __syncthreads();
  }

  // The scores of the chunk in shared.rows into to[i], i < many. The block has to be in step after.
  __device__ void score_rows(A* to, Storage storage, int many) {
    A s[kDotRows];
    dot_alone(s, query(), f.storage, {shared.rows.key, storage}, f.shape.dim, wide);
#pragma unroll
    for (int u = 0; u < kDotRows; ++u) {
      const int i = dot_row() + u * (kThreads / kDotLanes);
      if (threadIdx.x % kDotLanes == 0 && i < many)
        to[i] = shared.rows.row[i] >= 0 ? fused(static_cast<A>(f.shape.scale), s[u], shared.rows.log[i]) : nothing<A>();
    }
  }

  __device__ void score(const Entries<A>& of, const Numbers<A>& numbers, const TileSpace<A>& space, bool found) {
    for (int first = 0; first < numbers.count; first += kAloneEntries) {
      shared.rows.fill(of, f.shape.dim, numbers, first);
      __syncthreads();
      score_rows(space.scores + first, of.storage, minimum(numbers.count - first, kAloneEntries));
      __syncthreads();
    }
    if (!found) return;
    LogSum<A> part;
    part.clear();
    for (int i = static_cast<int>(threadIdx.x); i < numbers.count; i += kThreads) part.meet(space.scores[i]);
    part = block_join(part);
    part.join(0, sum, 0, 1);
    if (threadIdx.x == 0) shared.lse[0] = part.log();
    __syncthreads();
  }

  __device__ void absorb(const Entries<A>& of, const Numbers<A>& numbers, const A* scores, const int32_t* slots) {
    const int me = static_cast<int>(threadIdx.x), lane = me % kLanes;
    for (int first = 0; first < numbers.count; first += kAloneEntries) {
      const int many = minimum(numbers.count - first, kAloneEntries);
      shared.rows.fill(of, f.shape.dim, numbers, first);
      __syncthreads();
      if (!slots) {
        score_rows(shared.score, of.storage, many);
      } else if (me < many) {
        shared.score[me] = scores[slots[first + me]];
      }
      __syncthreads();
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
      add_alone(out, shared.weight, {shared.rows.value, of.storage}, many, c0, f.shape.dim, wide);
      __syncthreads();
    }
  }

  __device__ void finish() {
    sum_down(out, shared.partial);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[g][j] = sum.sum == A(0) ? A(0) : out[g][j] / sum.sum;
      void* const to = static_cast<char*>(f.out) + row * f.shape.dim * bytes_each<A>(f.storage);
      if (down() == 0) store_four(to, f.storage, c0 + kColumns * g + 4 * across(), f.shape.dim, wide, out[g]);
    }
    const A lse = sum.log();
    if (threadIdx.x != 0) return;
    shared.lse[0] = lse;
    if (c0 == 0) f.lse[row] = lse;
  }

  __device__ void add_mass(const Entries<A>& of, const Numbers<A>& numbers, unsigned long long* to, double scale) {
    for (int first = 0; first < numbers.count; first += kAloneEntries) {
      const int me = static_cast<int>(threadIdx.x), many = minimum(numbers.count - first, kAloneEntries);
      shared.rows.fill(of, f.shape.dim, numbers, first);
      __syncthreads();
      score_rows(shared.score, of.storage, many);
      __syncthreads();
      const A lse = shared.lse[0];
      if (me < many && shared.rows.row[me] >= 0)
        add_fixed_mass(to + shared.rows.row[me], lse == nothing<A>() ? A(0) : exp_for(shared.score[me] - lse), scale);
      __syncthreads();
    }
  }
};

// --- all stages ---------------------------------------------------------------------------------------------------------------

template <class Team, class A>
__global__ void __launch_bounds__(kThreads, 2)
    attend_kernel(const __grid_constant__ Attend<A> f, TileSpace<A> spaces, int64_t bytes, int64_t parts, int64_t columns,
                  unsigned long long* masses, bool wide) {
  TEXVLM_SHARED(shared, typename Team::Shared);
  const AttentionShape& shape = f.shape;
  const TileSpace<A> space = spaces.of_block(bytes);
  const int stages = shape.cells.stages;
  const int64_t tiles = shape.tiles(), total = shape.cells.total(), places = shape.cells.places();
  Team team{f, shared, wide};
  for (int64_t item = blockIdx.x; item < shape.batch * shape.heads * tiles * parts; item += gridDim.x) {
    const int64_t part = item % parts, row = item / parts, tile = row % tiles, bh = row / tiles, b = bh / shape.heads;
    const int64_t kv = b * shape.kv_heads + shape.kv_head(bh % shape.heads);
    const auto entries = [&](const void* key, const void* value, Storage storage, const A* log, int64_t each, int64_t first) {
      return Entries<A>{row_at<A>(key, storage, kv * each, shape.dim), row_at<A>(value, storage, kv * each, shape.dim), log,
                        storage, first};
    };
    const Entries<A> cells = entries(f.keys, f.values, Storage::own, f.log_count + b * total, total, 0);
    const Entries<A> near = entries(f.k, f.v, f.storage, f.log_weight ? f.log_weight + b * places : nullptr, places, total);
    const Entries<A> prefix = entries(f.prefix_k, f.prefix_v, f.storage, nullptr, shape.prefix, 0);
    team.start(bh, tile, part * columns);
    Descent<A> at(shape, space);
    int64_t choice = row * shape.splits;
    for (int step = -1; step <= stages; ++step) {  // the prefix, the cells of each stage, the places
      const bool choosing = step >= 0 && step < stages;
      Numbers<A> numbers{step < 0 ? static_cast<int>(shape.prefix) : at.present, nullptr, step < 0 ? nullptr : &at};
      int many = 0;
      if (choosing) {
        const int64_t first = shape.cells.offset[step];
        team.score({row_at<A>(cells.key, Storage::own, first, shape.dim), nullptr, cells.log + first, Storage::own, 0}, numbers,
                   space, !f.choice);
        if (f.choice) {
          at.mark(f.choice + choice);
          many = at.list_split(nullptr, 0);
        } else {
          many = choose<Team::kQueries>(f, at, b, kv, shared.query, shared.lse, team.spare());
        }
        for (int64_t i = threadIdx.x; part == 0 && i < shape.counts[step]; i += kThreads)
          f.chosen[choice + i] = f.choice ? f.choice[choice + i] : i < many ? at.split[i] : -1;
        numbers = {at.list_kept(cells.log, true), space.kept + at.kept, nullptr};
        at.kept += numbers.count;
      }
      team.absorb(step < 0 ? prefix : choosing ? cells : near, numbers, space.scores, choosing ? space.slot : nullptr);
      if (!choosing) continue;
      choice += shape.counts[step];
      at.next(many);
    }
    team.finish();
    for (int kind = 0; masses && part == 0 && kind < 2; ++kind) {
      const Numbers<A> numbers = kind ? Numbers<A>{at.present, nullptr, &at} : Numbers<A>{at.kept, space.kept, nullptr};
      team.add_mass(kind ? near : cells, numbers, masses + bh * (total + places), mass_scale(shape.queries));
    }
    __syncthreads();
  }
}

// What places have, by themselves and by their cells.
template <class A>
__global__ void __launch_bounds__(kThreads) mass_kernel(const __grid_constant__ Attend<A> f, const unsigned long long* masses) {
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

}  // namespace

template <class A>
int64_t attend_workspace(const AttentionShape& shape) {
  return Resident::of(shape, parts_of<A>(shape), TileSpace<A>::bytes(shape, shape.alone() ? 1 : kTileQueries)).all();
}

template <class A>
void attend(const Attend<A>& f, unsigned long long* masses, void* workspace, void* stream) {
  const AttentionShape& shape = f.shape;
  const int64_t queries = shape.alone() ? 1 : kTileQueries, parts = parts_of<A>(shape), columns = kColumns * groups_of<A>(shape);
  const Resident resident = Resident::of(shape, parts, TileSpace<A>::bytes(shape, queries));
  const bool wide = shape.dim % 4 == 0 && aligned<A>(f.storage, f.q, f.k, f.v, f.prefix_k, f.prefix_v, f.out) &&
                    aligned<A>(Storage::own, f.keys, f.values);
  if (resident.blocks > 0) {
    Carver carver{static_cast<char*>(workspace)};
    const TileSpace<A> spaces = TileSpace<A>::carve(carver, shape, queries);
    auto kernel = shape.alone() ? attend_kernel<Alone<A>, A> : attend_kernel<Together<A, 1>, A>;
    if constexpr (std::is_same_v<A, float>)
      if (columns > kColumns && !shape.alone()) kernel = attend_kernel<Together<A, 2>, A>;
    launch(kernel, dim3(static_cast<unsigned>(resident.blocks)), kThreads, 0, stream, f, spaces, resident.bytes, parts, columns,
           masses, wide);
  }
  const int64_t places = shape.batch * shape.heads * shape.cells.places();
  if (f.mass && places > 0) launch(mass_kernel<A>, dim3(blocks_for(places)), kThreads, 0, stream, f, masses);
}

#define TEXVLM_ATTENTION(A)                                    \
  template int64_t attend_workspace<A>(const AttentionShape&); \
  template void attend(const Attend<A>&, unsigned long long*, void*, void*)
TEXVLM_ATTENTION(float);
TEXVLM_ATTENTION(double);

}  // namespace texvlm::cuda
