// Rows reduced to a few numbers, in one order on every device and for every number of threads.
//
// Place x of a row counts in lane x % 32 of group x / 32 % G; the lanes of a group are added up as a tree, the groups one after
// another. G, 1 to 8, follows from the length of the row. CUDA gives a group to a warp, the host takes it in vectors.
//
// A functor has
//   Part<N>                 a template, N lanes of partial results: clear(), and join(at, from, first, count), which brings lanes
//                           [first, first + count) of `from` into lanes [at, at + count)
//   add(row, x, n, part)    brings place x + j into lane j, for each j < n
//   finish(row, total)      is given the Part<1> of the row
// and for planes [B, h, w] add(b, y, x, n, part) and finish(b, total).
#pragma once

#include "scalar.h"

namespace texvlm {

constexpr int kReduceLanes = 32, kReduceGroups = 8;
TEXVLM_HD int reduce_groups(int64_t count) { return static_cast<int>(clamp<int64_t>(count / 128, 1, kReduceGroups)); }

// K sums.
template <class S, int K, int N>
struct Sums {
  S of[K][N];

  TEXVLM_HD void clear() {
    for (int k = 0; k < K; ++k)
      for (int l = 0; l < N; ++l) of[k][l] = S(0);
  }
  template <int M>
  TEXVLM_HD void join(int at, const Sums<S, K, M>& from, int first, int count) {
    for (int k = 0; k < K; ++k)
      for (int l = 0; l < count; ++l) of[k][at + l] += from.of[k][first + l];
  }
};

// The two steps of planes: each row to its part, and a plane from the parts of its rows.
template <class F>
struct RowParts {
  template <int N>
  using Part = typename F::template Part<N>;
  F f;
  int64_t h;
  Part<1>* parts;  // [B, h]

  template <class P>
  TEXVLM_HD void add(int64_t row, int64_t x, int n, P& to) const {
    f.add(row / h, row % h, x, n, to);
  }
  TEXVLM_HD void finish(int64_t row, const Part<1>& total) const { parts[row] = total; }
};
template <class F>
struct PlaneParts {
  template <int N>
  using Part = typename F::template Part<N>;
  F f;
  int64_t h;
  const Part<1>* parts;

  template <class P>
  TEXVLM_HD void add(int64_t b, int64_t y, int n, P& to) const {
    for (int j = 0; j < n; ++j) to.join(j, parts[b * h + y + j], 0, 1);
  }
  TEXVLM_HD void finish(int64_t b, const Part<1>& total) const { f.finish(b, total); }
};

// The host's loop over a row, and what it ends in.
template <class F>
TEXVLM_HD typename F::template Part<1> reduced(const F& f, int64_t row, int64_t count) {
  typename F::template Part<1> total;
  total.clear();
  const int64_t width = kReduceLanes * reduce_groups(count);
  for (int64_t first = 0; first < width; first += kReduceLanes) {
    typename F::template Part<kReduceLanes> part;
    part.clear();
    int64_t x = first;
    for (; x + kReduceLanes <= count; x += width) f.add(row, x, kReduceLanes, part);
    if (x < count) f.add(row, x, static_cast<int>(count - x), part);
    for (int step = kReduceLanes / 2; step > 0; step /= 2) part.join(0, part, step, step);
    total.join(0, part, 0, 1);
  }
  return total;
}
template <class F>
TEXVLM_HD void reduce_row(const F& f, int64_t row, int64_t count) {
  f.finish(row, reduced(f, row, count));
}

}  // namespace texvlm
