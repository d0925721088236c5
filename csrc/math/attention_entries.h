// The entries of hierarchical attention on the host: rows and weights by number, which cells are split, and the list that
// follows.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "attention.h"
#include "lanes.h"
#include "stored.h"

namespace texvlm {

constexpr int kEntriesAtOnce = 48;  // whose scores, 64 queries each, stay in the first cache beside the queries

// NaN stays NaN: exp_of() makes 0 of it.
template <class A>
TEXVLM_HD A exp_or_nan(A x) {
  const A e = exp_of(x);
  return x == x ? e : x;
}
template <class A>
constexpr A kNothing = -std::numeric_limits<A>::infinity();  // the log of no weight

// What one head of keys offers: rows of keys or of values by the number of the entry.
template <class A>
struct EntryRows {
  const A* cells;
  StoredRows<A> places, prefix;
  int64_t total, count;

  // Rows of up to kEntriesAtOnce entries; widened [kEntriesAtOnce][dim].
  TEXVLM_HD void rows(const int32_t* ids, int64_t n, A* widened, const A** out) const {
    const int64_t dim = places.dim;
    if (places.storage == Storage::own) {
      // As numbers: a pointer may not point before what it points into, and these do.
      const uint64_t row = dim * sizeof(A), of_cells = reinterpret_cast<uintptr_t>(cells);
      const uint64_t of_places = reinterpret_cast<uintptr_t>(places.data) - total * row;
      const uint64_t of_prefix = reinterpret_cast<uintptr_t>(prefix.data) - (total + count) * row;
      const auto pitch = static_cast<uint32_t>(dim);  // a product of 32-bit numbers is one instruction in vectors
      for (int64_t i = 0; i < n; ++i) {
        const uint64_t from = ids[i] < total ? of_cells : ids[i] < total + count ? of_places : of_prefix;
        const uint64_t at = static_cast<uint64_t>(static_cast<uint32_t>(ids[i])) * pitch;
        out[i] = reinterpret_cast<const A*>(from + at * sizeof(A));
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t id = ids[i];
        out[i] = id < total           ? cells + id * dim
                 : id < total + count ? places.row(id - total, widened + i * dim)
                                      : prefix.row(id - total - count, widened + i * dim);
      }
    }
  }
  // Asks for rows before they are wanted: those of places lie anywhere, and no hardware guesses where.
  TEXVLM_HD void prefetch(const int32_t* ids, int64_t n) const {
    const int64_t bytes = places.dim * (places.storage == Storage::own ? sizeof(A) : 2);
    for (int64_t i = 0; i < n; ++i) {
      if (ids[i] < total || ids[i] >= total + count) continue;
      const char* const from = static_cast<const char*>(places.data) + (ids[i] - total) * bytes;
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
    }
  }
};

// The logs of the weights of entries; what has none is no entry.
template <class A>
struct EntryWeights {
  const A *log_count, *log_weight;  // the second may be null
  int64_t total, count;

  TEXVLM_HD A operator()(int64_t id) const {
    return id < total ? log_count[id] : id < total + count && log_weight ? log_weight[id - total] : A(0);
  }
  // Whether any of these entries may have another weight than 1.
  TEXVLM_HD bool any(const int32_t* ids, int64_t n) const {
    bool cells = log_weight != nullptr;
    for (int64_t i = 0; i < n; ++i) cells |= ids[i] < total;
    return cells;
  }
};

// Cells that are present at a stage, by their index in its grid, and the entries that a choice leads to.
struct EntryList {
  std::vector<int32_t> present, next, ids;
  std::vector<int32_t> opened;  // cells of the last stage that were split, in the order of their places

