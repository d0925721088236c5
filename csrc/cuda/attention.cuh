// What the kernels of attention share, forward and backward: which entries a tile reads, and products of rows by a block.
// Included by the .cu files only; torch-free.
//
// The cells of a stage that are there for a tile are numbered 0 .. present - 1 without being listed: all cells of the first stage,
// and then the children of the cells that the stage before split, as many numbers for each as the largest has. What is split is a
// set of bits over the grid of the stage, from which the list follows in ascending order; what is kept whole is listed, so that
// products are made of whole chunks of it.
#pragma once

#include "attention.h"
#include "scatter.cuh"

namespace texvlm::cuda {

constexpr int kSide = 16;  // the threads of a block as a square: kSide x kSide parts of a product
constexpr int kDepth = 16;
constexpr int kColumns = 64;            // of a product, at a time
constexpr int kPitch = kColumns + 4;    // of a row in shared memory: vectors are aligned, and columns spread over the banks
constexpr int kMostColumns = 128;       // of the values, for one block; more are other blocks' parts
constexpr int kGroups = kMostColumns / kColumns;
constexpr int kAloneEntries = 128;  // of a chunk, for a query that is alone
static_assert(kSide * kSide == kThreads && kTileQueries == 4 * kSide);

// Entries of a chunk, for a tile: doubles are large.
template <class A>
constexpr int kTileEntries = sizeof(A) == 8 ? 32 : 64;

// Blocks that run at a time, and the bytes each has to itself.
struct Resident {
  int64_t blocks, bytes;

