// The loops of attention_pack and its adjoint on the host. Cells of the finest coarse level are made of places, those of coarser
// levels of cells, band by band.
#pragma once

#include <limits>
#include <vector>

#include "attention.h"
#include "stored.h"

namespace texvlm {

// Squares of the distance of two rows.
template <class A>
TEXVLM_HD A square_distance(const A* a, const A* b, int64_t n) {
  constexpr int kSums = 16;
  A sums[kSums] = {}, sum = 0;
  int64_t d = 0;
  for (; d + kSums <= n; d += kSums)
    for (int i = 0; i < kSums; ++i) {
      const A off = a[d + i] - b[d + i];
      sums[i] += off * off;
    }
  for (; d < n; ++d) sum += (a[d] - b[d]) * (a[d] - b[d]);
  for (int i = 0; i < kSums; ++i) sum += sums[i];
  return sum;
}

template <class A>
class AttentionPackOnHost {
 public:
  explicit AttentionPackOnHost(const AttentionPack<A>& f)
      : f_(f), dim_(f.dim), k_{f.k, f.dim, f.storage}, v_{f.v, f.dim, f.storage}, widened_(memory_.of(2 * f.dim)) {}

  // Bands [begin, end) of all pictures: the rows of the coarsest cells, and what they are made of.
  TEXVLM_HD void bands(int64_t begin, int64_t end) {
    const CellPyramid& cells = f_.cells;
    const int64_t rows = cells.rows_of(0);
    for (int64_t i = begin; i < end; ++i) {
      b_ = i / rows;
      const int64_t y = i % rows;
      for (int s = cells.stages - 1; s >= 0; --s)
        for (int64_t cell = begin_of(s, y); cell < begin_of(s, y + 1); ++cell) count(s, cell);
      for (int64_t head = b_ * f_.heads; head < (b_ + 1) * f_.heads; ++head) {
        const int finest = cells.stages - 1;
        for (int64_t cell = begin_of(finest, y); cell < begin_of(finest, y + 1); ++cell) from_places(head, finest, cell);
        for (int s = finest - 1; s >= 0; --s)
          for (int64_t cell = begin_of(s, y); cell < begin_of(s, y + 1); ++cell) from_cells(head, s, cell);
      }
    }
  }

 private:
  // The first cell of stage s in row y of the coarsest.
  int64_t begin_of(int s, int64_t y) const {
    return minimum(y << (f_.cells.level[0] - f_.cells.level[s]), f_.cells.rows_of(s)) * f_.cells.columns_of(s);
  }

  A* log_count(int s) const { return f_.log_count + b_ * f_.cells.total() + f_.cells.offset[s]; }
  // The log of the weight of part j of a cell of stage s.
  A log_of_part(int s, int64_t j) const {
    if (s + 1 < f_.cells.stages) return log_count(s + 1)[j];
    return f_.log_weight ? f_.log_weight[b_ * f_.cells.places() + j] : A(0);
  }
  void count(int s, int64_t i) const {
    const CellBox box = f_.cells.children(s, i);
    A most = -std::numeric_limits<A>::infinity(), sum = 0;
    for (int64_t j = 0; j < box.count(); ++j) most = maximum(most, log_of_part(s, box.cell(j)));
    if (most != -std::numeric_limits<A>::infinity())
      for (int64_t j = 0; j < box.count(); ++j) sum += exp_of(log_of_part(s, box.cell(j)) - most);
    log_count(s)[i] = sum == 0 ? most : most + std::log(sum);
  }
  // What part j is of a cell; the parts' sum is 1.
  TEXVLM_HD A share(int s, int64_t i, int64_t j) const {
    if (!f_.log_weight) {
      const int64_t part = s + 1 < f_.cells.stages ? f_.cells.places_of(s + 1, j).count() : 1;
      return static_cast<A>(part) / static_cast<A>(f_.cells.places_of(s, i).count());
    }
    const A log = log_of_part(s, j);
    return log == -std::numeric_limits<A>::infinity() ? A(0) : exp_of(log - log_count(s)[i]);
  }

  struct Cell {
    A *TEXVLM_RESTRICT keys, *TEXVLM_RESTRICT values, *TEXVLM_RESTRICT low, *TEXVLM_RESTRICT high, *TEXVLM_RESTRICT spread;
  };
  Cell cell(int64_t head, int s, int64_t i) const {
    const int64_t at = head * f_.cells.total() + f_.cells.offset[s] + i;
    return {f_.keys + at * dim_, f_.values + at * dim_, f_.low + at * dim_, f_.high + at * dim_, f_.spread + 2 * at};
  }
  // Adds a part, the first of a cell or not.
  TEXVLM_HD void add(const Cell& to, bool first, A w, const A* TEXVLM_RESTRICT keys, const A* TEXVLM_RESTRICT values,
                     const A* TEXVLM_RESTRICT low, const A* TEXVLM_RESTRICT high) const {
    if (first) {
      for (int64_t d = 0; d < dim_; ++d) {
        to.keys[d] = w * keys[d], to.values[d] = w * values[d];
        to.low[d] = low[d], to.high[d] = high[d];
      }
    } else {
      for (int64_t d = 0; d < dim_; ++d) {
        to.keys[d] += w * keys[d], to.values[d] += w * values[d];
        to.low[d] = minimum(to.low[d], low[d]), to.high[d] = maximum(to.high[d], high[d]);
      }
    }
  }
  TEXVLM_HD void nothing(const Cell& to) const {
    for (int64_t d = 0; d < dim_; ++d) to.keys[d] = to.values[d] = to.low[d] = to.high[d] = 0;
  }

