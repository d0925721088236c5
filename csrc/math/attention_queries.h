// The loops of hierarchical attention on the host for queries that choose alone: one by one, with the coordinates in the lanes.
#pragma once

#include "attention_loops.h"

#if defined(TEXVLM_HAS_LANES)

namespace texvlm {

template <class A>
class AttendQueriesOnHost : AttendOnHost<A> {
  using Base = AttendOnHost<A>;

 public:
  using Base::Base;

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
  using Base::all_, Base::kept_scores_, Base::scores_, Base::mass_, Base::mean_, Base::cell_values_;
  using Base::enter, Base::load, Base::number, Base::split_all, Base::share_out, Base::given, Base::chosen;
  using Base::f_, Base::shape_, Base::dim_, Base::head_, Base::q_rows_, Base::out_rows_, Base::of_, Base::low_, Base::high_;
  using Base::widened_, Base::list_, Base::numbers_, Base::ties_, Base::taken_, Base::spread_, Base::q_, Base::out_, Base::chunk_;

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
      this->template score<W>(numbers_.data(), cells, n, q, panel);
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
    this->template weigh_present<W>(u, mass, bounds);
  }

  static constexpr int64_t kTogether = 6;          // queries for which a panel pays
  static constexpr size_t kAskedAtOnce = 1 << 17;  // entries whose scores are kept between keys and values

  std::vector<int32_t> asked_ids_;
  std::vector<A> asked_scores_;
  int64_t asked_counts_[kPanel] = {};
  Scratch<A> none_;
};

}  // namespace texvlm
#endif