  static Resident of(const AttentionShape& shape, int64_t bytes) {
    const int64_t all = shape.batch * shape.heads * shape.tiles() * parts(shape);
    const int64_t budget = int64_t{256} << 20;
    return {minimum(all, clamp<int64_t>(budget / maximum<int64_t>(bytes, 1), 132, 2112)), bytes};
  }
  static int64_t parts(const AttentionShape& shape) { return maximum<int64_t>(1, ceil_div(shape.dim, kMostColumns)); }
  int64_t all() const { return blocks * bytes; }
};

namespace {

__device__ inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double fused(double a, double b, double c) { return fma(a, b, c); }
__device__ inline float exp_for(float v) { return expf(v); }  // exp_of() has no NaN, which has to get through here
__device__ inline double exp_for(double v) { return exp(v); }
__device__ inline float log_for(float v) { return logf(v); }
__device__ inline double log_for(double v) { return log(v); }
template <class A>
__device__ A nothing() {
  return -static_cast<A>(HUGE_VALF);
}

// The sum over `lanes` neighbouring lanes, in all of them.
template <class V>
__device__ V lanes_sum(V value, int lanes = kLanes) {
  for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}
template <class V>
__device__ V lanes_max(V value, int lanes = kLanes) {
  for (int step = lanes / 2; step > 0; step /= 2) value = maximum(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// --- which entries ------------------------------------------------------------------------------------------------------------

// Numbers that a cell of stage s - 1 has for its children.
TEXVLM_HD int64_t children_most(const CellPyramid& cells, int s) {
  const int64_t side = int64_t{1} << (cells.level[s - 1] - (s < cells.stages ? cells.level[s] : 0));
  return minimum(side, cells.rows_of(s)) * minimum(side, cells.columns_of(s));
}
TEXVLM_HD int64_t words_of(const CellPyramid& cells, int s) { return (cells.cells(s) + 31) / 32; }
// The most that can be present in stage s.
TEXVLM_HD int64_t present_most(const AttentionShape& shape, int s) {
  if (s == 0) return shape.cells.cells(0);
  return minimum(shape.counts[s - 1], shape.cells.cells(s - 1)) * children_most(shape.cells, s);
}

// Work memory of a block.
template <class A>
struct TileSpace {
  A *scores, *values, *bounds, *mean;  // scores [present, queries]; the others only where something is chosen
  int32_t *split, *kept, *slot;        // per stage in turn, counts[s] of cells; entries; of the stage, their numbers
  uint32_t *bits, *equal;              // per stage in turn; of the stage

  // The part of this block: `bytes` for each.
  __device__ TileSpace of_block(int64_t bytes) const {
    const int64_t skip = blockIdx.x * bytes;
    const auto moved = [&](auto* p) { return reinterpret_cast<decltype(p)>(reinterpret_cast<char*>(p) + skip); };
    return {moved(scores), moved(values), moved(bounds), moved(mean), moved(split), moved(kept), moved(slot), moved(bits), moved(equal)};
  }
  // queries: of a tile; 0: nothing is scored before it is read (backward).
  static TileSpace carve(Carver& carver, const AttentionShape& shape, int64_t queries) {
    int64_t present = 0, most = 0, words = 0, most_words = 0;
    for (int s = 0; s < shape.cells.stages; ++s) {
      present += present_most(shape, s), most = maximum(most, present_most(shape, s));
      words += words_of(shape.cells, s), most_words = maximum(most_words, words_of(shape.cells, s));
    }
    TileSpace space{};
    space.scores = carver.take<A>(most * queries);
    space.values = carver.take<A>(queries ? most : 0);
    space.bounds = carver.take<A>(queries ? most : 0);
    space.mean = carver.take<A>(queries && most ? shape.dim : 0);
    space.split = carver.take<int32_t>(shape.splits);
    space.kept = carver.take<int32_t>(present);
    space.slot = carver.take<int32_t>(queries ? most : 0);
    space.bits = carver.take<uint32_t>(words);
    space.equal = carver.take<uint32_t>(queries ? most_words : 0);
    return space;
  }
  static int64_t bytes(const AttentionShape& shape, int64_t queries) {
    Carver carver{nullptr};
    carve(carver, shape, queries);
    return carver.bytes;
  }
};

// The work memory of a block as it goes through the stages; the same in all of its threads.
template <class A>
struct Descent {
  const AttentionShape& shape;
  TileSpace<A> space;
  int stage = 0;
  int present;                 // numbers of this stage
  int kept = 0;                // entries kept whole, of all stages before this
  int32_t *parents, *split;    // the cells that the stage before split, and those of this one
  uint32_t *above, *bits;      // alike
  int each, rows, columns;     // numbers for each parent; the grid of this stage
  int finer = 0, columns_above = 0;

  __device__ Descent(const AttentionShape& of, const TileSpace<A>& with)
      : shape(of), space(with), parents(nullptr), split(with.split), above(nullptr), bits(with.bits), each(1) {
    rows = static_cast<int>(of.cells.rows_of(0)), columns = static_cast<int>(of.cells.columns_of(0));
    present = rows * columns;
  }
  // On to the next stage, after `many` cells of this one were split.
  __device__ void next(int many) {
    parents = split, above = bits, columns_above = columns;
    split += shape.counts[stage], bits += words_of(shape.cells, stage);
    ++stage;
    finer = shape.cells.level[stage - 1] - (stage < shape.cells.stages ? shape.cells.level[stage] : 0);
    each = static_cast<int>(children_most(shape.cells, stage));
    rows = static_cast<int>(shape.cells.rows_of(stage)), columns = static_cast<int>(shape.cells.columns_of(stage));
    present = many * each;
  }
  // The cell (after the last stage, the place) that has a number; -1: none. As CellPyramid::children, in 32 bits.
  __device__ int cell(int number) const {
    if (stage == 0) return number;
    const int parent = parents[number / each], child = number % each, side = 1 << finer;
    const int y = parent / columns_above * side, x = parent % columns_above * side, wide = minimum(side, columns - x);
    const int down = child / wide;
    return down < minimum(side, rows - y) ? (y + down) * columns + x + child % wide : -1;
  }
  __device__ bool is_split(int cell) const { return bits[cell / 32] >> (cell % 32) & 1u; }

  // The block is in step after each of these.
  __device__ void clear(uint32_t* words) const {
    for (int64_t i = threadIdx.x; i < words_of(shape.cells, stage); i += kThreads) words[i] = 0;
    __syncthreads();
  }
  __device__ static void set(uint32_t* words, int cell) { atomicOr(words + cell / 32, 1u << (cell % 32)); }

  // The bits of a choice that is given; cells that are not there are left out.
  __device__ void mark(const int32_t* given) const {
    clear(bits);
    for (int64_t i = threadIdx.x; i < shape.counts[stage]; i += kThreads) {
      const int c = given[i];
      if (c < 0 || c >= rows * columns) continue;
      if (stage > 0) {
        const int parent = (c / columns >> finer) * columns_above + (c % columns >> finer);
        if (!(above[parent / 32] >> (parent % 32) & 1u)) continue;
      }
      set(bits, c);
    }
    __syncthreads();
  }

  // Lists what is split, ascending; the first `ties` of the `equal` bits are split as well. Returns how many.
  __device__ int list_split(const uint32_t* equal, unsigned ties) const {
    const int64_t words = words_of(shape.cells, stage);
    unsigned many = 0, same = 0, all;
    for (int64_t first = 0; first < words; first += kThreads) {
      const int64_t i = first + threadIdx.x;
      uint32_t word = i < words ? bits[i] : 0;
      if (equal) {
        uint32_t more = i < words ? equal[i] : 0;
        const unsigned before = same + block_exclusive<kThreads>(static_cast<unsigned>(__popc(more)), all);
        for (unsigned room = before < ties ? ties - before : 0; more && room; --room) {
          word |= more & (~more + 1u);
          more &= more - 1u;
        }
        if (i < words) bits[i] = word;
        same += all;
      }
      unsigned to = many + block_exclusive<kThreads>(static_cast<unsigned>(__popc(word)), all);
      for (; word; word &= word - 1u) split[to++] = static_cast<int32_t>(i * 32 + __ffs(static_cast<int>(word)) - 1);
      many += all;
    }
    __syncthreads();
    return static_cast<int>(many);
  }

  // Lists the cells of this stage that stay whole, behind those that are listed; log_count: of all cells. Returns how many.
  __device__ int list_kept(const A* log_count, bool slots) {
    unsigned many = 0, all;
    const int64_t offset = shape.cells.offset[stage];
    for (int first = 0; first < present; first += kThreads) {
      const int number = first + static_cast<int>(threadIdx.x);
      const int at = number < present ? cell(number) : -1;
      const bool stays = at >= 0 && !is_split(at) && log_count[offset + at] != nothing<A>();
      const unsigned to = many + block_exclusive<kThreads>(stays ? 1u : 0u, all);
      if (stays) {
        space.kept[kept + to] = static_cast<int32_t>(offset + at);
        if (slots) space.slot[to] = number;
      }
      many += all;
    }
    __syncthreads();
    kept += static_cast<int>(many);
    return static_cast<int>(many);
  }
};

// --- rows ---------------------------------------------------------------------------------------------------------------------

// Entries of one kind, of one batch and head: cells (U = A), places or the prefix (U = T).
template <class U, class A>
struct Entries {
  const U *key, *value;
  const A* log;  // of the count or the weight; null: 0
};

// E of them at a time, in shared memory.
template <class A, int E>
struct EntryRows {
  const void *key[E], *value[E];  // null: no entry
  A log[E];
  int64_t row[E];  // -1: no entry

  // The entries at(first) and on, of `count`; at() may give -1. The block has to be in step after.
  template <class U, class At>
  __device__ void fill(const Entries<U, A>& of, int64_t dim, int first, int count, const At& at) {
    for (int j = static_cast<int>(threadIdx.x); j < E; j += kThreads) {
      int64_t i = first + j < count ? static_cast<int64_t>(at(first + j)) : -1;
      log[j] = i < 0 ? nothing<A>() : of.log ? of.log[i] : A(0);
      if (log[j] == nothing<A>()) i = -1;
      key[j] = i < 0 ? nullptr : of.key + i * dim;
      value[j] = i < 0 ? nullptr : of.value + i * dim;
      row[j] = i;
    }
  }
};

// Four of a row, zeros beyond its end and where there is no row. wide: rows are a multiple of four, and aligned so.
template <class A, class U>
__device__ void load_four(const U* from, int64_t left, bool wide, A (&to)[4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) to[w] = A(0);
  if (!from || left <= 0) return;
  if (wide) {
    const Pack<U, 4> four = *reinterpret_cast<const Pack<U, 4>*>(from);
#pragma unroll
    for (int w = 0; w < 4; ++w) to[w] = static_cast<A>(four.v[w]);
    return;
  }
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (w < left) to[w] = static_cast<A>(from[w]);
}
template <class A, class U>
__device__ void store_four(U* to, int64_t left, bool wide, const A (&from)[4]) {
  if (left <= 0) return;
  if (wide) {
    Pack<U, 4> four;
#pragma unroll
    for (int w = 0; w < 4; ++w) four.v[w] = static_cast<U>(from[w]);
    *reinterpret_cast<Pack<U, 4>*>(to) = four;
    return;
  }
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (w < left) to[w] = static_cast<U>(from[w]);
}

// R neighbours in shared memory, by 16 bytes where it can be.
template <int R, class A>
__device__ void read_shared(const A* from, A (&to)[R]) {
  constexpr int W = R < static_cast<int>(16 / sizeof(A)) ? R : static_cast<int>(16 / sizeof(A));
#pragma unroll
  for (int r = 0; r < R; r += W) {
    const Pack<A, W> pack = *reinterpret_cast<const Pack<A, W>*>(from + r);
#pragma unroll
    for (int w = 0; w < W; ++w) to[r + w] = pack.v[w];
  }
}
template <int R, class A>
__device__ void write_shared(A* to, const A (&from)[R]) {
  constexpr int W = R < static_cast<int>(16 / sizeof(A)) ? R : static_cast<int>(16 / sizeof(A));
#pragma unroll
  for (int r = 0; r < R; r += W) {
    Pack<A, W> pack;
#pragma unroll
    for (int w = 0; w < W; ++w) pack.v[w] = from[r + w];
    *reinterpret_cast<Pack<A, W>*>(to + r) = pack;
  }
}

// --- products -----------------------------------------------------------------------------------------------------------------

// What a block holds of two operands.
template <class A>
struct Operands {
  alignas(16) A side[2][kDepth][kPitch];
};

__device__ inline int down() { return static_cast<int>(threadIdx.x) / kSide; }    // this thread's rows of a product
__device__ inline int across() { return static_cast<int>(threadIdx.x) % kSide; }  // and its columns

template <int R, class U, class A>
__device__ void load_deep(A (&to)[kDepth][kPitch], const void* const* rows, int64_t d0, int64_t dim, bool wide) {
  for (int i = static_cast<int>(threadIdx.x); i < R * kDepth / 4; i += kThreads) {
    const int row = i / (kDepth / 4), d = i % (kDepth / 4) * 4;
    const U* from = static_cast<const U*>(rows[row]);
    A four[4];
    load_four(from ? from + d0 + d : nullptr, dim - d0 - d, wide, four);
#pragma unroll
    for (int w = 0; w < 4; ++w) to[d + w][row] = four[w];
  }
}

// c[i][j] = x[R down + i] . y[J across + j]: rows in memory, of X and of Y. The block is in step after.
template <class X, class Y, int R, int J, class A>
__device__ void dot_rows(A (&c)[R][J], Operands<A>& operands, const void* const* x, const void* const* y, int64_t dim, bool wide) {
#pragma unroll
  for (int i = 0; i < R; ++i)
#pragma unroll
    for (int j = 0; j < J; ++j) c[i][j] = A(0);
  for (int64_t d0 = 0; d0 < dim; d0 += kDepth) {
    load_deep<R * kSide, X>(operands.side[0], x, d0, dim, wide);
    load_deep<J * kSide, Y>(operands.side[1], y, d0, dim, wide);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      A a[R], b[J];
      read_shared(&operands.side[0][d][R * down()], a);
      read_shared(&operands.side[1][d][J * across()], b);
#pragma unroll
      for (int i = 0; i < R; ++i)
#pragma unroll
        for (int j = 0; j < J; ++j) c[i][j] = fused(a[i], b[j], c[i][j]);
    }
    __syncthreads();
  }
}

// c[g][i][j] += sum_t panel[t][R down + i] y_t[c0 + 64 g + 4 across + j], for t < many; panel has rows up to a multiple of kDepth,
// zeros where there is no y. The block is in step after.
template <class Y, int G, int R, int P, class A>
__device__ void add_rows(A (&c)[G][R][4], Operands<A>& operands, const A (*panel)[P], const void* const* y, int many, int64_t c0,
                         int64_t dim, bool wide) {
  static_assert(G <= 2);
  for (int t0 = 0; t0 < many; t0 += kDepth) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const int64_t column = c0 + kColumns * g + 4 * across();
      const Y* from = static_cast<const Y*>(y[t0 + down()]);
      A four[4];
      load_four(from ? from + column : nullptr, dim - column, wide, four);
      write_shared(&operands.side[g][down()][4 * across()], four);
    }
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < kDepth; ++t) {
      A a[R];
      read_shared(&panel[t0 + t][R * down()], a);
#pragma unroll
      for (int g = 0; g < G; ++g) {
        A b[4];
        read_shared(&operands.side[g][t][4 * across()], b);
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) c[g][i][j] = fused(a[i], b[j], c[g][i][j]);
      }
    }
    __syncthreads();
  }
}

