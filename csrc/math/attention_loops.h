// The loops of hierarchical attention on the host. A tile of queries lies in the lanes of vectors: keys are broadcast to it, and
// the softmax runs down the lanes. Queries that choose alone go one by one, with the coordinates in the lanes.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "attention.h"
#include "products.h"
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
      const auto* const of_places = static_cast<const A*>(places.data) - total * dim;
      const auto* const of_prefix = static_cast<const A*>(prefix.data) - (total + count) * dim;
      const auto pitch = static_cast<uint32_t>(dim);  // a product of 32-bit numbers is one instruction in vectors
      for (int64_t i = 0; i < n; ++i) {
        const A* const from = ids[i] < total ? cells : ids[i] < total + count ? of_places : of_prefix;
        out[i] = from + static_cast<uint64_t>(static_cast<uint32_t>(ids[i])) * pitch;
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
  // Whether any of these entries, whose numbers ascend by kind, may have another weight than 1.
  TEXVLM_HD bool any(const int32_t* ids, int64_t n) const {
    return log_weight || (n > 0 && (ids[0] < total || ids[n - 1] < total));
  }
};

// Cells that are present at a stage, by their index in its grid, and the entries that a choice leads to.
struct EntryList {
  std::vector<int32_t> present, next, ids;

  void begin(const AttentionShape& shape) {
    ids.clear();
    present.clear();
    const int64_t first = shape.cells.stages ? shape.cells.cells(0) : 0;
    present.resize(static_cast<size_t>(first));
    for (int64_t i = 0; i < first; ++i) present[i] = static_cast<int32_t>(i);
    const int64_t before = shape.cells.total() + shape.cells.places();
    for (int64_t p = 0; p < shape.prefix; ++p) ids.push_back(static_cast<int32_t>(before + p));
  }
  // Splits a cell of stage s.
  void split(const AttentionShape& shape, int s, int64_t cell) {
    const CellBox box = shape.cells.children(s, cell);
    for (int64_t y = box.y0; y < box.y1; ++y)
      for (int64_t x = box.x0; x < box.x1; ++x) next.push_back(static_cast<int32_t>(y * box.columns + x));
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
  for (int64_t i = 0; i < n; ++i) {
    const bool read = (by_mass && !finite(mass[i])) || (by_bound && bound[i] != bound[i]);
    const A value = (by_mass ? mass[i] * of_mass : A(0)) + (by_bound ? values[i] * of_bound : A(0));
    values[i] = log_count[i] == kNothing<A> ? A(-1) : read ? std::numeric_limits<A>::infinity() : value;
  }
}

#if defined(TEXVLM_HAS_LANES)

// Attend<T> for every T of one arithmetic: pointers to T are those of A that `storage` explains.
template <class T>
Attend<Acc<T>> with_storage(const Attend<T>& f) {
  using A = Acc<T>;
  const auto erased = [](const T* p) { return reinterpret_cast<const A*>(p); };
  return {f.shape,
          f.importance,
          erased(f.q),
          erased(f.k),
          erased(f.v),
          erased(f.prefix_k),
          erased(f.prefix_v),
          f.keys,
          f.values,
          f.log_count,
          f.spread,
          f.low,
          f.high,
          f.log_weight,
          f.choice,
          reinterpret_cast<A*>(f.out),
          f.lse,
          f.chosen,
          f.mass};
}

// Keys, values and weights of one head.
template <class A>
struct HeadEntries {
  EntryRows<A> keys, values;
  EntryWeights<A> weights;

  template <class F>  // Attend or AttendAdjoint, of storage
  static HeadEntries of(const F& f, Storage storage, int64_t b, int64_t kv) {
    const AttentionShape& s = f.shape;
    const int64_t total = s.cells.total(), places = s.cells.places();
    const auto stored = [&](const A* p, int64_t rows) {
      const int64_t skipped = kv * rows * s.dim;
      const void* const from =
          storage == Storage::own ? static_cast<const void*>(p + skipped) : reinterpret_cast<const uint16_t*>(p) + skipped;
      return StoredRows<A>{p ? from : nullptr, s.dim, storage};
    };
    return {{f.keys + kv * total * s.dim, stored(f.k, places), stored(f.prefix_k, s.prefix), total, places},
            {f.values + kv * total * s.dim, stored(f.v, places), stored(f.prefix_v, s.prefix), total, places},
            {f.log_count + b * total, f.log_weight ? f.log_weight + b * places : nullptr, total, places}};
  }
};

template <class A>
class AttendOnHost {
 public:
  AttendOnHost(const Attend<A>& f, Storage storage)
      : f_(f),
        shape_(f.shape),
        dim_(f.shape.dim),
        storage_(storage),
        q_rows_{f.q, dim_, storage},
        out_rows_{f.out, dim_, storage} {
    widened_ = widened_memory_.of((kEntriesAtOnce + 1) * dim_);
  }