  void begin(const AttentionShape& shape) {
    ids.clear();
    opened.clear();
    present.clear();
    const int64_t first = shape.cells.stages ? shape.cells.cells(0) : 0;
    present.resize(static_cast<size_t>(first));
    for (int64_t i = 0; i < first; ++i) present[i] = static_cast<int32_t>(i);
    const int64_t before = shape.cells.total() + shape.cells.places();
    for (int64_t p = 0; p < shape.prefix; ++p) ids.push_back(static_cast<int32_t>(before + p));
  }
  // Splits a cell of stage s.
  void split(const AttentionShape& shape, int s, int64_t cell) {
    if (s + 1 == shape.cells.stages) opened.push_back(static_cast<int32_t>(cell));
    const CellBox box = shape.cells.children(s, cell);
    size_t n = next.size();
    next.resize(n + box.count());
    for (int64_t y = box.y0; y < box.y1; ++y)
      for (int64_t x = box.x0; x < box.x1; ++x) next[n++] = static_cast<int32_t>(y * box.columns + x);
  }
  void advance() {
    present.swap(next);
    next.clear();
  }
  // After the last stage, or where there are none: places.
  template <class A>
  void finish(const AttentionShape& shape, const EntryWeights<A>& weights) {
    const auto total = static_cast<int32_t>(shape.cells.total());
    if (shape.cells.stages == 0)
      for (int64_t i = 0; i < shape.cells.places(); ++i) present.push_back(static_cast<int32_t>(i));
    const size_t before = ids.size();
    ids.resize(before + present.size());
    if (!weights.log_weight) {
      for (size_t i = 0; i < present.size(); ++i) ids[before + i] = total + present[i];
      return;
    }
    size_t n = before;
    for (const int32_t i : present) {
      ids[n] = total + i;
      n += weights(total + i) != kNothing<A>;
    }
    ids.resize(n);
  }
  // All of it for a choice that is made: ascending for each stage in turn, -1 beyond.
  template <class A>
  void follow(const AttentionShape& shape, const int32_t* chosen, const EntryWeights<A>& weights) {
    begin(shape);
    for (int s = 0; s < shape.cells.stages; ++s) {
      const int32_t* const end = std::find(chosen, chosen + shape.counts[s], -1);
      for (const int32_t i : present) {
        if (std::binary_search(chosen, end, i)) {
          split(shape, s, i);
        } else if (const auto id = static_cast<int32_t>(shape.cells.offset[s] + i); weights(id) != kNothing<A>) {
          ids.push_back(id);
        }
      }
      chosen += shape.counts[s];
      advance();
    }
    finish(shape, weights);
  }
};

// Sums and maxima by kParts parts: as many vectors on every machine, and no number waits for the one before.
constexpr int kParts = 16;

template <class A>
TEXVLM_HD A largest(const A* v, int64_t n, A most) {  // NaN does not count
  A parts[kParts];
  for (int l = 0; l < kParts; ++l) parts[l] = most;
  int64_t i = 0;
  for (; i + kParts <= n; i += kParts)
    for (int l = 0; l < kParts; ++l) parts[l] = parts[l] < v[i + l] ? v[i + l] : parts[l];
  for (; i < n; ++i) parts[0] = parts[0] < v[i] ? v[i] : parts[0];
  for (int l = 0; l < kParts; ++l) most = most < parts[l] ? parts[l] : most;
  return most;
}
// The sum of f(i), i < n.
template <class A, class F>
TEXVLM_HD A sum_by_parts(int64_t n, const F& f) {
  A parts[kParts] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kParts <= n; i += kParts)
    for (int l = 0; l < kParts; ++l) parts[l] += f(i + l);
  for (; i < n; ++i) sum += f(i);
  for (int l = 0; l < kParts; ++l) sum += parts[l];
  return sum;
}
// out = e^(s - most), and its sum.
template <class A>
TEXVLM_HD A exponents(const A* s, int64_t n, A most, A* out) {
  return sum_by_parts<A>(n, [=](int64_t i) { return out[i] = exp_or_nan(s[i] - most); });
}

// The best `count` of n values, which are not negative, or -1: flags of them, and their cells, ascending, with -1 beyond. Ties go
// to the lowest cell. Floats of one sign are ordered as their bits are, so the least of the best is found bit by bit.
template <class A>
TEXVLM_HD void take_best(const A* values, const std::vector<int32_t>& cells, int64_t count, std::vector<int32_t>& ties,
                         std::vector<char>& taken, int32_t* chosen) {
  using Key = typename IntLike<A>::type;
  const auto n = static_cast<int64_t>(cells.size());
  const int64_t k = minimum(count, n);
  Key low = -1,
      high = bits_as<Key>(std::numeric_limits<A>::infinity());  // more than k lie above low, unless k is all; none above high
  const auto above = [&](Key key) {
    Key parts[kParts] = {}, sum = 0;
    int64_t i = 0;
    for (; i + kParts <= n; i += kParts)
      for (int l = 0; l < kParts; ++l) parts[l] += bits_as<Key>(values[i + l]) > key;
    for (; i < n; ++i) sum += bits_as<Key>(values[i]) > key;
    for (int l = 0; l < kParts; ++l) sum += parts[l];
    return static_cast<int64_t>(sum);
  };
  int64_t over = above(low);
  if (over <= k) {  // all that are worth anything
    high = low;
  } else {
    over = 0;
    while (high - low > 1 && over != k) {
      const Key middle = low + (high - low) / 2;
      const int64_t m = above(middle);
      if (m > k) {
        low = middle;
      } else {
        high = middle, over = m;
      }
    }
  }
  taken.resize(static_cast<size_t>(n));
  ties.clear();
  int64_t at = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Key key = bits_as<Key>(values[i]);
    taken[i] = key > high;
    if (key > high) chosen[at++] = cells[i];
    if (over < k && (high < 0 ? key <= high : key == high)) ties.push_back(static_cast<int32_t>(i));
  }
  if (at < k) {
    std::sort(ties.begin(), ties.end(), [&](int32_t a, int32_t b) { return cells[a] < cells[b]; });
    for (size_t i = 0; at < k; ++i) taken[ties[i]] = 1, chosen[at++] = cells[ties[i]];
  }
  std::sort(chosen, chosen + k);
  std::fill(chosen + k, chosen + count, -1);
}