// --- one query ----------------------------------------------------------------------------------------------------------------

constexpr int kDotLanes = 8;  // that share a product of two rows
constexpr int kDotRows = 4;   // that a thread takes at a time
static_assert(kThreads / kDotLanes * kDotRows == kAloneEntries);

// The products of x with the rows of a chunk: of row lane_row() + 32 u in c[u], in all lanes that share it.
__device__ inline int dot_row() { return static_cast<int>(threadIdx.x) / kDotLanes; }
template <class X, class Y, class A>
__device__ void dot_alone(A (&c)[kDotRows], const X* x, const void* const* y, int64_t dim, bool wide) {
#pragma unroll
  for (int u = 0; u < kDotRows; ++u) c[u] = A(0);
  for (int64_t d = 4 * (static_cast<int>(threadIdx.x) % kDotLanes); d < dim; d += 4 * kDotLanes) {
    A a[4];
    load_four(x + d, dim - d, wide, a);
#pragma unroll
    for (int u = 0; u < kDotRows; ++u) {
      const Y* from = static_cast<const Y*>(y[dot_row() + u * (kThreads / kDotLanes)]);
      A b[4];
      load_four(from ? from + d : nullptr, dim - d, wide, b);
#pragma unroll
      for (int w = 0; w < 4; ++w) c[u] = fused(a[w], b[w], c[u]);
    }
  }
#pragma unroll
  for (int u = 0; u < kDotRows; ++u) c[u] = lanes_sum(c[u], kDotLanes);
}