  // Tiles [begin, end) of all heads of all pictures.
  template <int W>
  TEXVLM_HD void tiles(int64_t begin, int64_t end) {
    const int64_t tiles = shape_.tiles();
    for (int64_t i = begin; i < end; ++i) {
      enter(i / tiles / shape_.heads, i / tiles % shape_.heads);
      tile<W>(i % tiles);
    }
  }
  // Groups of kPanel queries that choose alone, of all heads of all pictures.
  template <int W>
  TEXVLM_HD void queries(int64_t begin, int64_t end) {
    const int64_t groups = (shape_.queries + kPanel - 1) / kPanel;
    for (int64_t i = begin; i < end; ++i) {
      enter(i / groups / shape_.heads, i / groups % shape_.heads);
      group<W>(i % groups * kPanel);
    }
  }

 private:
  void enter(int64_t b, int64_t head) {
    const int64_t total = shape_.cells.total(), kv = b * shape_.kv_heads + shape_.kv_head(head);
    of_ = HeadEntries<A>::of(f_, storage_, b, kv);
    if (head_ != b * shape_.heads + head) {
      A* const of_cells = spread_.of(total);
      const A* const from = f_.spread + kv * total * 2;
      for (int64_t i = 0; i < total; ++i) of_cells[i] = from[2 * i] * sqrt_of(from[2 * i + 1]);
    }
    low_ = f_.low + kv * total * dim_, high_ = f_.high + kv * total * dim_;
    head_ = b * shape_.heads + head;
  }

  const int32_t* given(int64_t t) const { return f_.choice + (head_ * shape_.tiles() + t) * shape_.splits; }
  int32_t* chosen(int64_t t) const { return f_.chosen + (head_ * shape_.tiles() + t) * shape_.splits; }

  // ---- a tile, its queries in lanes ----

  template <int W>
  TEXVLM_HD void tile(int64_t t) {
    constexpr int V = kPanelVectors<W>;
    const CellBox box = shape_.tile(t);
    const int64_t n = box.count();
    A* const q = q_.of(dim_ * kPanel);
    for (int64_t i = 0; i < kPanel; ++i) load(i < n ? head_ * shape_.queries + box.cell(i) : -1, q + i);
    kept_ = 0;
    if (f_.choice) {
      list_.follow(shape_, given(t), of_.weights);
      std::copy(given(t), given(t) + shape_.splits, chosen(t));
    } else {
      choose<W>(n, q, chosen(t));
    }

    alignas(64) A most[kPanel], base[kPanel], sum[kPanel];
    for (int i = 0; i < kPanel; ++i) most[i] = kNothing<A>, sum[i] = 0;
    A* const out = out_.of(dim_ * kPanel);
    std::fill(out, out + dim_ * kPanel, A(0));
    const auto count = static_cast<int64_t>(list_.ids.size());
    A* const all = f_.mass ? all_.of(count * kPanel) : nullptr;
    A* const chunk = chunk_.of(kEntriesAtOnce * kPanel);
    const A* rows[kEntriesAtOnce + kRowsAtOnce];
    for (int64_t e = 0; e < count;) {
      const bool known = e < kept_;
      const int64_t m = minimum<int64_t>(kEntriesAtOnce, (known ? kept_ : count) - e);
      const A* s = chunk;
      of_.values.prefetch(list_.ids.data() + e, m);
      if (known) {
        s = kept_scores_.of(0) + e * kPanel;
      } else {
        score<W>(list_.ids.data() + e, m, n, q, chunk);
      }
      if (all) std::copy(s, s + m * kPanel, all + e * kPanel);
      rescale(s, m, most, sum, out);
      for (int j = 0; j < kPanel; ++j) base[j] = most[j] == kNothing<A> ? A(0) : most[j];
      for (int64_t i = 0; i < m; ++i)
        for (int j = 0; j < kPanel; ++j) {
          const A p = exp_or_nan(s[i * kPanel + j] - base[j]);
          chunk[i * kPanel + j] = p;
          sum[j] += p;
        }
      of_.values.rows(list_.ids.data() + e, m, widened_, rows);
      of_.keys.prefetch(list_.ids.data() + e + m, minimum<int64_t>(kEntriesAtOnce, count - e - m));
      multiply_columns<W, V>(rows, m, dim_, chunk, kPanel, n, out, kPanel);
      e += m;
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = head_ * shape_.queries + box.cell(i);
      const A share = sum[i] == 0 ? A(0) : A(1) / sum[i];  // it is 0 where there are no entries, or all scores are -inf
      A* const row = mean_.of(dim_);
      for (int64_t d = 0; d < dim_; ++d) row[d] = sum[i] == 0 ? A(0) : out[d * kPanel + i] * share;
      out_rows_.store(at, row);
      f_.lse[at] = sum[i] == 0 ? kNothing<A> : most[i] + std::log(sum[i]);
      sum[i] = f_.lse[at];
    }
    if (all)
      for (int64_t e = 0; e < count; ++e) {
        A mass = 0;
        for (int64_t i = 0; i < n; ++i)
          if (sum[i] != kNothing<A>) mass += exp_or_nan(all[e * kPanel + i] - sum[i]);
        share_out(list_.ids[e], mass);
      }
  }

