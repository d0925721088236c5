// Weighted sums over the rows and columns of a texel's neighbours, which separable filters and their adjoints are made of:
// columns are summed first, then along the row, one by one or a run of texels at a time.
#pragma once

#include <type_traits>

#include "scalar.h"

namespace texvlm {

// The texels of an axis that a sum reads: `count` from `first` on, none of them with a weight of 0.
template <class A, int N = 3>
struct AxisTaps {
  int64_t first;
  int count;
  A weight[N];
};

// `in` is where the taps begin.
template <class A, int N, class S>
TEXVLM_HD A gathered(const S* in, int64_t pitch, int64_t channels, const AxisTaps<A, N>& ty, const AxisTaps<A, N>& tx) {
  A sum = 0;
  for (int j = 0; j < tx.count; ++j) {
    A column = 0;
    for (int i = 0; i < ty.count; ++i) column += ty.weight[i] * static_cast<A>(in[i * pitch + j * channels]);
    sum += tx.weight[j] * column;
  }
  return sum;
}

constexpr int kGathered = 8;  // channels at a time

// A run of neighbours, in the same arithmetic: each column is summed once, some channels at a time. `in` is the first texel of
// the row where ty begins; tx are in order, and each begins at most kStep texels after the one before. Of `channels` channels, C
// where that is not 0, those in [begin, end): store(i, c, n, sums) takes n of them from c on of the i-th sum.
template <int C, int kStep, class A, int N, class S, class Store>
TEXVLM_HD void gather_run(const S* in, int64_t pitch, int64_t channels, int64_t begin, int64_t end, const AxisTaps<A, N>& ty,
                          const AxisTaps<A, N> (&tx)[kRun], int count, const Store& store) {
  constexpr int kC = C ? C : kGathered;
  const int64_t low = tx[0].first, columns = tx[count - 1].first + tx[count - 1].count - low;
  A sums[(kStep * kRun + N) * kC];
  const auto sum_columns = [&](const S* from, A* TEXVLM_RESTRICT to, auto n) {
    for (int64_t k = 0; k < n; ++k) to[k] = 0;
    for (int i = 0; i < ty.count; ++i)
      for (int64_t k = 0; k < n; ++k) to[k] += ty.weight[i] * static_cast<A>(from[i * pitch + k]);
  };
  const auto some = [&](int64_t c0, auto n) {
    const S* const from = in + low * channels;
    if constexpr (C != 0) {
      sum_columns(from, sums, columns * C);
    } else {
      for (int64_t k = 0; k < columns; ++k) sum_columns(from + k * channels + c0, sums + k * kC, n);
    }
    for (int i = 0; i < count; ++i) {
      const A* const first = sums + (tx[i].first - low) * kC + (C ? c0 : 0);
      A of[kC] = {};
      for (int j = 0; j < tx[i].count; ++j)
        for (int c = 0; c < n; ++c) of[c] += tx[i].weight[j] * first[j * kC + c];
      store(i, c0, n, of);
    }
  };
  int64_t c0 = begin;
  for (; c0 + kC <= end; c0 += kC) some(c0, std::integral_constant<int, kC>());
  if (c0 < end) some(c0, static_cast<int>(end - c0));
}

}  // namespace texvlm