// c[g][j] += sum weight_t y_t[c0 + 64 g + 4 across + j], over the rows t = down, down + 16, .. < many of a chunk.
template <class Y, int G, class A>
__device__ void add_alone(A (&c)[G][4], const A* weight, const void* const* y, int many, int64_t c0, int64_t dim, bool wide) {
  for (int t = down(); t < many; t += kSide) {
    const Y* from = static_cast<const Y*>(y[t]);
    if (!from) continue;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const int64_t column = c0 + kColumns * g + 4 * across();
      A four[4];
      load_four(from + column, dim - column, wide, four);
#pragma unroll
      for (int j = 0; j < 4; ++j) c[g][j] = fused(weight[t], four[j], c[g][j]);
    }
  }
}

// The sum of what the threads of a column have, in those that are first. The block is in step after.
template <int G, class A>
__device__ void sum_down(A (&c)[G][4], A (*partial)[kPitch]) {
#pragma unroll
  for (int g = 0; g < G; ++g) {
    write_shared(&partial[down()][4 * across()], c[g]);
    __syncthreads();
    if (down() == 0) {
      for (int t = 1; t < kSide; ++t) {
        A more[4];
        read_shared(&partial[t][4 * across()], more);
#pragma unroll
        for (int j = 0; j < 4; ++j) c[g][j] += more[j];
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace texvlm::cuda