// Values of a stage's cells from their mass, with spread, and the exponents of their bounds, both where `importance` wants
// them. What is not finite is read in full; cells without weight come last.
template <class A>
TEXVLM_HD void weigh_cells(Importance importance, const A* log_count, int64_t n, A* mass, A* bound, A* values) {
  const bool by_mass = importance != Importance::bound, by_bound = importance != Importance::mass;
  A of_mass = 0, of_bound = 0, most = kNothing<A>;
  if (by_mass) {
    const A sum = sum_by_parts<A>(n, [=](int64_t i) { return finite(mass[i]) && log_count[i] != kNothing<A> ? mass[i] : A(0); });
    of_mass = sum > 0 ? A(1) / sum : A(0);
  }
  if (by_bound) {
    for (int64_t i = 0; i < n; ++i)
      if (!finite(bound[i])) bound[i] = std::numeric_limits<A>::quiet_NaN();
    for (int64_t i = 0; i < n; ++i) values[i] = log_count[i] == kNothing<A> ? kNothing<A> : bound[i];
    most = largest(values, n, most);
    if (most == kNothing<A>) most = 0;
    const A sum = sum_by_parts<A>(n, [=](int64_t i) {
      const A e = exp_of(values[i] - most);
      values[i] = values[i] == values[i] ? e : A(0);
      return values[i];
    });
    of_bound = (by_mass ? static_cast<A>(kBoundShare) : A(1)) / (sum > 0 ? sum : A(1));
  }
  constexpr A most_of_all = std::numeric_limits<A>::infinity();
  if (by_mass && by_bound) {  // one loop each, which vectorises
    for (int64_t i = 0; i < n; ++i) {
      const A value = mass[i] * of_mass + values[i] * of_bound;
      values[i] = finite(mass[i]) & (bound[i] == bound[i]) ? value : most_of_all;
    }
  } else if (by_mass) {
    for (int64_t i = 0; i < n; ++i) values[i] = finite(mass[i]) ? mass[i] * of_mass : most_of_all;
  } else {
    for (int64_t i = 0; i < n; ++i) values[i] = bound[i] == bound[i] ? values[i] * of_bound : most_of_all;
  }
  for (int64_t i = 0; i < n; ++i) values[i] = log_count[i] == kNothing<A> ? A(-1) : values[i];
}

// Keys, values and weights of one head.
template <class A>
struct HeadEntries {
  EntryRows<A> keys, values;
  EntryWeights<A> weights;

  template <class F>  // Attend or AttendAdjoint
  static HeadEntries of(const F& f, int64_t b, int64_t kv) {
    const AttentionShape& s = f.shape;
    const int64_t total = s.cells.total(), places = s.cells.places();
    const auto stored = [&](const void* p, int64_t rows) {
      const int64_t skipped = kv * rows * s.dim * (f.storage == Storage::own ? sizeof(A) : sizeof(uint16_t));
      return StoredRows<A>{p ? static_cast<const char*>(p) + skipped : nullptr, s.dim, f.storage};
    };
    return {{f.keys + kv * total * s.dim, stored(f.k, places), stored(f.prefix_k, s.prefix), total, places},
            {f.values + kv * total * s.dim, stored(f.v, places), stored(f.prefix_v, s.prefix), total, places},
            {f.log_count + b * total, f.log_weight ? f.log_weight + b * places : nullptr, total, places}};
  }
};

}  // namespace texvlm
