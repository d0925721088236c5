// Products of a few rows with a panel of lanes, held in registers: what the loops of attention on the host are made of.
//
// Sums run over t in order, with fused multiply-adds where the instruction set has them (a third of the time, and rounded once):
// so they differ between instruction sets in the last places, and on one do not depend on who computes what.
#pragma once

#include "lanes.h"

#if defined(TEXVLM_HAS_LANES)

namespace texvlm {

constexpr int kPanel = 64;  // lanes of a panel: queries of a tile

// W, the width of a vector, is the instruction set: 16 floats of AVX-512, 8 of AVX2, 4 or 2 of the baseline, which has no fused
// multiply-adds. V vectors of R rows fill the registers.
template <int W>
constexpr int kPanelVectors = W == 16 ? 4 : 2;
constexpr int kRowsAtOnce = 6;

template <int W, class A>
TEXVLM_HD Lanes<A, W> multiply_add(A a, const Lanes<A, W>& b, const Lanes<A, W>& c) {
  if constexpr (std::is_same_v<A, float> && W >= 8) {
    Lanes<A, W> r;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) r[i] = __builtin_fmaf(a, b[i], c[i]);
    return r;
  } else {
    return a * b + c;
  }
}

// c[i][j] (+)= sum_t a_i[t] b[t][j], for i < R and j < V W.
template <int W, int V, int R, bool Add, class A>
TEXVLM_HD void rows_by_panel(const A* const* a, int64_t n, const A* b, int64_t b_row, A* c, int64_t c_row) {
  Lanes<A, W> sum[R][V];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[i][v] = Add ? load_lanes<A, W>(c + i * c_row + v * W) : Lanes<A, W>{};
  for (int64_t t = 0; t < n; ++t) {
    Lanes<A, W> x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = load_lanes<A, W>(b + t * b_row + v * W);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[i][v] = multiply_add<W, A>(a[i][t], x[v], sum[i][v]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store_lanes<A, W>(c + i * c_row + v * W, sum[i][v]);
}

// c[i][j] += sum_t a_t[i] b[t][j], for i < R and j < V W.
template <int W, int V, int R, class A>
TEXVLM_HD void columns_by_panel(const A* const* a, int64_t first, int64_t n, const A* b, int64_t b_row, A* c, int64_t c_row) {
  Lanes<A, W> sum[R][V];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[i][v] = load_lanes<A, W>(c + i * c_row + v * W);
  for (int64_t t = 0; t < n; ++t) {
    Lanes<A, W> x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = load_lanes<A, W>(b + t * b_row + v * W);
    const A* const row = a[t] + first;
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[i][v] = multiply_add<W, A>(row[i], x[v], sum[i][v]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store_lanes<A, W>(c + i * c_row + v * W, sum[i][v]);
}

// c [rows][c_row] (+)= a_i . b [n][b_row], over the first `lanes` lanes, rounded up to whole panels of V W.
template <int W, int V, bool Add, class A>
TEXVLM_HD void multiply_rows(const A* const* a, int64_t rows, int64_t n, const A* b, int64_t b_row, int64_t lanes, A* c,
                             int64_t c_row) {
  int64_t i = 0;
  for (; i + kRowsAtOnce <= rows; i += kRowsAtOnce)
    for (int64_t j = 0; j < lanes; j += V * W)
      rows_by_panel<W, V, kRowsAtOnce, Add>(a + i, n, b + j, b_row, c + i * c_row + j, c_row);
  for (; i + 2 <= rows; i += 2)
    for (int64_t j = 0; j < lanes; j += V * W) rows_by_panel<W, V, 2, Add>(a + i, n, b + j, b_row, c + i * c_row + j, c_row);
  for (; i < rows; ++i)
    for (int64_t j = 0; j < lanes; j += V * W) rows_by_panel<W, V, 1, Add>(a + i, n, b + j, b_row, c + i * c_row + j, c_row);
}

// c [columns][c_row] += the transpose of the rows a_t, times b [n][b_row].
template <int W, int V, class A>
TEXVLM_HD void multiply_columns(const A* const* a, int64_t n, int64_t columns, const A* b, int64_t b_row, int64_t lanes, A* c,
                                int64_t c_row) {
  for (int64_t j = 0; j < lanes; j += V * W) {
    int64_t i = 0;
    for (; i + kRowsAtOnce <= columns; i += kRowsAtOnce)
      columns_by_panel<W, V, kRowsAtOnce>(a, i, n, b + j, b_row, c + i * c_row + j, c_row);
    for (; i + 4 <= columns; i += 4) columns_by_panel<W, V, 4>(a, i, n, b + j, b_row, c + i * c_row + j, c_row);
    for (; i < columns; ++i) columns_by_panel<W, V, 1>(a, i, n, b + j, b_row, c + i * c_row + j, c_row);
  }
}

// s[i] (+)= a_i . x, over n values.
template <int W, bool Add, class A>
TEXVLM_HD void multiply_vector(const A* const* a, int64_t rows, int64_t n, const A* x, A* s) {
  constexpr int R = 4;
  const int64_t whole = n / W * W;
  for (int64_t i = 0; i < rows; i += R) {
    const A* row[R];
    Lanes<A, W> sum[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = a[minimum<int64_t>(i + r, rows - 1)], sum[r] = Lanes<A, W>{};
    for (int64_t t = 0; t < whole; t += W) {
      const Lanes<A, W> y = load_lanes<A, W>(x + t);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Lanes<A, W> k = load_lanes<A, W>(row[r] + t);
        if constexpr (std::is_same_v<A, float> && W >= 8) {
#pragma GCC unroll 16
          for (int l = 0; l < W; ++l) sum[r][l] = __builtin_fmaf(k[l], y[l], sum[r][l]);
        } else {
          sum[r] += k * y;
        }
      }
    }
    for (int r = 0; r < R && i + r < rows; ++r) {
      A half[W / 2], total = 0;
      for (int l = 0; l < W / 2; ++l) half[l] = sum[r][l] + sum[r][l + W / 2];
      for (int l = 0; l < W / 2; ++l) total += half[l];
      for (int64_t t = whole; t < n; ++t) total += row[r][t] * x[t];
      s[i + r] = Add ? s[i + r] + total : total;
    }
  }
}

// o[d] += sum_i p[i] a_i[d], over n values.
template <int W, class A>
TEXVLM_HD void add_rows(const A* const* a, int64_t rows, int64_t n, const A* p, A* o) {
  constexpr int V = 4;
  int64_t d = 0;
  for (; d + V * W <= n; d += V * W) {
    Lanes<A, W> sum[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[v] = load_lanes<A, W>(o + d + v * W);
    for (int64_t i = 0; i < rows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[v] = multiply_add<W, A>(p[i], load_lanes<A, W>(a[i] + d + v * W), sum[v]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store_lanes<A, W>(o + d + v * W, sum[v]);
  }
  for (; d + W <= n; d += W) {
    Lanes<A, W> sum = load_lanes<A, W>(o + d);
    for (int64_t i = 0; i < rows; ++i) sum = multiply_add<W, A>(p[i], load_lanes<A, W>(a[i] + d), sum);
    store_lanes<A, W>(o + d, sum);
  }
  for (; d < n; ++d)
    for (int64_t i = 0; i < rows; ++i) o[d] += p[i] * a[i][d];
}

}  // namespace texvlm
#endif