  // Query `at`, scaled, as a column of a panel; a column of zeros for -1.
  TEXVLM_HD void load(int64_t at, A* column) {
    const A* const row = at < 0 ? nullptr : q_rows_.row(at, widened_ + kEntriesAtOnce * dim_);
    for (int64_t d = 0; d < dim_; ++d) column[d * kPanel] = row ? static_cast<A>(shape_.scale) * row[d] : A(0);
  }

  // Brings the largest scores up to m more rows, and what has been summed with them.
  TEXVLM_HD void rescale(const A* s, int64_t m, A* most, A* sum, A* out) const {
    alignas(64) A factor[kPanel];
    bool changed = false;
    for (int j = 0; j < kPanel; ++j) factor[j] = most[j];
    for (int64_t i = 0; i < m; ++i)
      for (int j = 0; j < kPanel; ++j) most[j] = most[j] < s[i * kPanel + j] ? s[i * kPanel + j] : most[j];
    for (int j = 0; j < kPanel; ++j) {
      changed |= factor[j] != most[j];
      factor[j] = sum[j] == 0 ? A(1) : exp_or_nan(factor[j] - most[j]);
      sum[j] *= factor[j];
    }
    if (!changed) return;
    for (int64_t d = 0; d < dim_; ++d)
      for (int j = 0; j < kPanel; ++j) out[d * kPanel + j] *= factor[j];
  }

  // Scores of entries [count][kPanel], the logs of their weights added.
  template <int W>
  TEXVLM_HD void score(const int32_t* ids, int64_t count, int64_t n, const A* q, A* s) {
    const A* rows[kEntriesAtOnce + kRowsAtOnce];
    for (int64_t e = 0; e < count; e += kEntriesAtOnce) {
      const int64_t m = minimum<int64_t>(kEntriesAtOnce, count - e);
      of_.keys.rows(ids + e, m, widened_, rows);
      multiply_rows<W, kPanelVectors<W>, false>(rows, m, dim_, q, kPanel, n, s + e * kPanel, kPanel);
      if (n == kPanel && !of_.weights.any(ids + e, m)) continue;
      for (int64_t i = 0; i < m; ++i) {
        const A log = of_.weights(ids[e + i]);
        A* const row = s + (e + i) * kPanel;
        for (int j = 0; j < kPanel; ++j) row[j] = j < n ? row[j] + log : A(0);
      }
    }
  }

