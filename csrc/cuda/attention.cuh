// Which entries a tile reads: what the kernels of attention share, forward and backward. Included by the .cu files only;
// torch-free.
//
// The cells of a stage that are there for a tile are numbered 0 .. present - 1 without being listed: all cells of the first
// stage, and then the children of the cells that the stage before split, as many numbers for each as the largest has. What is
// split is a set of bits over the grid of the stage, from which the list follows in ascending order; what is kept whole is
// listed, so that products are made of whole chunks of it.
#pragma once

#include "attention.h"
#include "attention_rows.cuh"

namespace texvlm::cuda {

static_assert(kTileQueries == 4 * kSide && kTileQueries <= kColumns);

// Entries of a chunk, for a tile: doubles are large.
template <class A>
constexpr int kTileEntries = sizeof(A) == 8 ? 32 : 64;

// Groups of kColumns channels that a block holds sums of in registers; where there are more, others do the same for the rest.
template <class A>
int groups_of(const AttentionShape& shape) {
  return shape.alone() ? 2 : sizeof(A) == 8 || shape.dim <= kColumns ? 1 : 2;
}
template <class A>
int64_t parts_of(const AttentionShape& shape) {
  return maximum<int64_t>(1, ceil_div(shape.dim, kColumns * groups_of<A>(shape)));
}

// Blocks that run at a time, and the bytes each has to itself.
struct Resident {
  int64_t blocks, bytes;

  static Resident of(const AttentionShape& shape, int64_t parts, int64_t bytes) {
    const int64_t all = shape.batch * shape.heads * shape.tiles() * parts, budget = int64_t{256} << 20;
    return {minimum(all, clamp<int64_t>(budget / maximum<int64_t>(bytes, 1), 132, 2112)), bytes};
  }
  int64_t all() const { return blocks * bytes; }
};

namespace {

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
    return {moved(scores), moved(values), moved(bounds), moved(mean), moved(split),
            moved(kept),   moved(slot),   moved(bits),   moved(equal)};
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
  int present;               // numbers of this stage
  int kept = 0;              // entries kept whole, of all stages before this
  int32_t *parents, *split;  // the cells that the stage before split, and those of this one
  uint32_t *above, *bits;    // alike
  int each, rows, columns;   // numbers for each parent; the grid of this stage
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

  // Lists the cells of this stage that stay whole, behind those that are listed; log_count: of all cells. Returns how many:
  // `kept` is the caller's to move on.
  __device__ int list_kept(const A* log_count, bool slots) const {
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
    return static_cast<int>(many);
  }
};

// Entries of one kind, of one batch and head: cells, places or the prefix.
template <class A>
struct Entries {
  const void *key, *value;
  const A* log;  // of the count or the weight; null: 0
  Storage storage;
  int64_t first;  // the row in which gradients of the first one go, and masses
};

// Which of them: those in a list, the present ones of a descent, or all in order.
template <class A>
struct Numbers {
  int count;
  const int32_t* list;
  const Descent<A>* descent;

  __device__ int operator[](int i) const { return list ? list[i] : descent ? descent->cell(i) : i; }
};

// E of them at a time, in shared memory.
template <class A, int E>
struct EntryRows {
  const void *key[E], *value[E];  // null: no entry
  A log[E];
  int64_t row[E];  // -1: no entry

  // The entries numbers[first] and on. The block has to be in step after.
  __device__ void fill(const Entries<A>& of, int64_t dim, const Numbers<A>& numbers, int first) {
    for (int j = static_cast<int>(threadIdx.x); j < E; j += kThreads) {
      int i = first + j < numbers.count ? numbers[first + j] : -1;
      log[j] = i < 0 ? nothing<A>() : of.log ? of.log[i] : A(0);
      if (log[j] == nothing<A>()) i = -1;
      key[j] = i < 0 ? nullptr : row_at<A>(of.key, of.storage, i, dim);
      value[j] = i < 0 ? nullptr : row_at<A>(of.value, of.storage, i, dim);
      row[j] = i < 0 ? -1 : of.first + i;
    }
  }
};

}  // namespace
}  // namespace texvlm::cuda
