// The loops of the adjoint of hierarchical attention on the host. The weights of a tile are found again from its choice and the
// sums of the forward; heads that share keys are taken one after another, so that nothing is added to by two.
#pragma once

#include "attention_loops.h"

#if defined(TEXVLM_HAS_LANES)

namespace texvlm {

template <class A>
class AttendAdjointOnHost {
 public:
  // Gradients that tiles share are summed by `slices` of them, each in a part of its own of what `f` points to.
  AttendAdjointOnHost(const AttendAdjoint<A>& f, int64_t slices) : f_(f), shape_(f.shape), dim_(f.shape.dim), slices_(slices) {
    widened_rows_ = row_memory_.of(3 * dim_);
    widened_keys_ = keys_memory_.of(kEntriesAtOnce * dim_);
    widened_values_ = values_memory_.of(kEntriesAtOnce * dim_);
  }

  // Slices [begin, end) of the tiles of all heads of keys of all pictures.
  template <int W, bool Alone>
  TEXVLM_HD void slices(int64_t begin, int64_t end) {
    const int64_t group = shape_.heads / shape_.kv_heads, tiles = shape_.tiles();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slice = i % slices_, kv = i / slices_, b = kv / shape_.kv_heads;
      enter(b, kv, slice);
      for (int64_t h = 0; h < group; ++h) {
        head_ = b * shape_.heads + kv % shape_.kv_heads * group + h;
        for (int64_t t = tiles * slice / slices_; t < tiles * (slice + 1) / slices_; ++t) {
          list_.follow(shape_, f_.chosen + (head_ * tiles + t) * shape_.splits, of_.weights);
          if constexpr (Alone) {
            query<W>(t);
          } else {
            tile<W>(t);
          }
        }
      }
    }
  }

 private:
  // Where the gradients of the entries of a head go.
  struct Targets {
    A *cells, *places, *prefix;
    A* row(int64_t id, int64_t total, int64_t count, int64_t width) const {
      if (id < total) return cells ? cells + id * width : nullptr;
      if (id < total + count) return places ? places + (id - total) * width : nullptr;
      return prefix ? prefix + (id - total - count) * width : nullptr;
    }
    bool any() const { return cells || places || prefix; }
  };

  void enter(int64_t b, int64_t kv, int64_t slice) {
    const CellPyramid& cells = shape_.cells;
    const int64_t prefix = shape_.prefix;
    total_ = cells.total(), count_ = cells.places();
    of_ = HeadEntries<A>::of(f_, b, kv);
    const int64_t at = slice * shape_.batch * shape_.kv_heads + kv;
    const auto of = [at](A* grad, int64_t each) { return grad ? grad + at * each : nullptr; };
    key_targets_ = {of(f_.grad_keys, total_ * dim_), of(f_.grad_k, count_ * dim_), of(f_.grad_prefix_k, prefix * dim_)};
    value_targets_ = {of(f_.grad_values, total_ * dim_), of(f_.grad_v, count_ * dim_), of(f_.grad_prefix_v, prefix * dim_)};
    weight_targets_ = {of(f_.grad_log_count, total_), of(f_.grad_log_weight, count_), nullptr};
  }