  // Splits what matters most, stage by stage: list_ has the entries then, and kept_scores_ the scores of the first kept_ of them.
  template <int W>
  TEXVLM_HD void choose(int64_t n, const A* q, int32_t* to) {
    const CellPyramid& cells = shape_.cells;
    list_.begin(shape_);
    A* const kept = kept_scores_.of((shape_.prefix + cells.total()) * kPanel);
    kept_ = 0;
    alignas(64) A most[kPanel], before[kPanel], left[kPanel], total[kPanel];  // sums of exponents: of what stays, of all present
    for (int j = 0; j < kPanel; ++j) most[j] = kNothing<A>, left[j] = 0;
    for (int s = shape_.prefix ? -1 : 0; s < cells.stages; ++s) {  // the prefix, all of which stays, and then stages
      if (s >= 0 && split_all(s, to)) continue;
      if (s < 0) {
        numbers_ = list_.ids;
      } else {
        number(s);
      }
      const auto present = static_cast<int64_t>(numbers_.size());
      A* const scores = scores_.of((present + kRowsAtOnce) * kPanel);
      A* const exps = exps_.of(present * kPanel);
      score<W>(numbers_.data(), present, n, q, scores);
      for (int j = 0; j < kPanel; ++j) before[j] = most[j];
      for (int64_t i = 0; i < present; ++i)
        for (int j = 0; j < kPanel; ++j) most[j] = most[j] < scores[i * kPanel + j] ? scores[i * kPanel + j] : most[j];
      for (int j = 0; j < kPanel; ++j) {
        left[j] *= before[j] == most[j] || left[j] == 0 ? A(1) : exp_or_nan(before[j] - most[j]);
        total[j] = left[j];
        before[j] = most[j] == kNothing<A> ? A(0) : most[j];
      }
      for (int64_t i = 0; i < present; ++i)
        for (int j = 0; j < kPanel; ++j) {
          const A e = exp_or_nan(scores[i * kPanel + j] - before[j]);
          exps[i * kPanel + j] = e;
          total[j] += e;
        }
      if (s < 0) {
        std::copy(scores, scores + present * kPanel, kept);
        kept_ = present;
        for (int j = 0; j < kPanel; ++j) left[j] = total[j];
        continue;
      }
      const bool all = weigh<W>(n, q, most, total, exps);
      take_best(cell_values_.of(0), list_.present, shape_.counts[s], ties_, taken_, to);
      for (int64_t i = 0; i < present; ++i) {
        if (taken_[i]) {
          list_.split(shape_, s, list_.present[i]);
        } else if (of_.weights(numbers_[i]) != kNothing<A>) {
          list_.ids.push_back(numbers_[i]);
          const A *const row = scores + i * kPanel, *const known = exps + i * kPanel;
          std::copy(row, row + kPanel, kept + kept_++ * kPanel);
          for (int j = 0; j < kPanel; ++j) left[j] += all ? known[j] : exp_or_nan(row[j] - before[j]);
        }
      }
      to += shape_.counts[s];
      list_.advance();
    }
    list_.finish(shape_, of_.weights);
  }

  // Where no cell can be left unsplit there is nothing to choose. `to` moves on to the next stage.
  bool split_all(int s, int32_t*& to) {
    if (shape_.counts[s] < static_cast<int64_t>(list_.present.size())) return false;
    int32_t* const end = std::copy(list_.present.begin(), list_.present.end(), to);
    std::sort(to, end);
    std::fill(end, to + shape_.counts[s], -1);
    for (const int32_t i : list_.present) list_.split(shape_, s, i);
    to += shape_.counts[s];
    list_.advance();
    return true;
  }

  // The present cells as entries.
  void number(int s) {
    const auto offset = static_cast<int32_t>(shape_.cells.offset[s]);
    numbers_.resize(list_.present.size());
    for (size_t i = 0; i < numbers_.size(); ++i) numbers_[i] = offset + list_.present[i];
  }