  TEXVLM_HD void from_places(int64_t head, int s, int64_t i) const {
    const CellBox box = f_.cells.children(s, i);
    const int64_t first = head * f_.cells.places();
    const Cell to = cell(head, s, i);
    A of_keys = 0, of_values = 0;
    bool any = false;
    for (int64_t j = 0; j < box.count(); ++j) {
      const int64_t p = box.cell(j);
      const A w = share(s, i, p);
      if (w == 0) continue;
      const A* const key = k_.row(first + p, widened_);
      add(to, !any, w, key, v_.row(first + p, widened_ + dim_), key, key);
      any = true;
    }
    if (!any) nothing(to);
    for (int64_t j = 0; j < box.count() && any; ++j) {
      const int64_t p = box.cell(j);
      const A w = share(s, i, p);
      if (w == 0) continue;
      of_keys += w * square_distance(k_.row(first + p, widened_), to.keys, dim_);
      of_values += w * square_distance(v_.row(first + p, widened_ + dim_), to.values, dim_);
    }
    to.spread[0] = of_keys, to.spread[1] = of_values;
  }

  // The variance of a whole is the mean of its parts' variances and of the squares by which their means are off.
  TEXVLM_HD void from_cells(int64_t head, int s, int64_t i) const {
    const CellBox box = f_.cells.children(s, i);
    const Cell to = cell(head, s, i);
    A of_keys = 0, of_values = 0;
    bool any = false;
    for (int64_t j = 0; j < box.count(); ++j) {
      const Cell part = cell(head, s + 1, box.cell(j));
      const A w = share(s, i, box.cell(j));
      if (w == 0) continue;
      add(to, !any, w, part.keys, part.values, part.low, part.high);
      any = true;
    }
    if (!any) nothing(to);
    for (int64_t j = 0; j < box.count() && any; ++j) {
      const Cell part = cell(head, s + 1, box.cell(j));
      const A w = share(s, i, box.cell(j));
      if (w == 0) continue;
      of_keys += w * (part.spread[0] + square_distance(part.keys, to.keys, dim_));
      of_values += w * (part.spread[1] + square_distance(part.values, to.values, dim_));
    }
    to.spread[0] = of_keys, to.spread[1] = of_values;
  }

  const AttentionPack<A>& f_;
  int64_t dim_, b_ = 0;
  StoredRows<A> k_, v_;
  Scratch<A> memory_;
  A* widened_;
};

// Place by place, from all cells it is in.
template <class A>
class AttentionPackAdjointOnHost {
 public:
  explicit AttentionPackAdjointOnHost(const AttentionPackAdjoint<A>& f)
      : f_(f), dim_(f.dim), k_{f.k, f.dim, f.storage}, v_{f.v, f.dim, f.storage}, widened_(memory_.of(2 * f.dim)) {}

  // Rows [begin, end) of places, of all pictures.
  TEXVLM_HD void rows(int64_t begin, int64_t end) const {
    const CellPyramid& cells = f_.cells;
    for (int64_t i = begin; i < end; ++i)
      for (int64_t x = 0; x < cells.columns; ++x) place(i / cells.rows, i % cells.rows, x);
  }

 private:
  TEXVLM_HD void place(int64_t b, int64_t y, int64_t x) const {
    const CellPyramid& cells = f_.cells;
    const int64_t j = y * cells.columns + x;
    const A log = f_.log_weight ? f_.log_weight[b * cells.places() + j] : A(0);
    const bool there = log != -std::numeric_limits<A>::infinity();
    A of_weight = 0;
    for (int64_t h = 0; h < f_.heads; ++h) {
      const int64_t head = b * f_.heads + h, at = (head * cells.places() + j) * dim_;
      A *TEXVLM_RESTRICT const gk = f_.grad_k ? f_.grad_k + at : nullptr,
                               *TEXVLM_RESTRICT const gv = f_.grad_v ? f_.grad_v + at : nullptr;
      for (int64_t d = 0; gk && d < dim_; ++d) gk[d] = 0;
      for (int64_t d = 0; gv && d < dim_; ++d) gv[d] = 0;
      for (int s = 0; s < cells.stages && there; ++s) {
        const int64_t e = cells.above(s, y, x), cell = (head * cells.total() + e) * dim_;
        const A share = exp_of(log - f_.log_count[b * cells.total() + e]);
        const A *const of_keys = f_.grad_keys ? f_.grad_keys + cell : nullptr, *const of_values = f_.grad_values
                                                                                                      ? f_.grad_values + cell
                                                                                                      : nullptr;
        for (int64_t d = 0; gk && of_keys && d < dim_; ++d) gk[d] += share * of_keys[d];
        for (int64_t d = 0; gv && of_values && d < dim_; ++d) gv[d] += share * of_values[d];
        if (!f_.grad_log_weight) continue;
        A sum = h == 0 && f_.grad_log_count ? f_.grad_log_count[b * cells.total() + e] : A(0);
        const int64_t row = head * cells.places() + j;
        const A *const key = k_.row(row, widened_), *const value = v_.row(row, widened_ + dim_);
        for (int64_t d = 0; of_keys && d < dim_; ++d) sum += (key[d] - f_.keys[cell + d]) * of_keys[d];
        for (int64_t d = 0; of_values && d < dim_; ++d) sum += (value[d] - f_.values[cell + d]) * of_values[d];
        of_weight += share * sum;
      }
    }
    if (f_.grad_log_weight) f_.grad_log_weight[b * cells.places() + j] = of_weight;
  }

  const AttentionPackAdjoint<A>& f_;
  int64_t dim_;
  StoredRows<A> k_, v_;
  Scratch<A> memory_;
  A* widened_;
};

}  // namespace texvlm
