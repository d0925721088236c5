// The loops of hierarchical attention on the host for queries that choose alone: with the coordinates in the lanes. They
// choose one by one; cells that are split are taken one after another, each for all queries that split it: so that its rows are
// fetched once, not once for each.
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
    share_out();
  }

 private:
  using Base::all_, Base::masses_, Base::kept_scores_, Base::scores_, Base::mass_, Base::cell_values_;
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
      load(n, q, [first](int64_t i) { return first + i; });
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
    for (int64_t i = 0, done = 0; i < n; ++i) {
      ask<W>(first + i, i - done, together ? scores + i * cells : nullptr, together ? bounds + i * cells : nullptr);
      if (i + 1 < n && asked_ids_.size() < kAskedAtOnce) continue;
      answer<W>(first + done, i + 1 - done);
      done = i + 1;
    }
  }
  TEXVLM_HD static void turn(const A* panel, int64_t rows, A* out) {
    for (int j = 0; j < kPanel; j += 4) columns_to_rows(panel + j, kPanel, rows, out + j * rows, rows);
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

  // A query's part of what is asked at once: its entries are [begin, end) of asked_ids_, the places from `places` on.
  struct Asked {
    int64_t begin, places, end;
    A most, sum;
  };
  // A cell that a query has split, whose places are entries from `at` on.
  struct Opened {
    int32_t cell, slot;
    int64_t at;
  };

  // The entries of a query and, but for places of cells that queries share, their scores, appended to those asked before.
  // `scores` and `bounds` of all cells of the first stage, or null.
  template <int W>
  TEXVLM_HD void ask(int64_t t, int64_t slot, const A* scores, A* bounds) {
    const CellPyramid& cells = shape_.cells;
    A* const u = queries_.of(kPanel * dim_) + slot * dim_;
    const A* const row = q_rows_.row(head_ * shape_.queries + t, widened_ + kEntriesAtOnce * dim_);
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
        list_.ids.resize(kept + present);
        int32_t* const ids = list_.ids.data();
        for (int64_t i = 0; i < present; ++i) {  // most stay; without a branch that nothing could foretell
          ids[kept] = numbers_[i], s[kept] = own[i];
          kept += !taken_[i] && of_.weights.log_count[numbers_[i]] != kNothing<A>;
        }
        list_.ids.resize(kept);
        for (int64_t i = 0; i < present; ++i)
          if (taken_[i]) list_.split(shape_, stage, list_.present[i]);
        to += shape_.counts[stage];
        list_.advance();
      }
      list_.finish(shape_, of_.weights);
    }
    const auto count = static_cast<int64_t>(list_.ids.size()), begin = static_cast<int64_t>(asked_ids_.size());
    const bool shared =
        !of_.weights.log_weight && cells.stages > 0;  // then all places of split cells are entries, in their order
    const int64_t places = shared ? count - static_cast<int64_t>(list_.present.size()) : count;
    score_one<W>(list_.ids.data() + kept, places - kept, u, s + kept);
    asked_ids_.insert(asked_ids_.end(), list_.ids.begin(), list_.ids.end());
    asked_scores_.insert(asked_scores_.end(), s, s + count);
    asked_[slot] = {begin, begin + places, begin + count, A(0), A(0)};
    int64_t at = begin + places;
    for (size_t i = 0; shared && i < list_.opened.size(); ++i) {
      opened_.push_back({list_.opened[i], static_cast<int32_t>(slot), at});
      at += cells.children(cells.stages - 1, list_.opened[i]).count();
    }
  }

  // What has been asked: scores of the places of split cells, the softmax, and the values. Queries first .. first + n - 1.
  template <int W>
  TEXVLM_HD void answer(int64_t first, int64_t n) {
    sort_by_cell();
    A *const us = queries_.of(0), *const outs = out_.of(n * dim_), *const few = chunk_.of(kEntriesAtOnce + kVectorsAtOnce);
    std::fill(outs, outs + n * dim_, A(0));
    const A* rows[kEntriesAtOnce + kRowsAtOnce];
    const auto places_of = [this](const Opened& o) { return shape_.cells.children(shape_.cells.stages - 1, o.cell).count(); };
    const auto splits = static_cast<int64_t>(opened_.size());
    for (int64_t i = 0, next; i < splits; i = next) {
      for (next = i; next < splits && opened_[next].cell == opened_[i].cell;) ++next;
      const int64_t count = places_of(opened_[i]);
      for (int64_t e = 0; e < count; e += kEntriesAtOnce) {
        const int64_t m = minimum<int64_t>(kEntriesAtOnce, count - e);
        of_.keys.rows(asked_ids_.data() + opened_[i].at + e, m, widened_, rows);
        for (int64_t j = i; j < next; ++j) {
          multiply_vector<W, false>(rows, m, dim_, us + opened_[j].slot * dim_, few);
          std::copy(few, few + m, asked_scores_.data() + opened_[j].at + e);
        }
        if (next < splits)
          of_.keys.prefetch(asked_ids_.data() + opened_[next].at, minimum<int64_t>(kEntriesAtOnce, places_of(opened_[next])));
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      Asked& of = asked_[i];
      A* const s = asked_scores_.data();
      of.most = largest(s + of.begin, of.end - of.begin, kNothing<A>);
      if (of.most == kNothing<A>) of.most = 0;
      of.sum = exponents(s + of.begin, of.end - of.begin, of.most, s + of.begin);
      for (int64_t e = of.begin; e < of.places; e += kEntriesAtOnce) {
        const int64_t m = minimum<int64_t>(kEntriesAtOnce, of.places - e);
        of_.values.rows(asked_ids_.data() + e, m, widened_, rows);
        add_rows<W>(rows, m, dim_, s + e, outs + i * dim_);
      }
    }
    for (int64_t i = 0, next; i < splits; i = next) {
      for (next = i; next < splits && opened_[next].cell == opened_[i].cell;) ++next;
      const int64_t count = places_of(opened_[i]);
      for (int64_t e = 0; e < count; e += kEntriesAtOnce) {
        const int64_t m = minimum<int64_t>(kEntriesAtOnce, count - e);
        of_.values.rows(asked_ids_.data() + opened_[i].at + e, m, widened_, rows);
        for (int64_t j = i; j < next; ++j)
          add_rows<W>(rows, m, dim_, asked_scores_.data() + opened_[j].at + e, outs + opened_[j].slot * dim_);
        if (next < splits)
          of_.values.prefetch(asked_ids_.data() + opened_[next].at, minimum<int64_t>(kEntriesAtOnce, places_of(opened_[next])));
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      const Asked& of = asked_[i];
      const int64_t at = head_ * shape_.queries + first + i;
      A* const out = outs + i * dim_;
      for (int64_t d = 0; d < dim_; ++d) out[d] = of.sum == 0 ? A(0) : out[d] / of.sum;
      out_rows_.store(at, out);
      f_.lse[at] = of.sum == 0 ? kNothing<A> : of.most + std::log(of.sum);
      for (int64_t e = of.begin; f_.mass && of.sum != 0 && e < of.end; ++e) masses_[asked_ids_[e]] += asked_scores_[e] / of.sum;
    }
    asked_ids_.clear(), asked_scores_.clear(), opened_.clear();
  }
  // What is opened comes query by query; it is taken cell by cell.
  void sort_by_cell() {
    const AttentionShape& shape = shape_;
    first_of_.assign(static_cast<size_t>(shape.cells.stages ? shape.cells.cells(shape.cells.stages - 1) : 0) + 1, 0);
    for (const Opened& o : opened_) ++first_of_[o.cell + 1];
    for (size_t i = 1; i < first_of_.size(); ++i) first_of_[i] += first_of_[i - 1];
    sorted_.resize(opened_.size());
    for (const Opened& o : opened_) sorted_[first_of_[o.cell]++] = o;
    opened_.swap(sorted_);
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
  std::vector<Opened> opened_, sorted_;
  std::vector<int32_t> first_of_;
  Asked asked_[kPanel] = {};
  Scratch<A> queries_, none_;
};

}  // namespace texvlm
#endif