  // The values of the present cells to a tile, in cell_values_. Queries without a say are 0 in `exps` then; returns whether all
  // have one.
  template <int W>
  TEXVLM_HD bool weigh(int64_t n, const A* q, const A* most, A* total, A* exps) {
    const auto present = static_cast<int64_t>(numbers_.size());
    int64_t say = 0;
    bool all = true;
    for (int j = 0; j < kPanel; ++j) {
      const bool has = j < n && finite(most[j]) && finite(total[j]) && total[j] > 0;
      total[j] = has ? A(1) / total[j] : A(0);
      say += has;
      all &= has || j >= n;
    }
    if (!all)
      for (int64_t i = 0; i < present; ++i)
        for (int j = 0; j < kPanel; ++j) exps[i * kPanel + j] = total[j] == 0 ? A(0) : exps[i * kPanel + j];
    A *const mass = mass_.of(present), *const spread = spread_.of(0);
    for (int64_t i = 0; i < present; ++i) {
      const A* const row = exps + i * kPanel;
      const A one = sum_by_parts<A>(kPanel, [=](int64_t j) { return row[j] * total[j]; });
      mass[i] = f_.importance == Importance::spread ? one * spread[numbers_[i]] : one;
    }
    A* const mean = mean_.of(dim_);
    for (int64_t d = 0; d < dim_; ++d) {
      const A* const row = q + d * kPanel;
      const A sum = sum_by_parts<A>(kPanel, [=](int64_t j) { return total[j] == 0 ? A(0) : row[j]; });
      mean[d] = say ? sum / static_cast<A>(say) : A(0);
    }
    weigh_present<W>(mean, mass, nullptr);
    return all;
  }
  // With the masses known, and the bounds, or else one query for them.
  template <int W>
  TEXVLM_HD void weigh_present(const A* u, A* mass, A* bound) {
    const auto present = static_cast<int64_t>(numbers_.size());
    if (!bound && f_.importance != Importance::mass) {  // max(u low, u high) = max(u, 0) high + min(u, 0) low
      bound = bound_.of(present + kVectorsAtOnce);
      A* const up = sides_.of(2 * dim_);
      A* const down = up + dim_;
      for (int64_t d = 0; d < dim_; ++d) up[d] = maximum(u[d], A(0)), down[d] = minimum(u[d], A(0));
      const A* rows[kEntriesAtOnce + kRowsAtOnce];
      for (int64_t e = 0; e < present; e += kEntriesAtOnce) {
        const int64_t m = minimum<int64_t>(kEntriesAtOnce, present - e);
        for (int64_t i = 0; i < m; ++i) rows[i] = high_ + numbers_[e + i] * dim_;
        multiply_vector<W, false>(rows, m, dim_, up, bound + e);
        for (int64_t i = 0; i < m; ++i) rows[i] = low_ + numbers_[e + i] * dim_;
        multiply_vector<W, true>(rows, m, dim_, down, bound + e);
      }
    }
    A* const logs = logs_.of(present);
    for (int64_t i = 0; i < present; ++i) logs[i] = of_.weights.log_count[numbers_[i]];
    weigh_cells(f_.importance, logs, present, mass, bound, cell_values_.of(present));
  }

  void share_out(int64_t id, A mass) {
    const CellPyramid& cells = shape_.cells;
    A* const to = f_.mass + head_ * cells.places();
    if (id >= cells.total()) {
      if (id < cells.total() + cells.places()) to[id - cells.total()] += mass;
      return;
    }
    int s = 0;
    while (id >= cells.offset[s + 1]) ++s;
    const CellBox box = cells.places_of(s, id - cells.offset[s]);
    const A log = of_.weights(id);
    for (int64_t i = 0; i < box.count(); ++i) {
      const int64_t j = box.cell(i);
      const A own = of_.weights(cells.total() + j);
      if (own != kNothing<A>) to[j] += mass * exp_of(own - log);
    }
  }

  // ---- queries that choose alone ----

