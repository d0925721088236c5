// The loops of hierarchical attention on the host. A tile of queries lies in the lanes of vectors: keys are broadcast to it, and
// the softmax runs down the lanes. (attention_queries.h: those that choose alone.)
#pragma once

#include "attention_entries.h"
#include "products.h"

namespace texvlm {

#if defined(TEXVLM_HAS_LANES)

template <class A>
class AttendOnHost {
 public:
  explicit AttendOnHost(const Attend<A>& f)
      : f_(f), shape_(f.shape), dim_(f.shape.dim), q_rows_{f.q, dim_, f.storage}, out_rows_{f.out, dim_, f.storage} {
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
    share_out();
  }

 protected:
  void enter(int64_t b, int64_t head) {
    const int64_t total = shape_.cells.total(), kv = b * shape_.kv_heads + shape_.kv_head(head);
    if (head_ == b * shape_.heads + head) return;
    share_out();
    head_ = b * shape_.heads + head;
    of_ = HeadEntries<A>::of(f_, b, kv);
    low_ = f_.low + kv * total * dim_, high_ = f_.high + kv * total * dim_;
    A* const of_cells = spread_.of(total);
    const A* const from = f_.spread + kv * total * 2;
    for (int64_t i = 0; i < total; ++i) of_cells[i] = from[2 * i] * sqrt_of(from[2 * i + 1]);
  }

  const int32_t* given(int64_t t) const { return f_.choice + (head_ * shape_.tiles() + t) * shape_.splits; }
  int32_t* chosen(int64_t t) const { return f_.chosen + (head_ * shape_.tiles() + t) * shape_.splits; }

  template <int W>
  TEXVLM_HD void tile(int64_t t) {
    constexpr int V = kPanelVectors<W>;
    const CellBox box = shape_.tile(t);
    const int64_t n = box.count();
    A* const q = q_.of(dim_ * kPanel);
    load(n, q, [&](int64_t i) { return box.cell(i); });
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
    const int64_t chunks = count / kEntriesAtOnce + 2;  // one may end where the known scores do
    const int64_t noted = f_.mass ? count : 0;
    A* const exps = all_.of((noted + chunks) * kPanel);  // for the masses, and what was taken off in each chunk
    A* taken_off = exps + noted * kPanel;
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
      rescale(s, m, most, sum, out);
      for (int j = 0; j < kPanel; ++j) base[j] = most[j] == kNothing<A> ? A(0) : most[j];
      for (int64_t i = 0; i < m; ++i)
        for (int j = 0; j < kPanel; ++j) {
          const A p = exp_or_nan(s[i * kPanel + j] - base[j]);
          chunk[i * kPanel + j] = p;
          sum[j] += p;
        }
      if (noted) {
        std::copy(chunk, chunk + m * kPanel, exps + e * kPanel);
        taken_off = std::copy(base, base + kPanel, taken_off);
      }
      of_.values.rows(list_.ids.data() + e, m, widened_, rows);
      of_.keys.prefetch(list_.ids.data() + e + m, minimum<int64_t>(kEntriesAtOnce, count - e - m));
      multiply_columns<W, V>(rows, m, dim_, chunk, kPanel, n, out, kPanel);
      e += m;
    }
    A* const four = mean_.of(4 * dim_);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = head_ * shape_.queries + box.cell(i);
      const bool none = sum[i] == 0;  // where there are no entries, or all scores are -inf
      const A share = none ? A(0) : A(1) / sum[i];
      if (i % 4 == 0) columns_to_rows(out + i, kPanel, dim_, four, dim_);
      A* const row = four + i % 4 * dim_;
      for (int64_t d = 0; d < dim_; ++d) row[d] = none ? A(0) : row[d] * share;
      out_rows_.store(at, row);
      f_.lse[at] = none ? kNothing<A> : most[i] + std::log(sum[i]);
      sum[i] = f_.lse[at];
    }
    taken_off = exps + noted * kPanel;
    for (int64_t e = 0; e < noted; taken_off += kPanel) {
      const int64_t end = minimum<int64_t>(e + kEntriesAtOnce, e < kept_ ? kept_ : count);
      alignas(64) A factor[kPanel];
      for (int j = 0; j < kPanel; ++j) factor[j] = j < n && sum[j] != kNothing<A> ? exp_or_nan(taken_off[j] - sum[j]) : A(0);
      for (; e < end; ++e) {
        const A* const row = exps + e * kPanel;
        masses_[list_.ids[e]] += sum_by_parts<A>(kPanel, [&](int64_t j) { return factor[j] == 0 ? A(0) : row[j] * factor[j]; });
      }
    }
  }

  // Queries place(0) .. place(n - 1), scaled, as columns of a panel; columns of zeros beyond.
  template <class F>
  TEXVLM_HD void load(int64_t n, A* panel, const F& place) {
    A* const widened = widened_;
    for (int64_t i = 0; i < kPanel; i += 4) {
      const A* rows[4];
      for (int64_t j = 0; j < 4; ++j) {
        rows[j] = widened + j * dim_;
        if (i + j < n) {
          rows[j] = q_rows_.row(head_ * shape_.queries + place(i + j), widened + j * dim_);
        } else {
          std::fill(widened + j * dim_, widened + (j + 1) * dim_, A(0));
        }
      }
      rows_to_columns(rows, dim_, static_cast<A>(shape_.scale), panel + i, kPanel);
    }
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
          if (all) {
            for (int j = 0; j < kPanel; ++j) left[j] += known[j];
          } else {  // weigh() has made some 0
            for (int j = 0; j < kPanel; ++j) left[j] += exp_or_nan(row[j] - before[j]);
          }
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

  // The attention that the entries of a head got, to its places; a cell's is shared out by their weights. And a fresh start.
  void share_out() {
    if (!f_.mass) return;
    const CellPyramid& cells = shape_.cells;
    const int64_t total = cells.total(), places = cells.places();
    for (int64_t j = 0; head_ >= 0 && j < places; ++j) {
      const A own = of_.weights(total + j);
      if (own == kNothing<A>) continue;
      A sum = masses_[total + j];
      for (int s = 0; s < cells.stages; ++s) {
        const int64_t cell = cells.above(s, j / cells.columns, j % cells.columns);
        if (masses_[cell] != 0) sum += masses_[cell] * exp_of(own - of_.weights(cell));
      }
      f_.mass[head_ * places + j] = sum;
    }
    masses_.assign(static_cast<size_t>(shape_.entries()), A(0));
  }

  const Attend<A>& f_;
  const AttentionShape& shape_;
  int64_t dim_, head_ = -1, kept_ = 0;
  StoredRows<A> q_rows_;
  StoredOut<A> out_rows_;
  HeadEntries<A> of_{};
  const A *low_ = nullptr, *high_ = nullptr;
  A* widened_;
  EntryList list_;
  std::vector<int32_t> numbers_, ties_;
  std::vector<char> taken_;
  std::vector<A> masses_;
  Scratch<A> widened_memory_, spread_, q_, out_, chunk_, all_, kept_scores_, scores_, exps_, mass_, mean_, bound_, sides_, logs_,
      cell_values_;
};

#endif

}  // namespace texvlm