  template <int W>
  TEXVLM_HD void tile(int64_t t) {
    constexpr int V = kPanelVectors<W>, Across = 2;
    const CellBox box = shape_.tile(t);
    const int64_t n = box.count(), width = (dim_ + Across * W - 1) / (Across * W) * (Across * W);
    // Queries and gradients, as columns for the scores and as rows for what is added to the keys and values.
    A* const q = q_.of(2 * dim_ * kPanel);
    A* const g = q + dim_ * kPanel;
    A* const q_rows = rows_.of(2 * kPanel * width);
    A* const g_rows = q_rows + kPanel * width;
    alignas(64) A lse[kPanel], delta[kPanel];
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t at = head_ * shape_.queries + (i < n ? box.cell(i) : 0);
      A *const of_q = q_rows + i * width, *const of_g = g_rows + i * width;
      for (int64_t d = 0; d < width; ++d) of_q[d] = of_g[d] = 0;
      const A dot = i < n ? load(at, of_q, of_g) : A(0);
      for (int64_t d = 0; d < dim_; ++d) q[d * kPanel + i] = of_q[d], g[d * kPanel + i] = of_g[d];
      // What has no entries, or is no query, weighs nothing.
      lse[i] = i < n && f_.lse[at] != kNothing<A> ? f_.lse[at] : std::numeric_limits<A>::infinity();
      delta[i] = i < n ? dot - (f_.grad_lse ? f_.grad_lse[at] : A(0)) : A(0);
    }
    A* const of_queries = out_.of(dim_ * kPanel);
    std::fill(of_queries, of_queries + dim_ * kPanel, A(0));
    A* const p = chunk_.of(2 * kEntriesAtOnce * kPanel);
    A* const ds = p + kEntriesAtOnce * kPanel;
    A* const sums = sums_.of(kEntriesAtOnce * width);
    const A *keys[kEntriesAtOnce + kRowsAtOnce], *values[kEntriesAtOnce + kRowsAtOnce], *own[kEntriesAtOnce + kRowsAtOnce];
    const auto count = static_cast<int64_t>(list_.ids.size());
    for (int64_t e = 0; e < count; e += kEntriesAtOnce) {
      const int64_t m = minimum<int64_t>(kEntriesAtOnce, count - e);
      const int32_t* const ids = list_.ids.data() + e;
      of_.keys.rows(ids, m, widened_keys_, keys);
      of_.values.rows(ids, m, widened_values_, values);
      multiply_rows<W, V, false>(keys, m, dim_, q, kPanel, kPanel, p, kPanel);
      multiply_rows<W, V, false>(values, m, dim_, g, kPanel, kPanel, ds, kPanel);
      for (int64_t i = 0; i < m; ++i) {
        const A log = of_.weights(ids[i]);
        for (int j = 0; j < kPanel; ++j) {
          const A weight = exp_or_nan(p[i * kPanel + j] + log - lse[j]);
          p[i * kPanel + j] = weight;
          ds[i * kPanel + j] = weight == 0 ? A(0) : weight * (ds[i * kPanel + j] - delta[j]);
        }
      }
      if (f_.grad_q) multiply_columns<W, V>(keys, m, dim_, ds, kPanel, n, of_queries, kPanel);
      if (key_targets_.any()) {
        for (int64_t i = 0; i < m; ++i) own[i] = ds + i * kPanel;
        multiply_rows<W, Across, false>(own, m, n, q_rows, width, width, sums, width);
        add(key_targets_, ids, m, sums, width);
      }
      if (value_targets_.any()) {
        for (int64_t i = 0; i < m; ++i) own[i] = p + i * kPanel;
        multiply_rows<W, Across, false>(own, m, n, g_rows, width, width, sums, width);
        add(value_targets_, ids, m, sums, width);
      }
      for (int64_t i = 0; i < m && weight_targets_.any(); ++i) {
        A sum = 0;
        for (int j = 0; j < kPanel; ++j) sum += ds[i * kPanel + j];
        add_weight(ids[i], sum);
      }
    }
    for (int64_t i = 0; i < n && f_.grad_q; ++i)
      for (int64_t d = 0; d < dim_; ++d)
        f_.grad_q[(head_ * shape_.queries + box.cell(i)) * dim_ + d] = static_cast<A>(shape_.scale) * of_queries[d * kPanel + i];
  }

  // Query `at`, scaled, and its gradient; returns the product of that and its output.
  TEXVLM_HD A load(int64_t at, A* query, A* grad) const {
    const A* const q = StoredRows<A>{f_.q, dim_, f_.storage}.row(at, widened_rows_);
    const A* const g = StoredRows<A>{f_.grad, dim_, f_.storage}.row(at, widened_rows_ + dim_);
    const A* const out = StoredRows<A>{f_.out, dim_, f_.storage}.row(at, widened_rows_ + 2 * dim_);
    A dot = 0;
    for (int64_t d = 0; d < dim_; ++d) {
      query[d] = static_cast<A>(shape_.scale) * q[d], grad[d] = g[d];
      dot += g[d] * out[d];
    }
    return dot;
  }
  TEXVLM_HD void add(const Targets& targets, const int32_t* ids, int64_t m, const A* sums, int64_t width) const {
    for (int64_t i = 0; i < m; ++i) {
      A* TEXVLM_RESTRICT const to = targets.row(ids[i], total_, count_, dim_);
      const A* TEXVLM_RESTRICT const from = sums + i * width;
      for (int64_t d = 0; to && d < dim_; ++d) to[d] += from[d];
    }
  }
  void add_weight(int64_t id, A ds) const {
    if (id >= total_ + count_) return;
    if (A* const to = weight_targets_.row(id, total_, count_, 1)) *to += ds;
  }

  // One query, the coordinates in lanes.
  template <int W>
  TEXVLM_HD void query(int64_t t) {
    const int64_t at = head_ * shape_.queries + t;
    A* const u = q_.of(3 * dim_);
    A *const g = u + dim_, *const of_query = g + dim_;
    const A delta = load(at, u, g) - (f_.grad_lse ? f_.grad_lse[at] : A(0));
    for (int64_t d = 0; d < dim_; ++d) of_query[d] = 0;
    const A lse = f_.lse[at];
    const A *keys[kEntriesAtOnce + kVectorsAtOnce], *values[kEntriesAtOnce + kVectorsAtOnce];
    A p[kEntriesAtOnce + kVectorsAtOnce], ds[kEntriesAtOnce + kVectorsAtOnce];
    const int64_t count = lse == kNothing<A> ? 0 : static_cast<int64_t>(list_.ids.size());
    for (int64_t e = 0; e < count; e += kEntriesAtOnce) {
      const int64_t m = minimum<int64_t>(kEntriesAtOnce, count - e);
      const int32_t* const ids = list_.ids.data() + e;
      of_.keys.rows(ids, m, widened_keys_, keys);
      of_.values.rows(ids, m, widened_values_, values);
      multiply_vector<W, false>(keys, m, dim_, u, p);
      multiply_vector<W, false>(values, m, dim_, g, ds);
      for (int64_t i = 0; i < m; ++i) {
        p[i] = exp_or_nan(p[i] + of_.weights(ids[i]) - lse);
        ds[i] = p[i] == 0 ? A(0) : p[i] * (ds[i] - delta);
      }
      if (f_.grad_q) add_rows<W>(keys, m, dim_, ds, of_query);
      for (int64_t i = 0; i < m; ++i) {
        if (A* TEXVLM_RESTRICT const to = key_targets_.row(ids[i], total_, count_, dim_))
          for (int64_t d = 0; d < dim_; ++d) to[d] += ds[i] * u[d];
        if (A* TEXVLM_RESTRICT const to = value_targets_.row(ids[i], total_, count_, dim_))
          for (int64_t d = 0; d < dim_; ++d) to[d] += p[i] * g[d];
        add_weight(ids[i], ds[i]);
      }
    }
    for (int64_t d = 0; d < dim_ && f_.grad_q; ++d) f_.grad_q[at * dim_ + d] = static_cast<A>(shape_.scale) * of_query[d];
  }

  const AttendAdjoint<A>& f_;
  const AttentionShape& shape_;
  int64_t dim_, slices_, head_ = 0, total_ = 0, count_ = 0;
  HeadEntries<A> of_{};
  Targets key_targets_{}, value_targets_{}, weight_targets_{};
  A *widened_rows_, *widened_keys_, *widened_values_;
  EntryList list_;
  Scratch<A> row_memory_, keys_memory_, values_memory_, q_, rows_, out_, chunk_, sums_;
};

}  // namespace texvlm
#endif