  template <int W>
  TEXVLM_HD void group(int64_t first) {
    const int64_t n = minimum<int64_t>(kPanel, shape_.queries - first), cells = shape_.cells.stages ? shape_.cells.cells(0) : 0;
    const bool together = n >= kTogether && cells > 0 && !f_.choice && shape_.counts[0] < cells;
    A *scores = nullptr, *bounds = nullptr;
    if (together) {  // all of them read all cells of the first stage
      constexpr int V = kPanelVectors<W>;
      A* const q = q_.of(3 * dim_ * kPanel);
      A *const up = q + dim_ * kPanel, *const down = up + dim_ * kPanel;
      for (int64_t i = 0; i < kPanel; ++i) load(i < n ? head_ * shape_.queries + first + i : -1, q + i);
      for (int64_t i = 0; i < dim_ * kPanel; ++i) up[i] = maximum(q[i], A(0)), down[i] = minimum(q[i], A(0));
      list_.begin(shape_);
      number(0);
      A* const panel = scores_.of((cells + kRowsAtOnce) * kPanel);
      scores = all_.of(2 * cells * kPanel), bounds = scores + cells * kPanel;
      score<W>(numbers_.data(), cells, n, q, panel);
      turn(panel, cells, scores);
      if (f_.importance != Importance::mass) {
        const A* rows[kEntriesAtOnce + kRowsAtOnce];
        for (int64_t e = 0; e < cells; e += kEntriesAtOnce) {
          const int64_t m = minimum<int64_t>(kEntriesAtOnce, cells - e);
          for (int64_t i = 0; i < m; ++i) rows[i] = high_ + (e + i) * dim_;
          multiply_rows<W, V, false>(rows, m, dim_, up, kPanel, n, panel + e * kPanel, kPanel);
          for (int64_t i = 0; i < m; ++i) rows[i] = low_ + (e + i) * dim_;
          multiply_rows<W, V, true>(rows, m, dim_, down, kPanel, n, panel + e * kPanel, kPanel);
        }
        turn(panel, cells, bounds);
      }
    }
    // Keys for a number of queries, then values: one or the other of a head lies in the cache.
    for (int64_t i = 0, done = 0; i < n; ++i) {
      ask<W>(first + i, together ? scores + i * cells : nullptr, together ? bounds + i * cells : nullptr);
      if (i + 1 < n && asked_ids_.size() < kAskedAtOnce) continue;
      int64_t begin = 0;
      for (; done <= i; ++done) {
        const int64_t count = asked_counts_[done % kPanel];
        answer<W>(first + done, asked_ids_.data() + begin, count, asked_scores_.data() + begin);
        begin += count;
      }
      asked_ids_.clear(), asked_scores_.clear();
    }
  }
  TEXVLM_HD static void turn(const A* panel, int64_t rows, A* out) {
    for (int64_t r0 = 0; r0 < rows; r0 += 16)
      for (int j = 0; j < kPanel; ++j)
        for (int64_t r = r0; r < minimum<int64_t>(r0 + 16, rows); ++r) out[j * rows + r] = panel[r * kPanel + j];
  }

  // Scores of entries to one query, the logs of their weights added.
  template <int W>
  TEXVLM_HD void score_one(const int32_t* ids, int64_t count, const A* u, A* s) {
    const A* rows[kEntriesAtOnce + kRowsAtOnce];
    for (int64_t e = 0; e < count; e += kEntriesAtOnce) {
      const int64_t m = minimum<int64_t>(kEntriesAtOnce, count - e);
      of_.keys.rows(ids + e, m, widened_, rows);
      of_.keys.prefetch(ids + e + m, minimum<int64_t>(kEntriesAtOnce, count - e - m));
      multiply_vector<W, false>(rows, m, dim_, u, s + e);
      if (!of_.weights.any(ids + e, m)) continue;
      for (int64_t i = 0; i < m; ++i) s[e + i] += of_.weights(ids[e + i]);
    }
  }

  // The entries of a query and their scores, appended to those asked before. `scores` and `bounds` of all cells of the first
  // stage, or null.
  template <int W>
  TEXVLM_HD void ask(int64_t t, const A* scores, A* bounds) {
    const CellPyramid& cells = shape_.cells;
    A* const u = mean_.of(dim_);
    const int64_t at = head_ * shape_.queries + t;
    const A* const row = q_rows_.row(at, widened_ + kEntriesAtOnce * dim_);
    for (int64_t d = 0; d < dim_; ++d) u[d] = static_cast<A>(shape_.scale) * row[d];
    A* const s = kept_scores_.of(shape_.entries() + kVectorsAtOnce);
    int64_t kept = 0;
    if (f_.choice) {
      list_.follow(shape_, given(t), of_.weights);
      std::copy(given(t), given(t) + shape_.splits, chosen(t));
    } else {
      list_.begin(shape_);
      int32_t* to = chosen(t);
      for (int stage = shape_.prefix ? -1 : 0; stage < cells.stages;
           ++stage) {  // the prefix, all of which stays, and then stages
        if (stage >= 0 && split_all(stage, to)) continue;
        if (stage < 0) {
          numbers_ = list_.ids;
        } else {
          number(stage);
        }
        const auto present = static_cast<int64_t>(numbers_.size());
        A* const own = chunk_.of(present + kVectorsAtOnce);
        if (stage == 0 && scores) {
          std::copy(scores, scores + present, own);
        } else {
          score_one<W>(numbers_.data(), present, u, own);
        }
        if (stage < 0) {
          std::copy(own, own + present, s);
          kept = present;
          continue;
        }
        weigh_one<W>(u, s, kept, own, stage == 0 ? bounds : nullptr);
        take_best(cell_values_.of(0), list_.present, shape_.counts[stage], ties_, taken_, to);
        for (int64_t i = 0; i < present; ++i) {
          if (taken_[i]) {
            list_.split(shape_, stage, list_.present[i]);
          } else if (of_.weights(numbers_[i]) != kNothing<A>) {
            list_.ids.push_back(numbers_[i]);
            s[kept++] = own[i];
          }
        }
        to += shape_.counts[stage];
        list_.advance();
      }
      list_.finish(shape_, of_.weights);
    }
    score_one<W>(list_.ids.data() + kept, static_cast<int64_t>(list_.ids.size()) - kept, u, s + kept);
    asked_ids_.insert(asked_ids_.end(), list_.ids.begin(), list_.ids.end());
    asked_scores_.insert(asked_scores_.end(), s, s + list_.ids.size());
    asked_counts_[t % kPanel] = static_cast<int64_t>(list_.ids.size());
  }

  template <int W>
  TEXVLM_HD void answer(int64_t t, const int32_t* ids, int64_t count, A* s) {
    const int64_t at = head_ * shape_.queries + t;
    of_.values.prefetch(ids, minimum<int64_t>(kEntriesAtOnce, count));
    A most = largest(s, count, kNothing<A>);
    if (most == kNothing<A>) most = 0;
    const A sum = exponents(s, count, most, s);
    A* const out = out_.of(dim_);
    std::fill(out, out + dim_, A(0));
    const A* rows[kEntriesAtOnce + kRowsAtOnce];
    for (int64_t e = 0; e < count; e += kEntriesAtOnce) {
      const int64_t m = minimum<int64_t>(kEntriesAtOnce, count - e);
      of_.values.rows(ids + e, m, widened_, rows);
      of_.values.prefetch(ids + e + m, minimum<int64_t>(kEntriesAtOnce, count - e - m));
      add_rows<W>(rows, m, dim_, s + e, out);
    }
    for (int64_t d = 0; d < dim_; ++d) out[d] = sum == 0 ? A(0) : out[d] / sum;
    out_rows_.store(at, out);
    f_.lse[at] = sum == 0 ? kNothing<A> : most + std::log(sum);
    if (f_.mass && sum != 0)
      for (int64_t e = 0; e < count; ++e) share_out(ids[e], s[e] / sum);
  }

  // The values of the present cells to one query, whose scores of what stays and of the cells are known.
  template <int W>
  TEXVLM_HD void weigh_one(const A* u, const A* stays, int64_t kept, const A* own, A* bounds) {
    const auto present = static_cast<int64_t>(numbers_.size());
    const A most = largest(own, present, largest(stays, kept, kNothing<A>));
    A *const mass = mass_.of(present), *const spread = spread_.of(0);
    const A total =
        sum_by_parts<A>(kept, [=](int64_t i) { return exp_or_nan(stays[i] - most); }) + exponents(own, present, most, mass);
    const bool has = finite(most) && finite(total) && total > 0, by_spread = f_.importance == Importance::spread;
    const A scale = A(1) / total;
    for (int64_t i = 0; i < present; ++i) {
      const A share = has ? mass[i] * scale : A(0);
      mass[i] = by_spread ? share * spread[numbers_[i]] : share;
    }
    if (!has) {  // no say: its mean is that of no query
      bounds = nullptr;
      A* const none = none_.of(dim_);
      std::fill(none, none + dim_, A(0));
      u = none;
    }
    weigh_present<W>(u, mass, bounds);
  }

  static constexpr int64_t kTogether = 6;          // queries for which a panel pays
  static constexpr size_t kAskedAtOnce = 1 << 17;  // entries whose scores are kept between keys and values

  const Attend<A>& f_;
  const AttentionShape& shape_;
  int64_t dim_, head_ = -1, kept_ = 0;
  Storage storage_;
  StoredRows<A> q_rows_;
  StoredOut<A> out_rows_;
  HeadEntries<A> of_{};
  const A *low_ = nullptr, *high_ = nullptr;
  A* widened_;
  EntryList list_;
  std::vector<int32_t> numbers_, ties_;
  std::vector<char> taken_;
  std::vector<int32_t> asked_ids_;
  std::vector<A> asked_scores_;
  int64_t asked_counts_[kPanel] = {};
  Scratch<A> widened_memory_, spread_, q_, out_, chunk_, all_, kept_scores_, scores_, exps_, mass_, mean_, bound_, sides_, logs_,
      cell_values_, none_;
};

#endif

}  // namespace texvlm
